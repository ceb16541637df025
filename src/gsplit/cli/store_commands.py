"""``gsplit inspect``, ``convert``, ``propagate``, ``partition``, ``shard``, ``upload``: show a store, or copy it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Flags, Json, Output, Overwrite, StoreArgument, settings_options
from gsplit.cli.ranks import rank_of_environment, run_task
from gsplit.cli.store_view import describe, describe_memory, show, show_memory, show_partition
from gsplit.cli.tasks import PartitionTask
from gsplit.errors import InputError, explain
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.solvers.run import solver_module
from gsplit.run.config import TrainSettings
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store.reader import Store, open_store
from gsplit.store.writer import check_output

if TYPE_CHECKING:
    from gsplit.run.memory import RankMemory

__all__ = ["convert", "inspect", "partition", "propagate", "shard", "upload"]

_MODEL = ("hidden", "fanout", "batch_size", "targets", "features")
_MEMORY = ("cache", "copies", "features_on_disk", "prefetch", "sampling_threads")


@settings_options(
    only=_MODEL + _MEMORY,
    defaults={"hidden": "no model", "fanout": "as partitioned", "batch_size": "as partitioned"},
)
def inspect(
    *,
    store: StoreArgument,
    check: Annotated[bool, typer.Option("--verify", help="read and check everything: checksums, ids, orders")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="forecast the memory of each rank of a training with the options below")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, metavar="INT", help="number of ranks")] = 1,
    flags: Flags[TrainSettings],
    as_json: Json = False,
) -> None:
    """Show what a store contains.

    With --verify, check every byte. With --memory, forecast what each rank of a training will hold in memory.
    """
    with command(as_json):
        opened = open_store(store)
        document = describe(opened) | {"verified": check}
        if check:
            from gsplit.store.verify import verify_store  # numba, only when used

            with progress_bars(as_json) as progress:
                verify_store(opened, progress)
        found = _forecast_memory(opened, ranks, flags) if memory else None
        if found is not None:
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


def _forecast_memory(store: Store, ranks: int, flags: Flags[TrainSettings]) -> "list[RankMemory]":
    from gsplit.files.byte_sizes import parse_bytes
    from gsplit.run.memory import MemoryPlan, forecast_memory  # torch, only when used

    settings = flags.parse()
    given = settings.model_fields_set
    plan = MemoryPlan(
        ranks=ranks,
        features=tuple(settings.feature_names),
        targets=settings.targets,
        cache_bytes=parse_bytes(settings.cache),
        on_disk=settings.features_on_disk,
        batch_size=settings.batch_size if "batch_size" in given else None,
        num_neighbors=tuple(settings.fanout) if "fanout" in given else None,
        hidden=settings.hidden if "hidden" in given else None,
        prefetch=settings.prefetch or 0,
        sampling_threads=settings.sampling_threads,
        copies_bytes=parse_bytes(settings.copies, "copies"),
        compares=settings.verify_every != 0,
    )
    return forecast_memory(store, plan)


def convert(
    store: StoreArgument,
    output: Output,
    features: Annotated[
        str | None, typer.Option(metavar="TYPE", help="float32, float16, bfloat16, or int8 with a scale for every row")
    ] = None,
    add: Annotated[
        str | None,
        typer.Option(
            metavar="ARRAY",
            help="add internal_ids, to a store that an older version partitioned, or time_order/NAME, "
            "for temporal sampling by the times edges/NAME",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a store with its features in another type.

    Smaller types take less disk, memory and cache; training then uses the rounded values.
    """
    with command(as_json):
        from gsplit.store import feature_types  # numba, only when used

        folder, _, name = (add or "").partition("/")
        known = add in (None, "internal_ids") or (folder == "time_order" and name)
        if (features is None) == (add is None) or not known:
            expected = "--features TYPE, --add internal_ids or --add time_order/NAME"
            got = f"--features {features}, --add {add}"
            raise InputError(explain("convert", expected, got, "give one of them"))
        check_output(output, overwrite=overwrite)
        opened = open_store(store)
        with progress_bars(as_json) as progress:
            if features is not None:
                made = feature_types.write_with_features(
                    opened, output, features, overwrite=overwrite, progress=progress
                )
            elif add == "internal_ids":
                made = feature_types.write_with_internal_ids(opened, output, overwrite=overwrite, progress=progress)
            else:
                made = feature_types.write_with_time_order(opened, output, name, overwrite=overwrite, progress=progress)
        _print_store(made, as_json=as_json)


