"""The loss of a mini-batch over all ranks: sums, gathered rows, and the check that a loss went through one of them.

Ranks have different numbers of targets, so a mean over one rank's rows has a wrong gradient on several ranks. A loss
reaches the model through one of two functions, which every rank calls and in which every rank takes part in backward:

- ``GlobalSum``: rows of this rank to their sum over all ranks (``Batch.mean``, ``Batch.sum``);
- ``GatherRows``: rows of this rank to the rows of all ranks (``Batch.gather``), for losses in which the value of one
  target depends on others: contrastive losses, triplets, weights of classes.

Parameter gradients are averaged over the ranks after backward (``nn.gradients``), which both start (``Mesh.averages``):
a rank on which no row reaches a module must take part, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import GradientAverages, Mesh
from gsplit.errors import InputError, explain

__all__ = ["GatherRows", "GlobalSum", "LossCheck", "LossGuard", "positions_of"]


class LossCheck(Protocol):
    """What is looked at in the first steps of a training loop (``nn.checks.first_backward``)."""

    is_probing: bool
    """Whether a backward through the loss alone is running: it stops at sums and gathered rows."""

    def check_values(self, batch: Any, values: Tensor, weight: Tensor | None) -> None:
        """Called with the values, one per target, that ``mean`` or ``sum`` gets."""

    def follow(self, rows: Tensor) -> None:
        """Called with what ``gather`` gets, which may depend on any rows of this rank."""

    def compare_gradient(self, gradient: Tensor) -> None:
        """Called with the gradient of every sum. A collective."""

    def pause(self, paused: bool) -> bool:
        """Pause, or go on with, watching the functions of torch; returns what was before."""


class LossGuard:
    """What is known of the loss of one batch; shared by all forms of the batch."""

    def __init__(self) -> None:
        self._backward = -1
        self.model_mode = ""
        """Train/eval mode of the model that was called with the batch; it must be equal on all ranks."""
        self.has_endpoints = False
        """Whether the running forward has called ``LinkBatch.endpoints``."""
        self.check: LossCheck | None = None
        """In the first steps of a loop."""
        self.averages: GradientAverages | None = None
        """Those of the mesh of the model that was called with the batch; on one process a loader may have another."""
        self.positions: tuple[Tensor, int] | None = None
        """Of this rank's targets among those of all ranks, and their number, once they were needed."""

    @contextmanager
    def watch(
        self,
        batch: Any,
        values: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        gathered: Tensor | None = None,
    ) -> Iterator[None]:
        """Around the functions of torch that gsplit calls between the model and the loss."""
        check = self.check
        if check is None or check.is_probing or not torch.is_grad_enabled():
            yield
            return
        if values is not None:
            check.check_values(batch, values, weight)
        if gathered is not None:
            check.follow(gathered)
        before = check.pause(True)
        try:
            yield
        finally:
            check.pause(before)

    @property
    def is_probing(self) -> bool:
        """Whether a backward through the loss alone is running."""
        return self.check is not None and self.check.is_probing

    def reach(self, mesh: Mesh) -> None:
        """Called when backward reaches a sum or gathered rows of this batch. A collective in the first steps."""
        self._backward = torch._C._current_graph_task_id()
        averages = self.averages_on(mesh)
        if averages is not None:
            averages.begin()

    def averages_on(self, mesh: Mesh) -> GradientAverages | None:
        """What averages the gradients of a loss of this batch, if something is wrapped."""
        return self.averages or next(iter(mesh.averages), None)

    def require_reached(self, gradient: Tensor) -> None:
        """Called with the gradient of a wrapped model's output."""
        if self._backward != torch._C._current_graph_task_id() and not self.is_probing:
            fix = 'write loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none")), or use batch.sum'
            got = "a loss of this rank's rows alone, whose gradient would be wrong on several ranks"
            raise InputError(explain("backward", "a loss from batch.mean or batch.sum of this batch", got, fix))


class GlobalSum(torch.autograd.Function):
    """Sum of the rows of all ranks: [n] to a scalar, [n, k] to [k].

    Backward: g times the number of ranks, for every local row, because parameter gradients are averaged over the ranks;
    another factor in a comparison with one process (``Mesh.averages``).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: Mesh, call: Call, guard: LossGuard) -> Tensor:
        ctx.shape = rows.shape
        ctx.mesh = mesh
        ctx.guard = guard
        averages = guard.averages_on(mesh)
        if averages is not None:
            averages.before_loss()
        total = rows.sum() if rows.dim() == 1 else rows.sum(0)
        mesh.world.all_reduce(call, total).wait()  # all ranks: every rank calls batch.mean or batch.sum
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.guard.is_probing:
            return g.new_zeros(ctx.shape), None, None, None
        if ctx.guard.check is not None:
            ctx.guard.check.compare_gradient(g)  # all ranks: every rank has this sum in its loss
        ctx.guard.reach(ctx.mesh)
        averages = ctx.guard.averages_on(ctx.mesh)
        factor = ctx.mesh.size if averages is None else averages.factor
        return (g * factor).expand(ctx.shape), None, None, None


class GatherRows(torch.autograd.Function):
    """The rows of all ranks: [n, ...] to [N, ...], with row i of this rank at ``positions[i]``.

    Backward: the sum over the ranks of the gradients of this rank's rows, without a factor. A loss that every rank
    computes from all rows has W times its gradient then, and one whose values a rank computes for its own targets gets
    the factor W from the sum over ranks: parameter gradients are averaged over the W ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, positions: Tensor, num_rows: int, mesh: Mesh, call: Call, guard: LossGuard
    ) -> Tensor:
        ctx.positions = positions
        ctx.mesh = mesh
        ctx.call = call
        ctx.guard = guard
        averages = guard.averages_on(mesh)
        if averages is not None:
            averages.before_loss()
            averages.factor = mesh.size  # a loss that every rank computes has it without a sum
        gathered = rows.new_zeros(num_rows, *rows.shape[1:])
        gathered[positions] = rows
        mesh.world.all_reduce(call, gathered).wait()  # all ranks: every rank calls batch.gather
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.guard.is_probing:  # how values depend on gathered rows is exact
            return g.new_zeros(len(ctx.positions), *g.shape[1:]), None, None, None, None, None
        ctx.guard.reach(ctx.mesh)
        summed = g.clone(memory_format=torch.contiguous_format)  # it may be shared, or expanded
        ctx.mesh.world.all_reduce(ctx.call, summed).wait()  # all ranks: every rank has the rows in its loss
        return summed[ctx.positions], None, None, None, None, None


def positions_of(keys: Tensor, mesh: Mesh, step: int) -> tuple[Tensor, int]:
    """The positions of this rank's targets among those of all ranks, by the order of their keys, and their number.

    ``keys``: of this rank's targets; they do not depend on the ranks, and so neither does the order. A collective.
    """
    world = mesh.world
    mine = len(keys)
    counts = world.all_to_all_counts(Call("count targets", step), (mine,) * world.size)
    first = sum(counts[: world.rank])
    every = keys.new_zeros(sum(counts))
    every[first : first + mine] = keys
    world.all_reduce(Call("gather keys of targets", step), every).wait()
    positions = torch.empty_like(every)
    positions[every.argsort(stable=True)] = torch.arange(len(every), device=every.device)
    return positions[first : first + mine], len(every)
