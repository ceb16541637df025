"""Where a model joins rows of different layers, found when it is wrapped: which strategies can run it.

Rows of two levels stand for the same vertices, one by one, within the split part of a mini-batch and within its data
parallel part, but not across the boundary between the two (``boundary``). A residual ``x[:h.size(0)] + h`` across it
would add rows of other vertices. So the model is run on toy batches with a boundary at every level, the rows below it
in another order, and on one whose input rows only the bottom layers get to see; where its outputs stay the same, it may
be trained so.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gsplit.batch import Batch
from gsplit.errors import InputError, explain
from gsplit.nn.calls import LayerCall, rows_of, tensors_of
from gsplit.nn.checks.toy import ExampleInput, toy_boundary
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan

__all__ = ["RowCrossings", "find_row_crossings"]

RunPass = Callable[[Batch, type[ForwardPass]], Any]
"""Runs the model on a batch with a kind of forward pass."""


@dataclass(frozen=True)
class RowCrossings:
    """``boundaries``: levels that no two joined tensors lie on both sides of. ``input_in_bottom_only``: nothing but
    the bottom layers reads the input rows.
    """

    boundaries: frozenset[int]
    input_in_bottom_only: bool


def hide_input(kind: type[ForwardPass], x: Tensor) -> type[ForwardPass]:
    """A forward pass whose bottom layers get the input rows ``x``, whatever the model was given."""

    class HiddenInput(kind):  # type: ignore[misc, valid-type]
        def enter_layer(self, name: str, layer: Module, call: LayerCall) -> LayerCall:
            """Give a bottom layer what the model was not given."""
            if self._plan.layer_of.get(name) == 0:
                if rows_of(call) is not self.batch.x:
                    raise InputError(explain(name, "the input rows themselves", "others", "pass batch.x"))
                call = _swap_rows(call, x)
            entered: LayerCall = super().enter_layer(name, layer, call)
            return entered

    return HiddenInput


def _swap_rows(call: LayerCall, rows: Tensor) -> LayerCall:
    args, kwargs = call
    return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "x": rows})


def find_row_crossings(
    plan: ForwardPlan, like: ExampleInput, whole: Batch, expected: Any, run: RunPass, kind: type[ForwardPass]
) -> RowCrossings:
    """Try the model on toy batches with boundaries, and with hidden input rows.

    ``expected``: what it returned for ``whole``, the toy batch of all targets.
    """

    def same(batch: Batch, how: type[ForwardPass]) -> bool:
        with suppress(InputError):
            return _all_close(list(tensors_of(expected)), list(tensors_of(run(batch, how))))
        return False

    levels = [level for level in range(1, plan.depth) if same(toy_boundary(plan.depth, like, level), kind)]
    others = torch.rand(whole.x.size(0), whole.x.size(1) + 1, generator=torch.Generator().manual_seed(1))
    hidden = replace(whole, x=others.to(whole.x))  # other rows, of another width
    return RowCrossings(frozenset(levels), same(hidden, hide_input(kind, whole.x)))


def _all_close(expected: list[Tensor], found: list[Tensor]) -> bool:
    if len(expected) != len(found):
        return False
    for one, other in zip(expected, found, strict=True):
        scale = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.is_floating_point() and one.numel() else 0.0
        tolerance = (1e-9 if one.dtype == torch.float64 else 1e-3) * (scale + 1e-3)
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=tolerance):
            return False
    return True
