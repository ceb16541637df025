"""A training run from settings to a trained model: what ``gsplit train`` runs on every rank.

``Trainer`` runs steps. A run adds its folder, the schedules of evaluation and learning rate, checkpoints, early
stopping and signals. A run that is resumed builds the same objects, restores the latest checkpoint and runs the same
loop.
"""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import cast

import torch

from gsplit.distributed.comm.comm import run_on_all_ranks, run_on_rank_zero
from gsplit.distributed.comm.mesh import Mesh
from gsplit.distributed.watch.stragglers import WaitClock
from gsplit.errors import InputError, explain
from gsplit.inference.evaluate import count_evaluation_edges
from gsplit.inference.evaluate_links import LinkEvaluationOptions
from gsplit.inference.metrics import Metric, check_metrics
from gsplit.loading.plan import stored_checksums
from gsplit.run.arrays import array_names, feature_arrays
from gsplit.run.choices import (
    check_labels,
    check_metric_labels,
    choose_loss,
    hint_at_partitioning,
    make_loss,
)
from gsplit.run.config import LINK_SETTINGS, TrainSettings
from gsplit.run.folder import (
    begin_run,
    check_new_run,
    checkpoint_folder,
    continue_run,
    finish_run,
    finished_folder,
    latest_checkpoint,
    lock_run,
    telemetry_path,
    training_folder,
    write_settings,
)
from gsplit.run.preflight import check_precision
from gsplit.run.recipe import make_loader, shape_of, wrap_model
from gsplit.run.results import EpochReport, ModelShape, RunView, TrainResult
from gsplit.run.trial import choose_strategy
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store.reader import Store
from gsplit.training.checkpoints.files import Checkpoint, CheckpointManifest
from gsplit.training.checkpoints.training import read_on_all_ranks
from gsplit.training.scalar_log import ScalarLog
from gsplit.training.train_state import Evaluation, History, TrainState, history_of
from gsplit.training.trainer import Trainer

__all__ = ["EvaluationSchedule", "train_run"]

_ADJUSTABLE = frozenset(
    {
        "cache",
        "copies",
        "deterministic",
        "device_cache",
        "epochs",
        "evaluate_every",
        "features_on_disk",
        "keep_checkpoints",
        "log_dir",
        "log_every",
        "metric",
        "patience",
        "prefetch",
        "replicas",
        "sampling_threads",
        "save_every",
        "steps",
        "strategy",
        "tensorboard",
        "trial_steps",
        "verify_every",
    }
)
"""Settings that a resumed run may change: how long or how fast it is, not what its steps compute."""


