"""GAT's attention on a device; ``kernels.attention`` has the definition and the shapes.

One program handles one destination and one head. Forward passes over the edges once: a running maximum rescales what
was summed so far when it rises. Kept for backward are the maximum and the sum of exponentials of each destination and
head; weights are made again, so nothing has a row per edge. Backward is two kernels, over the edges of each destination
and over those of each source (``aggregation.transpose``): no atomics, and sums in an order that the block alone
decides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.attention_options import AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.triton.aggregation import transpose
from gsplit.kernels.triton.edge_softmax import REALS, Sums, attention_of, edge_tile, leaky_relu, option_args
from gsplit.kernels.triton.launch import launch
from gsplit.kernels.triton.words import join_float

__all__ = [
    "Inputs",
    "backward",
    "forward",
    "gat_backward_dst_kernel",
    "gat_backward_src_kernel",
    "gat_forward_kernel",
]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""values, score_src, score_dst, score_edge."""


@triton.jit(do_not_specialize=REALS)
def gat_forward_kernel(
    indptr,
    src_rows,
    values,
    score_src,
    score_dst,
    score_edge,
    keep,
    slope_high,
    slope_low,
    scale_high,
    scale_low,
    num_heads,
    width,
    tops,
    totals,
    out,
    ONE_ROW: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out`` and what backward needs of one destination and head; ONE_ROW: values are [S, 1, C]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at = row * num_heads + head
    number = values.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_dst = tl.load(score_dst + at)
    top, total = tl.full([], float("-inf"), number), tl.full([], 0, number)
    summed = tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        source = tl.load(src_rows + edge, mask=inside, other=0)
        raw = tl.load(score_src + source * num_heads + head, mask=inside, other=0) + of_dst
        if HAS_EDGE:
            raw += tl.load(score_edge + edge * num_heads + head, mask=inside, other=0)
        score = tl.where(inside, leaky_relu(raw, slope), float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        place = source if ONE_ROW else source * num_heads + head
        wanted = inside[:, None] & (column < width)[None, :]
        rows = tl.load(values + place[:, None] * width + column[None, :], mask=wanted, other=0)
        summed = summed * shrink + tl.sum(weight[:, None] * rows, axis=0)
        top = higher
    tl.store(tops + at, top)
    tl.store(totals + at, total)
    tl.store(out + at * width + column, summed * (scale / (total + 1e-16)), mask=column < width)


@triton.jit(do_not_specialize=REALS)
def gat_backward_dst_kernel(
    indptr,
    src_rows,
    values,
    score_src,
    score_dst,
    score_edge,
    keep,
    slope_high,
    slope_low,
    scale_high,
    scale_low,
    num_heads,
    width,
    tops,
    totals,
    out,
    g,
    deltas,
    g_dst,
    g_edge,
    ONE_ROW: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    WANTS_EDGE: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``delta`` and ``g_score_dst`` of one destination and head, and ``g_score_edge`` of its edges."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at = row * num_heads + head
    number = values.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_dst, top, total = tl.load(score_dst + at), tl.load(tops + at), tl.load(totals + at)
    g_row = tl.load(g + at * width + column, mask=column < width, other=0)
    delta = tl.sum(g_row * tl.load(out + at * width + column, mask=column < width, other=0), axis=0)
    summed = tl.full([], 0, number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        source = tl.load(src_rows + edge, mask=inside, other=0)
        raw = tl.load(score_src + source * num_heads + head, mask=inside, other=0) + of_dst
        if HAS_EDGE:
            raw += tl.load(score_edge + edge * num_heads + head, mask=inside, other=0)
        alpha = attention_of(leaky_relu(raw, slope), top, total, inside)
        weight = alpha * scale
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        place = source if ONE_ROW else source * num_heads + head
        wanted = inside[:, None] & (column < width)[None, :]
        rows = tl.load(values + place[:, None] * width + column[None, :], mask=wanted, other=0)
        g_score = weight * tl.sum(rows * g_row[None, :], axis=1) - alpha * delta
        g_raw = tl.where(raw > 0, g_score, g_score * slope)
        if WANTS_EDGE:
            tl.store(g_edge + edge * num_heads + head, g_raw, mask=inside)
        summed += tl.sum(g_raw, axis=0)
    tl.store(deltas + at, delta)
    tl.store(g_dst + at, summed)


@triton.jit(do_not_specialize=REALS)
def gat_backward_src_kernel(
    indptr,
    edges,
    dst_rows,
    values,
    score_src,
    score_dst,
    score_edge,
    keep,
    slope_high,
    slope_low,
    scale_high,
    scale_low,
    num_heads,
    width,
    tops,
    totals,
    deltas,
    g,
    g_values,
    g_src,
    ONE_ROW: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``g_values``, head by head, and ``g_score_src`` of one source and head, over its edges."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at_src = row * num_heads + head
    number = values.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_src = tl.load(score_src + at_src)
    value = tl.load(values + (row if ONE_ROW else at_src) * width + column, mask=column < width, other=0)
    summed, summed_score = tl.zeros([COLUMNS], number), tl.full([], 0, number)
    for begin in range(start, stop, EDGES):
        entry = begin + tl.arange(0, EDGES)
        inside = entry < stop
        edge = tl.load(edges + entry, mask=inside, other=0)
        at = tl.load(dst_rows + entry, mask=inside, other=0) * num_heads + head
        raw = of_src + tl.load(score_dst + at, mask=inside, other=0)
        if HAS_EDGE:
            raw += tl.load(score_edge + edge * num_heads + head, mask=inside, other=0)
        top, total = tl.load(tops + at, mask=inside, other=0), tl.load(totals + at, mask=inside, other=1)
        alpha = attention_of(leaky_relu(raw, slope), top, total, inside)
        weight = alpha * scale
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        wanted = inside[:, None] & (column < width)[None, :]
        g_rows = tl.load(g + at[:, None] * width + column[None, :], mask=wanted, other=0)
        delta = tl.load(deltas + at, mask=inside, other=0)
        g_score = weight * tl.sum(g_rows * value[None, :], axis=1) - alpha * delta
        summed_score += tl.sum(tl.where(raw > 0, g_score, g_score * slope), axis=0)
        summed += tl.sum(weight[:, None] * g_rows, axis=0)
    tl.store(g_src + at_src, summed_score)
    tl.store(g_values + at_src * width + column, summed, mask=column < width)


def _shared(inputs: Inputs, options: AttentionOptions) -> tuple[tuple[Tensor | int, ...], dict[str, int | bool]]:
    """Arguments and constants that all three kernels have, from the values on."""
    values, score_src, score_dst, score_edge = (None if t is None else t.detach().contiguous() for t in inputs)
    assert values is not None and score_src is not None and score_dst is not None
    tensors = (values, score_src, score_dst, score_src if score_edge is None else score_edge)
    constants = {
        "ONE_ROW": values.size(1) == 1,
        "HAS_EDGE": score_edge is not None,
        "HAS_KEEP": options.keep is not None,
        **edge_tile(values.size(2), values.dtype),
    }
    return (*tensors, *option_args(options, score_src), score_src.size(1), values.size(2)), constants


def forward(edges: CsrEdges, inputs: Inputs, options: AttentionOptions) -> tuple[Tensor, Sums]:
    """out [D, H, C], and what ``backward`` wants of it."""
    values, num_heads = inputs[0], inputs[1].size(1)
    out = values.new_empty(edges.num_dst, num_heads, values.size(2))
    tops, totals = (values.new_empty(edges.num_dst, num_heads) for _ in range(2))
    args, constants = _shared(inputs, options)
    writes = (tops, totals, out)
    grid = (edges.num_dst, num_heads)
    launch(gat_forward_kernel, grid, (edges.indptr, edges.src_rows, *args, *writes), constants, writes)
    return out, (tops, totals)


def backward(
    edges: CsrEdges,
    inputs: Inputs,
    out: Tensor,
    sums: Sums,
    g: Tensor,
    options: AttentionOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of values and of the scores of sources, destinations and edges (None if not wanted)."""
    (values, score_src, score_dst, _), g = inputs, g.contiguous()
    num_heads = score_src.size(1)
    args, constants = _shared(inputs, options)
    wants_edges = wants[3]
    deltas, g_dst = torch.empty_like(sums[0]), score_dst.new_empty(score_dst.shape)
    g_edge = score_src.new_empty(edges.num_edges if wants_edges else 0, num_heads)
    writes = (deltas, g_dst, g_edge)
    launch(
        gat_backward_dst_kernel,
        (edges.num_dst, num_heads),
        (edges.indptr, edges.src_rows, *args, *sums, out, g, *writes),
        constants | {"WANTS_EDGE": wants_edges},
        writes,
    )
    g_values = values.new_empty(values.size(0), num_heads, values.size(2))
    g_src = score_src.new_empty(score_src.shape)
    by_source = transpose(edges.indptr, edges.src_rows, edges.num_src)
    launch(
        gat_backward_src_kernel,
        (edges.num_src, num_heads),
        (by_source.indptr, by_source.edges, by_source.dst_rows, *args, *sums, deltas, g, g_values, g_src),
        constants,
        (g_values, g_src),
    )
    if values.size(1) != num_heads:
        g_values = g_values.sum(1, keepdim=True)
    return g_values, g_src, g_dst, g_edge if wants_edges else None