def propagate(
    store: StoreArgument,
    output: Output,
    hops: Annotated[int, typer.Option(min=1, metavar="INT", help="hops to write: features x1, x2, .. of them")],
    features: Annotated[str, typer.Option(metavar="NAME", help="features to propagate")] = "x",
    self_loops: Annotated[
        bool, typer.Option("--self-loops/--no-self-loops", help="as in SGConv, or without, as in PyG's SIGN")
    ] = True,
    edge_weight: Annotated[str | None, typer.Option(metavar="NAME", help="stored weights of the edges")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a store with features averaged over neighbours.

    For SGC and SIGN: a model of these features does not need the graph any more.
    """
    with command(as_json):
        from gsplit.store.propagate import write_propagated  # numba, only when used

        check_output(output, overwrite=overwrite)
        opened = open_store(store)
        with progress_bars(as_json) as progress:
            made = write_propagated(
                opened,
                output,
                hops,
                features=features,
                self_loops=self_loops,
                edge_weight=edge_weight,
                overwrite=overwrite,
                progress=progress,
            )
        _print_store(made, as_json=as_json)


@settings_options()
def partition(
    *,
    store: Annotated[
        Path,
        typer.Argument(metavar="STORE", help="a store, made by gsplit import, or the name its shards were given"),
    ],
    output: Output,
    flags: Flags[PartitionSettings],
    nproc: Annotated[
        int,
        typer.Option(min=1, metavar="INT", help="ranks to start, each with one of the store's shards, STORE-i-of-INT"),
    ] = 1,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Partition a store so that ranks exchange little.

    Writes a renumbered store with even parts; any number of ranks up to --parts can train from it. With --nproc, or
    on the ranks of a torchrun, shards are read and as many are written, by restreaming.
    """
    rank = rank_of_environment()
    with command(as_json, rank=rank):
        settings = flags.parse()
        if nproc > 1 or rank is not None:
            task = PartitionTask(
                store=store, output=output, settings=settings, overwrite=overwrite, as_json=as_json, device="cpu"
            )
            run_task(task, nproc)
            return
        check_output(output, overwrite=overwrite)
        opened = open_store(store)
        DrawOptions(**settings.sampler_options)
        if settings.solver is not None:
            solver_module(settings.solver)
        from gsplit.partitioning.partition import partition_store  # torch and numba, only when used

        start = time.perf_counter()
        with progress_bars(as_json) as progress:
            partition_store(opened, output, settings, overwrite=overwrite, progress=progress)
        document = describe(open_store(output)) | {"seconds": time.perf_counter() - start}
        if as_json:
            emit_json(document)
            return
        console = Console()
        show_partition(document, console)
        _show_cost(document, console)


def _show_cost(document: dict[str, Any], console: Console) -> None:
    counts = document["provenance"][-1]["counts"]
    stages = ("verify", "presample", "solve", "held_out")
    verified, presampled, solved, forecast = (counts[f"{stage}_ms"] / 1000 for stage in stages)
    rest = document["seconds"] - verified - presampled - solved - forecast
    console.print(
        f"\n{document['path']}: verified {verified:.1f} s, presampled {presampled:.1f} s, solved {solved:.1f} s"
        f" ({human(counts['solver_peak_bytes'])}B), forecast {forecast:.1f} s, renumbered {rest:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def shard(
    store: StoreArgument,
    output: Output,
    host: Annotated[int, typer.Option(min=0, metavar="INT", help="number of this host, from 0")],
    hosts: Annotated[int, typer.Option(min=1, metavar="INT", help="number of hosts")],
    ranks_per_host: Annotated[int, typer.Option(min=1, metavar="INT", help="ranks that run on each host")] = 1,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write the shard of a store that one host needs.

    That is the vertices of its ranks, with their in-edges, rows and targets.
    """
    with command(as_json):
        from gsplit.store.shard import host_range, write_shard

        check_output(output, overwrite=overwrite)
        opened = open_store(store)
        with progress_bars(as_json) as progress:
            first, stop = host_range(opened, host, hosts, ranks_per_host)
            made = write_shard(opened, output, first, stop, overwrite=overwrite, progress=progress)
        _print_store(made, as_json=as_json)


def upload(
    store: StoreArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://BUCKET/NAME.gsplit, or of another object storage")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a copy of a store to object storage.

    Commands open it there by its URL. The manifest is written last, so a store that was not copied completely cannot
    be opened.
    """
    with command(as_json):
        from gsplit.store.upload import upload_store

        opened = open_store(store)
        with progress_bars(as_json) as progress:
            upload_store(opened, url, overwrite=overwrite, progress=progress)
        _print_store(open_store(url), as_json=as_json)


def _print_store(store: Store, *, as_json: bool) -> None:
    document = describe(store)
    if as_json:
        emit_json(document)
    else:
        show(document, Console())
