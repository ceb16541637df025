"""Attention of GAT and GATv2 on a device; ``kernels.attention`` has the definition, the names and the shapes.

One program handles one destination, or one source, and one head. Forward passes over the edges once: a running maximum
rescales what was summed so far when it rises. Kept for backward are the maximum and the sum of exponentials of each
destination and head; weights are computed again, so nothing has a row per edge. Backward is two kernels, over the edges
of each destination and over those of each source: no atomics, and sums in an order that the block alone decides.

V2 chooses between the two kinds: a term of an edge, z, is [EDGES] for GAT and [EDGES, COLUMNS] for GATv2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.attention_types import AttentionInputs, AttentionOptions
from gsplit.kernels.csr import CsrEdges, group_by_source
from gsplit.kernels.triton.launch import launch
from gsplit.kernels.triton.words import float_halves, join_float

__all__ = [
    "REALS",
    "attention_backward_dst_kernel",
    "attention_backward_src_kernel",
    "attention_forward_kernel",
    "backward",
    "edge_tile",
    "forward",
]

REALS = ("slope_high", "slope_low", "scale_high", "scale_low")
"""Arguments whose value must not decide how a kernel is compiled."""


@triton.jit
def leaky_relu(z, slope):
    """``z`` where it is positive, else ``slope * z``."""
    return tl.where(z > 0, z, z * slope)


@triton.jit
def load_terms(terms, rows, width, column, inside, V2: tl.constexpr):
    """The terms of some rows, numbered over heads: [EDGES], or [EDGES, COLUMNS] for GATv2."""
    if V2:
        wanted = inside[:, None] & (column < width)[None, :]
        found = tl.load(terms + rows[:, None] * width + column[None, :], mask=wanted, other=0)
    else:
        found = tl.load(terms + rows, mask=inside, other=0)
    return found


@triton.jit
def load_term(terms, row, width, column, V2: tl.constexpr):
    """The term of one row: a number, or [COLUMNS] for GATv2."""
    if V2:
        found = tl.load(terms + row * width + column, mask=column < width, other=0)
    else:
        found = tl.load(terms + row)
    return found


@triton.jit
def score_of(z, of_att, slope, V2: tl.constexpr):
    """The scores of some edges, [EDGES]."""
    active = leaky_relu(z, slope)
    if V2:
        active = tl.sum(of_att[None, :] * active, axis=1)
    return active


@triton.jit
def gradient_of(z, g_score, of_att, slope, V2: tl.constexpr):
    """The gradient of z."""
    g_active = g_score
    if V2:
        g_active = g_score[:, None] * of_att[None, :]
    return tl.where(z > 0, g_active, g_active * slope)


@triton.jit
def attention_of(score, top, total, inside):
    """alpha of some edges, 0 for those that are not there."""
    return tl.where(inside, tl.exp(score - top) / (total + 1e-16), 0)


@triton.jit(do_not_specialize=REALS)
def attention_forward_kernel(
    indptr,
    src_rows,
    values,
    src_terms,
    dst_terms,
    edge_terms,
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
    V2: tl.constexpr,
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
    of_dst = load_term(dst_terms, at, width, column, V2)
    of_att = of_dst
    if V2:
        of_att = load_term(att, head, width, column, V2)
    top, total = tl.full([], float("-inf"), number), tl.full([], 0, number)
    summed = tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        source = tl.load(src_rows + edge, mask=inside, other=0)
        place = source if ONE_ROW else source * num_heads + head
        rows = load_terms(values, place, width, column, inside, True)
        if V2:
            z = rows + of_dst[None, :]
        else:
            z = load_terms(src_terms, source * num_heads + head, width, column, inside, V2) + of_dst
        if HAS_EDGE:
            z += load_terms(edge_terms, edge * num_heads + head, width, column, inside, V2)
        score = tl.where(inside, score_of(z, of_att, slope, V2), float("-inf"))
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
def attention_backward_dst_kernel(
    indptr,
    src_rows,
    values,
    src_terms,
    dst_terms,
    edge_terms,
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
    V2: tl.constexpr,
    ONE_ROW: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    WANTS_EDGE: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``delta``, ``g_dst`` and the part of ``g_att`` of one destination and head, and ``g_edge`` of its edges."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at = row * num_heads + head
    number = values.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    of_dst = load_term(dst_terms, at, width, column, V2)
    of_att = of_dst
    if V2:
        of_att = load_term(att, head, width, column, V2)
    top, total = tl.load(tops + at), tl.load(totals + at)
    g_row = tl.load(g + at * width + column, mask=column < width, other=0)
    delta = tl.sum(g_row * tl.load(out + at * width + column, mask=column < width, other=0), axis=0)
    summed = tl.zeros([COLUMNS], number) if V2 else tl.full([], 0, number)
    summed_att = tl.zeros([COLUMNS], number)
    for begin in range(start, stop, EDGES):
        edge = begin + tl.arange(0, EDGES)
        inside = edge < stop
        source = tl.load(src_rows + edge, mask=inside, other=0)
        place = source if ONE_ROW else source * num_heads + head
        rows = load_terms(values, place, width, column, inside, True)
        product = tl.sum(rows * g_row[None, :], axis=1)
        if V2:
            z = rows + of_dst[None, :]
        else:
            z = load_terms(src_terms, source * num_heads + head, width, column, inside, V2) + of_dst
        if HAS_EDGE:
            z += load_terms(edge_terms, edge * num_heads + head, width, column, inside, V2)
        alpha = attention_of(score_of(z, of_att, slope, V2), top, total, inside)
        weight = alpha * scale
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        g_score = weight * product - alpha * delta
        g_z = gradient_of(z, g_score, of_att, slope, V2)
        summed += tl.sum(g_z, axis=0)
        if V2:
            summed_att += tl.sum(g_score[:, None] * leaky_relu(z, slope), axis=0)
        if WANTS_EDGE and V2:
            beside = (edge * num_heads + head)[:, None] * width + column[None, :]
            tl.store(g_edge + beside, g_z, mask=inside[:, None] & (column < width)[None, :])
        if WANTS_EDGE and not V2:
            tl.store(g_edge + edge * num_heads + head, g_z, mask=inside)
    tl.store(deltas + at, delta)
    if V2:
        tl.store(g_dst + at * width + column, summed, mask=column < width)
        tl.store(g_att + at * width + column, summed_att, mask=column < width)
    else:
        tl.store(g_dst + at, summed)


@triton.jit(do_not_specialize=REALS)
def attention_backward_src_kernel(
    indptr,
    edges,
    dst_rows,
    values,
    src_terms,
    dst_terms,
    edge_terms,
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
    g_values,
    g_src,
    V2: tl.constexpr,
    ONE_ROW: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    WANTS_VALUES: tl.constexpr,
    EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``g_values``, head by head, and GAT's ``g_src`` of one source and head, over its edges."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at_src = row * num_heads + head
    number = values.dtype.element_ty
    slope, scale = join_float(slope_high, slope_low).to(number), join_float(scale_high, scale_low).to(number)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    value = tl.load(values + (row if ONE_ROW else at_src) * width + column, mask=column < width, other=0)
    of_att, of_src = value, value
    if V2:
        of_att = load_term(att, head, width, column, V2)
    else:
        of_src = tl.load(src_terms + at_src)
    summed, summed_score = tl.zeros([COLUMNS], number), tl.full([], 0, number)
    for begin in range(start, stop, EDGES):
        entry = begin + tl.arange(0, EDGES)
        inside = entry < stop
        edge = tl.load(edges + entry, mask=inside, other=0)
        at = tl.load(dst_rows + entry, mask=inside, other=0) * num_heads + head
        of_dst = load_terms(dst_terms, at, width, column, inside, V2)
        z = (of_src[None, :] if V2 else of_src) + of_dst
        if HAS_EDGE:
            z += load_terms(edge_terms, edge * num_heads + head, width, column, inside, V2)
        top, total = tl.load(tops + at, mask=inside, other=0), tl.load(totals + at, mask=inside, other=1)
        alpha = attention_of(score_of(z, of_att, slope, V2), top, total, inside)
        weight = alpha * scale
        if HAS_KEEP:
            weight = tl.where(tl.load(keep + edge * num_heads + head, mask=inside, other=0) != 0, weight, 0)
        g_rows = load_terms(g, at, width, column, inside, True)
        delta = tl.load(deltas + at, mask=inside, other=0)
        g_score = weight * tl.sum(g_rows * value[None, :], axis=1) - alpha * delta
        g_z = gradient_of(z, g_score, of_att, slope, V2)
        if V2:
            summed += tl.sum(weight[:, None] * g_rows + g_z, axis=0)
        else:
            summed_score += tl.sum(g_z, axis=0)
            if WANTS_VALUES:
                summed += tl.sum(weight[:, None] * g_rows, axis=0)
    if WANTS_VALUES:
        tl.store(g_values + at_src * width + column, summed, mask=column < width)
    if not V2:
        tl.store(g_src + at_src, summed_score)


def edge_tile(width: int, dtype: torch.dtype) -> dict[str, int]:
    """EDGES and COLUMNS of a tile: all columns of a head, and as many edges as make 1 KiB of numbers."""
    columns = 1 << max(0, width - 1).bit_length()
    return {"EDGES": max(1, 1024 // (columns * dtype.itemsize)), "COLUMNS": columns}


def _shared(inputs: AttentionInputs, options: AttentionOptions) -> tuple[list[Tensor | int], dict[str, int | bool]]:
    """Arguments and constants that all three kernels have, from the values on; values replace what is absent."""
    values = inputs.values.detach().contiguous()
    tensors = [values if t is None else t.detach().contiguous() for t in inputs[1:]]
    keep = values if options.keep is None else options.keep.contiguous().view(torch.uint8)
    reals = [*float_halves(options.negative_slope), *float_halves(options.scale)]
    constants = {
        "V2": inputs.att is not None,
        "ONE_ROW": values.size(1) == 1,
        "HAS_EDGE": inputs.edge_terms is not None,
        "HAS_KEEP": options.keep is not None,
        **edge_tile(values.size(2), values.dtype),
        "num_warps": 1,  # a tile is 1 KiB: more warps would only wait for each other
        # a fused product is rounded in one thread and not in another: copies of a sum would differ in the last bit, and
        # where threads share it through memory, which copy is used is not defined
        "enable_fp_fusion": False,
    }
    return [values, *tensors, keep, *reals, inputs.dst_terms.size(1), values.size(2)], constants


def forward(edges: CsrEdges, inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, tuple[Tensor, ...]]:
    """out [D, H, C]; the largest score and the sum of exponentials of every destination and head, [D, H]."""
    values, num_heads = inputs.values, inputs.dst_terms.size(1)
    out = values.new_empty(edges.num_dst, num_heads, values.size(2))
    tops, totals = (values.new_empty(edges.num_dst, num_heads) for _ in range(2))
    args, constants = _shared(inputs, options)
    writes = (tops, totals, out)
    grid = (edges.num_dst, num_heads)
    launch(attention_forward_kernel, grid, (edges.indptr, edges.src_rows, *args, *writes), constants, writes)
    return out, (tops, totals)


def backward(
    edges: CsrEdges,
    inputs: AttentionInputs,
    out: Tensor,
    kept: tuple[Tensor, ...],
    g: Tensor,
    options: AttentionOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs; None for what is not there, and for values and edge terms that are not wanted."""
    values, src_terms, dst_terms, _, att = inputs
    num_heads, g = dst_terms.size(1), g.contiguous()
    args, constants = _shared(inputs, options)
    wants_values, _, _, wants_edges, _ = wants
    deltas, g_dst = torch.empty_like(kept[0]), dst_terms.new_empty(dst_terms.shape)
    g_edge = dst_terms.new_empty((edges.num_edges if wants_edges else 0, *dst_terms.shape[1:]))
    g_att = dst_terms.new_empty((0,) if att is None else dst_terms.shape)
    writes = (deltas, g_dst, g_edge, g_att)
    launch(
        attention_backward_dst_kernel,
        (edges.num_dst, num_heads),
        (edges.indptr, edges.src_rows, *args, *kept, out, g, *writes),
        constants | {"WANTS_EDGE": wants_edges},
        writes,
    )
    g_values = values.new_empty(values.size(0) if wants_values else 0, num_heads, values.size(2))
    g_src = values.new_empty((0,) if src_terms is None else src_terms.shape)
    by_source = group_by_source(edges.indptr, edges.src_rows, edges.num_src)
    launch(
        attention_backward_src_kernel,
        (edges.num_src, num_heads),
        (by_source.offsets, by_source.places, by_source.dst_rows, *args, *kept, deltas, g, g_values, g_src),
        constants | {"WANTS_VALUES": wants_values},
        (g_values, g_src),
    )
    if values.size(1) != num_heads:
        g_values = g_values.sum(1, keepdim=True)
    g_att_sum = None if att is None else g_att.sum(0, dtype=torch.float64).to(att.dtype)
    g_src_terms = None if src_terms is None else g_src
    return g_values if wants_values else None, g_src_terms, g_dst, g_edge if wants_edges else None, g_att_sum
