"""``gsplit partition`` and ``gsplit shard``: a store cut for several ranks, and a host's shard of it."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json, parse_fanout
from gsplit.cli.partition_task import PartitionTask
from gsplit.cli.ranks import rank_of_environment, run_task
from gsplit.cli.summary import describe, show, show_partition
from gsplit.partitioning.defaults import C_E, C_V, EPOCHS, TOLERANCE
from gsplit.store.reader import open_store
from gsplit.store.writer import check_output

__all__ = ["partition", "shard"]

Output = Annotated[Path, typer.Argument(metavar="OUT.gsplit", help="the store to write")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a store of the same name")]


def partition(
    store: Annotated[
        Path,
        typer.Argument(metavar="STORE", help="a directory made by gsplit import, or what its shards are named after"),
    ],
    output: Output,
    parts: Annotated[int, typer.Option(min=1, help="number of parts")],
    targets: Annotated[str, typer.Option(help="targets that training uses; all: every vertex")] = "train",
    fanout: Annotated[str, typer.Option(help="neighbours per hop, as in training")] = "15,15,15",
    batch_size: Annotated[int, typer.Option(min=1, help="targets of the GLOBAL mini-batch, as in training")] = 1024,
    objective: Annotated[str, typer.Option(help="gsplit, or a baseline: node, edge or random")] = "gsplit",
    solver: Annotated[str | None, typer.Option(help="metis, mtkahypar or restream [default: metis]")] = None,
    tolerance: Annotated[float, typer.Option(help="largest allowed work of a part, over the mean")] = TOLERANCE,
    c_v: Annotated[float, typer.Option(help="work per sampled vertex")] = C_V,
    c_e: Annotated[float, typer.Option(help="work per sampled edge")] = C_E,
    epochs: Annotated[int, typer.Option(min=1, help="epochs to presample")] = EPOCHS,
    seed: Annotated[int, typer.Option(min=0, help="of the presampled mini-batches and the solver")] = 0,
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
    rank, chosen = rank_of_environment(), None if targets == "all" else targets
    choices: dict[str, Any] = {
        "batch_size": batch_size,
        "objective": objective,
        "solver": solver,
        "tolerance": tolerance,
        "c_v": c_v,
        "c_e": c_e,
        "epochs": epochs,
        "seed": seed,
        "overwrite": overwrite,
    }
    with command(as_json, rank=rank):
        hops = parse_fanout(fanout)
        if nproc > 1 or rank is not None:
            asked = {"parts": parts, "fanout": hops, "targets": chosen, **choices}
            task = PartitionTask(store=store, output=output, as_json=as_json, device="cpu", **asked)
            run_task(task, nproc)
            return
        from gsplit.partitioning.partition import partition as make_partition

        check_output(output, overwrite=overwrite)
        opened, start = open_store(store), time.perf_counter()
        with progress_bars(as_json) as progress:
            made = make_partition(opened, output, parts, hops, chosen, **choices, progress=progress)
        document = describe(made) | {"seconds": time.perf_counter() - start}
        if as_json:
            emit_json(document)
            return
        console = Console()
        show_partition(document, console)
        _show_cost(document, console)


def _show_cost(document: dict[str, Any], console: Console) -> None:
    counts = document["provenance"][-1]["counts"]
    verified, presampled, solved = (counts[f"{stage}_ms"] / 1000 for stage in ("verify", "presample", "solve"))
    rest = document["seconds"] - verified - presampled - solved
    console.print(
        f"\n{document['path']}: verified {verified:.1f} s, presampled {presampled:.1f} s, solved {solved:.1f} s"
        f" ({human(counts['solver_peak_bytes'])}B), renumbered {rest:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def shard(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a whole store, usually one made by gsplit partition")],
    output: Output,
    host: Annotated[int, typer.Option(min=0, help="number of this host, from 0")],
    hosts: Annotated[int, typer.Option(min=1, help="number of hosts")],
    ranks_per_host: Annotated[int, typer.Option(min=1, help="ranks that run on each host")] = 1,
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
        document = describe(made)
        if as_json:
            emit_json(document)
        else:
            show(document, Console())
