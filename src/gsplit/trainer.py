"""Training: steps, epochs, evaluation. ``Trainer.train_step`` is the whole of a step, on one screen.

Nothing here depends on the strategy or the number of ranks. The loss is the mean over the global mini-batch, gradients
arrive averaged and are the same on every rank, and so are clipping, the optimizer's step and the schedule.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gsplit.batch import Batch
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference import evaluate
from gsplit.loader import NeighborLoader
from gsplit.nn.calls import call_model, dtype_of
from gsplit.store.memory import MemoryStore
from gsplit.store.reader import Store

__all__ = ["History", "StepReport", "Trainer", "check_finite", "per_target_cross_entropy"]


class Schedule(Protocol):
    """What is needed of a learning-rate scheduler of torch."""

    def step(self) -> None:
        """Move on by one training step."""


@dataclass(frozen=True)
class StepReport:
    """What an observer hears after every step."""

    epoch: int
    step: int
    num_steps: int
    loss: float
    num_targets: int
    seconds: float
    stages: dict[str, float]


@dataclass
class History:
    """What training has been: the loss of every step, the seconds of every epoch, accuracies where they were taken."""

    losses: list[float] = field(default_factory=list)
    epoch_seconds: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)


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
        mesh: Mesh,
        loss: Callable[[Tensor, Tensor], Tensor] = per_target_cross_entropy,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        observer: Callable[[StepReport], None] | None = None,
    ) -> None:
        """``loss(out, y)`` gives one value per target. ``schedule`` moves with every step. ``clip_norm`` bounds the
        norm of the whole gradient.
        """
        if clip_norm is not None and clip_norm <= 0:
            raise InputError(explain("clip_norm", "a positive number", clip_norm, "leave it out to clip nothing"))
        self._model, self._optimizer, self._loader, self._mesh = model, optimizer, loader, mesh
        self._loss, self._schedule, self._clip_norm, self._observer = loss, schedule, clip_norm, observer
        self.history = History()

    def train_step(self, batch: Batch) -> float:
        """One step on one mini-batch; returns its loss, the same on every rank. A collective."""
        telemetry = self._loader.telemetry
        with telemetry.span("forward"):
            out = call_model(self._model, batch.cast(dtype_of(self._model)))
            loss = batch.mean(self._loss(out, batch.y))
        with telemetry.span("backward"):
            loss.backward()  # gradients are averaged over all ranks on the way
        with telemetry.span("optimizer"):
            if self._clip_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
                telemetry.note("gradient_norm", float(norm))
            telemetry.note("learning_rate", float(self._optimizer.param_groups[0]["lr"]))
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._schedule is not None:
                self._schedule.step()
        value = float(loss.detach())  # device sync: once per step
        check_finite(value, batch)
        telemetry.note("loss", value)
        return value

    def train_epoch(self, max_steps: int | None = None) -> list[float]:
        """The loader's next epoch, or its first steps; the losses. A collective."""
        self._model.train()
        losses: list[float] = []
        started = previous = time.perf_counter()
        for batch in self._loader:
            losses.append(self.train_step(batch))
            now = time.perf_counter()
            self._report(batch, losses[-1], now - previous)
            previous = now
            if max_steps is not None and len(losses) >= max_steps:
                break
        self.history.losses += losses
        self.history.epoch_seconds.append(time.perf_counter() - started)
        return losses

    def _report(self, batch: Batch, loss: float, seconds: float) -> None:
        if self._observer is not None:
            stages = self._loader.telemetry.seconds
            place = (batch.key.epoch, batch.key.step, len(self._loader))
            self._observer(StepReport(*place, loss, batch.global_batch_size, seconds, stages))

    def evaluate(self, graph: Store | MemoryStore, names: list[str], **options: Any) -> dict[str, float]:
        """Exact accuracies on stored targets, kept in the history. A collective."""
        scores = evaluate(self._model, graph, names, mesh=self._mesh, **options)
        self.history.evaluations.append({"epoch": len(self.history.epoch_seconds), **scores})
        return scores
