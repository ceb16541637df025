"""Attention on the host; ``kernels.attention`` has the definition, the names and the shapes.

Rows of GATv2's terms are [H * C] here, all heads one after the other. Sums over a destination's edges of one number
(exponentials, GAT's ``g_dst``) are made in float64: a hub has 10^4 edges. GATv2's ``g_att`` sums over all edges: those
of one destination are added in the type of the rows, destinations in float64.
"""

from math import exp, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.kernels.attention_types import AttentionInputs, AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_scaled, dot, prefetch_row

__all__ = ["backward", "forward"]

Floats = npt.NDArray[Any]

_AHEAD = 8
"""Edges between the one that is computed and the one whose source row, and in backward its gradient, is prefetched."""


class _Operands(NamedTuple):
    """What the kernels of both directions read; an absent edge term or mask has no rows."""

    indptr: Ids
    src_rows: Ids
    values: Floats
    src_terms: Floats
    dst_terms: Floats
    edge_terms: Floats
    keep: npt.NDArray[np.bool_]
    slope: Any
    scale: Any


@kernel
def _normalise(scores: Floats) -> None:
    """Softmax over the edges of one destination, head by head, in place; [edges, heads]."""
    for h in range(scores.shape[1]):
        top = scores[0, h]
        for e in range(1, scores.shape[0]):
            top = max(top, scores[e, h])
        total = 1e-16
        for e in range(scores.shape[0]):
            scores[e, h] = exp(scores[e, h] - top)
            total += scores[e, h]
        for e in range(scores.shape[0]):
            scores[e, h] /= total


@kernel
def _over_root(rows: Floats) -> Any:
    """1 / sqrt(C) of rows [rows, H, C], in their type."""
    return rows.dtype.type(1 / sqrt(rows.shape[2]))


@kernel
def _score_gat(operands: _Operands, i: int, scores: Floats) -> None:
    """The scores [E, H] of the edges of destination i; the rows of other edges are left alone."""
    src_rows, src_terms, edge_terms = operands.src_rows, operands.src_terms, operands.edge_terms
    slope, dst_term = operands.slope, operands.dst_terms[i]
    for e in range(operands.indptr[i], operands.indptr[i + 1]):
        prefetch_row(operands.values, src_rows[e])
        src_term, score = src_terms[src_rows[e]], scores[e]
        for h in range(score.size):
            raw = src_term[h] + dst_term[h]
            if edge_terms.size:
                raw += edge_terms[e, h]
            score[h] = raw if raw > 0 else raw * slope


@kernel
def _score_gatv2(operands: _Operands, att: Floats, i: int, active: Floats, scores: Floats) -> None:
    """The same for GATv2; ``active`` [H * C] is scratch memory for leaky_relu(z)."""
    src_rows, src_terms, edge_terms = operands.src_rows, operands.src_terms, operands.edge_terms
    width, slope, dst_term = att.shape[1], operands.slope, operands.dst_terms[i]
    for e in range(operands.indptr[i], operands.indptr[i + 1]):
        if e + _AHEAD < src_rows.size:
            prefetch_row(src_terms, src_rows[e + _AHEAD])
        src_term = src_terms[src_rows[e]]
        if edge_terms.size:
            edge_term = edge_terms[e]
            for c in range(active.size):
                z = src_term[c] + dst_term[c] + edge_term[c]
                active[c] = z if z > 0 else z * slope
        else:
            for c in range(active.size):
                z = src_term[c] + dst_term[c]
                active[c] = z if z > 0 else z * slope
        for h in range(scores.shape[1]):
            scores[e, h] = dot(att[h], active[h * width : (h + 1) * width])


@kernel
def _score_dot(operands: _Operands, i: int, scores: Floats) -> None:
    """The same for dot products."""
    src_rows, keys, queries = operands.src_rows, operands.src_terms, operands.dst_terms[i]
    scale = _over_root(keys)
    for e in range(operands.indptr[i], operands.indptr[i + 1]):
        if e + _AHEAD < src_rows.size:
            prefetch_row(keys, src_rows[e + _AHEAD])
        prefetch_row(operands.values, src_rows[e])
        rows = keys[src_rows[e]]
        for h in range(scores.shape[1]):
            scores[e, h] = dot(queries[h], rows[h]) * scale


