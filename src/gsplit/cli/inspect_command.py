"""``gsplit inspect``: what a store holds, whether every byte is right, and what a run on it will take."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gsplit.cli.console import command, emit_json, progress_bars
from gsplit.cli.memory_view import describe_memory, show_memory
from gsplit.cli.options import Json, parse_fanout
from gsplit.cli.summary import describe, show, show_partition
from gsplit.store.reader import open_store

__all__ = ["inspect"]


def inspect(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a directory made by gsplit import")],
    check: Annotated[bool, typer.Option("--verify", help="read and check everything: checksums, ids, orders")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="say what each rank of a run will hold in memory")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="--memory: number of ranks")] = 1,
    cache: Annotated[
        str, typer.Option(metavar="SIZE", help="--memory: memory of each rank for its hottest rows")
    ] = "0",
    on_disk: Annotated[bool, typer.Option("--features-on-disk", help="--memory: features are not mapped")] = False,
    features: Annotated[str, typer.Option(metavar="NAME", help="--memory: features to train from")] = "x",
    targets: Annotated[str, typer.Option(metavar="NAME", help="--memory: targets to train on")] = "train",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="--memory: targets of the GLOBAL mini-batch [default: as partitioned]")
    ] = None,
    fanout: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="--memory: neighbours per layer [default: as partitioned]")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="--memory: width of a GraphSAGE to train")] = None,
    prefetch: Annotated[int, typer.Option(min=0, help="--memory: batches made ahead")] = 0,
    copies: Annotated[
        str, typer.Option(metavar="SIZE", help="--memory: memory of each rank for other ranks' hottest rows")
    ] = "0",
    as_json: Json = False,
) -> None:
    """Show what a store contains.

    With --verify, check every byte. With --memory, say before a run what each rank will hold.
    """
    with command(as_json):
        opened = open_store(store)
        document = describe(opened) | {"verified": check}
        if check:
            from gsplit.store.verify import verify_store  # numba, only when used

            with progress_bars(as_json) as progress:
                verify_store(opened, progress)
        found = None
        if memory:
            from gsplit.features.cache import parse_bytes
            from gsplit.run.memory import MemoryPlan, forecast_memory  # torch, only when used

            plan = MemoryPlan(
                ranks=ranks,
                features=tuple(features.split(",")),
                targets=targets,
                cache_bytes=parse_bytes(cache),
                on_disk=on_disk,
                batch_size=batch_size,
                num_neighbors=None if fanout is None else tuple(parse_fanout(fanout)),
                hidden=hidden,
                prefetch=prefetch,
                copies_bytes=parse_bytes(copies, "copies"),
            )
            found = forecast_memory(opened, plan)
            document |= {"memory": describe_memory(found)}
        if as_json:
            emit_json(document)
            return
        console = Console()
        show(document, console)
        show_partition(document, console)
        if found is not None:
            console.print()
            show_memory(found, console)
        if check:
            console.print("\nverified: every checksum, every id and every order is right", style="green")
