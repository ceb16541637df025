"""GATv2's attention on a device; ``kernels.attention`` has the definition and the shapes.

As in ``gat``, one program handles one destination, or one source, and one head; forward passes over the edges once and
reads a source's row once, for the score and for the sum. ``g_att`` is summed by destination, then in float64 over them.
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
    "gatv2_backward_dst_kernel",
    "gatv2_backward_src_kernel",
    "gatv2_forward_kernel",
]

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""x_src, x_dst, x_edge, att."""


@triton.jit(do_not_specialize=REALS)
def gatv2_forward_kernel(
    indptr,
    src_rows,
    x_src,
    x_dst,
    x_edge,
    att,
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
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out`` and what backward needs of one destination and head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at = row * num_heads + head
    number = x_src.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_dst = tl.load(x_dst + at * width + column, mask=column < width, other=0)
    of_att = tl.load(att + head * width + column, mask=column < width, other=0)
    top, total = tl.full([], float("-inf"), number), tl.full([], 0, number)
    summed = tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        place = tl.load(src_rows + edge, mask=inside, other=0) * num_heads + head
        wanted = inside[:, None] & (column < width)[None, :]
        rows = tl.load(x_src + place[:, None] * width + column[None, :], mask=wanted, other=0)
        z = rows + of_dst[None, :]
        if HAS_EDGE:
            beside = (edge * num_heads + head)[:, None] * width + column[None, :]
            z += tl.load(x_edge + beside, mask=wanted, other=0)
        score = tl.where(inside, tl.sum(of_att[None, :] * leaky_relu(z, slope), axis=1), float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        summed = summed * shrink + tl.sum(weight[:, None] * rows, axis=0)
        top = higher
    tl.store(tops + at, top)
    tl.store(totals + at, total)
    tl.store(out + at * width + column, summed * (scale / (total + 1e-16)), mask=column < width)


@triton.jit(do_not_specialize=REALS)
def gatv2_backward_dst_kernel(
    indptr,
    src_rows,
    x_src,
    x_dst,
    x_edge,
    att,
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
    g_att,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    WANTS_EDGE: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``delta``, ``g_x_dst`` and the part of ``g_att`` of one destination and head, and ``g_x_edge`` of its edges."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at = row * num_heads + head
    number = x_src.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_dst = tl.load(x_dst + at * width + column, mask=column < width, other=0)
    of_att = tl.load(att + head * width + column, mask=column < width, other=0)
    top, total = tl.load(tops + at), tl.load(totals + at)
    g_row = tl.load(g + at * width + column, mask=column < width, other=0)
    delta = tl.sum(g_row * tl.load(out + at * width + column, mask=column < width, other=0), axis=0)
    summed, summed_att = tl.zeros([COLUMNS], number), tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        place = tl.load(src_rows + edge, mask=inside, other=0) * num_heads + head
        wanted = inside[:, None] & (column < width)[None, :]
        beside = (edge * num_heads + head)[:, None] * width + column[None, :]
        z = tl.load(x_src + place[:, None] * width + column[None, :], mask=wanted, other=0)
        product = tl.sum(z * g_row[None, :], axis=1)
        z += of_dst[None, :]
        if HAS_EDGE:
            z += tl.load(x_edge + beside, mask=wanted, other=0)
        active = leaky_relu(z, slope)
        alpha = attention_of(tl.sum(of_att[None, :] * active, axis=1), top, total, inside)
        weight = alpha * scale
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        g_score = weight * product - alpha * delta
        g_active = g_score[:, None] * of_att[None, :]
        g_z = tl.where(z > 0, g_active, g_active * slope)
        if WANTS_EDGE:
            tl.store(g_edge + beside, g_z, mask=wanted)
        summed += tl.sum(g_z, axis=0)
        summed_att += tl.sum(g_score[:, None] * active, axis=0)
    tl.store(deltas + at, delta)
    tl.store(g_dst + at * width + column, summed, mask=column < width)
    tl.store(g_att + at * width + column, summed_att, mask=column < width)


@triton.jit(do_not_specialize=REALS)
def gatv2_backward_src_kernel(
    indptr,
    edges,
    dst_rows,
    x_src,
    x_dst,
    x_edge,
    att,
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
    g_src,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``g_x_src`` of one source and head, over its edges: as a value and as a part of the score."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at_src = row * num_heads + head
    number = x_src.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_src = tl.load(x_src + at_src * width + column, mask=column < width, other=0)
    of_att = tl.load(att + head * width + column, mask=column < width, other=0)
    summed = tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        entry = begin + tl.arange(0, EDGES)
        inside = entry < stop
        edge = tl.load(edges + entry, mask=inside, other=0)
        at = tl.load(dst_rows + entry, mask=inside, other=0) * num_heads + head
        wanted = inside[:, None] & (column < width)[None, :]
        place = at[:, None] * width + column[None, :]
        z = of_src[None, :] + tl.load(x_dst + place, mask=wanted, other=0)
        if HAS_EDGE:
            beside = (edge * num_heads + head)[:, None] * width + column[None, :]
            z += tl.load(x_edge + beside, mask=wanted, other=0)
        top, total = tl.load(tops + at, mask=inside, other=0), tl.load(totals + at, mask=inside, other=1)
        alpha = attention_of(tl.sum(of_att[None, :] * leaky_relu(z, slope), axis=1), top, total, inside)
        weight = alpha * scale
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        g_rows = tl.load(g + place, mask=wanted, other=0)
        delta = tl.load(deltas + at, mask=inside, other=0)
        g_score = weight * tl.sum(g_rows * of_src[None, :], axis=1) - alpha * delta
        g_active = g_score[:, None] * of_att[None, :]
        summed += tl.sum(weight[:, None] * g_rows + tl.where(z > 0, g_active, g_active * slope), axis=0)
    tl.store(g_src + at_src * width + column, summed, mask=column < width)


def _shared(inputs: Inputs, options: AttentionOptions) -> tuple[tuple[Tensor | int, ...], dict[str, int | bool]]:
    """Arguments and constants that all three kernels have, from the rows on."""
    x_src, x_dst, x_edge, att = (None if t is None else t.detach().contiguous() for t in inputs)
    assert x_src is not None and x_dst is not None and att is not None
    tensors = (x_src, x_dst, x_src if x_edge is None else x_edge, att)
    constants = {
        "HAS_EDGE": x_edge is not None,
        "HAS_KEEP": options.keep is not None,
        **edge_tile(att.size(1), x_src.dtype),
    }
    return (*tensors, *option_args(options, x_src), *att.shape), constants


def forward(edges: CsrEdges, inputs: Inputs, options: AttentionOptions) -> tuple[Tensor, Sums]:
    """out [D, H, C], and what ``backward`` wants of it."""
    x_dst, num_heads = inputs[1], inputs[3].size(0)
    out = x_dst.new_empty(x_dst.shape)
    tops, totals = (x_dst.new_empty(edges.num_dst, num_heads) for _ in range(2))
    args, constants = _shared(inputs, options)
    writes = (tops, totals, out)
    grid = (edges.num_dst, num_heads)
    launch(gatv2_forward_kernel, grid, (edges.indptr, edges.src_rows, *args, *writes), constants, writes)
    return out, (tops, totals)


def backward(
    edges: CsrEdges,
    inputs: Inputs,
    out: Tensor,
    sums: Sums,
    g: Tensor,
    options: AttentionOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of the rows of sources, destinations and edges (None if not wanted), and of ``att``."""
    (x_src, x_dst, _, att), g = inputs, g.contiguous()
    num_heads = att.size(0)
    args, constants = _shared(inputs, options)
    wants_edges = wants[2]
    deltas, g_dst, g_att = torch.empty_like(sums[0]), x_dst.new_empty(x_dst.shape), x_dst.new_empty(x_dst.shape)
    g_edge = x_src.new_empty((edges.num_edges if wants_edges else 0, *x_src.shape[1:]))
    writes = (deltas, g_dst, g_edge, g_att)
    launch(
        gatv2_backward_dst_kernel,
        (edges.num_dst, num_heads),
        (edges.indptr, edges.src_rows, *args, *sums, out, g, *writes),
        constants | {"WANTS_EDGE": wants_edges},
        writes,
    )
    g_src = x_src.new_empty(x_src.shape)
    by_source = transpose(edges.indptr, edges.src_rows, edges.num_src)
    launch(
        gatv2_backward_src_kernel,
        (edges.num_src, num_heads),
        (by_source.indptr, by_source.edges, by_source.dst_rows, *args, *sums, deltas, g, g_src),
        constants,
        (g_src,),
    )
    return g_src, g_dst, g_edge if wants_edges else None, g_att.sum(0, dtype=torch.float64).to(att.dtype)