@dataclass(frozen=True)
class _Run:
    """The inputs of a run, and what follows from them. ``out`` is None if no files are written."""

    settings: TrainSettings
    shape: ModelShape
    store: Store
    mesh: Mesh
    out: Path | None
    workspace: Path | None

    @property
    def loss(self) -> str:
        assert self.settings.loss is not None  # choose_loss
        return self.settings.loss

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of an evaluation; the first one decides which weights are best."""
        assert self.settings.metric is not None  # choose_loss
        return check_metrics(self.settings.metric.split(","), of_pairs=self.settings.of_pairs)

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.out is not None and self.settings.save_every != 0

    @property
    def val(self) -> str:
        """The name of the targets or pairs that decide which weights are best."""
        return self.settings.list_named("val")

    @property
    def evaluated(self) -> list[str]:
        """The names of the targets or pairs that are evaluated."""
        if self.settings.of_pairs:
            listed = [name for name in ("val", "test") if name in self.store.pair_names]
            return [name for name in listed if self.store.pairs(name).shape[0]]
        named = [self.settings.list_named(name) for name in ("val", "test")]
        stored = [name for name in named if f"targets/{name}" in self.store.names]
        return [name for name in stored if self.store.stored_targets(name)[2]]

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        return self.settings.num_steps(self.store)

    @property
    def description(self) -> dict[str, str]:
        """What a resumed run must have in common with the checkpoint, beside loader, model and optimizer."""
        settings = self.settings
        others = set() if settings.of_pairs else LINK_SETTINGS
        described = settings.model_dump(exclude={*_ADJUSTABLE, *settings.sampler_options, *others})
        found = {name: str(value) for name, value in described.items()}
        sampler = str(DrawOptions(**settings.sampler_options))
        if sampler:  # as in the description of a loader
            found["sampler"] = sampler
        if settings.lr_scheduler != "constant":
            found["steps of the schedule"] = str(self.num_steps)
        if settings.metric is not None:
            found["metric"] = settings.metric.split(",")[0]
        found["store parts"] = str(len(self.store.part_boundaries) - 1)
        arrays = ["indptr", "indices", "edge_type", "original_ids"]
        arrays.append("y" if settings.vertex_type is None else f"y/{settings.vertex_type}")
        arrays += [f"features/{name}" for name in feature_arrays(settings, self.store)]
        if settings.of_pairs:
            lists = (settings.pairs, "val", "test")
            arrays += [f"{kind}/{name}" for kind in ("pairs", "pair_labels", "pair_negatives") for name in lists]
        else:
            arrays += [f"targets/{name}" for name in (settings.targets, self.val, settings.list_named("test"))]
        arrays += [f"edges/{name}" for name in (settings.edge_attr, settings.edge_weight, settings.weight_attr)]
        return found | stored_checksums(self.store, arrays)

    def is_over(self, history: History) -> bool:
        """Whether all steps are done, or the last ``patience`` evaluations on val were not better than one before."""
        if len(history.losses) >= self.num_steps:
            return True
        patience = self.settings.patience
        scores = [each.scores[self.val] for each in history.evaluations if self.val in each.scores]
        if patience is None or len(scores) <= patience:
            return False
        metric = self.metrics[0]
        best = max if metric.higher_is_better else min
        return not metric.is_better(best(scores[-patience:]), best(scores[:-patience]))


@dataclass(frozen=True)
class EvaluationSchedule:
    """``every``: epochs between evaluations, 0 for never, None for auto. ``cost``: edges of one evaluation.

    Auto evaluates as often as evaluation costs no more than training. Both costs are counted in edges over all layers
    and ranks. The counts are the same on every rank, so all ranks decide the same.
    """

    every: int | None
    cost: int

    def is_due(self, state: TrainState, *, last: bool) -> bool:
        """Whether to evaluate at the end of this epoch; unless never, always after the last epoch."""
        if self.every == 0 or last:
            return self.every != 0
        if self.every is not None:
            return state.epoch % self.every == 0
        return state.evaluation_edges + self.cost <= state.train_edges

    def describe(self, state: TrainState) -> str:
        """The interval that auto results in, after the first epoch."""
        each = max(1, -(-self.cost // max(1, state.train_edges)))
        when = "after every epoch" if each == 1 else f"after about every {each} epochs, and after the last"
        why = f"one computes {self.cost:,} edges, an epoch of training {state.train_edges:,}"
        return f"exact evaluation {when}: {why}" + ("" if each == 1 else " (--evaluate-every N to choose)")


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

    Without an evaluation the last weights are kept. ``resume``: continue from the latest checkpoint of ``out``. After
    SIGTERM or Ctrl-C the run saves its state and returns a result with ``finished=False``. ``workspace`` is the folder
    for activations of an evaluation.
    """
    view = view or RunView()
    check_precision(settings, mesh.device.type)
    if settings.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    settings = choose_loss(settings, store, mesh, view)
    shape = shape_of(store, settings)
    run = _Run(choose_strategy(settings, shape, store, mesh, view), shape, store, mesh, out, workspace)
    if not settings.of_pairs:
        run_on_all_ranks(mesh.control, "check labels", lambda: check_labels(store, settings.targets, run.loss))
    schedule = _make_schedule(run)
    if schedule.every != 0 and not settings.of_pairs:
        check_metric_labels(store, run.evaluated, run.metrics, run.loss, mesh)
    checkpoint = None
    with ExitStack() as lock:  # entered on rank 0
        if out is not None and resume:
            run_on_rank_zero(mesh.control, "lock run", lambda: _lock_to_resume(out, lock))
            checkpoint = _read_checkpoint(run, out, view)
            if finished_folder(out) == training_folder(out) and run.is_over(history_of(checkpoint.state)):
                return _result(run, _make_trainer(run, view, checkpoint, writes=False))
        if out is not None:
            run_on_rank_zero(mesh.control, "begin run", lambda: _open_folder(run, out, lock, overwrite, checkpoint))
        logs = _open_logs(run)
        trainer = _make_trainer(run, view, checkpoint, logs=logs)
        if out is not None and checkpoint is not None:  # not before: what is refused should not be tried again
            run_on_rank_zero(mesh.control, "write settings", lambda: write_settings(out, run.settings, run.shape))
        if trainer.state.loader.device_note:
            view.note(trainer.state.loader.device_note)
        hint_at_partitioning(store, run.settings, mesh, view)
        view.begin(run.num_steps, trainer.state.num_steps)
        stopping = _stop_on_signals(trainer.request_stop) if run.saves else nullcontext()
        with ExitStack() as open_files, trainer.state.loader.telemetry, stopping:
            for log in logs:
                open_files.enter_context(log)
            waits = WaitClock(mesh)
            _train(trainer, run, schedule, view)
            straggler = waits.name_straggler()  # all ranks: all stop after the same step
            if run.saves:
                trainer.save()
        if out is not None and not trainer.stopped:
            run_on_rank_zero(mesh.control, "finish run", lambda: _finish(run, out, trainer.state))
    return _result(run, trainer, straggler)


