"""Batch norm over the rows of all ranks, equal to that of one process on the whole mini-batch.

Shapes: x [rows, D] on this rank, N rows on all. With g the gradient of the output and xhat the normalised input,

    forward:  xhat = (x - mean) / sqrt(var + eps),  out = weight * xhat + bias
    backward: gx = weight / sqrt(var + eps) * (g - sum(g) / N - xhat * sum(g * xhat) / N)      sums over all ranks
              gweight = sum(g * xhat), gbias = sum(g)                                         over this rank's rows

Statistics are merged from every rank's (count, mean, sum of squared deviations), not from sums of squares, which in
float32 lose the variance of rows far from zero. They are float32 at least, also for rows in half precision. One
all-reduce in forward and one in backward; N stays on the device, so the host does not wait. xhat is saved. Assumes that
each row is on one rank, which the caller checks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.errors import InputError, explain
from gsplit.minibatch.route import count_reduction
from gsplit.telemetry import StepTelemetry

__all__ = ["global_batch_norm"]


def _statistics(
    x: Tensor, comm: Comm, call: Call, checks: DeferredChecks, telemetry: StepTelemetry
) -> tuple[Tensor, Tensor, Tensor]:
    """Number of rows on all ranks, and mean and biased variance over them. A collective."""
    width, dtype = x.size(1), torch.promote_types(x.dtype, torch.float32)
    table = torch.zeros(comm.size, 2 * width + 1, dtype=torch.float64, device=x.device)  # one row per rank
    if x.size(0):
        variance, mean = torch.var_mean(x.to(dtype), dim=0, correction=0)
        own = table[comm.rank]
        own[0] = x.size(0)
        own[1 : width + 1] = mean
        own[width + 1 :] = variance * x.size(0)
    count_reduction(table.nbytes, comm.size, telemetry)
    comm.all_reduce(call, table).wait()  # all ranks: once per batch norm of every forward
    counts, means, squares = table.split([1, width, width], dim=1)
    total = counts.sum()
    checks.add(total, _check_rows)
    mean = (counts * means).sum(0) / total
    variance = (squares + counts * (means - mean) ** 2).sum(0) / total
    return total, mean.to(dtype), variance.to(dtype)


def _check_rows(total: Tensor) -> None:
    if total == 1:
        got = f"{int(total)} in the whole mini-batch"
        fix = "use larger mini-batches, or leave the last one out"
        raise InputError(explain("batch norm", "at least 2 rows", got, fix))


class _GlobalBatchNorm(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        total: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        comm: Comm,
        call: Call,
        telemetry: StepTelemetry,
    ) -> Tensor:
        inverse = torch.rsqrt(variance + eps)
        xhat = (x - mean) * inverse
        ctx.save_for_backward(xhat, inverse, weight, total)
        ctx.dtype = x.dtype
        ctx.comm = comm
        ctx.call = call
        ctx.telemetry = telemetry
        return xhat.clone() if weight is None else xhat * weight  # saved: the model may change its output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        xhat, inverse, weight, total = ctx.saved_tensors
        own = torch.stack([g.sum(0), (g * xhat).sum(0)])
        sums = own.clone()
        count_reduction(sums.nbytes, ctx.comm.size, ctx.telemetry)
        ctx.comm.all_reduce(Call(f"{ctx.call.name} backward", ctx.call.step), sums).wait()  # all ranks: as in forward
        scale = inverse if weight is None else inverse * weight
        gx = (g - (sums[0] + xhat * sums[1]) / total) * scale
        return gx.to(ctx.dtype), None if weight is None else own[1], *[None] * 7


def global_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    comm: Comm,
    step: int,
    checks: DeferredChecks,
    telemetry: StepTelemetry,
) -> Tensor:
    """``F.batch_norm`` in training, over the rows of all ranks; running statistics stay equal on all ranks.

    Without rows on any rank, as of a vertex type that a mini-batch does not reach, they stay what they are, as in
    torch. ``checks`` gets the check that there is not only one row. ``telemetry`` counts both all-reduces.
    """
    call = Call("batch norm", step)
    total, mean, variance = _statistics(x.detach(), comm, call, checks, telemetry)
    if running_mean is not None and running_var is not None:
        unbiased = variance * (total / (total - 1))
        running_mean.lerp_(torch.where(total > 0, mean.to(running_mean.dtype), running_mean), momentum)
        running_var.lerp_(torch.where(total > 0, unbiased.to(running_var.dtype), running_var), momentum)
    out: Tensor = _GlobalBatchNorm.apply(x, weight, total, mean, variance, eps, comm, call, telemetry)  # type: ignore[no-untyped-call]
    return (out if bias is None else out + bias).to(x.dtype)
