"""Row independence, checked when a model is wrapped: a target's output must not depend on the other targets.

A model that fails the check mixes rows that are not neighbours, in an unknown layer or in its own code, and would be
silently wrong on a split mini-batch. The check runs on a perturbed copy of the model, in float64 if the model runs
there, in evaluation and in training mode, without dropout and with batch norm by its running statistics.

The same runs find where the model joins rows of different layers, which decides whether ``hybrid(k)`` can train it.
Rows of two levels are the same vertices within the split part of a mini-batch and within its data parallel part, but
not across the boundary between the two: a residual ``x[:h.size(0)] + h`` across it would add rows of other vertices. So
the model runs on toy batches with a boundary at every level and the rows below it in another order. A level where the
outputs stay the same may be a boundary.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Embedding, Module, Parameter

from gsplit.device.devices import fork_random_states
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.nn.calls import LayerCall, call_model, tensors_of
from gsplit.nn.checks.dry_run import explain_failure
from gsplit.nn.checks.toy import ToyLinkBatch, Toys, num_toy_vertices
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan
from gsplit.nn.split_forward import SplitForward

__all__ = ["check_row_independence", "check_rows", "has_tables", "perturbed_copy"]

OverrideForwardPass = Callable[[Module, ForwardPass], AbstractContextManager[None]]


@dataclass(frozen=True)
class _Run:
    """The model's output on a toy batch, and the buffers that forwards change, after it."""

    out: Any
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class _Runs:
    """Of one mode: with all targets, with the same again, with some of the targets, which are slices, and with none."""

    whole: _Run
    again: _Run
    parts: list[tuple[_Run, slice]]
    empty: _Run


class _DeterministicPass(ForwardPass):
    """A forward pass without dropout, and with batch norm by its running statistics."""

    allows_fused = False

    def __init__(self, batch: Batch, plan: ForwardPlan) -> None:
        super().__init__(batch, plan)
        self.called: set[str] = set()

    def run_layer(self, split: SplitForward, call: LayerCall) -> Any:
        self.called.add(split.name)
        return super().run_layer(split, call)

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        return x

    def batch_norm(
        self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def check_row_independence(
    model: Module, plan: ForwardPlan, like: Toys, override_forward_pass: OverrideForwardPass
) -> frozenset[int]:
    """Refuse a wrapped model that mixes rows; return the levels that may be boundaries.

    ``override_forward_pass`` sets the forward pass of a model. One copy of the model is alive at a time. If the smaller
    copy, or the one in float64, does not run, the next is tried.
    """
    num_vertices = num_toy_vertices(plan.depth)
    copies: list[tuple[torch.dtype | None, int | None]] = [(torch.float64, num_vertices), (None, num_vertices)]
    if has_tables(model, num_vertices):
        copies.append((None, None))

    def outputs(dtype: torch.dtype | None, max_rows: int | None) -> tuple[list[_Runs], frozenset[int]]:
        perturbed = perturbed_copy(model, dtype, max_rows)
        return _outputs_of(perturbed, plan, like if dtype is None else like.to(dtype), override_forward_pass)

    with fork_random_states(like.device), torch.no_grad():
        for dtype, max_rows in copies[:-1]:
            with suppress(InputError):  # not kept: its traceback would keep the copy
                found, boundaries = outputs(dtype, max_rows)
                break
        else:
            dtype, max_rows = copies[-1]
            found, boundaries = outputs(dtype, max_rows)
    for runs in found:
        _check_state(runs)
        for part, half in runs.parts:
            check_rows(runs.whole.out, part.out, half)
    return boundaries


def _check_state(runs: _Runs) -> None:
    """Refuse buffers that depend on rows, and outputs that depend on more than rows, weights and buffers."""
    others = [runs.again, runs.empty, *(run for run, _ in runs.parts)]
    buffers = runs.whole.buffers
    differing = [name for name in buffers if not all(_all_close([buffers[name]], [o.buffers[name]]) for o in others)]
    if differing:
        fix = "use torch.nn.BatchNorm1d, or keep such statistics outside of the model"
        got = f"{', '.join(differing)}, which would differ between ranks"
        raise InputError(explain("the model", "buffers that do not depend on a mini-batch's rows", got, fix))
    if not _all_close(list(tensors_of(runs.whole.out)), list(tensors_of(runs.again.out))):
        fix = "read no time, keep no rows between calls, and count calls in a buffer (register_buffer)"
        got = "outputs that change from call to call"
        raise InputError(explain("the model", "the same outputs for the same mini-batch", got, fix))


def _outputs_of(
    model: Module, plan: ForwardPlan, like: Toys, override_forward_pass: OverrideForwardPass
) -> tuple[list[_Runs], frozenset[int]]:
    """Outputs for all targets and for each half, in evaluation and in training, and the possible boundaries.

    The model also runs on a batch without rows, as a rank may have. All runs begin with the same buffers.
    """
    buffers = {name: model.get_buffer(name) for name in plan.changed_buffers}

    def run(vertices: Batch) -> _Run:
        for name, buffer in buffers.items():
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._buffers[last] = buffer.clone()
        batch = like.with_pairs(vertices, plan.pairs) if plan.pairs else vertices
        forward_pass = _DeterministicPass(batch, plan)
        with override_forward_pass(model, forward_pass):
            out = explain_failure(lambda: call_model(model, batch, takes_edge_attr=plan.takes_edge_attr))
        if forward_pass.called != set(plan.layer_of):
            left_out = ", ".join(sorted(set(plan.layer_of) - forward_pass.called))
            got = f"a forward without {left_out} where a rank has no rows: other ranks would wait for it"
            fix = "call all layers whatever the rows are"
            raise InputError(explain("the model", "the same layers in every forward", got, fix))
        out = _compared(batch, plan.pairs, out) if isinstance(batch, ToyLinkBatch) else out
        return _Run(out, {name: model.get_buffer(name) for name in buffers})

    def runs_with_boundary(level: int, expected: Any) -> bool:
        with suppress(InputError):
            out = run(like.boundary(plan.depth, level)).out
            return _all_close(list(tensors_of(expected)), list(tensors_of(out)))
        return False

    found: list[_Runs] = []
    (all_targets, _), *halves = like.halves(plan.depth)
    boundaries = set(range(1, plan.depth))
    for training in (False, True):
        model.train(training)
        empty = run(like.empty(plan.depth))
        whole = run(all_targets)
        again = run(all_targets)
        found.append(_Runs(whole, again, [(run(batch), half) for batch, half in halves], empty))
        boundaries = {level for level in sorted(boundaries) if runs_with_boundary(level, whole.out)}
    return found, frozenset(boundaries)


def _compared(batch: ToyLinkBatch, kind: str, out: Any) -> list[Any]:
    """What a model that decodes pairs computes for each target: its rows, and outputs of pairs with own negatives."""
    outputs = list(tensors_of(out)) if kind in ("binary", "triplet", "triplets") else []
    of_pairs = [tensor for tensor in outputs if tensor.dim() and tensor.size(0) == batch.num_values]
    return [*batch.encoded, *of_pairs]


def check_rows(whole: Any, part: Any, half: slice) -> None:
    """Refuse outputs of the same targets that differ.

    ``half``: the positions of the part's targets in the whole. An output of a heterogeneous model has the rows of one
    type or of all types, of which the part has the first or the last.
    """
    for one, other in zip(tensors_of(whole), tensors_of(part), strict=True):
        if not one.is_floating_point():
            continue
        kept = one
        if one.dim() and one.size(0) != other.size(0):
            kept = one[: other.size(0)] if half.start == 0 else one[-other.size(0) :]
        if not torch.isfinite(one).all():
            fix = "let it take any features in (0, 1), or change them before the model"
            raise InputError(
                explain("the model's output on a toy mini-batch", "finite numbers", "NaN or infinity", fix)
            )
        share = 1e-9 if one.dtype == torch.float64 else 1e-3
        largest = one.detach().abs().amax(0) if one.numel() else one.new_zeros(())  # of every column
        near = kept.shape == other.shape and bool(((kept - other).abs() <= share * (largest + 1e-3)).all())
        if not near:
            fix = "use layers and norms that read a vertex and its in-neighbours only"
            got = "outputs that change with the other targets of the mini-batch"
            raise InputError(
                explain("the model", "every target's output to depend on its neighbourhood only", got, fix)
            )


def _all_close(expected: list[Tensor], found: list[Tensor]) -> bool:
    if len(expected) != len(found):
        return False
    for one, other in zip(expected, found, strict=True):
        scale = 0.0
        if one.is_floating_point() and one.numel():
            scale = float(one.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
        tolerance = (1e-9 if one.dtype == torch.float64 else 1e-3) * (scale + 1e-3)
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True):
            return False
    return True


class _FoldedEmbedding(Embedding):
    """An embedding with few rows that takes any id, modulo the number of rows."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input % self.num_embeddings)


def _tables(model: Module, max_rows: int) -> dict[str, Embedding]:
    """Embeddings with more rows; not subclasses, which may use their ids in other ways."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is Embedding and module.num_embeddings > max_rows
    }