def _lock_to_resume(out: Path, lock: ExitStack) -> None:
    """Lock before the checkpoint is read, because another training could remove it or write newer ones."""
    if latest_checkpoint(out) is not None:  # otherwise reading raises, and the lock must not make the folder
        lock.enter_context(lock_run(out))


def _read_checkpoint(run: _Run, out: Path, view: RunView) -> Checkpoint:
    """The latest checkpoint; one of a different training is refused before any file is changed. A collective."""
    checkpoint = read_on_all_ranks(run.mesh.control, checkpoint_folder(training_folder(out)))
    saved = checkpoint.manifest
    others = {name: value for name, value in saved.fixed.items() if name != "sampler"}  # not set: the uniform one
    saved.compare(CheckpointManifest({**others, **run.description}), checkpoint.path)
    for text in checkpoint.damaged:
        view.note(f"not used: {text}")
    return checkpoint


def _train(trainer: Trainer, run: _Run, schedule: EvaluationSchedule, view: RunView) -> None:
    """Train from the current state to the end of the run, or until a stop is requested."""
    state = trainer.state
    if state.num_steps and not state.is_evaluated:  # perhaps resumed between an epoch and its evaluation
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
    """Evaluate if an evaluation is due, and report. Does nothing in the middle of an epoch."""
    state = trainer.state
    steps_per_epoch = trainer.steps_per_epoch
    is_over = run.is_over(state.history)
    if state.num_steps % steps_per_epoch and not is_over:
        return
    scores = None
    if schedule.is_due(state, last=is_over):
        if run.saves:  # a run that is killed during a long evaluation repeats only the evaluation
            trainer.save_in_background()
        options: LinkEvaluationOptions = {"workspace": run.workspace}
        options.update(cast(LinkEvaluationOptions, array_names(run.settings, run.store)))
        if run.settings.of_pairs:
            options["num_negatives"] = run.settings.ranked_negatives
        scores = trainer.evaluate(run.store, run.evaluated, keep_best=run.val, **options)
        if run.val not in scores:
            view.note(f"{run.metrics[0].name} of {run.val} is not a finite number: this epoch cannot be the best")
        if run.saves:
            trainer.save_in_background()
    first = (state.num_steps - 1) // steps_per_epoch * steps_per_epoch
    losses = state.history.losses[first:]
    view.epoch(
        EpochReport(
            epoch=state.epoch,
            mean_loss=sum(losses) / len(losses),
            seconds=sum(state.history.step_seconds[first:]),
            scores=scores,
            metric=run.metrics[0].name,
        )
    )


def _result(run: _Run, trainer: Trainer, straggler: str | None = None) -> TrainResult:
    best = trainer.state.best
    return TrainResult(
        ranks=run.mesh.size,
        replicas=run.mesh.num_replicas,
        strategy=run.settings.strategy,
        history=trainer.state.history,
        best=None if best is None else Evaluation(best.epoch, best.num_steps, best.scores),
        out=run.out,
        metric=run.metrics[0].name,
        finished=not trainer.stopped,
        straggler=straggler,
    )


