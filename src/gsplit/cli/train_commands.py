"""``gsplit train``, ``infer`` and ``verify``: one process, or ``--nproc`` ranks of this host, or a torchrun's."""

from pathlib import Path
from typing import Annotated

import typer

from gsplit.cli.console import command
from gsplit.cli.options import Json
from gsplit.cli.ranks import default_ranks, rank_of_environment, run_task
from gsplit.cli.settings_options import Flags, settings_options
from gsplit.cli.tasks import InferTask, TrainTask, VerifyTask
from gsplit.store.reader import open_store

__all__ = ["infer", "train", "verify"]

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="a directory made by gsplit import")]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="cpu or cuda [default: GPUs where there are any, else the CPU]")
]
Nproc = Annotated[int, typer.Option(min=1, metavar="INT", help="ranks to start on this host")]


@settings_options()
def train(
    *,
    store: StoreArgument,
    nproc: Nproc = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="folder for weights, history and telemetry; left out: not kept")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of the same name")] = False,
    device: Device = None,
    flags: Flags,
    as_json: Json = False,
) -> None:
    """Train a stock model on a store, on one process or several.

    The losses do not depend on the strategy or on the number of ranks.
    """
    with command(as_json, rank=rank_of_environment(), lost="no weights were kept"):
        settings = flags.settings()
        open_store(store)
        run_task(
            TrainTask(store=store, as_json=as_json, device=device, settings=settings, out=out, overwrite=overwrite),
            nproc,
        )


def infer(
    store: StoreArgument,
    weights: Annotated[Path, typer.Option(metavar="RUN", help="a folder made by gsplit train --out")],
    out: Annotated[Path, typer.Option(metavar="FILE.npy", help="file to write: a row per vertex, in original order")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a file of the same name")] = False,
    nproc: Nproc = 1,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write the outputs of a trained model for every vertex.

    They are exact: from all neighbours, not sampled ones.
    """
    with command(as_json, rank=rank_of_environment()):
        open_store(store)
        run_task(
            InferTask(store=store, as_json=as_json, device=device, weights=weights, out=out, overwrite=overwrite), nproc
        )


@settings_options(for_verify=True)
def verify(
    *,
    store: StoreArgument,
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="ranks to start on this host [default: 2]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="INT", help="steps compared")] = 3,
    device: Device = None,
    flags: Flags,
    as_json: Json = False,
) -> None:
    """Check that ranks compute what one process does, in float64.

    Exit code 3 if they differ.
    """
    with command(as_json, rank=rank_of_environment()):
        settings = flags.settings()
        open_store(store)
        run_task(
            VerifyTask(store=store, as_json=as_json, device=device, settings=settings, steps=steps),
            nproc or default_ranks(2),
        )
