"""Training: steps, epochs, evaluation. What a step is stands in ``training_step``.

A step is one of the optimizer, of one mini-batch or of several that are accumulated: losses, limits, checkpoints and
callbacks count these. What a run is at a step lies in ``Trainer.state`` and nowhere else; ``save`` and ``load`` are for
it. On a device the loss of a step is read when the next one has been launched, so that the device is never left without
work; callbacks come that much later, and ``Trainer.state`` is that of a step only when ``train_epoch`` has returned.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.nn import Module
from torch.optim import Optimizer

from gsplit.batch import Batch
from gsplit.callbacks import Callback, EvaluationReport, StepReport
from gsplit.checkpoints.files import Checkpoint
from gsplit.checkpoints.training import StateSaver, read_on_all_ranks, restore_state
from gsplit.devices import AsyncHostCopy
from gsplit.distributed.comm import Call
from gsplit.errors import InputError, explain
from gsplit.inference.evaluate import EvaluationOptions, evaluate_targets
from gsplit.loader import NeighborLoader
from gsplit.losses import LossFunction, named_loss
from gsplit.metrics import DEFAULT_METRICS, check_metrics
from gsplit.nn.parallelize import finish_checks
from gsplit.stop_vote import StopVote
from gsplit.train_state import LRScheduler, TrainState
from gsplit.training_step import TrainingStep, check_finite

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)


def _check_scheduler(scheduler: object) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        fix = "choose another, or step it yourself with what trainer.evaluate returns"
        raise InputError(explain("lr_scheduler", "one that steps without a score", "ReduceLROnPlateau", fix))


@dataclass(frozen=True)
class _LaunchedStep:
    """A step whose loss has not been read yet."""

    batch: Batch
    loss: AsyncHostCopy
    vote: StopVote | None
    num_targets: int
    num_edges: int


class Trainer:
    """Trains a wrapped model. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loader: NeighborLoader,
        *,
        loss_fn: str | LossFunction = "cross_entropy",
        metrics: Sequence[str] | None = None,
        lr_scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        precision: str = "float32",
        callback: Callable[[StepReport], None] | None = None,
        callbacks: Sequence[Callback] = (),
        save_to: str | Path | None = None,
        save_every: int | None = None,
        keep_checkpoints: int = 2,
        description: Mapping[str, str] | None = None,
    ) -> None:
        """``loss_fn``: a name of ``gsplit.losses``, or a function of (out, y) that gives one value per target.

        ``metrics``: what ``evaluate`` computes, of ``gsplit.metrics.METRICS``, by default the one that fits the loss;
        the first decides what is best. ``lr_scheduler`` steps after every training step.

        ``max_grad_norm`` bounds the norm of the whole gradient. ``accumulate``: mini-batches per step of the optimizer.
        ``precision="bf16"``: forward and loss under autocast. ``callback`` is called after every step; ``callbacks``
        are told of evaluations and resumed trainings, too (``gsplit.callbacks``).

        ``save_to``: a folder for checkpoints, made every ``save_every`` steps while training goes on and whenever
        ``save`` is called; the newest ``keep_checkpoints`` and the best are left (docs/checkpoints.md).
        ``description``: what else must be equal when training goes on from them, such as {"dropout": "0.5"}.
        """
        if save_every is not None and (save_every < 1 or save_to is None):
            got, fix = f"save_every={save_every}, save_to={save_to}", "give both, or leave save_every out"
            raise InputError(explain("save_every", "a positive number of steps, and a folder to save to", got, fix))
        _check_scheduler(lr_scheduler)
        self.state = TrainState(model, optimizer, loader, lr_scheduler)
        loss = named_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        fitting = DEFAULT_METRICS[loss_fn] if isinstance(loss_fn, str) else "accuracy"
        self._metrics = check_metrics(metrics if metrics is not None else [fitting])
        self._step = TrainingStep(
            self.state, loss, max_grad_norm=max_grad_norm, accumulate=accumulate, precision=precision
        )
        self._callback, self._callbacks, self._has_told_start = callback, tuple(callbacks), False
        self._previous = 0.0  # when the last step ended
        self._num_edges = 0  # of this rank, not yet in the state
        self._save_every, self._keep = save_every, keep_checkpoints
        fixed = {"max_grad_norm": str(max_grad_norm), "metric": self._metrics[0].name}
        fixed |= {"accumulate": str(accumulate), "precision": precision}
        self._description = {**fixed, **(description or {})}
        self._saver: StateSaver | None = None
        if save_to is not None:
            self._saver = StateSaver(self.state, Path(save_to), keep_checkpoints, self._description)
        self._wants_to_stop = False
        self.stopped = False
        """Whether training was left early because some rank had called ``request_stop``."""

    def request_stop(self) -> None:
        """Have all ranks leave ``train_epoch`` after the same step, soon; only where ``save_to`` is given.

        On any rank, from a signal's handler or another thread.
        """
        self._wants_to_stop = True

    def train_step(self, batch: Batch) -> float:
        """A step of the optimizer on one mini-batch; returns its loss, the same on every rank. A collective."""
        self._step.reset()
        self._step.add(batch)
        return self._read_loss(batch, self._step.finish(batch))

    def _read_loss(self, batch: Batch, loss: AsyncHostCopy) -> float:
        value = float(loss)  # the only wait of a step, for one that is over
        check_finite(value, batch)
        batch.telemetry.record("loss", value)
        return value

    def train_epoch(self, max_steps: int | None = None) -> list[float]:
        """Train to the end of the loader's epoch, or ``max_steps`` steps of it; returns the losses. A collective.

        An epoch that was left in the middle goes on where it was left.
        """
        if max_steps is not None and max_steps < 1:
            return []
        self._tell_start()
        state, history = self.state, self.state.history
        state.model.train()
        state.loader.load_state_dict(state.loader.state_dict())  # not a new epoch before the last one has ended
        first, self.stopped = state.num_steps, False
        self._previous = time.perf_counter()
        under_way: deque[_LaunchedStep] = deque()
        num_late = 0 if state.loader.mesh.device.type == "cpu" else 1
        number = num_targets = num_edges = 0
        try:
            for batch in state.loader:
                is_last, vote = self._step.ends_with(batch), None
                if is_last and self._saver is not None:
                    vote = StopVote(state.loader.mesh.world, self._wants_to_stop)
                self._step.add(batch)
                num_targets += batch.global_batch_size
                num_edges += sum(block.num_edges for block in batch.blocks)
                if not is_last:
                    continue
                number += 1
                under_way.append(_LaunchedStep(batch, self._step.finish(batch), vote, num_targets, num_edges))
                self._num_edges += num_edges
                num_targets = num_edges = 0
                is_due = self._save_every is not None and (first + number) % self._save_every == 0
                while len(under_way) > (0 if is_due else num_late):
                    self._finish_step(under_way.popleft())
                if is_due:
                    self.save_in_background()
                if number == max_steps or self.stopped:
                    break
            while under_way:
                self._finish_step(under_way.popleft())
            finish_checks(state.model)
        finally:  # after an error: steps that are in the weights are in the history too
            history.losses += [float(step.loss) for step in under_way]
            history.step_seconds += [0.0] * len(under_way)
        self._sum_edges()
        return history.losses[first:]

    def _sum_edges(self) -> None:
        """Count the edges of the last steps over all ranks. A collective: after the same steps on every rank."""
        total = torch.tensor([self._num_edges], dtype=torch.int64, device=self.state.loader.mesh.device)
        self.state.loader.mesh.world.all_reduce(Call("sum edges"), total).wait()
        self.state.train_edges += int(total)
        self._num_edges = 0

    def _finish_step(self, step: _LaunchedStep) -> None:
        """Put a step's loss into the history, whatever it is: the step is in the weights. Check it and report."""
        history = self.state.history
        history.losses.append(float(step.loss))
        now = time.perf_counter()
        history.step_seconds.append(now - self._previous)
        self._previous = now
        self._read_loss(step.batch, step.loss)
        self.stopped |= step.vote is not None and step.vote.count()
        if self._callback is not None or self._callbacks:
            self._report(step)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        return -(-len(self.state.loader) // self._step.accumulate)

    def _tell_start(self) -> None:
        if not self._has_told_start:
            self._has_told_start = True
            for callback in self._callbacks:
                callback.on_start(self.state.num_steps)

    def _report(self, step: _LaunchedStep) -> None:
        history, key, telemetry = self.state.history, step.batch.key, step.batch.telemetry
        telemetry.synchronize()
        report = StepReport(
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
        if self._callback is not None:
            self._callback(report)
        for callback in self._callbacks:
            callback.on_step(report)

    def evaluate(
        self, graph: Any, names: list[str], *, keep_best: str | None = None, **options: Unpack[EvaluationOptions]
    ) -> dict[str, float]:
        """Exact scores on stored targets, kept in the history. A collective.

        ``keep_best`` is one of ``names``: the weights with the best score on it are kept in ``state.best``. Arrays
        are those of the loader; options are those of ``gsplit.evaluate``.
        """
        if keep_best is not None and keep_best not in names:
            raise InputError(explain("keep_best", f"one of {', '.join(names)}", keep_best, "evaluate it too"))
        arrays = self.state.loader.arrays
        options.setdefault("features", arrays.features)
        options.setdefault("edge_attr", arrays.edge_attr)
        options.setdefault("edge_weight", arrays.edge_weight)
        options.setdefault("metrics", [metric.name for metric in self._metrics])
        found = evaluate_targets(self.state.model, graph, names, **options)
        self.state.evaluation_edges += found.num_edges
        self.state.record_evaluation(found.scores, keep_best, check_metrics(options["metrics"])[0])
        self._tell_start()
        report = EvaluationReport(self.state.epoch, self.state.num_steps, tuple(options["metrics"]), found.scores)
        for callback in self._callbacks:
            callback.on_evaluation(report)
        return found.scores

    def save_in_background(self) -> None:
        """Copy the state and have it written into ``save_to`` while training goes on. A collective."""
        self._sum_edges()
        self._checked_saver().save()

    def _checked_saver(self) -> StateSaver:
        if self._saver is None:
            fix = "trainer.save(FOLDER), or Trainer(..., save_to=FOLDER)"
            raise InputError(explain("save", "a folder for checkpoints", "none", fix))
        return self._saver

    def save(self, folder: str | Path | None = None) -> None:
        """Save the state and wait until it is on the disk: into ``save_to``, or another folder. A collective."""
        if folder is None:
            saver = self._checked_saver()
        else:
            if self._saver is not None:  # perhaps the same folder: two must not write there at once
                self._saver.finish()
            saver = StateSaver(self.state, Path(folder), self._keep, self._description)
        saver.save()
        saver.finish()

    def load(self, place: str | Path) -> None:
        """Go on from a checkpoint, or from the newest of a folder. A collective.

        The model, the optimizer, the loader and the scheduler are made as they were; ranks, strategy, replicas, caches
        and prefetching may differ. The steps that follow are those that would have followed. Checkpoints of later steps
        in ``save_to`` are renamed to end in ``.unused``: the latest one there is always one of this training.
        """
        if self._saver is not None:  # what is being written may be what is asked for
            self._saver.finish()
        self.restore(read_on_all_ranks(self.state.loader.mesh.world, Path(place)))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint that was read. A collective."""
        restore_state(self.state, checkpoint, self._description)
        self._step.reset()
        self._has_told_start = False
        if self._saver is not None:
            self._saver.set_newer_aside()
        for text in checkpoint.damaged:
            _LOG.warning("not used: %s", text)