@kernel
def _forward(operands: _Operands, src_terms: Floats, att: Floats | None, alpha: Floats, out: Floats) -> None:
    """Compiled for every kind, without the branches of the others: only GATv2 has ``att``, only keys are [S, H, C].

    ``src_terms`` are those of the operands: numba decides a branch by the dimensions of an argument.
    """
    indptr, src_rows, values, keep = operands.indptr, operands.src_rows, operands.values, operands.keep
    num_heads, one_for_all, scale = alpha.shape[1], values.shape[1] == 1, operands.scale
    active = np.empty(operands.dst_terms.shape[1], values.dtype)
    for i in range(indptr.size - 1):
        first, last = indptr[i], indptr[i + 1]
        out[i] = 0
        if first == last:
            continue
        if att is not None:
            _score_gatv2(operands, att, i, active, alpha)
        elif src_terms.ndim == 3:
            _score_dot(operands, i, alpha)
        else:
            _score_gat(operands, i, alpha)
        _normalise(alpha[first:last])
        for e in range(first, last):
            rows = values[src_rows[e]]
            for h in range(num_heads):
                weight = alpha[e, h] * scale
                if keep.size and not keep[e, h]:
                    continue
                add_scaled(out[i, h], weight, rows[0 if one_for_all else h])


@kernel
def _backward(
    operands: _Operands,
    src_terms: Floats,
    alpha: Floats,
    out: Floats,
    g: Floats,
    g_values: Floats,
    g_src: Floats,
    g_dst: Floats,
    g_edge: Floats,
) -> None:
    """GAT and dot products, as in ``_forward``. ``g_values``, ``g_edge`` have no rows where they are not wanted."""
    indptr, src_rows, values, keep = operands.indptr, operands.src_rows, operands.values, operands.keep
    dst_terms, edge_terms = operands.dst_terms, operands.edge_terms
    num_heads, one_for_all, over_root = alpha.shape[1], values.shape[1] == 1, _over_root(g)
    delta, of_destination = np.empty(num_heads, g.dtype), np.empty(num_heads, np.float64)
    for i in range(indptr.size - 1):
        for h in range(num_heads):
            delta[h] = dot(g[i, h], out[i, h])
            of_destination[h] = 0.0
        g_dst[i] = 0
        for e in range(indptr[i], indptr[i + 1]):
            if e + _AHEAD < src_rows.size:
                prefetch_row(values, src_rows[e + _AHEAD])
                if g_values.size:
                    prefetch_row(g_values, src_rows[e + _AHEAD])
                if src_terms.ndim == 3:
                    prefetch_row(src_terms, src_rows[e + _AHEAD])
                    prefetch_row(g_src, src_rows[e + _AHEAD])
            s = src_rows[e]
            rows = values[s]
            for h in range(num_heads):
                place, g_row = 0 if one_for_all else h, g[i, h]
                g_score = -alpha[e, h] * delta[h]
                if not keep.size or keep[e, h]:
                    weight = alpha[e, h] * operands.scale
                    g_score += weight * dot(g_row, rows[place])
                    if g_values.size:
                        add_scaled(g_values[s, place], weight, g_row)
                if src_terms.ndim == 3:
                    add_scaled(g_dst[i, h], g_score * over_root, src_terms[s, h])
                    add_scaled(g_src[s, h], g_score * over_root, dst_terms[i, h])
                else:
                    raw = src_terms[s, h] + dst_terms[i, h]
                    if edge_terms.size:
                        raw += edge_terms[e, h]
                    g_raw = g_score if raw > 0 else g_score * operands.slope
                    g_src[s, h] += g_raw
                    of_destination[h] += g_raw
                    if g_edge.size:
                        g_edge[e, h] = g_raw
        if src_terms.ndim == 2:
            for h in range(num_heads):
                g_dst[i, h] = of_destination[h]


