"""A training run from settings to a trained model: what ``gsplit train`` does on every rank.

``Trainer`` knows steps; a run is what stands around them: its folder, when it evaluates, saves and ends. A run that is
resumed builds the same objects, takes its state from the latest checkpoint and goes through the same loop.
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from gsplit.distributed.comm.comm import run_on_all_ranks, run_on_rank_zero
from gsplit.distributed.comm.mesh import Mesh
from gsplit.distributed.watch.stragglers import WaitClock
from gsplit.errors import InputError, explain
from gsplit.inference.evaluate import count_evaluation_edges
from gsplit.inference.metrics import Metric, check_metrics
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.run.checkpoint import check_run, describe_run
from gsplit.run.choices import (
    check_labels,
    check_metric_labels,
    choose_loss,
    choose_strategy,
    hint_at_partitioning,
    make_loss,
)
from gsplit.run.config import TrainSettings
from gsplit.run.folder import begin_run, check_new_run, continue_run, finish_run, telemetry_path, write_settings
from gsplit.run.layout import RunLock, checkpoint_folder, finished_folder, latest_checkpoint, training_folder
from gsplit.run.recipe import array_names, build_model, shape_of
from gsplit.run.results import EpochReport, ModelShape, RunView, TrainResult
from gsplit.run.schedule import EvaluationSchedule, has_stalled, learning_rate
from gsplit.run.stop_signals import stop_on_signals
from gsplit.store.reader import Store
from gsplit.training.checkpoints.files import Checkpoint
from gsplit.training.checkpoints.training import read_on_all_ranks
from gsplit.training.scalar_log import ScalarLog
from gsplit.training.train_state import Evaluation, History, TrainState, history_of
from gsplit.training.trainer import Trainer

__all__ = ["train_run"]


@dataclass(frozen=True)
class _Run:
    """What a run is made from. ``out`` is None if nothing is kept."""

    settings: TrainSettings
    shape: ModelShape
    store: Store
    mesh: Mesh
    out: Path | None
    workspace: Path | None

    @property
    def loss(self) -> str:
        """What is minimised, chosen when the run began."""
        assert self.settings.loss is not None
        return self.settings.loss

    @property
    def metrics(self) -> list[Metric]:
        """What is evaluated; the first decides what is best."""
        assert self.settings.metric is not None
        return check_metrics(self.settings.metric.split(","))

    @property
    def saves(self) -> bool:
        """Whether it makes checkpoints."""
        return self.out is not None and self.settings.save_every != 0

    @property
    def evaluated(self) -> list[str]:
        """The targets that are evaluated."""
        stored = [name for name in ("val", "test") if f"targets/{name}" in self.store.names]
        return [name for name in stored if self.store.stored_targets(name)[2]]

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, if it does not end earlier."""
        num_targets = self.store.stored_targets(self.settings.targets)[2]
        return self.settings.steps or self.settings.epochs * self.settings.steps_per_epoch(num_targets)

    @property
    def description(self) -> dict[str, str]:
        """What must be equal to go on with it."""
        return describe_run(self.settings, self.store, self.num_steps)

    def is_over(self, history: History) -> bool:
        """Whether all steps are done, or no evaluation has been better for too long."""
        return len(history.losses) >= self.num_steps or has_stalled(
            history.evaluations, self.settings.patience, self.metrics[0]
        )


