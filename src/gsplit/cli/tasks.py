"""What ranks do: one frozen document per command, with everything resolved, that is written and read as JSON.

A task checks its settings (``check_settings``), prints what is being started (``announce``), both before torch is
imported, checks what else can be checked without ranks (``check``) and does its work on every rank (``run``, which
returns an exit code).
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich.console import Console

from gsplit.cli.console import emit_json, progress_bars
from gsplit.cli.store_view import describe, show_partition
from gsplit.cli.training_view import TrainingView, announce_training, describe_predictions, show_result
from gsplit.errors import InputError, explain
from gsplit.files.mapped_files import check_workspace
from gsplit.files.objects import shown_place
from gsplit.inference.prediction_table import What
from gsplit.minibatch.strategy_names import AUTO
from gsplit.partitioning.settings import PartitionSettings
from gsplit.run.config import TrainSettings
from gsplit.run.folder import check_new_run, latest_checkpoint, load_run
from gsplit.run.preflight import (
    check_device,
    check_features,
    check_new_file,
    check_precision,
    check_ranks,
    check_settings,
    check_threads,
    choose_what,
)
from gsplit.store.reader import open_store
from gsplit.store.writer import check_output
from gsplit.training.checkpoints.names import num_steps_of

if TYPE_CHECKING:
    from gsplit.distributed.comm.mesh import Mesh

__all__ = ["InferTask", "PartitionTask", "Task", "TaskBase", "TrainTask", "VerifyTask", "parse_task"]


class TaskBase(BaseModel):
    """What all tasks have in common: a store, what ranks must agree on, and what happens when they fail."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: Path
    as_json: bool
    device: str | None
    sample_device: str = "cpu"

    def agreement(self) -> dict[str, object]:
        """What must be the same on every rank. Paths may differ between hosts."""
        own = {"store", "as_json", "device", "sample_device", "settings", "out", "weights", "workspace"}
        values = self.model_dump(exclude=own)
        manifest = open_store(self.store).manifest
        values |= {"vertices of the store": manifest.num_vertices, "parts of the store": manifest.part_boundaries}
        if manifest.shard is None:
            values["edges of the store"] = manifest.arrays["indices"].sha256
        return values

    def check_settings(self, num_ranks: int) -> None:
        """Refuse what is found to be wrong without torch and without ranks."""
        check_device(self.device)
        if self.sample_device != AUTO:
            check_device(self.sample_device)

    def check(self, num_ranks: int) -> None:
        """Refuse what is found to be wrong with torch, before ranks are started."""

    @property
    def replicas(self) -> int:
        """Number of groups of ranks that each own the whole graph."""
        return 1

    @property
    def grace_s(self) -> float:
        """Seconds for ranks to end after a signal."""
        return 5.0

    def latest(self) -> Path | None:
        """The newest checkpoint of this task."""
        return None

    @property
    def origin(self) -> str:
        """Where it starts."""
        return "the start"

    def resumed(self, before: Path | None) -> Self:
        """The task after a failure: from the start, unless there is a newer checkpoint than ``before``."""
        return self

    def goes_on(self, started_s: float | None) -> bool:
        """Whether to resume after torchrun, which began at ``started_s``, has started the same command line again."""
        return False


class PartitionTask(TaskBase):
    """``gsplit partition`` on ranks that each hold a shard: rank r of N reads ``NAME-r-of-N.gsplit`` for ``store``."""

    kind: Literal["partition"] = "partition"
    output: Path
    settings: PartitionSettings
    overwrite: bool

    def agreement(self) -> dict[str, object]:
        """The settings; shards are compared when they are joined."""
        return self.settings.as_dict() | {"overwrite": self.overwrite}

    def announce(self, num_ranks: int) -> None:
        _print_start(f"partition {num_ranks} shards of {self.store} into {self.settings.parts} parts; starting ...")

    def check(self, num_ranks: int) -> None:
        """Check that all shards are there and that the new ones can be written."""
        from gsplit.store.sharded_import import shard_paths

        for shard, output in zip(shard_paths(self.store, num_ranks), shard_paths(self.output, num_ranks), strict=True):
            open_store(shard)
            check_output(output, overwrite=self.overwrite)

    def run(self, mesh: "Mesh") -> int:
        """Partition; rank 0 prints the result."""
        from gsplit.partitioning.sharded.partition import partition_shards
        from gsplit.store.sharded_import import shard_paths

        start = time.perf_counter()
        shard = open_store(shard_paths(self.store, mesh.size)[mesh.rank])
        with progress_bars(self.as_json or mesh.rank > 0) as progress:
            made = partition_shards(
                shard, self.output, self.settings, mesh=mesh, overwrite=self.overwrite, progress=progress
            )
        if mesh.rank:
            return 0
        shards = shard_paths(self.output, mesh.size)
        seconds = time.perf_counter() - start
        document = describe(made) | {"seconds": seconds, "shards": [str(shard) for shard in shards]}
        if self.as_json:
            emit_json(document)
            return 0
        console = Console()
        show_partition(document, console)
        text = f"\nall {mesh.size} shards are there in {seconds:.1f} s: {shards[0]} and so on"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return 0


