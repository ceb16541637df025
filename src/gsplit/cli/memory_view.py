"""``gsplit inspect --memory``: what every rank will hold, as a document and as a table."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gsplit.cli.console import human

if TYPE_CHECKING:
    from gsplit.run.memory import RankMemory

__all__ = ["describe_memory", "show_memory"]


def describe_memory(ranks: "list[RankMemory]") -> list[dict[str, Any]]:
    """For ``--json``."""
    return [asdict(rank) | {"num_bytes": rank.num_bytes} for rank in ranks]


def show_memory(ranks: "list[RankMemory]", console: Console) -> None:
    """One column per rank; the rows are what memory is for."""
    table = Table(box=None, pad_edge=False)
    table.add_column("memory")
    for rank in ranks:
        table.add_column(f"rank {rank.rank}", justify="right")
    for name in ranks[0].mapped:
        table.add_row(f"mapped: {name}", *(_bytes(rank.mapped[name]) for rank in ranks), style="dim")
    for name in ranks[0].anonymous:
        if any(rank.anonymous[name] for rank in ranks):
            table.add_row(name, *(_bytes(rank.anonymous[name]) for rank in ranks))
    table.add_row("its own, in all", *(_bytes(rank.num_bytes) for rank in ranks), style="bold")
    table.add_row("input rows per step", *(f"{rank.input_rows:,.0f}" for rank in ranks))
    if ranks[0].expected_hit_rate is not None:
        table.add_row("expected cache hits", *(f"{rank.expected_hit_rate or 0:.1%}" for rank in ranks))
    console.print(table, highlight=False)
    console.print(f"mini-batches: {ranks[0].basis}", highlight=False, soft_wrap=True)


def _bytes(number: int) -> str:
    return f"{human(number)}B"
