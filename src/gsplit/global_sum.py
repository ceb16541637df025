"""The sum of a loss over all ranks, and the guard that no loss reaches the model without it.

Both stand at the end of the forward pass: ``batch.mean`` and ``batch.sum`` call them. Ranks own different numbers of
targets, so a plain mean over a rank's rows is silently wrong on several ranks; backward refuses it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.distributed.comm import Call, Comm
from gsplit.errors import InputError, explain

__all__ = ["LossGuard", "global_sum"]


class LossGuard:
    """Sees to it that a loss goes through ``batch.mean`` or ``batch.sum`` before backward reaches the model."""

    def __init__(self) -> None:
        self._backward = -1
        self.model = ""
        """How the model stood that was called with the batch; the same on every rank."""

    def reduced(self) -> None:
        """Backward has come through the global sum of this batch."""
        self._backward = torch._C._current_graph_task_id()

    def check(self, gradient: Tensor) -> None:
        """Called with the gradient of a wrapped model's output."""
        if self._backward != torch._C._current_graph_task_id():
            fix = 'write loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none")), or use batch.sum'
            got = "a loss of this rank's rows alone, whose gradient would be wrong on several ranks"
            raise InputError(explain("backward", "a loss from batch.mean or batch.sum of this batch", got, fix))


class _GlobalSum(torch.autograd.Function):
    """Sum of local rows over all ranks. Backward: times the ranks, on local rows; gradients are averaged later.

    rows [n] to a scalar, rows [n, k] to [k].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, call: Call, guard: LossGuard) -> Tensor:
        ctx.shape, ctx.size, ctx.guard = rows.shape, comm.size, guard
        total = rows.sum() if rows.dim() == 1 else rows.sum(0)
        comm.all_reduce(call, total).wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        ctx.guard.reduced()
        return (g * ctx.size).expand(ctx.shape), None, None, None


def global_sum(rows: Tensor, comm: Comm, call: Call, guard: LossGuard) -> Tensor:
    """Sum of the rows of all ranks, the same on every rank; differentiable once. A collective."""
    total: Tensor = _GlobalSum.apply(rows, comm, call, guard)  # type: ignore[no-untyped-call]
    return total