def _open_folder(run: _Run, out: Path, lock: ExitStack, overwrite: bool, checkpoint: Checkpoint | None) -> None:
    """Prepare the folder of a new or a resumed run. On rank 0."""
    if checkpoint is None:
        check_new_run(out, overwrite=overwrite)
        lock.enter_context(lock_run(out))
        begin_run(out)
        write_settings(out, run.settings, run.shape)
    else:
        position = checkpoint.state["loader"]
        continue_run(out, (position["epoch"], position["step"]))


def _finish(run: _Run, out: Path, state: TrainState) -> None:
    weights = state.model.state_dict() if state.best is None else state.best.weights
    finish_run(out, run.settings, run.shape, weights, state.history)


def _make_schedule(run: _Run) -> EvaluationSchedule:
    settings = run.settings
    names = run.evaluated
    if (settings.evaluate_every or settings.patience) and run.val not in names:
        key = "evaluate_every" if settings.evaluate_every else "patience"
        what = "pairs" if settings.of_pairs else "targets"
        got = f"{run.store.where} with {', '.join(names) or 'neither val nor test'} {what}"
        fix = f"import the store with val {what}, or leave the option out"
        raise InputError(explain(key, f"val {what} to evaluate on", got, fix))
    every = settings.evaluate_every if run.val in names else 0
    if every is not None:
        return EvaluationSchedule(every, cost=0)
    if settings.of_pairs:  # with their negatives they mostly reach every vertex
        return EvaluationSchedule(every, cost=settings.num_layers * run.store.num_edges)
    return EvaluationSchedule(every, count_evaluation_edges(run.store, names, run.mesh, settings.num_layers))


def _learning_rate(settings: TrainSettings, num_steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at every step: a linear warm-up, then constant or half a cosine."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.lr_scheduler == "constant":
            return 1.0
        done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


@contextmanager
def _stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call ``request_stop`` on SIGTERM and Ctrl-C: training stops after the current step and saves.

    A process that a user started ends at the second signal. A rank of a launcher gets the signal both from the terminal
    and from the launcher, so it ignores the second one, also while it ends; the launcher kills ranks that take too
    long. In a thread other than the main thread, which receives no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_launched = "RANK" in os.environ
    is_stopped = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        is_stopped.set()
        request_stop()
        if not is_launched:
            restore()

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_IGN if is_launched and is_stopped.is_set() else handler)

    try:
        yield
    finally:
        restore()


def _open_logs(run: _Run) -> list[ScalarLog]:
    """The scalar log on rank 0, if there is a --log-dir. A collective."""
    settings = run.settings
    logs: list[ScalarLog] = []
    if settings.log_dir is not None:
        folder = Path(settings.log_dir)
        run_on_rank_zero(
            run.mesh.control,
            "open log",
            lambda: logs.append(ScalarLog(folder, every=settings.log_every, tensorboard=settings.tensorboard)),
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
    """The trainer of a run, with the state of the checkpoint. A collective."""
    settings = run.settings
    mesh = run.mesh
    out = run.out if writes else None
    model = wrap_model(settings, run.shape, run.store, mesh)
    telemetry = None if out is None else telemetry_path(out, mesh.rank)
    loader = make_loader(settings, run.store, mesh, telemetry)
    fused = mesh.device.type == "cuda"  # one launch instead of one per operation
    optimizer = torch.optim.Adam(model.parameters(), settings.lr, weight_decay=settings.weight_decay, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate(settings, run.num_steps))
    trainer = Trainer(
        model,
        optimizer,
        loader,
        loss_fn=make_loss(settings, run.store, mesh),
        metrics=[metric.name for metric in run.metrics],
        lr_scheduler=scheduler,
        max_grad_norm=settings.max_grad_norm,
        accumulate=settings.accumulate,
        precision="bf16" if settings.precision == "bf16" else "float32",
        callbacks=[view, *logs],
        save_to=checkpoint_folder(training_folder(out)) if out is not None and run.saves else None,
        save_every=settings.save_every if out is not None and settings.save_every else None,
        keep_checkpoints=settings.keep_checkpoints,
        description=run.description,
        verify_every=settings.verify_every,
    )
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer
