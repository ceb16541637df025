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
from gsplit.nn.calls import LayerCall, call_model, tensors_of
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

    def __init__(self, batch: Batch, plan: ForwardPlan) -> None:
        super().__init__(batch, plan)
        self.entered: set[str] = set()

    def enter_layer(self, name: str, layer: Module, call: LayerCall) -> LayerCall:
        """Note which layers are called."""
        self.entered.add(name)
        return super().enter_layer(name, layer, call)

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
        forward_pass = kind(batch, plan)
        with override_forward_pass(model, forward_pass):
            out = explain_failure(lambda: call_model(model, batch, takes_edge_attr=plan.takes_edge_attr))
        assert isinstance(forward_pass, _DeterministicPass)
        if forward_pass.entered != set(plan.layer_of):
            left_out, fix = sorted(set(plan.layer_of) - forward_pass.entered), "call all layers whatever the rows are"
            got = f"a forward without {', '.join(left_out)} where a rank has no rows: other ranks would wait for it"
            raise InputError(explain("the model", "the same layers in every forward", got, fix))
        return out

    run(toy_empty(plan.depth, like))
    found, crossings, halves = [], [], toy_halves(plan.depth, like)
    for training in (False, True):
        model.train(training)
        found.append([(run(batch), half) for batch, half in halves])
        whole, expected = halves[0][0], found[-1][0][0]
        crossings.append(find_row_crossings(plan, like, whole, expected, run, _DeterministicPass))
    boundaries = crossings[0].boundaries & crossings[1].boundaries
    return found, RowCrossings(boundaries, all(each.input_in_bottom_only for each in crossings))


def check_rows(whole: Any, part: Any, half: slice) -> None:
    """Refuse outputs of the same targets that differ; ``half`` is where the part's targets stand in the whole."""
    for one, other in zip(tensors_of(whole), tensors_of(part), strict=True):
        if not one.is_floating_point():
            continue
        kept = one[half] if one.dim() and one.size(0) != other.size(0) else one
        if not torch.isfinite(one).all():
            got, fix = "NaN or infinity", "let it take any features in (0, 1), or change them before the model"
            raise InputError(explain("the model's output on a toy mini-batch", "finite numbers", got, fix))
        share = 1e-9 if one.dtype == torch.float64 else 1e-3
        largest = one.detach().abs().amax(0) if one.numel() else one.new_zeros(())  # of every column
        near = kept.shape == other.shape and bool(((kept - other).abs() <= share * (largest + 1e-3)).all())
        if not near:
            fix = "use layers and norms that look at a vertex and its in-neighbours only"
            got = "outputs that change with the other targets of the mini-batch"
            raise InputError(
                explain("the model", "every target's output to depend on its neighbourhood only", got, fix)
            )
