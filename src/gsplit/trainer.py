"""Training: steps, epochs, evaluation. ``Trainer.train_step`` is the whole of a step, on one screen.

Nothing here depends on the strategy or the number of ranks. The loss is the mean over the global mini-batch, gradients
arrive averaged and are the same on every rank, and so are clipping, the optimizer's step and the schedule. What a run
is at a step lies in ``Trainer.state`` and nowhere else. On a device the loss of a step is read when the next one has
been launched, so that the device is never left without work; callbacks come that much later, and ``Trainer.state`` is
that of a step only when ``train_epoch`` has returned.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gsplit.batch import Batch
from gsplit.devices import LateTensor
from gsplit.distributed.comm import Call
from gsplit.errors import InputError, explain
from gsplit.inference.evaluate import EvaluationOptions, evaluate_targets
from gsplit.loader import NeighborLoader
from gsplit.nn.calls import dtype_of
from gsplit.nn.parallelize import call_wrapped, finish_checks
from gsplit.train_state import LRScheduler, TrainState

__all__ = ["StepReport", "Trainer", "check_finite", "per_target_cross_entropy"]


@dataclass(frozen=True)
class StepReport:
    """What the callback is given after every step; ``num_steps`` is that of an epoch."""

    epoch: int
    step: int
    num_steps: int
    loss: float
    num_targets: int
    seconds: float
    stages: dict[str, float]


def per_target_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """The default loss: one value per target; ``batch.mean`` makes the mean over the mini-batch of them."""
    return F.cross_entropy(out, y, reduction="none")


def check_finite(loss: float, batch: Batch) -> None:
    """Stop where a loss is no number; it is the same on every rank, so all stop."""
    if not math.isfinite(loss):
        fix = "look at the features of these targets, lower the learning rate, or clip gradients"
        where = f"epoch {batch.key.epoch}, step {batch.key.step}"
        raise InputError(explain(f"the loss of {where}", "a number", loss, fix))


class Trainer:
    """Trains a wrapped model. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loader: NeighborLoader,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = per_target_cross_entropy,
        lr_scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        callback: Callable[[StepReport], None] | None = None,
    ) -> None:
        """``loss_fn(out, y)`` gives one value per target. ``lr_scheduler`` steps after every training step.

        ``max_grad_norm`` bounds the norm of the whole gradient. ``callback`` is called after every step.
        """
        if max_grad_norm is not None and max_grad_norm <= 0:
            fix = "leave it out to clip nothing"
            raise InputError(explain("max_grad_norm", "a positive number", max_grad_norm, fix))
        self.state = TrainState(model, optimizer, loader, lr_scheduler)
        self._loss_fn, self._max_grad_norm, self._callback = loss_fn, max_grad_norm, callback
        self._previous = 0.0  # when the last step ended

    def train_step(self, batch: Batch) -> float:
        """One step on one mini-batch; returns its loss, the same on every rank. A collective."""
        return self._read_loss(batch, self._launch_step(batch))

    def _launch_step(self, batch: Batch) -> LateTensor:
        """One step on one mini-batch, with nothing waited for; returns its loss, on its way to the host."""
        model, optimizer, telemetry = self.state.model, self.state.optimizer, batch.telemetry
        with telemetry.span("forward"):
            out = call_wrapped(model, batch.cast(dtype_of(model)))
            loss = batch.mean(self._loss_fn(out, batch.y))
        with telemetry.span("backward"):
            loss.backward()  # gradients are averaged over all ranks on the way
        with telemetry.span("optimizer"):
            if self._max_grad_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._max_grad_norm)
                telemetry.note("gradient_norm", norm)
            telemetry.note("learning_rate", float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            optimizer.zero_grad()
            if self.state.lr_scheduler is not None:
                self.state.lr_scheduler.step()
        return LateTensor(loss)

    def _read_loss(self, batch: Batch, loss: LateTensor) -> float:
        value = float(loss)  # the only wait of a step, for one that is over
        check_finite(value, batch)
        batch.telemetry.note("loss", value)
        return value

    def train_epoch(self, max_steps: int | None = None) -> list[float]:
        """Train to the end of the loader's epoch, or ``max_steps`` steps of it; returns the losses. A collective.

        An epoch that was left in the middle goes on where it was left.
        """
        if max_steps is not None and max_steps < 1:
            return []
        state, history = self.state, self.state.history
        state.model.train()
        state.loader.load_state_dict(state.loader.state_dict())  # not a new epoch before the last one has ended
        first, edges = state.num_steps, 0
        self._previous = time.perf_counter()
        under_way: deque[tuple[Batch, LateTensor]] = deque()
        num_late = 0 if state.loader.mesh.device.type == "cpu" else 1
        try:
            for number, batch in enumerate(state.loader, 1):
                under_way.append((batch, self._launch_step(batch)))
                edges += sum(block.num_edges for block in batch.blocks)
                if len(under_way) > num_late:
                    self._finish_step(*under_way.popleft())
                if number == max_steps:
                    break
            while under_way:
                self._finish_step(*under_way.popleft())
            finish_checks(state.model)
        finally:  # after an error: steps that are in the weights are in the history too
            history.losses += [float(loss) for _, loss in under_way]
            history.step_seconds += [0.0] * len(under_way)
        total = torch.tensor([edges], dtype=torch.int64, device=state.loader.mesh.device)
        state.loader.mesh.world.all_reduce(Call("sum edges"), total).wait()  # all ranks: after the same steps
        state.train_edges += int(total)
        return history.losses[first:]

    def _finish_step(self, batch: Batch, loss: LateTensor) -> None:
        """Read a step's loss, put it into the history and report the step."""
        history = self.state.history
        value, now = self._read_loss(batch, loss), time.perf_counter()
        history.losses.append(value)
        history.step_seconds.append(now - self._previous)
        self._previous = now
        self._report(batch)

    def _report(self, batch: Batch) -> None:
        if self._callback is not None:
            loader, history = self.state.loader, self.state.history
            batch.telemetry.settle()
            place, last = (batch.key.epoch, batch.key.step, len(loader)), (history.losses[-1], batch.global_batch_size)
            self._callback(StepReport(*place, *last, history.step_seconds[-1], dict(batch.telemetry.seconds)))

    def evaluate(
        self, graph: Any, names: list[str], *, keep_best: str | None = None, **options: Unpack[EvaluationOptions]
    ) -> dict[str, float]:
        """Exact accuracies on stored targets, kept in the history. A collective.

        ``keep_best`` is one of ``names``: the weights with the highest score on it are kept in ``state.best``. Arrays
        are those of the loader; options are those of ``gsplit.evaluate``.
        """
        if keep_best is not None and keep_best not in names:
            raise InputError(explain("keep_best", f"one of {', '.join(names)}", keep_best, "evaluate it too"))
        arrays = self.state.loader.arrays
        options.setdefault("features", arrays.features)
        options.setdefault("edge_attr", arrays.edge_attr)
        options.setdefault("edge_weight", arrays.edge_weight)
        found = evaluate_targets(self.state.model, graph, names, **options)
        self.state.evaluation_edges += found.num_edges
        self.state.record_evaluation(found.scores, keep_best)
        return found.scores
