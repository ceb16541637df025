"""GATv2's attention on the host; ``kernels.attention`` has the definition and the shapes.

``g_att`` sums over all edges: numbers of one destination are added in the type of the rows, destinations in float64.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.kernels.attention_options import AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.gat_numba import normalise
from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_scaled, dot

__all__ = ["backward", "forward"]

Floats = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""x_src, x_dst, x_edge, att."""


@kernel
def _forward(
    indptr: Ids,
    src_rows: Ids,
    x_src: Floats,
    x_dst: Floats,
    x_edge: Floats,
    att: Floats,
    keep: Mask,
    slope: Any,
    scale: Any,
    alpha: Floats,
    out: Floats,
) -> None:
    """Rows are [H * C] here, all heads one after the other, but in ``att`` [H, C]."""
    num_heads, width = att.shape
    active = np.empty(num_heads * width, x_src.dtype)  # leaky_relu(z)
    for i in range(indptr.size - 1):
        first, last = indptr[i], indptr[i + 1]
        out[i] = 0
        if first == last:
            continue
        for e in range(first, last):
            of_source, of_destination = x_src[src_rows[e]], x_dst[i]
            if x_edge.size:
                of_edge = x_edge[e]
                for c in range(active.size):
                    z = of_source[c] + of_destination[c] + of_edge[c]
                    active[c] = z if z > 0 else z * slope
            else:
                for c in range(active.size):
                    z = of_source[c] + of_destination[c]
                    active[c] = z if z > 0 else z * slope
            for h in range(num_heads):
                alpha[e, h] = dot(att[h], active[h * width : (h + 1) * width])
        normalise(alpha[first:last])
        for e in range(first, last):
            rows = x_src[src_rows[e]]
            for h in range(num_heads):
                weight = alpha[e, h] * scale
                if keep.size and not keep[e, h]:
                    continue
                begin, end = h * width, (h + 1) * width
                add_scaled(out[i, begin:end], weight, rows[begin:end])


@kernel
def _backward(
    indptr: Ids,
    src_rows: Ids,
    x_src: Floats,
    x_dst: Floats,
    x_edge: Floats,
    att: Floats,
    keep: Mask,
    slope: Any,
    scale: Any,
    alpha: Floats,
    out: Floats,
    g: Floats,
    g_src: Floats,
    g_dst: Floats,
    g_edge: Floats,
    g_att: Floats,
) -> None:
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
                weight = alpha[e, h] * scale
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


def _arrays(edges: CsrEdges, inputs: Inputs, options: AttentionOptions) -> tuple[Any, ...]:
    """Arguments that both kernels have; what is not there has no rows."""
    x_src, x_dst, x_edge, att = inputs
    rows = (t.flatten(1) for t in (x_src, x_dst, x_src[:0] if x_edge is None else x_edge))
    tensors = (edges.indptr, edges.src_rows, *rows, att, options.kept())
    arrays = [t.detach().contiguous().numpy() for t in tensors]
    number = arrays[2].dtype.type
    return *arrays, number(options.negative_slope), number(options.scale)


def forward(edges: CsrEdges, inputs: Inputs, options: AttentionOptions) -> tuple[Tensor, tuple[Tensor]]:
    """out [D, H, C] and, for ``backward``, alpha [E, H]."""
    x_dst, att = inputs[1], inputs[3]
    out, alpha = x_dst.new_empty(x_dst.shape), x_dst.new_empty(edges.num_edges, att.size(0))
    _forward(*_arrays(edges, inputs, options), *(t.numpy() for t in (alpha, out.flatten(1))))
    return out, (alpha,)


def backward(
    edges: CsrEdges,
    inputs: Inputs,
    out: Tensor,
    kept: tuple[Tensor],
    g: Tensor,
    options: AttentionOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of the rows of sources, destinations and edges (None if not wanted), and of ``att``."""
    (x_src, x_dst, _, att), (alpha,), wants_edges = inputs, kept, wants[2]
    g_src, g_dst = x_src.new_zeros(x_src.shape), x_dst.new_empty(x_dst.shape)
    g_edge = x_src.new_empty((edges.num_edges if wants_edges else 0, *x_src.shape[1:]))
    g_att = torch.zeros(att.numel(), dtype=torch.float64)
    tensors = (alpha, *(t.flatten(1) for t in (out, g.contiguous(), g_src, g_dst, g_edge)), g_att)
    _backward(*_arrays(edges, inputs, options), *(t.numpy() for t in tensors))
    return g_src, g_dst, g_edge if wants_edges else None, g_att.view_as(att).to(att.dtype)
