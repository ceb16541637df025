"""GAT's attention on the host; ``kernels.attention`` has the definition and the shapes.

Sums over a destination's edges of one number (exponentials, ``g_score_dst``) are made in float64: a hub has 10^4 edges.
"""

from math import exp
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.kernels.attention_options import AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_scaled, dot

__all__ = ["backward", "forward", "normalise"]

Floats = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""values, score_src, score_dst, score_edge."""


@kernel
def normalise(scores: Floats) -> None:
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
def _forward(
    indptr: Ids,
    src_rows: Ids,
    values: Floats,
    score_src: Floats,
    score_dst: Floats,
    score_edge: Floats,
    keep: Mask,
    slope: Any,
    scale: Any,
    alpha: Floats,
    out: Floats,
) -> None:
    num_heads, one_for_all = alpha.shape[1], values.shape[1] == 1
    for i in range(indptr.size - 1):
        first, last = indptr[i], indptr[i + 1]
        out[i] = 0
        if first == last:
            continue
        for e in range(first, last):
            of_source, of_destination, scores = score_src[src_rows[e]], score_dst[i], alpha[e]
            for h in range(num_heads):
                raw = of_source[h] + of_destination[h]
                if score_edge.size:
                    raw += score_edge[e, h]
                scores[h] = raw if raw > 0 else raw * slope
        normalise(alpha[first:last])
        for e in range(first, last):
            rows = values[src_rows[e]]
            for h in range(num_heads):
                weight = alpha[e, h] * scale
                if keep.size and not keep[e, h]:
                    continue
                add_scaled(out[i, h], weight, rows[0 if one_for_all else h])


@kernel
def _backward(
    indptr: Ids,
    src_rows: Ids,
    values: Floats,
    score_src: Floats,
    score_dst: Floats,
    score_edge: Floats,
    keep: Mask,
    slope: Any,
    scale: Any,
    alpha: Floats,
    out: Floats,
    g: Floats,
    g_values: Floats,
    g_src: Floats,
    g_dst: Floats,
    g_edge: Floats,
) -> None:
    num_heads, one_for_all = alpha.shape[1], values.shape[1] == 1
    delta, of_destination = np.empty(num_heads, g.dtype), np.empty(num_heads, np.float64)
    for i in range(indptr.size - 1):
        for h in range(num_heads):
            delta[h], of_destination[h] = dot(g[i, h], out[i, h]), 0.0
        for e in range(indptr[i], indptr[i + 1]):
            s = src_rows[e]
            rows = values[s]
            for h in range(num_heads):
                place, g_row = 0 if one_for_all else h, g[i, h]
                g_score = -alpha[e, h] * delta[h]
                if not keep.size or keep[e, h]:
                    weight = alpha[e, h] * scale
                    g_score += weight * dot(g_row, rows[place])
                    if g_values.size:
                        add_scaled(g_values[s, place], weight, g_row)
                raw = score_src[s, h] + score_dst[i, h]
                if score_edge.size:
                    raw += score_edge[e, h]
                g_raw = g_score if raw > 0 else g_score * slope
                g_src[s, h] += g_raw
                of_destination[h] += g_raw
                if g_edge.size:
                    g_edge[e, h] = g_raw
        for h in range(num_heads):
            g_dst[i, h] = of_destination[h]


def _arrays(edges: CsrEdges, inputs: Inputs, options: AttentionOptions) -> tuple[Any, ...]:
    """Arguments that both kernels have; what is not there has no rows."""
    values, score_src, score_dst, score_edge = inputs
    scores = (score_src, score_dst, score_src[:0] if score_edge is None else score_edge)
    tensors = (edges.indptr, edges.src_rows, values, *scores, options.kept())
    arrays = [t.detach().contiguous().numpy() for t in tensors]
    number = arrays[2].dtype.type
    return *arrays, number(options.negative_slope), number(options.scale)


def forward(edges: CsrEdges, inputs: Inputs, options: AttentionOptions) -> tuple[Tensor, tuple[Tensor]]:
    """out [D, H, C] and, for ``backward``, alpha [E, H]."""
    values, num_heads = inputs[0], inputs[1].size(1)
    out, alpha = (
        values.new_empty(edges.num_dst, num_heads, values.size(2)),
        values.new_empty(edges.num_edges, num_heads),
    )
    _forward(*_arrays(edges, inputs, options), *(t.numpy() for t in (alpha, out)))
    return out, (alpha,)


def backward(
    edges: CsrEdges,
    inputs: Inputs,
    out: Tensor,
    kept: tuple[Tensor],
    g: Tensor,
    options: AttentionOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of values and of the scores of sources, destinations and edges; None for what is not wanted."""
    (values, score_src, score_dst, _), (alpha,) = inputs, kept
    wants_values, _, _, wants_edges = wants
    g_values = values.new_zeros((values.size(0) if wants_values else 0, *values.shape[1:]))
    g_src, g_dst = score_src.new_zeros(score_src.shape), score_dst.new_empty(score_dst.shape)
    g_edge = alpha.new_empty(alpha.size(0) if wants_edges else 0, alpha.size(1))
    tensors = (alpha, out, g.contiguous(), g_values, g_src, g_dst, g_edge)
    _backward(*_arrays(edges, inputs, options), *(t.numpy() for t in tensors))
    return g_values if wants_values else None, g_src, g_dst, g_edge if wants_edges else None