class _SettingsTask(TaskBase):
    settings: TrainSettings

    def check_settings(self, num_ranks: int) -> None:
        super().check_settings(num_ranks)
        check_precision(self.settings, self.device)
        check_threads(self.settings, self.device)
        store = open_store(self.store)
        check_ranks(self.settings, store, num_ranks)
        check_settings(self.settings, store)

    def check(self, num_ranks: int) -> None:
        """Check that the model can be built and wrapped."""
        _check_model(self.settings, self.store, num_ranks)

    def agreement(self) -> dict[str, object]:
        return super().agreement() | self.settings.model_dump()

    @property
    def replicas(self) -> int:
        return self.settings.replicas


class TrainTask(_SettingsTask):
    """``gsplit train``. ``resume``: continue from the latest checkpoint of ``out``."""

    kind: Literal["train"] = "train"
    out: Path | None
    overwrite: bool
    workspace: Path | None = None
    resume: bool = False

    @property
    def grace_s(self) -> float:
        """Longer if there is a run folder: ranks finish their step and save."""
        return 5.0 if self.out is None else 30.0

    def latest(self) -> Path | None:
        return None if self.out is None else latest_checkpoint(self.out)

    @property
    def origin(self) -> str:
        return str(self.latest()) if self.resume else "the start"

    def resumed(self, before: Path | None) -> Self:
        """See the base class. A checkpoint of an older run in the same folder does not count."""
        latest = self.latest()
        if latest is None or (latest == before and not self.resume):
            return self
        return self.model_copy(update={"resume": True})

    def goes_on(self, started_s: float | None) -> bool:
        """See the base class. An older checkpoint is of another run, which is refused or to be replaced."""
        latest = self.latest()
        if latest is None or started_s is None:
            return latest is not None and not self.overwrite
        return latest.stat().st_mtime >= started_s

    def check_settings(self, num_ranks: int) -> None:
        super().check_settings(num_ranks)
        check_workspace(self.workspace)
        if self.out is not None and not self.resume:
            check_new_run(self.out, overwrite=self.overwrite)
        latest = self.latest() if self.resume else None
        steps = self.settings.num_steps(open_store(self.store))
        if latest is not None and steps < num_steps_of(latest.name):
            expected = f"at least the {num_steps_of(latest.name)} steps that {self.out} has"
            raise InputError(explain("--steps or --epochs", expected, f"{steps} steps", "give more, or leave them out"))

    def announce(self, num_ranks: int) -> None:
        announce_training(open_store(self.store), self.settings, num_ranks, Console(stderr=True, soft_wrap=True))

    def run(self, mesh: "Mesh") -> int:
        """Train; rank 0 shows the progress and the result."""
        from gsplit.distributed.launch.launcher import REQUEUE
        from gsplit.run.training import train_run

        store = open_store(self.store)
        view = None if mesh.rank or self.as_json else TrainingView(mesh.size)
        with nullcontext() if view is None else view:
            result = train_run(
                self.settings,
                store,
                mesh,
                self.out,
                overwrite=self.overwrite,
                resume=self.resume,
                workspace=self.workspace,
                view=view,
            )
        if view is not None:
            show_result(result, self.store, Console())
        elif mesh.rank == 0:
            emit_json(result.as_dict())
        return 0 if result.finished else REQUEUE


