"""``python -m gsplit_bench loading``: what split parallelism saves in loading, counted, and how long real ranks take."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json, parse_fanout

__all__ = ["loading"]


def loading(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a partitioned store")],
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="number of ranks; repeatable [default: 2 and 4]")
    ] = None,
    targets: Annotated[str, typer.Option(help="targets of the mini-batches; all: every vertex")] = "train",
    fanout: Annotated[str, typer.Option(help="neighbours per hop")] = "15,15,15",
    batch_size: Annotated[int, typer.Option(min=1, help="targets of the GLOBAL mini-batch")] = 1024,
    steps: Annotated[int, typer.Option(min=0, help="mini-batches to count; 0: an epoch")] = 0,
    run_steps: Annotated[int, typer.Option(min=0, help="mini-batches that real ranks load; 0: none")] = 8,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="where real ranks read: memory, map, warm, cold, bus, network or indexed; repeatable [default: all]"
        ),
    ] = None,
    cache: Annotated[float, typer.Option(min=0, max=1, help="cache of each rank, of all features")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="of the mini-batches; not that of the partition")] = 1,
    as_json: Json = False,
) -> None:
    """Measure what ranks load, against data parallelism.

    Rows and cache hits are counted for all ranks in one process; real ranks then read from memory, from disk (warm;
    cold: dropped from the page cache before every step), from sources throttled to 12 GB/s (bus) and 1 GB/s (network),
    and, as PyG does, by indexing a cold memory map (indexed).
    """
    with command(as_json):
        from gsplit.partitioning.presample import Workload
        from gsplit.store.reader import open_store
        from gsplit_bench.loading import count_loading, time_loading
        from gsplit_bench.loading_runs import SOURCES

        opened, chosen = open_store(store), None if targets == "all" else targets
        workload = Workload.of_store(opened, chosen, parse_fanout(fanout), batch_size, seed)
        numbers, sources = ranks or [2, 4], source or list(SOURCES)
        with progress_bars(as_json) as progress:
            document = count_loading(opened, workload, numbers, steps=steps, progress=progress)
            document["runs"] = time_loading(
                *(opened, chosen, workload, numbers, sources if run_steps else []),
                steps=run_steps,
                cache_share=cache,
                progress=progress,
            )
        if as_json:
            emit_json(document)
            return
        for table in (_redundancy(document), _hits(document), _copies(document), _runs(document)):
            if table.row_count:
                Console().print(table)


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _redundancy(document: dict[str, Any]) -> Table:
    table = _table("edges computed and rows loaded", "ranks", "edges", "data", "split", "rows", "data", "split")
    for row in document["redundancy"]:
        cells = [cell for what in ("edges", "rows") for cell in _ratios(row, what)]
        table.add_row(str(row["ranks"]), *cells)
    return table


def _ratios(row: dict[str, Any], what: str) -> list[str]:
    ratios = (f"{row[f'{what}_{who}_to_mini']:.2f} x" for who in ("data", "split"))
    return [human(row[what]["mini"]), *ratios]


def _hits(document: dict[str, Any]) -> Table:
    table = _table("cache hits", "ranks", "order", "cached", "measured", "predicted", "most off")
    for row in document["hits"]:
        shares = (f"{row[name]:.1%}" for name in ("budget", "measured", "predicted", "most_off"))
        table.add_row(str(row["ranks"]), row["order"], *shares)
    return table


def _copies(document: dict[str, Any]) -> Table:
    table = _table("rows exchanged at layer 0, with copies", "ranks", "copied", "rows exchanged", "of no copies")
    for row in document["copies"]:
        cells = (f"{row['budget']:.0%}", human(row["rows_received"]), f"{row['of_no_copies']:.1%}")
        table.add_row(str(row["ranks"]), *cells)
    return table


def _runs(document: dict[str, Any]) -> Table:
    names = ("ranks", "source", "strategy", "rows", "bytes", "hits", "predicted", "s", "CPU s")
    table = _table("real ranks, sampling and loading", *names)
    for row in document["runs"]:
        hits = (f"{row['hits_measured']:.1%}", f"{row['hits_predicted']:.1%}")
        sizes = (human(row["rows_loaded"]), f"{human(row['bytes_loaded'])}B")
        times = (f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}")
        table.add_row(str(row["ranks"]), row["source"], row["strategy"], *sizes, *hits, *times)
    return table
