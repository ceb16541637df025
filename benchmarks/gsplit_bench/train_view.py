"""What ``python -m gsplit_bench train`` shows: a table per scenario with a line per system, and one of what was counted."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gsplit.cli.console import human

if TYPE_CHECKING:
    from gsplit_bench.train import TrainReport
    from gsplit_bench.train_records import TrainRecord

__all__ = ["show_report"]

_LEGEND = """ms per step: wall time of the slowest rank, the median of the turns and how far
they are from it; CPU time of all ranks; blocked (wait) and by stages, means of
the ranks. Edges computed, rows loaded, bytes sent: of all ranks."""


def show_report(report: "TrainReport", console: Console) -> None:
    """All tables, then what has to be known beside them."""
    groups: dict[tuple[Any, ...], list[TrainRecord]] = {}
    for record in report.records:
        groups.setdefault(_scenario_of(record), []).append(record)
    for scenario, records in groups.items():
        console.print(_title(scenario), style="bold", highlight=False)
        console.print(_epochs_table(records) if records[0].epochs else _records_table(records))
        console.print()
    if any(not record.epochs for record in report.records):
        console.print(_LEGEND, style="dim", highlight=False)
    _show_losses(report, console)
    if report.counts:
        console.print(_counts_table(report))
    for note in report.notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", highlight=False, soft_wrap=True)


def _scenario_of(record: "TrainRecord") -> tuple[Any, ...]:
    return (
        *(record.graph, record.model, record.hidden, tuple(record.fanout), record.batch_size),
        *(record.ranks, record.replicas, record.features, record.allocator),
    )


def _title(scenario: tuple[Any, ...]) -> str:
    graph, model, hidden, fanout, batch_size, ranks, replicas, features, allocator = scenario
    hops = ",".join(map(str, fanout))
    grouped = f" as {replicas} replicas" if replicas > 1 else ""
    how = f"{ranks} rank{'s' * (ranks > 1)}{grouped}, {features}, {allocator} allocator"
    return f"{graph}: {model} {hidden}, fanout {hops}, batch {batch_size}; {how}"


def _records_table(records: list["TrainRecord"]) -> Table:
    table = _table("", "ms", "+-", "CPU", "wait", "sample", "load", "fwd", "bwd", "edges", "rows", "sent")
    fastest = min(record.wall_s.median for record in records)
    for record in records:
        wall, stages = record.wall_s, record.stages_s
        spread = max(wall.high - wall.median, wall.median - wall.low) / wall.median
        sample = sum(stages.get(name, 0.0) for name in ("sample", "split", "exchange_ids"))
        load = stages.get("load", 0.0) + stages.get("exchange_features", 0.0)
        forward = stages.get("forward", 0.0) + stages.get("shuffle", 0.0)
        parts = (record.cpu_s.median, record.wait_s, sample, load, forward, stages.get("backward", 0.0))
        amounts = (record.edges, record.rows_loaded, record.bytes_sent)
        table.add_row(
            record.system,
            _ms(wall.median),
            f"{100 * spread:.0f}%",
            *map(_ms, parts),
            *(human(amount).replace(" ", "") for amount in amounts),
            style="bold" if wall.median == fastest and len(records) > 1 else "",
        )
    return table


def _epochs_table(records: list["TrainRecord"]) -> Table:
    names = list(records[0].epochs[0]["accuracies"])
    table = _table("", "epoch", "loss", *names, "ms")
    for record in records:
        for epoch in record.epochs:
            scores = (f"{epoch['accuracies'][name]:.1%}" for name in names)
            table.add_row(record.system, str(epoch["epoch"] + 1), f"{epoch['loss']:.4f}", *scores, _ms(epoch["wall_s"]))
    return table


def _show_losses(report: "TrainReport", console: Console) -> None:
    """Whether all runs of our strategies trained the same steps."""
    ours = [record for record in report.records if record.loss_difference is not None]
    if len(ours) < 2:
        return
    off = max(record.loss_difference or 0.0 for record in ours)
    said = (
        f"losses of all {len(ours)} runs of our strategies {'equal' if report.losses_equal else 'DIFFER'}, to {off:.0e}"
    )
    console.print(said, style="" if report.losses_equal else "bold red", highlight=False)


def _counts_table(report: "TrainReport") -> Table:
    names = ("graph", "batch", "ranks", "strategy", "edges", "rows loaded", "bytes sent", "imbalance")
    table = _table(*names)
    table.title, table.title_justify = "counted in one process, per step", "left"
    for count in report.counts:
        amounts = (count.edges, sum(count.rows_loaded_per_rank), sum(count.bytes_sent_per_rank))
        place = (count.graph, str(count.batch_size), str(count.ranks), count.strategy)
        table.add_row(*place, *(human(amount).replace(" ", "") for amount in amounts), f"{count.imbalance:.2f}")
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name in ("", "graph", "strategy") else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"
