"""The attention kernels beside the host's, in the interpreter's process; see ``triton_programs``.

The stated bound: the largest difference to the host's result in float64 is at most ``BOUND`` units of rounding of the
tested type, times the largest element. Inputs are of the order of 1, and edges per destination at most 40.
"""

from typing import Any

import torch
import triton_order
from torch import Tensor
from triton_attention_shape import Shape
from triton_programs import DTYPES, assert_same_bits, random_block

from gsplit.kernels import attention_numba
from gsplit.kernels.attention import attend
from gsplit.kernels.attention_types import AttentionInputs, AttentionKernels, AttentionOptions
from gsplit.kernels.csr import CsrEdges, make_csr_edges
from gsplit.kernels.triton import attention as attention_triton
from gsplit.kernels.triton.launch import set_launcher

BOUND = 32


def _draw(shape: Shape, seed: int) -> tuple[CsrEdges, AttentionOptions, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    indptr, src_rows = random_block(shape.num_dst, shape.num_src, shape.most, generator)
    edges = make_csr_edges(indptr, src_rows, shape.num_src, add_self_loops=shape.loops)
    keep = torch.rand(edges.num_edges, shape.heads, generator=generator) >= shape.p if shape.p else None
    return edges, AttentionOptions(0.2, keep, shape.p), generator


def _results(
    kernels: AttentionKernels, inputs: AttentionInputs, edges: CsrEdges, options: AttentionOptions, g: Tensor
) -> list[Tensor]:
    """The output and the gradients of every input."""
    leaves = AttentionInputs._make(None if t is None else t.detach().clone().requires_grad_() for t in inputs)
    out = attend(kernels, edges, options, leaves)
    out.backward(g)
    grads = [t.grad for t in leaves if t is not None]
    assert all(grad is not None for grad in grads)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def _inputs(kind: str, shape: Shape, edges: CsrEdges, generator: torch.Generator) -> AttentionInputs:
    """Numbers of the tested type's precision are drawn in float32, so that float64 holds the same ones."""

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    heads, width = shape.heads, shape.width
    if kind == "gat":
        score_edge = draw(edges.num_edges, heads) if shape.edge else None
        scores = draw(shape.num_src, heads), draw(shape.num_dst, heads)
        return AttentionInputs(draw(shape.num_src, shape.values, width), scores[0], scores[1], score_edge, att=None)
    x_edge = draw(edges.num_edges, heads, width) if shape.edge else None
    x_src, x_dst = draw(shape.num_src, heads, width), draw(shape.num_dst, heads, width)
    return AttentionInputs(x_src, None, x_dst, x_edge, att=draw(heads, width) / width**0.5)


def check_attention(kind: str, shape: Shape, dtype: str, seed: int) -> float:
    """Forward and backward against the host in float64; returns the worst error in units of the bound's."""
    edges, options, generator = _draw(shape, seed)
    inputs = _inputs(kind, shape, edges, generator)
    g = torch.randn(shape.num_dst, shape.heads, shape.width, generator=generator)
    typed = AttentionInputs._make(None if t is None else t.to(DTYPES[dtype]) for t in inputs)
    wide = AttentionInputs._make(None if t is None else t.double() for t in inputs)
    with triton_order.program_order(seed):
        got = _results(attention_triton, typed, edges, options, g.to(DTYPES[dtype]))
    exact = _results(attention_numba, wide, edges, options, g.double())
    worst = 0.0
    for one, two in zip(got, exact, strict=True):
        assert one.dtype == DTYPES[dtype] and one.shape == two.shape
        if one.numel():
            error = float((one.double() - two).abs().max()) / torch.finfo(DTYPES[dtype]).eps
            worst = max(worst, error / max(1.0, float(two.abs().max())))
    assert worst <= BOUND, worst
    return worst


def same_for_every_order(kind: str, seeds: list[int]) -> None:
    shape = Shape(5, 8, 9, 1, 20, 1, edge=True, p=0.5)
    edges, options, generator = _draw(shape, 3)
    inputs = _inputs(kind, shape, edges, generator)
    g = torch.randn(shape.num_dst, shape.heads, shape.width, generator=generator)
    results = []
    for seed in seeds:
        with triton_order.program_order(seed):
            results.append(_results(attention_triton, inputs, edges, options, g))
    for result in results[1:]:
        for one, two in zip(result, results[0], strict=True):
            assert_same_bits(one, two)


def sizes_saved(kind: str) -> tuple[int, list[list[int]]]:
    """The number of edges, and the shapes of what forward keeps for backward."""
    shape = Shape(4, 6, 30, 2, 3, 2)
    edges, options, generator = _draw(shape, 5)
    inputs = _inputs(kind, shape, edges, generator)
    leaves = AttentionInputs._make(None if t is None else t.requires_grad_() for t in inputs)
    out = attend(attention_triton, edges, options, leaves)
    saved: Any = out.grad_fn
    return edges.num_edges, [list(t.shape) for t in saved.saved_tensors if t is not None]


def without_gradient_of_values(values: int) -> list[int]:
    """The elements of the gradient of the values that the kernel is given, with and without need of it."""
    shape = Shape(5, 8, 9, 2, 20, values)
    edges, options, generator = _draw(shape, 3)
    inputs = _inputs("gat", shape, edges, generator)
    g = torch.randn(shape.num_dst, shape.heads, shape.width, generator=generator)
    sizes, grads = [], []

    def record(kernel: Any, grid: Any, args: Any, constants: Any, writes: Any) -> None:
        if kernel is attention_triton.attention_backward_src_kernel:
            sizes.append(writes[0].numel())
        launcher(kernel, grid, args, constants, writes)

    launcher = set_launcher(record)
    try:
        for needed in (True, False):
            leaves = [
                None if t is None else t.detach().clone().requires_grad_(place > 0 or needed)
                for place, t in enumerate(inputs)
            ]
            attend(attention_triton, edges, options, AttentionInputs._make(leaves)).backward(g)
            grads.append([t.grad for t in leaves if t is not None])
    finally:
        set_launcher(launcher)
    assert grads[0][0] is not None and grads[1][0] is None
    for one, two in zip(grads[0][1:], grads[1][1:], strict=True):
        assert one is not None and two is not None
        assert_same_bits(one, two)
    return sizes
