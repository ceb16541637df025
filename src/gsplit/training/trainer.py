"""Training: steps, epochs, evaluation and checkpoints. ``training_step`` defines a step.

A step is one of the optimizer, of one mini-batch or of several accumulated ones: losses, limits, checkpoints and
callbacks count these. The whole state of a run is ``Trainer.state``; ``save`` and ``load`` write and read it. On a
device, the loss of a step is read after the next step has been launched, so that the device always has work. Callbacks
are called that much later, and ``Trainer.state`` is consistent when ``train_epoch`` has returned.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.nn import Module
from torch.optim import Optimizer

from gsplit.device.devices import AsyncHostCopy
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType
from gsplit.inference.evaluate import evaluate_targets, list_names
from gsplit.inference.evaluate_links import LinkEvaluationOptions, evaluate_pair_lists
from gsplit.inference.metric_names import DEFAULT_METRICS
from gsplit.inference.metrics import check_metrics
from gsplit.loading.batch_loader import BatchLoader
from gsplit.loading.link_loader import LinkNeighborLoader, Pairs
from gsplit.minibatch.batch import Batch
from gsplit.nn.parallelize import finish_checks
from gsplit.nn.runtime import runtime_of
from gsplit.training.callbacks import Callback, EvaluationReport, StepReport
from gsplit.training.checkpoints.files import Checkpoint
from gsplit.training.checkpoints.training import StateSaver, read_on_all_ranks, restore_state
from gsplit.training.losses import LossFunction, PairLossFunction, resolve_loss
from gsplit.training.train_state import History, LRScheduler, TrainState
from gsplit.training.training_step import TrainingStep, check_finite

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)


class _StopVote:
    """Sums over all ranks which of them want to stop. A collective, started at the beginning of a step.

    A signal reaches ranks at different times, and a rank that stopped alone would leave the others waiting (law 5). The
    sum is read at the end of the step, so all ranks stop after the same one.
    """

    def __init__(self, comm: Comm, wants_to_stop: bool) -> None:
        self._votes = torch.full((1,), int(wants_to_stop), dtype=torch.int32)
        self._work = comm.all_reduce(Call("vote to stop"), self._votes)

    def read(self) -> bool:
        """Whether any rank wants to stop; the same on every rank."""
        self._work.wait()
        return int(self._votes) > 0


@dataclass(frozen=True)
class _LaunchedStep:
    """A step whose loss may still be on its way to the host; ``batch`` is its last mini-batch."""

    batch: Batch
    loss: AsyncHostCopy
    vote: _StopVote | None
    num_targets: int
    num_edges: int


class _StepsInFlight:
    """Steps that were launched and whose losses have not been read, oldest first.

    A launched step is in the weights, so its loss goes into the history in any case.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._steps: deque[_LaunchedStep] = deque()
        self._previous = time.perf_counter()
        self._num_targets = 0
        self._num_edges = 0

    @property
    def num_launched(self) -> int:
        """Steps of the whole training up to the last one launched."""
        return len(self._history.losses) + len(self._steps)

    def count(self, batch: Batch) -> None:
        """Count the targets and edges of a mini-batch of the next step."""
        self._num_targets += batch.global_batch_size
        self._num_edges += sum(block.num_edges for block in batch.blocks)

    def push(self, batch: Batch, loss: AsyncHostCopy, vote: _StopVote | None) -> _LaunchedStep:
        """Add a step that was just launched."""
        step = _LaunchedStep(batch, loss, vote, self._num_targets, self._num_edges)
        self._steps.append(step)
        self._num_targets = 0
        self._num_edges = 0
        return step

    def drain(self, leave: int) -> Iterator[_LaunchedStep]:
        """Read the losses of all but the last ``leave`` steps, and yield these steps."""
        while len(self._steps) > leave:
            step = self._steps[0]
            loss = float(step.loss)
            self._steps.popleft()
            now = time.perf_counter()
            self._history.add(loss, now - self._previous)
            self._previous = now
            yield step

    def abandon(self) -> None:
        """Record the remaining steps after an error; a loss that cannot be read, on a failed device, is NaN."""
        for step in self._steps:
            try:
                loss = float(step.loss)
            except Exception:
                loss = math.nan
            self._history.add(loss, 0.0)