class InferTask(TaskBase):
    """``gsplit infer``; the fields with a description are its options."""

    kind: Literal["infer"] = "infer"
    weights: Path = Field(description="a folder made by gsplit train --out", json_schema_extra={"metavar": "RUN"})
    out: Path = Field(
        description="NAME.parquet or .csv with your ids, or NAME.npy", json_schema_extra={"metavar": "FILE"}
    )
    what: What | None = Field(
        None, description="the predicted class, the model's outputs (logits), or both [default: classes; .npy: outputs]"
    )
    only: str | None = Field(None, description="targets such as test instead of all vertices")
    overwrite: bool = Field(False, description="replace a file of the same name")
    workspace: Path | None = Field(
        None,
        description="where activations of exact inference are kept [default: the temporary folder]",
        json_schema_extra={"metavar": "FOLDER"},
    )

    def check_settings(self, num_ranks: int) -> None:
        """Check that the run can be read and the result can be written."""
        super().check_settings(num_ranks)
        check_workspace(self.workspace)
        settings, shape = load_run(self.weights)
        store = open_store(self.store)
        choose_what(settings, self.out, self.what)
        check_new_file(self.out, overwrite=self.overwrite)
        check_features(store, settings, shape)
        if self.only is not None:
            store.stored_targets(self.only if "/" in self.only else settings.list_named(self.only))

    def announce(self, num_ranks: int) -> None:
        _print_start(f"infer with {self.weights} on {shown_place(self.store)}, {num_ranks} rank(s); starting ...")

    def run(self, mesh: "Mesh") -> int:
        """Infer; rank 0 prints where the predictions are."""
        from gsplit.run.recipe import infer_run

        with progress_bars(self.as_json or mesh.rank > 0) as progress:
            result = infer_run(
                self.weights,
                open_store(self.store),
                self.out,
                mesh,
                what=self.what,
                only=self.only,
                overwrite=self.overwrite,
                workspace=self.workspace,
                progress=progress,
            )
        if mesh.rank == 0 and self.as_json:
            emit_json(result.as_dict())
        elif mesh.rank == 0:
            text = describe_predictions(result, open_store(self.store))
            Console().print(text, highlight=False, markup=False, soft_wrap=True)
        return 0


class VerifyTask(_SettingsTask):
    """``gsplit verify``. ``own_model``: a function of the user that returns the model."""

    kind: Literal["verify"] = "verify"
    steps: int
    own_model: str | None = None

    @property
    def model(self) -> str:
        return self.own_model or self.settings.model

    def announce(self, num_ranks: int) -> None:
        _print_start(f"verify {self.model} on {shown_place(self.store)}, {num_ranks} rank(s) against one; starting ...")

    def check(self, num_ranks: int) -> None:
        """See the base class."""
        _check_model(self.settings, self.store, num_ranks, self.own_model)

    def run(self, mesh: "Mesh") -> int:
        """Compare; rank 0 prints the differences."""
        from gsplit.distributed.launch.launcher import DIFFERS
        from gsplit.run.recipe import verify_run

        found = verify_run(self.settings, open_store(self.store), mesh, self.steps, self.own_model)
        if mesh.rank == 0 and self.as_json:
            emit_json(found.as_dict())
        elif mesh.rank == 0:
            verdict = "equal one process" if found.ok else "DIFFER from one process"
            console = Console(soft_wrap=True)
            ranks = f"{found.ranks} rank(s) {verdict} over {found.steps} steps"
            console.print(f"{self.model}, {found.strategy}: {ranks}")
            errors = f"loss {found.max_loss_error:.2e}, gradients {found.max_grad_error:.2e}"
            console.print(f"largest difference: {errors}, buffers {found.max_buffer_error:.2e}")
        sys.stdout.flush()
        return 0 if found.ok else DIFFERS


Task = TrainTask | InferTask | VerifyTask | PartitionTask


def parse_task(text: str) -> Task:
    """A task from its JSON."""
    adapter: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
    return adapter.validate_json(text)


def _print_start(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)


def _check_model(settings: TrainSettings, path: Path, nproc: int, own_model: str | None = None) -> None:
    from gsplit.distributed.comm.mesh import solo_mesh
    from gsplit.run.choices import check_labels, choose_for_pairs, fitting_loss, refuse_typed_settings
    from gsplit.run.recipe import build_model, shape_of, wrap

    store = open_store(path)
    if settings.strategy == AUTO:
        _measure_machine(nproc)
    refuse_typed_settings(settings, store)
    if settings.of_pairs:
        settings = choose_for_pairs(settings, store)
    else:
        check_labels(store, settings.targets, settings.loss or fitting_loss(store, settings.targets))
    shape = shape_of(store, settings)
    wrap(build_model(settings, shape, store, own_model), shape, store, solo_mesh())


def _measure_machine(nproc: int) -> None:
    """Measure the planner's constants before ranks are started: a minute, once per machine."""
    from gsplit.planner.calibration import known_machine, this_machine

    if nproc > 1 and known_machine() is None:
        Console(stderr=True).print("measuring this machine for --strategy auto, once: about a minute ...")
        this_machine()
