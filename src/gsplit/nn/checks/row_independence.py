"""A check made when a model is wrapped: outputs of a target must not depend on which other targets are there.

A model that fails it mixes rows that are not neighbours, in a layer we do not know or in its own code, and would be
silently wrong when it is split. It runs on a copy with other weights (a gate that starts closed would hide what lies
behind), in float64 where the model can, in evaluation and in training, with dropout off and batch norm by its running
statistics.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.batch import Batch
from gsplit.errors import InputError, explain
from gsplit.nn.calls import call_model
from gsplit.nn.checks.dry_run import explain_failure, tensors_of
from gsplit.nn.checks.toy import toy_empty, toy_halves
from gsplit.nn.forward_pass import ForwardPass, ForwardPlan

__all__ = ["check_row_independence", "check_rows"]

OverrideForwardPass = Callable[[Module, ForwardPass], AbstractContextManager[None]]


class _Still(ForwardPass):
    """A step without dropout, and with batch norm by its running statistics: what is left must be row-wise."""

    def drop(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Nothing."""
        return x

    def normalise(
        self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> Tensor:
        """As in evaluation."""
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def check_row_independence(
    model: Module, plan: ForwardPlan, like: Tensor, override_forward_pass: OverrideForwardPass
) -> None:
    """Try a copy of a wrapped model; ``override_forward_pass`` lets another step answer its layers."""
    moved, like = _moved_copy(model, like, plan, override_forward_pass)
    for training in (False, True):
        moved.train(training)
        outs = [(_run(moved, batch, plan, override_forward_pass), half) for batch, half in toy_halves(plan.depth, like)]
        for part, half in outs[1:]:
            check_rows(outs[0][0], part, half)


def _run(model: Module, batch: Batch, plan: ForwardPlan, override_forward_pass: OverrideForwardPass) -> Any:
    with override_forward_pass(model, _Still(batch, plan)):
        return explain_failure(lambda: call_model(model, batch))


def _moved_copy(
    model: Module, like: Tensor, plan: ForwardPlan, override_forward_pass: OverrideForwardPass
) -> tuple[Module, Tensor]:
    """A copy with other weights that runs on nothing, as a rank without rows must; in float64 if it does there."""
    moved = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in moved.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.device, parameter.dtype))
    _run(moved, toy_empty(plan.depth, like), plan, override_forward_pass)
    wide = copy.deepcopy(moved).double()
    try:
        _run(wide, toy_empty(plan.depth, like.double()), plan, override_forward_pass)
    except InputError:
        return moved, like
    return wide, like.double()


def check_rows(whole: Any, part: Any, half: slice) -> None:
    """Refuse outputs of the same targets that differ; ``half`` is where the part's targets stand in the whole."""
    for one, other in zip(tensors_of(whole), tensors_of(part), strict=True):
        if not one.is_floating_point():
            continue
        kept = one[half] if one.dim() and one.size(0) != other.size(0) else one
        largest = float(one.detach().abs().nan_to_num(0.0, 0.0).max()) if one.numel() else 0.0
        tolerance = (1e-9 if one.dtype == torch.float64 else 1e-3) * (largest + 1e-3)
        if kept.shape != other.shape or not torch.allclose(kept, other, rtol=0.0, atol=tolerance, equal_nan=True):
            fix = "use layers and norms that look at a vertex and its in-neighbours only"
            got = "outputs that change with the other targets of the mini-batch"
            raise InputError(
                explain("the model", "every target's output to depend on its neighbourhood only", got, fix)
            )
