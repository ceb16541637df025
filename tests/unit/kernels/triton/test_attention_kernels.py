"""Attention as compiled: within a stated bound of the exact result, the same bits in every order of programs.

The bound: the largest difference to the host's result in float64 is at most ``BOUND`` units of rounding of the tested
type, times the largest element. Inputs are of the order of 1, and edges per destination at most 40.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from same_bits import assert_same_bits
from torch import Tensor

from gsplit.kernels import attention_numba
from gsplit.kernels.attention import attend
from gsplit.kernels.attention_types import AttentionInputs, AttentionKernels, AttentionOptions
from gsplit.kernels.csr import CsrEdges, make_csr_edges
from gsplit.kernels.triton import attention as attention_triton
from gsplit.kernels.triton.launch import set_launcher

BOUND = 32


@dataclass(frozen=True)
class Shape:
    """``most``: edges of a destination. ``values``: rows of values per source, 1 for one row for all heads."""

    num_dst: int
    num_src: int
    most: int
    heads: int
    width: int
    values: int
    edge: bool = False
    p: float = 0.0
    loops: bool = False


SHAPES = {
    "plain": Shape(4, 6, 20, 2, 5, 2),
    "one head of one": Shape(4, 6, 20, 1, 1, 1),
    "no edges": Shape(3, 4, 0, 2, 3, 2),
    "all dropped": Shape(3, 4, 9, 2, 3, 2, p=1.0),
    "no destinations": Shape(0, 4, 0, 2, 3, 2),
}
EVERYTHING = Shape(3, 5, 16, 2, 17, 2, edge=True, p=0.5, loops=True)


@dataclass(frozen=True)
class Problem:
    """Attention of some edges. Numbers are drawn in float32, so that float64 holds the same ones."""

    edges: CsrEdges
    inputs: AttentionInputs
    options: AttentionOptions
    g: Tensor

    @classmethod
    def draw(cls, kind: str, shape: Shape, seed: int = 1) -> "Problem":
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        counts = torch.randint(0, shape.most + 1, (shape.num_dst,), generator=generator)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        src_rows = torch.randint(0, shape.num_src, (int(indptr[-1]),), generator=generator)
        edges = make_csr_edges(indptr, src_rows, shape.num_src, add_self_loops=shape.loops)
        heads, width = shape.heads, shape.width
        keep = torch.rand(edges.num_edges, heads, generator=generator) >= shape.p if shape.p else None
        if kind == "gat":
            edge_terms = randn(edges.num_edges, heads) if shape.edge else None
            values = randn(shape.num_src, shape.values, width)
            inputs = AttentionInputs(
                values, randn(shape.num_src, heads), randn(shape.num_dst, heads), edge_terms, att=None
            )
        else:
            edge_terms = randn(edges.num_edges, heads, width) if shape.edge else None
            values, dst_terms = randn(shape.num_src, heads, width), randn(shape.num_dst, heads, width)
            inputs = AttentionInputs(values, None, dst_terms, edge_terms, att=randn(heads, width) / width**0.5)
        g = randn(shape.num_dst, heads, width)
        return cls(edges, inputs, AttentionOptions(0.2, keep, shape.p), g)

    def results(self, kernels: AttentionKernels, dtype: torch.dtype) -> list[Tensor]:
        """The output and the gradients of every input."""
        leaves = AttentionInputs._make(
            None if t is None else t.detach().clone().to(dtype).requires_grad_() for t in self.inputs
        )
        out = attend(kernels, self.edges, self.options, leaves)
        out.backward(self.g.to(dtype))
        grads = [t.grad for t in leaves if t is not None]
        assert all(grad is not None for grad in grads)
        return [out.detach(), *(grad for grad in grads if grad is not None)]


def assert_within_the_bound(problem: Problem, dtype: torch.dtype) -> None:
    exact = problem.results(attention_numba, torch.float64)
    for one, two in zip(problem.results(attention_triton, dtype), exact, strict=True):
        assert one.dtype == dtype and one.shape == two.shape
        if one.numel():
            error = float((one.double() - two).abs().max()) / torch.finfo(dtype).eps
            assert error / max(1.0, float(two.abs().max())) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_stays_within_the_bound(kind: str, dtype: torch.dtype, compiled: int) -> None:
    assert_within_the_bound(Problem.draw(kind, EVERYTHING), dtype)


# every change: one architecture
@pytest.mark.parametrize(
    "compiled", [80, *(pytest.param(each, marks=pytest.mark.weekly) for each in (75, 90))], indirect=True
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_stay_within_the_bound(kind: str, shape: str, dtype: torch.dtype, compiled: int) -> None:
    assert_within_the_bound(Problem.draw(kind, SHAPES[shape]), dtype)


@pytest.mark.parametrize("shape", [Shape(4, 6, 20, 3, 7, 1, p=0.3), Shape(5, 9, 40, 2, 64, 2)], ids=["one row", "wide"])
def test_one_row_of_values_and_wide_ones_stay_within_the_bound(shape: Shape, compiled: int) -> None:
    assert_within_the_bound(Problem.draw("gat", shape), torch.float32)


@pytest.mark.parametrize("compiled", [80], indirect=True)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_is_the_same_in_every_order(kind: str, compiled: int) -> None:
    """A launcher draws another order for every launch."""
    problem = Problem.draw(kind, Shape(5, 8, 9, 1, 20, 1, edge=True, p=0.5))
    results = [problem.results(attention_triton, torch.float32) for _ in range(3)]
    for result in results[1:]:
        for one, two in zip(result, results[0], strict=True):
            assert_same_bits(one, two)


@pytest.mark.parametrize("compiled", [80], indirect=True)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_keeps_nothing_of_the_size_of_the_edges(kind: str, compiled: int) -> None:
    problem = Problem.draw(kind, Shape(4, 6, 30, 2, 3, 2), seed=5)
    leaves = AttentionInputs._make(None if t is None else t.requires_grad_() for t in problem.inputs)
    saved: Any = attend(attention_triton, problem.edges, problem.options, leaves).grad_fn
    assert problem.edges.num_edges > 20
    assert max(size for t in saved.saved_tensors if t is not None for size in t.shape) < 10


@pytest.mark.parametrize("compiled", [80], indirect=True)
@pytest.mark.parametrize("values", [1, 2])
def test_a_gradient_of_values_that_nobody_wants_is_not_computed(values: int, compiled: int) -> None:
    problem = Problem.draw("gat", Shape(5, 8, 9, 2, 20, values), seed=3)
    sizes: list[int] = []
    grads: list[list[Tensor | None]] = []

    def record(
        kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
    ) -> None:
        if kernel is attention_triton.attention_backward_src_kernel:
            sizes.append(writes[0].numel())
        launcher(kernel, grid, args, constants, writes)

    launcher = set_launcher(record)
    try:
        for needed in (True, False):
            leaves = [None if t is None else t.detach().clone().requires_grad_() for t in problem.inputs]
            assert leaves[0] is not None
            leaves[0].requires_grad_(needed)
            attend(attention_triton, problem.edges, problem.options, AttentionInputs._make(leaves)).backward(problem.g)
            grads.append([t.grad for t in leaves if t is not None])
    finally:
        set_launcher(launcher)
    assert sizes == [8 * 2 * 20, 0]
    assert grads[0][0] is not None and grads[1][0] is None
    for one, two in zip(grads[0][1:], grads[1][1:], strict=True):
        assert one is not None and two is not None
        assert_same_bits(one, two)
