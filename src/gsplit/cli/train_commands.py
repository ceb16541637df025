"""``gsplit train``, ``infer`` and ``verify``: one process, or ``--nproc`` ranks of this host, or a torchrun's."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gsplit.cli.console import command
from gsplit.cli.options import Device, Flags, Json, SampleDevice, StoreArgument, settings_options
from gsplit.cli.ranks import default_ranks, rank_of_environment, run_task
from gsplit.cli.tasks import InferTask, TrainTask, VerifyTask
from gsplit.errors import InputError, explain
from gsplit.inference.prediction_table import check_request
from gsplit.run.config import TrainSettings, applies_to_verify, load_settings
from gsplit.run.folder import (
    latest_checkpoint,
    load_run,
    run_of_training,
    training_folder,
    trainings_with_checkpoints,
)
from gsplit.store.reader import open_store
from gsplit.training.scalar_log import check_log_folder

__all__ = ["infer", "train", "verify"]

Config = Annotated[Path | None, typer.Option(metavar="TOML", help="a file with these settings; flags override it")]
Workspace = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="where activations of exact inference are kept [default: the temporary folder]"
    ),
]
Nproc = Annotated[int, typer.Option(min=1, metavar="INT", help="ranks to start on this host")]


@settings_options()
def train(
    *,
    store: StoreArgument,
    nproc: Nproc = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="folder for weights, history and telemetry [default: none]")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="continue this run, with its settings but for those given here"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of the same name")] = False,
    workspace: Workspace = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="INT", help="restart all ranks, from the latest checkpoint, when one fails"),
    ] = 0,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="INT", help="continue with fewer ranks, down to so many, when the restarts are used up"
        ),
    ] = None,
    device: Device = None,
    sample_device: SampleDevice = "cpu",
    config: Config = None,
    flags: Flags[TrainSettings],
    as_json: Json = False,
) -> None:
    """Train a stock model on a store, in one process or several.

    The losses do not depend on the strategy or on the number of ranks. SIGTERM and Ctrl-C save a run that has an --out
    and end with exit code 75.
    """
    run = out if resume is None else resume
    with command(as_json, rank=rank_of_environment(), lost=_Kept(run, replaces=overwrite and resume is None)):
        settings = _settings(config, flags, None if resume is None else _resumed_settings(resume, out))
        if run is None and settings.save_every:
            raise InputError(explain("--save-every", "a run to save", "no --out", "add --out RUN, or leave it out"))
        if settings.tensorboard and settings.log_dir is None:
            raise InputError(explain("--tensorboard", "a folder for it", "no --log-dir", "add --log-dir DIR"))
        open_store(store)
        task = TrainTask(
            store=store,
            as_json=as_json,
            device=device,
            sample_device=sample_device,
            settings=_with_checked_log(settings, run),
            out=run,
            overwrite=overwrite,
            workspace=workspace,
            resume=resume is not None,
        )
        run_task(task, nproc, max_restarts=max_restarts, min_ranks=min_ranks)


def _settings(config: Path | None, flags: Flags[TrainSettings], resumed: TrainSettings | None = None) -> TrainSettings:
    """The settings of a training: options, then the file, then those of a resumed run, then the defaults."""
    return load_settings(config, flags.values(), resumed)


def _with_checked_log(settings: TrainSettings, run: Path | None) -> TrainSettings:
    """The settings with an absolute --log-dir that can be written: a run may be resumed from another folder."""
    if settings.log_dir is None:
        return settings
    folder = Path(settings.log_dir).resolve()
    if run is not None and folder.is_relative_to(run.resolve()):  # a run folder has no other files
        raise InputError(explain("--log-dir", f"a folder outside of the run {run}", folder, "choose another folder"))
    if rank_of_environment() in (None, 0):  # rank 0 writes it, perhaps on another host
        check_log_folder(folder)
    return settings.model_copy(update={"log_dir": str(folder)})


class _Kept:
    """The text about a run that was ended: how to resume it, if that is possible."""

    def __init__(self, run: Path | None, *, replaces: bool = False) -> None:
        self._run = run
        self._replaced = latest_checkpoint(run) if run is not None and replaces else None

    @property
    def _has_checkpoints(self) -> bool:
        return self._run is not None and latest_checkpoint(self._run) not in (None, self._replaced)

    @property
    def exit_code(self) -> int:
        """After SIGTERM: 75 if there is a checkpoint to resume from."""
        return os.EX_TEMPFAIL if self._has_checkpoints else 143

    def __str__(self) -> str:
        if self._run is None:
            return "no weights were kept; --out RUN keeps them, also of a run that is interrupted"
        if not self._has_checkpoints:
            return "no weights were kept: there was no checkpoint yet"
        return f"the latest checkpoint of {self._run} is kept; to continue: --resume {self._run}"


def _resumed_settings(run: Path, out: Path | None) -> TrainSettings:
    if out not in (None, run):
        raise InputError(explain("--out", f"{run}, the run that is resumed", out, "leave it out"))
    whole = run_of_training(run)
    if whole is not None:
        fix = f"pass --resume {whole}"
        raise InputError(explain(f"--resume {run}", "a run", f"one training of the run {whole}", fix))
    if latest_checkpoint(run) is None:
        got, fix = ("no checkpoint", "train it from the start, with --out")
        if older := trainings_with_checkpoints(run):
            got = f"no checkpoint of {training_folder(run)}, which was to replace {older[0]}"
            fix = f"remove {training_folder(run)} to continue {older[0]}"
        if not run.exists():
            got, fix = ("no such folder", "check the path of the run")
        raise InputError(explain(f"--resume {run}", "a run with a checkpoint", got, fix))
    return load_run(training_folder(run))[0]


@settings_options()
def infer(
    *,
    store: StoreArgument,
    flags: Flags[InferTask],
    nproc: Nproc = 1,
    device: Device = None,
    sample_device: SampleDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Write what a trained model predicts for every vertex.

    Predictions are exact: from all neighbours, not sampled ones. Tables have a row per vertex with its id as it was
    imported; row v of an .npy file is original vertex v.
    """
    with command(as_json, rank=rank_of_environment()):
        task = flags.parse(store=store, as_json=as_json, device=device, sample_device=sample_device)
        check_request(task.out, task.what, task.only)
        open_store(store)
        run_task(task, nproc)