def train_run(
    settings: TrainSettings,
    store: Store,
    mesh: Mesh,
    out: Path | None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    workspace: Path | None = None,
    view: RunView | None = None,
) -> TrainResult:
    """Train, evaluate exactly, and keep the weights of the best epoch on the validation targets. A collective.

    Without an evaluation the last weights are kept. ``resume``: go on from the latest checkpoint of ``out``. A run that
    is told to stop (SIGTERM, Ctrl-C) saves its state and returns, not finished. ``workspace`` is that of evaluation.
    """
    view = view or RunView()
    settings = choose_loss(settings, store, mesh, view)
    shape = shape_of(store, settings)
    run = _Run(choose_strategy(settings, shape, store, mesh, view), shape, store, mesh, out, workspace)
    run_on_all_ranks(mesh.world, "check labels", lambda: check_labels(store, settings.targets, run.loss))
    schedule = _make_schedule(run)
    if schedule.every != 0:
        check_metric_labels(store, run.evaluated, run.metrics, run.loss, mesh)
    checkpoint = None
    with RunLock(out) if out is not None else nullcontext() as lock:
        if out is not None and lock is not None and resume:
            run_on_rank_zero(mesh.world, "lock run", lambda: _lock_to_resume(out, lock))
            checkpoint = _read_checkpoint(run, out, view)
            if finished_folder(out) == training_folder(out) and run.is_over(history_of(checkpoint.state)):
                return _result(run, _make_trainer(run, view, checkpoint, writes=False))
        if out is not None and lock is not None:
            run_on_rank_zero(mesh.world, "begin run", lambda: _open_folder(run, out, lock, overwrite, checkpoint))
        logs = _open_logs(run)
        trainer = _make_trainer(run, view, checkpoint, logs=logs)
        hint_at_partitioning(store, run.settings, mesh, view)
        view.begin(run.num_steps, trainer.state.num_steps)
        stopping = stop_on_signals(trainer.request_stop) if run.saves else nullcontext()
        with ExitStack() as open_files, trainer.state.loader.telemetry, stopping:
            for log in logs:
                open_files.enter_context(log)
            waits = WaitClock(mesh)
            _train(trainer, run, schedule, view)
            straggler = waits.name_straggler()  # all ranks: they stop after the same step
            if run.saves:
                trainer.save()
        if out is not None and not trainer.stopped:
            run_on_rank_zero(mesh.world, "finish run", lambda: _finish(run, out, trainer.state))
    return _result(run, trainer, straggler)


def _lock_to_resume(out: Path, lock: RunLock) -> None:
    """Take the lock before a checkpoint is read, or another training could remove it, or have newer ones."""
    if latest_checkpoint(out) is not None:  # else reading says so, and no folder was made for the lock
        lock.take()


def _read_checkpoint(run: _Run, out: Path, view: RunView) -> Checkpoint:
    """The latest checkpoint of this training. A collective."""
    checkpoint = read_on_all_ranks(run.mesh.world, checkpoint_folder(training_folder(out)))
    check_run(checkpoint, run.description)
    for text in checkpoint.damaged:
        view.note(f"not used: {text}")
    return checkpoint


def _train(trainer: Trainer, run: _Run, schedule: EvaluationSchedule, view: RunView) -> None:
    """From wherever the state stands to the end of the run, or until it is told to stop."""
    state = trainer.state
    if state.num_steps and not state.is_evaluated:  # resumed between an epoch and its evaluation, perhaps
        _end_epoch(trainer, run, schedule, view)
    while not run.is_over(state.history):
        begun = state.num_steps
        trainer.train_epoch(run.num_steps - begun)
        if trainer.stopped:
            return
        if schedule.every is None and begun == 0 and not run.is_over(state.history):
            view.note(schedule.describe(state))
        _end_epoch(trainer, run, schedule, view)


def _end_epoch(trainer: Trainer, run: _Run, schedule: EvaluationSchedule, view: RunView) -> None:
    """Evaluate if that is due, and report, where an epoch or the run has ended; elsewhere nothing."""
    state, steps_per_epoch = trainer.state, trainer.steps_per_epoch
    is_over = run.is_over(state.history)
    if state.num_steps % steps_per_epoch and not is_over:
        return
    scores = None
    if schedule.is_due(state, last=is_over):
        if run.saves:  # who is killed during a long evaluation repeats only that
            trainer.save_in_background()
        arrays, folder = array_names(run.settings), run.workspace
        scores = trainer.evaluate(run.store, run.evaluated, keep_best="val", workspace=folder, **arrays)
        if "val" not in scores:
            view.note(f"no {run.metrics[0].name} of val, where it is no finite number: this epoch cannot be the best")
        if run.saves:
            trainer.save_in_background()
    first = (state.num_steps - 1) // steps_per_epoch * steps_per_epoch
    losses, seconds = state.history.losses[first:], state.history.step_seconds[first:]
    view.epoch(EpochReport(state.epoch, sum(losses) / len(losses), sum(seconds), scores, run.metrics[0].name))


