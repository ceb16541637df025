"""Attention over the edges of a block on a device: ``gat_attention`` and ``gatv2_attention`` as ``kernels.attention``
has them.

Saved for backward: the inputs, out, and two numbers for each destination and head; nothing with a row per edge.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.kernels.attention_options import AttentionOptions
from gsplit.kernels.csr import CsrEdges
from gsplit.kernels.triton import gat, gatv2

__all__ = ["gat_attention", "gatv2_attention"]


class _GatAttention(torch.autograd.Function):
    """See ``kernels.attention``."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        score_src: Tensor,
        score_dst: Tensor,
        score_edge: Tensor | None,
        edges: CsrEdges,
        options: AttentionOptions,
    ) -> Tensor:
        out, sums = gat.forward(edges, (values, score_src, score_dst, score_edge), options)
        ctx.edges, ctx.options = edges, options
        ctx.save_for_backward(values, score_src, score_dst, score_edge, out, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs, out, sums = ctx.saved_tensors[:4], ctx.saved_tensors[4], ctx.saved_tensors[5:]
        grads = gat.backward(ctx.edges, inputs, out, sums, g, ctx.options, ctx.needs_input_grad[3])
        return *grads, None, None


class _Gatv2Attention(torch.autograd.Function):
    """See ``kernels.attention``."""

    @staticmethod
    def forward(
        ctx: Any,
        x_src: Tensor,
        x_dst: Tensor,
        x_edge: Tensor | None,
        att: Tensor,
        edges: CsrEdges,
        options: AttentionOptions,
    ) -> Tensor:
        out, sums = gatv2.forward(edges, (x_src, x_dst, x_edge, att), options)
        ctx.edges, ctx.options = edges, options
        ctx.save_for_backward(x_src, x_dst, x_edge, att, out, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs, out, sums = ctx.saved_tensors[:4], ctx.saved_tensors[4], ctx.saved_tensors[5:]
        grads = gatv2.backward(ctx.edges, inputs, out, sums, g, ctx.options, ctx.needs_input_grad[2])
        return *grads, None, None


def gat_attention(
    edges: CsrEdges,
    values: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    score_edge: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """GAT's attention: values [S, H or 1, C], scores [S, H], [D, H] and [E, H] or None; out [D, H, C]."""
    out: Tensor = _GatAttention.apply(values, score_src, score_dst, score_edge, edges, options)  # type: ignore[no-untyped-call]
    return out


def gatv2_attention(
    edges: CsrEdges, x_src: Tensor, x_dst: Tensor, x_edge: Tensor | None, att: Tensor, options: AttentionOptions
) -> Tensor:
    """GATv2's attention: x_src [S, H, C], x_dst [D, H, C], x_edge [E, H, C] or None, att [H, C]; out [D, H, C]."""
    out: Tensor = _Gatv2Attention.apply(x_src, x_dst, x_edge, att, edges, options)  # type: ignore[no-untyped-call]
    return out