def _checked_own_model(own_model: str | None, settings: TrainSettings) -> str | None:
    """The place of a user's model; its file, which ranks read, as an absolute path."""
    if own_model is not None and settings.strategy == "auto":
        fix = "name a strategy: split, data, data_cached or hybrid(k)"
        raise InputError(explain("--strategy", "a strategy by name with --own-model", "auto", fix))
    file, colon, function = (own_model or "").rpartition(":")
    return f"{Path(file).resolve()}:{function}" if colon and file.endswith(".py") else own_model


@settings_options(only=[name for name in TrainSettings.model_fields if applies_to_verify(name)])
def verify(
    *,
    store: StoreArgument,
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="ranks to start on this host [default: 2]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="INT", help="steps compared")] = 3,
    own_model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="a function that returns your model, also as MODULE:FUNCTION, in place of --model; it gets those of "
            "in_channels and out_channels that it takes",
        ),
    ] = None,
    device: Device = None,
    sample_device: SampleDevice = "cpu",
    config: Config = None,
    flags: Flags[TrainSettings],
    as_json: Json = False,
) -> None:
    """Check that ranks compute what one process does, in float64.

    Exit code 3 if they differ.
    """
    with command(as_json, rank=rank_of_environment()):
        settings = _settings(config, flags)
        open_store(store)
        run_task(
            VerifyTask(
                store=store,
                as_json=as_json,
                device=device,
                sample_device=sample_device,
                settings=settings,
                steps=steps,
                own_model=_checked_own_model(own_model, settings),
            ),
            nproc or default_ranks(2),
        )