def _check_scheduler(scheduler: object) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        fix = "choose another, or step it yourself with what trainer.evaluate returns"
        raise InputError(explain("lr_scheduler", "one that steps without a score", "ReduceLROnPlateau", fix))


def _evaluate_targets(model: Module, graph: Any, names: list[str], **options: Any) -> tuple[dict[str, float], int]:
    found = evaluate_targets(model, graph, names, **options)
    return found.scores, found.num_edges


def _evaluate_pairs(
    model: Module, graph: Any, names: list[str], *, edge_type: EdgeType | None, **options: Any
) -> tuple[dict[str, float], int]:
    """Scores by name of the pairs: the first metric, and the others with their names."""
    lists: list[Pairs] = [name if edge_type is None else (edge_type, name) for name in names]
    found, num_edges = evaluate_pair_lists(model, graph, lists, **options)
    scores = {}
    for name, of_list in zip(names, found, strict=True):
        for number, (metric, score) in enumerate(of_list.items()):
            scores[name if number == 0 else f"{name} {metric}"] = score
    return scores, num_edges


class Trainer:
    """Trains a model returned by ``gsplit.parallelize``. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loader: BatchLoader[Any],
        *,
        loss_fn: str | LossFunction | PairLossFunction = "cross_entropy",
        metrics: Sequence[str] | None = None,
        lr_scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        precision: str = "float32",
        callbacks: Sequence[Callback] = (),
        save_to: str | Path | None = None,
        save_every: int | None = None,
        keep_checkpoints: int = 2,
        description: Mapping[str, str] | None = None,
        verify_every: int | None = None,
    ) -> None:
        """``loss_fn``: a name of ``gsplit.losses``, or a function of (out, y) that returns one value per target. For a
        ``LinkNeighborLoader``: "cross_entropy", "bpr", or a function of (out, batch) that returns one value per pair.

        ``metrics``: keys of ``inference.metrics.METRICS`` that ``evaluate`` computes, by default the one that fits the
        loss, or for a function the labels: rmse for floats, else accuracy; the first one determines the best
        evaluation. ``lr_scheduler`` steps after every training step.

        ``max_grad_norm`` bounds the norm of the whole gradient. ``accumulate``: mini-batches per step of the optimizer.
        ``precision="bf16"``: forward and loss under autocast. ``callbacks`` are called after steps and evaluations
        (``gsplit.callbacks``).

        ``save_to``: a folder for checkpoints. They are written every ``save_every`` steps in the background, and
        whenever ``save`` is called; the newest ``keep_checkpoints`` and the best are kept (docs/checkpoints.md).
        ``description``: what else must be equal to continue from them, such as {"dropout": "0.5"}.

        ``verify_every``: as for ``gsplit.parallelize``, whose value it replaces; here the comparison with one process
        includes ``loss_fn``.
        """
        if save_every is not None and (save_every < 1 or save_to is None):
            got = f"save_every={save_every}, save_to={save_to}"
            fix = "give both, or leave save_every out"
            raise InputError(explain("save_every", "a positive number of steps, and a folder to save to", got, fix))
        _check_scheduler(lr_scheduler)
        self.state = TrainState(model, optimizer, loader, lr_scheduler)
        has_pairs = isinstance(loader, LinkNeighborLoader)
        loss = resolve_loss(loss_fn, of_pairs=has_pairs)
        fitting = "mrr" if has_pairs else "rmse" if loader.has_float_labels else "accuracy"
        if isinstance(loss_fn, str) and not has_pairs:
            fitting = DEFAULT_METRICS[loss_fn]
        self._metrics = check_metrics(metrics if metrics is not None else [fitting], of_pairs=has_pairs)
        self._step = TrainingStep(
            self.state, loss, max_grad_norm=max_grad_norm, accumulate=accumulate, precision=precision
        )
        if verify_every is not None:
            step_check = runtime_of(model).step_check
            assert step_check is not None  # of a model that parallelize has returned
            step_check.set_interval(verify_every)
        self._callbacks = tuple(callbacks)
        loader.telemetry.times_devices |= bool(callbacks)  # which get the times of every step
        self._has_started = False  # whether callbacks were told where training continues
        self._num_edges = 0  # of this rank, not yet in the state
        self._save_every = save_every
        self._keep = keep_checkpoints
        self._description = {
            "max_grad_norm": str(max_grad_norm),
            "metric": self._metrics[0].name,
            "accumulate": str(accumulate),
            "precision": precision,
            **(description or {}),
        }
        self._saver: StateSaver | None = None
        if save_to is not None:
            self._saver = StateSaver(self.state, Path(save_to), keep_checkpoints, self._description)
        self._wants_to_stop = False
        self.stopped = False
        """Whether ``train_epoch`` returned early because a rank had called ``request_stop``."""

    def request_stop(self) -> None:
        """Make all ranks leave ``train_epoch`` after the same step, soon. Works only with ``save_to``.

        May be called on any rank, from a signal handler or another thread.
        """
        self._wants_to_stop = True

    def train_step(self, batch: Batch) -> float:
        """Step the optimizer on one mini-batch; returns its loss, the same on every rank. A collective.

        It is a step of the training, as those of ``train_epoch`` are: it is in the history, and callbacks are called.
        """
        self._call_on_start()
        self._tell_loss()
        in_flight = _StepsInFlight(self.state.history)
        self._step.reset()
        self._step.add(batch)
        in_flight.count(batch)
        self._num_edges += in_flight.push(batch, self._step.finish(batch), None).num_edges
        for step in in_flight.drain(leave=0):
            self._finish_step(step)
        return float(self.state.history.losses[-1])

    def _tell_loss(self) -> None:
        """Tell the comparison with one process which loss the next steps have: a model may have several trainers."""
        step_check = runtime_of(self.state.model).step_check
        assert step_check is not None  # of a model that parallelize has returned
        step_check.use_loss(self._step.loss.mean, self._step.loss.loss_fn)

    def _read_loss(self, batch: Batch, loss: AsyncHostCopy) -> None:
        value = float(loss)  # the only device sync of a step
        check_finite(value, batch)
        batch.telemetry.record("loss", value)

    def train_epoch(self, max_steps: int | None = None) -> list[float]:
        """Train to the end of the loader's epoch, or ``max_steps`` steps of it; returns the losses. A collective.

        An epoch that was left in the middle continues there.
        """
        if max_steps is not None and max_steps < 1:
            return []
        self._call_on_start()
        state = self.state
        state.model.train()
        self._tell_loss()
        state.loader.load_state_dict(state.loader.state_dict())  # not a new epoch before the last one has ended
        self.stopped = False
        first = state.num_steps
        num_late = 0 if state.loader.mesh.device.type == "cpu" else 1
        in_flight = _StepsInFlight(state.history)
        try:
            for batch in state.loader:
                ends_step = self._step.ends_with(batch)
                votes = ends_step and self._saver is not None
                vote = _StopVote(state.loader.mesh.control, self._wants_to_stop) if votes else None
                self._step.add(batch)
                in_flight.count(batch)
                if not ends_step:
                    continue
                self._num_edges += in_flight.push(batch, self._step.finish(batch), vote).num_edges
                is_due = self._save_every is not None and in_flight.num_launched % self._save_every == 0
                for step in in_flight.drain(leave=0 if is_due else num_late):
                    self._finish_step(step)
                if is_due:
                    self.save_in_background()
                if in_flight.num_launched - first == max_steps or self.stopped:
                    break
            for step in in_flight.drain(leave=0):
                self._finish_step(step)
            finish_checks(state.model)
        except BaseException:
            in_flight.abandon()
            raise
        self._sum_edges()
        return state.history.losses[first:].tolist()

    def _sum_edges(self) -> None:
        """Add the edges of the last steps, over all ranks, to the state. A collective, called after the same steps."""
        total = torch.tensor([self._num_edges], dtype=torch.int64)
        self.state.loader.mesh.control.all_reduce(Call("sum edges"), total).wait()
        self.state.train_edges += int(total)
        self._num_edges = 0

    def _finish_step(self, step: _LaunchedStep) -> None:
        """Check the loss of a step, count the votes to stop and call the callbacks."""
        self._read_loss(step.batch, step.loss)
        self.stopped |= step.vote is not None and step.vote.read()
        if self._callbacks:
            report = self._report(step)
            for callback in self._callbacks:
                callback.on_step(report)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        return -(-len(self.state.loader) // self._step.accumulate)

    def _call_on_start(self) -> None:
        if not self._has_started:
            self._has_started = True
            for callback in self._callbacks:
                callback.on_start(self.state.num_steps)

    def _report(self, step: _LaunchedStep) -> StepReport:
        history = self.state.history
        key = step.batch.key
        telemetry = step.batch.telemetry
        telemetry.synchronize()
        return StepReport(
            epoch=key.epoch,
            step=key.step // self._step.accumulate,
            num_steps=self.steps_per_epoch,
            loss=history.losses[-1],
            num_targets=step.num_targets,
            seconds=history.step_seconds[-1],
            stages=dict(telemetry.seconds),
            number=len(history.losses),
            learning_rate=telemetry.values["learning_rate"],
            num_edges=step.num_edges,
        )

    def evaluate(
        self,
        graph: Any,
        names: str | Sequence[str],
        *,
        keep_best: str | None = None,
        **options: Unpack[LinkEvaluationOptions],
    ) -> dict[str, float]:
        """Compute exact scores on stored targets, or stored pairs, and add them to the history. A collective.

        ``names``: one, such as "val", or several.
        ``keep_best`` is one of ``names``: the weights with the best score on it are kept in ``state.best``. Arrays
        are those of the loader; options are those of ``gsplit.evaluate``, or of ``gsplit.evaluate_links``.
        """
        names = list_names(names)
        if keep_best is not None and keep_best not in names:
            raise InputError(explain("keep_best", f"one of {', '.join(names)}", keep_best, "evaluate it too"))
        arrays = self.state.loader.arrays
        options.setdefault("features", arrays.given)
        options.setdefault("edge_attr", arrays.edge_attr)
        options.setdefault("edge_weight", arrays.edge_weight)
        options.setdefault("metrics", [metric.name for metric in self._metrics])
        has_pairs = isinstance(self.state.loader, LinkNeighborLoader)
        evaluate_names: Callable[..., tuple[dict[str, float], int]] = _evaluate_targets
        if has_pairs:
            evaluate_names = partial(_evaluate_pairs, edge_type=self.state.loader.plan.pair_type)
        scores, num_edges = evaluate_names(self.state.model, graph, names, **options)
        self.state.evaluation_edges += num_edges
        best_by = check_metrics(options["metrics"], of_pairs=has_pairs)[0]
        self.state.record_evaluation(scores, keep_best, best_by)
        self._call_on_start()
        report = EvaluationReport(self.state.epoch, self.state.num_steps, tuple(options["metrics"]), scores)
        for callback in self._callbacks:
            callback.on_evaluation(report)
        return scores

    def save_in_background(self) -> None:
        """Copy the state and write it into ``save_to`` in the background. A collective."""
        self._sum_edges()
        self._checked_saver().save()

    def _checked_saver(self) -> StateSaver:
        if self._saver is None:
            fix = "trainer.save(FOLDER), or Trainer(..., save_to=FOLDER)"
            raise InputError(explain("save", "a folder for checkpoints", "save_to=None", fix))
        return self._saver

    def save(self, folder: str | Path | None = None) -> None:
        """Save the state and wait until it is on the disk: into ``save_to``, or another folder. A collective."""
        self._sum_edges()
        if folder is None:
            saver = self._checked_saver()
        else:
            if self._saver is not None:  # it may be the same folder: two must not write there at once
                self._saver.finish()
            saver = StateSaver(self.state, Path(folder), self._keep, self._description)
        saver.save()
        saver.finish()

    def load(self, place: str | Path) -> None:
        """Continue from a checkpoint, or from the newest of a folder. A collective.

        The model, the optimizer, the loader and the scheduler must have been made with the same settings; ranks,
        strategy, replicas, caches and prefetching may differ. The steps that follow equal those of a training that was
        not interrupted. Checkpoints of later steps in ``save_to`` are renamed to end in ``.unused``, so the latest one
        there always belongs to this training.
        """
        if self._saver is not None:  # the file may still be being written
            self._saver.finish()
        self.restore(read_on_all_ranks(self.state.loader.mesh.control, Path(place)))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint that was read. A collective."""
        restore_state(self.state, checkpoint, self._description)
        self._step.reset()
        self._has_started = False
        if self._saver is not None:
            self._saver.set_newer_aside()
        for text in checkpoint.damaged:
            _LOG.warning("not used: %s", text)
