"""Row independence, checked when a model is wrapped: a target's output must not depend on the other targets.

A model that fails it mixes rows that are not neighbours, in a layer we do not know or in its own code, and would be
silently wrong when it is split. It runs on a copy with other weights (a gate that starts closed would hide what lies
behind), in float64 if the model runs there, in evaluation and in training mode, with dropout off and batch norm by its
running statistics.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.batch import Batch
from gsplit.devices import fork_random_states
from gsplit.errors import InputError, explain
from gsplit.nn.calls import call_model, tensors_of
from gsplit.nn.checks.dry_run import explain_failure
from gsplit.nn.checks.perturbed_copy import has_tables, perturbed_copy
from gsplit.nn.checks.row_crossing import RowCrossings, find_row_crossings
from gsplit.nn.checks.toy import ExampleInput, num_toy_vertices, toy_empty, toy_halves
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan

__all__ = ["check_row_independence", "check_rows"]

_Outputs = list[tuple[Any, slice]]
"""What the model returned for some of the targets, and which these are."""
OverrideForwardPass = Callable[[Module, ForwardPass], AbstractContextManager[None]]


class _DeterministicPass(ForwardPass):
    """A forward pass without dropout, and with batch norm by its running statistics: what is left must be row-wise."""

    fuses_attention = False

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Drop nothing."""
        return x

    def batch_norm(
        self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> Tensor:
        """As in evaluation."""
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def check_row_independence(
    model: Module, plan: ForwardPlan, like: ExampleInput, override_forward_pass: OverrideForwardPass
) -> RowCrossings:
    """Refuse a wrapped model that mixes rows, and find where it joins those of different layers.

    ``override_forward_pass`` sets the forward pass of its layers.
    One copy of the model is alive at a time. A smaller one, or one in float64, that does not run gives way to the next.
    """
    num_vertices = num_toy_vertices(plan.depth)
    copies: list[tuple[torch.dtype | None, int | None]] = [(torch.float64, num_vertices), (None, num_vertices)]
    if has_tables(model, num_vertices):
        copies.append((None, None))

    def outputs(dtype: torch.dtype | None, max_rows: int | None) -> tuple[list[_Outputs], RowCrossings]:
        perturbed = perturbed_copy(model, dtype, max_rows)
        return _outputs_of(perturbed, plan, like if dtype is None else like.to(dtype), override_forward_pass)

    with fork_random_states(like.row.device), torch.no_grad():
        for attempt in copies[:-1]:
            with suppress(InputError):  # not kept: its traceback would keep the copy
                found, crossings = outputs(*attempt)
                break
        else:
            found, crossings = outputs(*copies[-1])
    for whole, *parts in found:
        for part, half in parts:
            check_rows(whole[0], part, half)
    return crossings


def _outputs_of(
    model: Module, plan: ForwardPlan, like: ExampleInput, override_forward_pass: OverrideForwardPass
) -> tuple[list[_Outputs], RowCrossings]:
    """Outputs for all targets and for each half, in evaluation and in training; also without any row, as a rank may."""

    def run(batch: Batch, kind: type[ForwardPass] = _DeterministicPass) -> Any:
        with override_forward_pass(model, kind(batch, plan)):
            return explain_failure(lambda: call_model(model, batch, takes_edge_attr=plan.takes_edge_attr))

    run(toy_empty(plan.depth, like))
    found = []
    for training in (False, True):
        model.train(training)
        found.append([(run(batch), half) for batch, half in toy_halves(plan.depth, like)])
    return found, find_row_crossings(plan, like, run, _DeterministicPass)


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