@kernel
def _backward_gatv2(
    operands: _Operands,
    att: Floats,
    alpha: Floats,
    out: Floats,
    g: Floats,
    g_src: Floats,
    g_dst: Floats,
    g_edge: Floats,
    g_att: Floats,
) -> None:
    """Rows of ``out`` and of the gradients are [H * C]; ``g_edge`` has none where it is not wanted."""
    indptr, src_rows, keep, slope = operands.indptr, operands.src_rows, operands.keep, operands.slope
    x_src, x_dst, x_edge = operands.src_terms, operands.dst_terms, operands.edge_terms
    num_heads, width = att.shape
    size = num_heads * width
    delta, z = np.empty(num_heads, g.dtype), np.empty(size, g.dtype)
    of_att = np.empty(size, g.dtype)  # of one destination
    zero, one = g.dtype.type(0), g.dtype.type(1)  # an integer would turn float32 into float64
    for i in range(indptr.size - 1):
        of_destination, g_row = x_dst[i], g[i]
        for h in range(num_heads):
            delta[h] = dot(g_row[h * width : (h + 1) * width], out[i, h * width : (h + 1) * width])
        of_att[:] = 0
        g_dst[i] = 0
        for e in range(indptr[i], indptr[i + 1]):
            if e + _AHEAD < src_rows.size:
                prefetch_row(x_src, src_rows[e + _AHEAD])
                prefetch_row(g_src, src_rows[e + _AHEAD])
            s = src_rows[e]
            of_source = x_src[s]
            for c in range(size):
                z[c] = of_source[c] + of_destination[c]
            if x_edge.size:
                of_edge = x_edge[e]
                for c in range(size):
                    z[c] += of_edge[c]
            for h in range(num_heads):
                begin, end = h * width, (h + 1) * width
                g_head, z_head, att_head = g_row[begin:end], z[begin:end], att[h]
                target, target_dst, target_att = g_src[s, begin:end], g_dst[i, begin:end], of_att[begin:end]
                weight = alpha[e, h] * operands.scale
                if keep.size and not keep[e, h]:
                    weight = zero
                g_score = weight * dot(g_head, of_source[begin:end]) - alpha[e, h] * delta[h]
                for c in range(width):
                    slope_here = one if z_head[c] > 0 else slope
                    target_att[c] += g_score * (z_head[c] * slope_here)
                    z_head[c] = g_score * att_head[c] * slope_here
                for c in range(width):
                    target[c] += weight * g_head[c] + z_head[c]
                    target_dst[c] += z_head[c]
            if g_edge.size:
                g_edge[e] = z
        for c in range(size):
            g_att[c] += of_att[c]


def _array(tensor: Tensor, *, flat: bool = False) -> Floats:
    array: Floats = (tensor.flatten(1) if flat else tensor).detach().contiguous().numpy()
    return array


def _operands(edges: CsrEdges, inputs: AttentionInputs, options: AttentionOptions) -> _Operands:
    values, src_terms, dst_terms, edge_terms, att = inputs
    src_terms = values if src_terms is None else src_terms
    is_v2 = att is not None
    number = _array(values[:0]).dtype.type
    return _Operands(
        indptr=_array(edges.indptr),
        src_rows=_array(edges.src_rows),
        values=_array(values),
        src_terms=_array(src_terms, flat=is_v2),
        dst_terms=_array(dst_terms, flat=is_v2),
        edge_terms=_array(src_terms[:0] if edge_terms is None else edge_terms, flat=is_v2),
        keep=_array(torch.empty(0, 0, dtype=torch.bool) if options.keep is None else options.keep),
        slope=number(options.negative_slope),
        scale=number(options.scale),
    )


def forward(edges: CsrEdges, inputs: AttentionInputs, options: AttentionOptions) -> tuple[Tensor, tuple[Tensor, ...]]:
    """out [D, H, C] and, for ``backward``, alpha [E, H]."""
    values = inputs.values
    num_heads = inputs.dst_terms.size(1)
    out = values.new_empty(edges.num_dst, num_heads, values.size(2))
    alpha = values.new_empty(edges.num_edges, num_heads)
    operands = _operands(edges, inputs, options)
    att = None if inputs.att is None else _array(inputs.att)
    _forward(operands, operands.src_terms, att, alpha.numpy(), out.numpy())
    return out, (alpha,)


def backward(
    edges: CsrEdges,
    inputs: AttentionInputs,
    out: Tensor,
    kept: tuple[Tensor, ...],
    g: Tensor,
    options: AttentionOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs; None for what is not there or not wanted."""
    values, src_terms, dst_terms, _, att = inputs
    operands = _operands(edges, inputs, options)
    alpha = kept[0].numpy()
    wants_values, _, _, wants_edges, _ = wants
    g_dst = dst_terms.new_empty(dst_terms.shape)
    g_edge = dst_terms.new_empty((edges.num_edges if wants_edges else 0, *dst_terms.shape[1:]))
    if att is None:
        assert src_terms is not None
        g_values = values.new_zeros((values.size(0) if wants_values else 0, *values.shape[1:]))
        g_src = src_terms.new_zeros(src_terms.shape)
        written = [t.numpy() for t in (g_values, g_src, g_dst, g_edge)]
        _backward(operands, operands.src_terms, alpha, _array(out), _array(g), *written)
        return g_values if wants_values else None, g_src, g_dst, g_edge if wants_edges else None, None
    g_src = values.new_zeros(values.shape)
    g_att = torch.zeros(att.numel(), dtype=torch.float64)
    rows = [t.flatten(1).numpy() for t in (g_src, g_dst, g_edge)]
    _backward_gatv2(
        operands,
        _array(att),
        alpha,
        _array(out, flat=True),
        _array(g, flat=True),
        rows[0],
        rows[1],
        rows[2],
        g_att.numpy(),
    )
    return g_src, None, g_dst, g_edge if wants_edges else None, g_att.view_as(att).to(att.dtype)