def _result(run: _Run, trainer: Trainer, straggler: str | None = None) -> TrainResult:
    best, history = trainer.state.best, trainer.state.history
    kept = None if best is None else Evaluation(best.epoch, best.num_steps, best.scores)
    how = (run.mesh.size, run.mesh.num_replicas, run.settings.strategy)
    return TrainResult(*how, history, kept, run.out, run.metrics[0].name, not trainer.stopped, straggler)


def _open_folder(run: _Run, out: Path, lock: RunLock, overwrite: bool, checkpoint: Checkpoint | None) -> None:
    """Make the folder ready to be written, for a new run or one that goes on. On rank 0."""
    if checkpoint is None:
        check_new_run(out, overwrite=overwrite)
        lock.take()
        begin_run(out)
    else:
        position = checkpoint.state["loader"]
        continue_run(out, (position["epoch"], position["step"]))
    write_settings(out, run.settings, run.shape)


def _finish(run: _Run, out: Path, state: TrainState) -> None:
    weights = state.model.state_dict() if state.best is None else state.best.weights
    finish_run(out, run.settings, run.shape, weights, state.history)


def _make_schedule(run: _Run) -> EvaluationSchedule:
    settings, names = run.settings, run.evaluated
    if (settings.evaluate_every or settings.patience) and "val" not in names:
        key = "evaluate_every" if settings.evaluate_every else "patience"
        fix = "import the store with val targets, or leave the option out"
        raise InputError(explain(key, "val targets to evaluate on", "a store without", fix))
    every = settings.evaluate_every if "val" in names else 0
    cost = 0 if every is not None else count_evaluation_edges(run.store, names, run.mesh, settings.num_layers)
    return EvaluationSchedule(every, cost)


def _open_logs(run: _Run) -> list[ScalarLog]:
    """The log of a run on rank 0, if it wants one. A collective."""
    settings, logs = run.settings, list[ScalarLog]()
    if settings.log_dir is not None:
        folder, every = Path(settings.log_dir), settings.log_every
        run_on_rank_zero(
            run.mesh.world,
            "open log",
            lambda: logs.append(ScalarLog(folder, every=every, tensorboard=settings.tensorboard)),
        )
    return logs


def _make_trainer(
    run: _Run,
    view: RunView,
    checkpoint: Checkpoint | None,
    *,
    writes: bool = True,
    logs: Sequence[ScalarLog] = (),
) -> Trainer:
    """The trainer of a run, where its checkpoint left it. A collective."""
    settings, mesh, out = run.settings, run.mesh, run.out if writes else None
    model = parallelize(build_model(settings, run.shape, run.store), mesh)
    loader = NeighborLoader(
        run.store,
        settings.fanout,
        settings.targets,
        batch_size=settings.batch_size,
        strategy=settings.strategy,
        seed=settings.seed,
        mesh=mesh,
        deterministic=settings.deterministic,
        prefetch=settings.prefetch,
        cache=settings.cache,
        device_cache=settings.device_cache,
        copies=settings.copies,
        features_on_disk=settings.features_on_disk,
        telemetry=None if out is None else telemetry_path(out, mesh.rank),
        **array_names(settings),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(settings, run.num_steps))
    trainer = Trainer(
        model,
        optimizer,
        loader,
        loss_fn=make_loss(settings, run.store, mesh),
        metrics=[metric.name for metric in run.metrics],
        lr_scheduler=scheduler,
        max_grad_norm=settings.max_grad_norm,
        accumulate=settings.accumulate,
        precision=settings.precision,
        callbacks=[view, *logs],
        save_to=checkpoint_folder(training_folder(out)) if out is not None and run.saves else None,
        save_every=settings.save_every if out is not None and settings.save_every else None,
        keep_checkpoints=settings.keep_checkpoints,
        description=run.description,
    )
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer
