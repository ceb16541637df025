"""An optimizer step: forward, loss and backward of one mini-batch or several, then the optimizer.

Nothing here depends on the strategy or the number of ranks. The loss is the mean over the global mini-batch, gradients
arrive averaged and are the same on every rank, and so are clipping, the optimizer's step and the schedule.

Several mini-batches are accumulated exactly: gradients of their sums are added, and divided once by the weight of all
their targets. That is the gradient of the mean over all these targets, as of one mini-batch with all of them, also
where the last mini-batch of an epoch is smaller or targets have weights. A step whose targets all have weight 0, since
none has a label, has a loss and gradients of 0.

``bf16``: forward and loss run under ``torch.autocast``. Weights, gradients and the optimizer stay in float32, outputs
are cast to float32 before the loss, and hidden rows are exchanged in the type that autocast chooses.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gsplit.device.devices import AsyncHostCopy
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch, divisor
from gsplit.nn.calls import dtype_of
from gsplit.nn.parallelize import call_wrapped
from gsplit.nn.runtime import runtime_of
from gsplit.training.losses import LossFunction, PairLossFunction, loss_of_batch
from gsplit.training.train_state import TrainState

__all__ = ["PRECISIONS", "BatchLoss", "TrainingStep", "check_finite"]

PRECISIONS = ("float32", "bf16")
"""Types of the forward pass; float32 means the model's own type."""


def check_finite(loss: float, batch: Batch) -> None:
    """Raise if a loss is NaN or infinite. It is the same on every rank, so all ranks raise."""
    if not math.isfinite(loss):
        fix = "check the features of these targets, lower the learning rate, or clip gradients"
        where = f"epoch {batch.key.epoch}, step {batch.key.step}"
        raise InputError(explain(f"the loss of {where}", "a number", loss, fix))


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of a mini-batch. It does not hold the model, which holds it."""

    loss_fn: LossFunction | PairLossFunction
    precision: str

    def sums(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor | int]:
        """The weighted sum of the losses of all targets of all ranks, and of the weights. A collective."""
        dtype = dtype_of(runtime_of(model).parameters(model))
        with self._autocast(batch.x.device):
            out = call_wrapped(model, batch.cast(dtype))
            if self.precision == "bf16":
                out = _converted(out, dtype)
            values = loss_of_batch(self.loss_fn, out, batch)
        return batch.weighted_sum(*values)

    def mean(self, model: Module, batch: Batch) -> Tensor:
        """The mean over all targets of all ranks. A collective."""
        total, weight = self.sums(model, batch)
        return total / divisor(weight)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()


def _converted(out: Any, dtype: torch.dtype) -> Any:
    """The rows of an output, also of one by vertex types, as another type."""
    if isinstance(out, Tensor):
        return out.to(dtype) if out.is_floating_point() else out
    if isinstance(out, Mapping):
        return {name: _converted(rows, dtype) for name, rows in out.items()}
    return type(out)(_converted(each, dtype) for each in out) if type(out) in (tuple, list) else out


class TrainingStep:
    """Computes optimizer steps: ``add`` every mini-batch of a step, then ``finish`` it."""

    def __init__(
        self,
        state: TrainState,
        loss_fn: LossFunction | PairLossFunction,
        *,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        precision: str = "float32",
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:  # or NaN
            fix = "leave it out to clip nothing"
            raise InputError(explain("max_grad_norm", "a positive number", max_grad_norm, fix))
        if accumulate < 1:
            raise InputError(explain("accumulate", "at least 1 mini-batch per step", accumulate, "leave it out"))
        if precision not in PRECISIONS:
            raise InputError(explain("precision", " or ".join(PRECISIONS), precision, "choose one of them"))
        if precision == "bf16" and dtype_of(state.model.parameters()) == torch.float64:
            fix = "convert it with model.float(), or leave precision out"
            raise InputError(explain("precision", "a model in float32 for bf16", "float64", fix))
        _check_parameters(state)
        self.accumulate = accumulate
        self.loss = BatchLoss(loss_fn, precision)
        self._state = state
        self._max_grad_norm = max_grad_norm
        self._total: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def ends_with(self, batch: Batch) -> bool:
        """Whether a mini-batch of the loader is the last of its step; the last of an epoch always is."""
        done = batch.key.step + 1
        return done % self.accumulate == 0 or done == len(self._state.loader)

    def reset(self) -> None:
        """Drop what was added, also by a step that failed, and all gradients."""
        self._total = self._weight = 0.0
        own = runtime_of(self._state.model).parameters(self._state.model)  # perhaps some that the optimizer has not
        for parameter in (*own, *_parameters(self._state.optimizer)):
            parameter.grad = None

    def add(self, batch: Batch) -> None:
        """Run forward and backward of one mini-batch; its gradients are accumulated. A collective."""
        if batch.key.step % self.accumulate == 0:
            self.reset()
        with batch.telemetry.span("forward"):
            total, weight = self.loss.sums(self._state.model, batch)
        with batch.telemetry.span("backward"):  # also averages the gradients over all ranks
            if self.accumulate == 1:
                (total / divisor(weight)).backward()
            else:
                total.backward()
                batch.telemetry.record("loss", total.detach() / divisor(weight))
        self._total = self._total + total.detach()
        self._weight = self._weight + weight

    def finish(self, batch: Batch) -> AsyncHostCopy:
        """Step the optimizer with what was added, ``batch`` last; returns the loss, being copied to the host."""
        optimizer = self._state.optimizer
        telemetry = batch.telemetry
        parameters = _parameters(optimizer)
        weight = divisor(self._weight)
        with telemetry.span("optimizer"):
            if self.accumulate > 1:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad /= weight
            if self._max_grad_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
                telemetry.record("gradient_norm", norm)
            telemetry.record("learning_rate", float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if self._state.lr_scheduler is not None:
                self._state.lr_scheduler.step()
        loss = torch.as_tensor(self._total / weight)
        self.reset()
        return AsyncHostCopy(loss)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_parameters(state: TrainState) -> None:
    """On several ranks all parameters must be the model's: gradients of others are not averaged over the ranks."""
    own = {id(parameter) for parameter in state.model.parameters()}
    strange = sum(id(parameter) not in own for parameter in _parameters(state.optimizer))
    if strange and state.loader.mesh.size > 1:
        fix = "make them parameters of the model before gsplit.parallelize, or write a loop for a gsplit.OwnedEmbedding"
        raise InputError(explain("the optimizer", "parameters of the model", f"{strange} others", fix))
