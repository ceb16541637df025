"""What ranks are told to do: one frozen document per command, with everything resolved. Read and written as JSON.

A task says what is being started (``announce``, before torch is imported), checks what can be checked without ranks
(``check``) and does its work on every rank (``run``, which returns an exit code).
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, TypeAdapter
from rich.console import Console

from gsplit.cli.announcement import announce_training
from gsplit.cli.console import emit_json, progress_bars
from gsplit.cli.partition_task import PartitionTask
from gsplit.cli.prediction_view import describe_predictions
from gsplit.cli.task_base import TaskBase, say
from gsplit.errors import InputError, explain
from gsplit.inference.prediction_table import What
from gsplit.run.config import TrainSettings
from gsplit.store.reader import open_store

if TYPE_CHECKING:
    from gsplit.distributed.mesh import Mesh

__all__ = ["InferTask", "Task", "TrainTask", "VerifyTask", "parse_task"]


class _SettingsTask(TaskBase):
    settings: TrainSettings

    def agreement(self) -> dict[str, object]:
        """See the base class."""
        return super().agreement() | self.settings.model_dump()

    @property
    def replicas(self) -> int:
        """Groups of ranks."""
        return self.settings.replicas


class TrainTask(_SettingsTask):
    """``gsplit train``."""

    kind: Literal["train"] = "train"
    out: Path | None
    overwrite: bool
    workspace: Path | None = None
    resume: bool = False
    """Go on from the latest checkpoint of ``out``."""

    @property
    def grace_s(self) -> float:
        """Time to finish a step and to save, if there is something to save into."""
        return 5.0 if self.out is None else 30.0

    def latest(self) -> Path | None:
        """See the base class."""
        from gsplit.run.checkpoint import latest_checkpoint

        return None if self.out is None else latest_checkpoint(self.out)

    @property
    def origin(self) -> str:
        """See the base class."""
        return str(self.latest()) if self.resume else "the start"

    def resumed(self, before: Path | None) -> Self:
        """See the base class. An older run at this place is not what goes on, unless that was asked for."""
        latest = self.latest()
        if latest is None or (latest == before and not self.resume):
            return self
        return self.model_copy(update={"resume": True})

    def restarted(self) -> Self:
        """See the base class. With --overwrite, a checkpoint may be of the run that is to be replaced."""
        return self if self.overwrite else self.resumed(None)

    def announce(self, num_ranks: int) -> None:
        """Say what is being started."""
        announce_training(open_store(self.store), self.settings, num_ranks, Console(stderr=True, soft_wrap=True))

    def check(self, nproc: int) -> None:
        """Whether the run has a place and its model can be built and wrapped."""
        from gsplit.inference.workspace import check_workspace
        from gsplit.run.folder import check_new_run

        if self.out is not None and not self.resume:
            check_new_run(self.out, overwrite=self.overwrite)
        check_workspace(self.workspace)
        if nproc > 1:
            _check_model(self.settings, self.store, nproc)

    def run(self, mesh: "Mesh") -> int:
        """Train; rank 0 shows it."""
        from gsplit.cli.training_view import TrainingView, show_result
        from gsplit.run.checkpoint import REQUEUE
        from gsplit.run.training import train_run

        store, view = open_store(self.store), None if mesh.rank or self.as_json else TrainingView(mesh.size)
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
    """``gsplit infer``."""

    kind: Literal["infer"] = "infer"
    weights: Path
    out: Path
    what: What | None = None
    only: str | None = None
    overwrite: bool
    workspace: Path | None = None

    @property
    def replicas(self) -> int:
        """Every rank has its own vertices."""
        return 1

    def announce(self, num_ranks: int) -> None:
        """Say what is being started."""
        say(f"infer with {self.weights} on {self.store}, {num_ranks} rank(s); starting ...")

    def check(self, nproc: int) -> None:
        """Whether there is a run and a place for the result."""
        from gsplit.inference.workspace import check_workspace
        from gsplit.run.folder import load_run
        from gsplit.run.recipe import check_new_file, choose_what

        check_workspace(self.workspace)
        choose_what(load_run(self.weights)[0], self.out, self.what)
        check_new_file(self.out, overwrite=self.overwrite)
        if self.only is not None:
            open_store(self.store).stored_targets(self.only)

    def run(self, mesh: "Mesh") -> int:
        """Infer; rank 0 shows it."""
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
    """``gsplit verify``."""

    kind: Literal["verify"] = "verify"
    steps: int

    def announce(self, num_ranks: int) -> None:
        """Say what is being started."""
        say(f"verify {self.settings.model} on {self.store}, {num_ranks} rank(s) against one; starting ...")

    def check(self, nproc: int) -> None:
        """Whether the model can be built and wrapped."""
        if nproc > 1:
            _check_model(self.settings, self.store, nproc)

    def run(self, mesh: "Mesh") -> int:
        """Compare; rank 0 shows it."""
        from gsplit.distributed.launch import DIFFERS
        from gsplit.run.recipe import verify_run

        found = verify_run(self.settings, open_store(self.store), mesh, self.steps)
        if mesh.rank == 0 and self.as_json:
            emit_json(found.as_dict())
        elif mesh.rank == 0:
            verdict = "equal one process" if found.ok else "DIFFER from one process"
            console = Console(soft_wrap=True)
            ranks = f"{found.ranks} rank(s) {verdict} over {found.steps} steps"
            console.print(f"{self.settings.model}, {found.strategy}: {ranks}")
            errors = f"loss {found.max_loss_error:.2e}, gradients {found.max_grad_error:.2e}"
            console.print(f"largest difference: {errors}, buffers {found.max_buffer_error:.2e}")
        sys.stdout.flush()
        return 0 if found.ok else DIFFERS


Task = TrainTask | InferTask | VerifyTask | PartitionTask


def parse_task(text: str) -> Task:
    """A task from its JSON."""
    adapter: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
    return adapter.validate_json(text)


def _check_model(settings: TrainSettings, path: Path, nproc: int) -> None:
    from gsplit.distributed.mesh import solo_mesh
    from gsplit.nn.parallelize import parallelize
    from gsplit.ownership import own_parts
    from gsplit.planner.auto import AUTO
    from gsplit.run.choices import check_labels, fitting_loss
    from gsplit.run.recipe import build_model, shape_of
    from gsplit.strategies.spec import parse_strategy

    store = open_store(path)
    if settings.strategy == AUTO:
        _measure_machine(nproc)
    else:
        parse_strategy(settings.strategy, len(settings.fanout))
    if nproc % settings.replicas:
        raise InputError(explain("--replicas", f"a divisor of {nproc} ranks", settings.replicas, "change one of them"))
    own_parts(store.part_boundaries, nproc // settings.replicas, store.part_loads)
    store.stored_array(f"targets/{settings.targets}")
    check_labels(store, settings.targets, settings.loss or fitting_loss(store, settings.targets))
    parallelize(build_model(settings, shape_of(store, settings), store), solo_mesh())


def _measure_machine(nproc: int) -> None:
    """The planner's constants, measured before ranks are started: a minute, once per machine."""
    from gsplit.planner.calibration import known_machine, this_machine

    if nproc > 1 and known_machine() is None:
        Console(stderr=True).print("measuring this machine for --strategy auto, once: about a minute ...")
        this_machine()