def has_tables(model: Module, max_rows: int) -> bool:
    """Whether ``perturbed_copy`` would cut an embedding."""
    return bool(_tables(model, max_rows))


def perturbed_copy(model: Module, dtype: torch.dtype | None, max_rows: int | None) -> Module:
    """A copy with perturbed parameters and buffers, in ``dtype`` if given; embeddings have at most ``max_rows``.

    Weights are moved away from their initial values, because a gate that starts closed would hide what is behind it.
    Embeddings are cut, because a table with a row per vertex of the real graph may be most of a rank's memory.
    """
    tables = {} if max_rows is None else _tables(model, max_rows)
    cut = {id(table.weight) for table in tables.values()}
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            values = parameter.detach()[:max_rows] if id(parameter) in cut else parameter.detach()
            memo[id(parameter)] = Parameter(_perturb(values, dtype or values.dtype, generator), parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            moved = _perturb(buffer.detach(), dtype or buffer.dtype, generator)
            still = buffer.detach().to(moved)
            memo[id(buffer)] = still + (moved - still).abs()  # upwards: some, such as variances, must stay positive
    copied = copy.deepcopy(model, memo)
    if isinstance(copied, GraphModule):  # such as that of to_hetero: its copy does not have the hooks of forward
        for hooks in ("hooks", "pre_hooks", "hooks_always_called", "pre_hooks_with_kwargs", "hooks_with_kwargs"):
            setattr(copied, f"_forward_{hooks}", copy.deepcopy(getattr(model, f"_forward_{hooks}"), memo))
    for name in tables:
        table = copied.get_submodule(name)
        assert isinstance(table, Embedding)
        table.__class__ = _FoldedEmbedding
        table.num_embeddings = table.weight.size(0)
        table.padding_idx = None
    return copied


def _perturb(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.randn(values.shape, generator=generator, dtype=wide).to(values.device)
    return noise.mul_(0.1).add_(values).to(dtype)
