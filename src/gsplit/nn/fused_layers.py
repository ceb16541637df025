"""SAGEConv, GraphConv and GCNConv on the host, computed in one pass over the rows where that is exact.

All three aggregate rows over edges and multiply, so that one form covers them:

    out = aggregate(x) @ weight^T + x_dst @ root^T + bias        aggregate: the sum or mean of ``kernels.sums``

PyG's layers make the two products, their sum and the bias one after another, each a pass over memory, and so does their
backward. Here the aggregated rows and the destinations' own rows are the columns of one matrix, written once:

    forward:  A = [aggregate(x) | x_dst]  [D, K + R];  out = A @ [weight | root]^T + bias;  then max(out, 0) if a ReLU
              follows (``Activation``)
    backward: G = g, where the ReLU kept out;  g_bias = sum of G over rows
              [g_weight | g_root] = G^T @ A;  g_A = G @ [weight | root]
              g_x[s] = sum over the edges s -> i of g_A[i, :K], + g_A[s, K:] if s is a destination

x [S, K], x_dst [D, R]: the first rows of x, or those of another vertex type; weight [C, K], root [C, R], bias [C].
Saved: A, and a mask if a ReLU follows. Rows are read where they lie: input rows in the store (``InPlaceRows``), and
those of other ranks in what these have sent (``shuffle.RowExchange``), whose gradients are returned. GCN's weight is
applied after the sum, to D rows instead of S, where ``aggregates_first`` says so.

The formula and the parameters are PyG's; sums run in another order, so results are equal to rounding. GCN's sums of
numbers near the largest float may overflow where PyG's do not. Everywhere else PyG's layer runs: subclasses, user hooks
inside the layer, explanations, other aggregations, autocast, weights with gradients, and types and devices for which
``kernels.dispatch`` has no host kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric import nn as pyg

from gsplit.features.in_place import InPlaceRows
from gsplit.kernels import sums_numba
from gsplit.kernels.attention_types import aggregates_first
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import NO_PLACES, copy_rows, list_places
from gsplit.kernels.sums import EdgeSums, row_addresses
from gsplit.kernels.sums_numba import run_in_threads
from gsplit.minibatch.shuffle import RowExchange
from gsplit.nn.layers import sums_or_means
from gsplit.nn.wrappers_and_hooks import runs_pyg_code

__all__ = ["Activation", "LinearForm", "linear_form", "run_linear_form", "takes_host_kernels"]


@dataclass(frozen=True)
class LinearForm:
    """What a layer computes; see the module."""

    weight: Tensor
    root: Tensor | None
    bias: Tensor | None
    mean: bool

    def aggregates_first(self, num_src: int, num_dst: int, num_edges: int) -> bool:
        """Whether to sum rows before the product: it has fewer rows then, but those that are summed may be wider."""
        width_out, width_in = self.weight.shape
        return aggregates_first(num_src, num_dst, num_edges, 1, width_in, width_out)


class Activation:
    """A ReLU that a layer applies to its output ``h`` before the model calls it, in the same pass as the bias.

    ``relu`` is what the model then gets: another tensor over the same memory. The layer's backward masks the gradient.
    If the model reads ``h`` otherwise, or keeps it, ``restore`` gives ``h`` memory of its own, with the values before
    the ReLU, and the ReLU's own backward masks the gradient (``is_applied`` is False from then on).
    """

    def __init__(self) -> None:
        self.is_applied = False
        self.is_called = False
        self.kept: Tensor | None = None
        self._compute: Callable[[], Tensor] | None = None

    def apply(self, compute: Callable[[], Tensor], kept: Tensor | None) -> None:
        """The layer has applied the ReLU; ``compute`` makes its output before it, ``kept`` is the mask for backward."""
        self.is_applied = True
        self.kept = kept
        self._compute = compute

    def relu(self, h: Tensor) -> Tensor:
        """The ReLU of a layer's output, which the model calls."""
        self.is_called = True
        out: Tensor = _AppliedRelu.apply(h, self)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def restore(self, h: Tensor) -> None:
        """Give the layer's output the values before the ReLU."""
        assert self._compute is not None
        h.data = self._compute()
        self.is_applied = False
        self._compute = None


class _AppliedRelu(torch.autograd.Function):
    """The ReLU of a layer that has applied it. Backward: the gradient where it is kept; see ``Activation``."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, activation: Activation) -> Tensor:
        ctx.activation = activation
        return h.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        activation: Activation = ctx.activation
        if activation.is_applied:
            return g, None
        assert activation.kept is not None
        return torch.where(activation.kept, g, 0), None


def linear_form(layer: Any) -> LinearForm | None:
    """The form of a layer of PyG's; None for other layers and options."""
    kind = type(layer)
    if kind not in (pyg.SAGEConv, pyg.GraphConv, pyg.GCNConv) or not sums_or_means(layer):
        return None
    if layer.flow != "source_to_target" or layer.decomposed_layers != 1 or not runs_pyg_code(layer):
        return None
    mean = layer.aggr == "mean"
    if kind is pyg.GCNConv:
        return None if mean or layer.lin.bias is not None else LinearForm(layer.lin.weight, None, layer.bias, mean)
    if kind is pyg.SAGEConv and (layer.project or layer.normalize):
        return None
    if kind is pyg.GraphConv:
        lin = layer.lin_rel
        root = layer.lin_root
    else:
        lin = layer.lin_l
        root = layer.lin_r if layer.root_weight else None
    if root is not None and root.bias is not None:
        return None
    return LinearForm(lin.weight, None if root is None else root.weight, lin.bias, mean)


def takes_host_kernels(form: LinearForm, x: Tensor, dst: Tensor, edge_weight: Tensor | None) -> bool:
    """Whether host kernels compute a layer on these rows: of the parameters' type and widths, and on the host."""
    if kernel_for("sum rows", x.device, x.dtype) != "numba" or torch.is_autocast_enabled(x.device.type):
        return False
    if edge_weight is not None and edge_weight.requires_grad:
        return False
    rows_of = [(x, form.weight)] if form.root is None else [(x, form.weight), (dst, form.root)]
    if any(rows.dim() != 2 or rows.size(1) != weight.size(1) for rows, weight in rows_of):
        return False
    given = (dst, form.weight, form.root, form.bias)
    return all(each is None or (each.dtype == x.dtype and each.device == x.device) for each in given)


def run_linear_form(
    form: LinearForm,
    x: Tensor,
    dst: Tensor | None,
    edges: EdgeSums,
    exchange: RowExchange | None,
    pool: BufferPool,
    activation: Activation | None,
) -> Tensor:
    """The output of a layer. A collective with ``exchange``.

    ``x``: the rows of the sources, or with ``exchange`` those of this rank, which come first. ``dst``: the rows of the
    destinations, if they are not the first rows of ``x``.
    """
    rows = None
    if isinstance(x, InPlaceRows):
        rows = x.rows
        x = x.array
    out: Tensor = _LinearForm.apply(  # type: ignore[no-untyped-call]
        x,
        dst,
        form.weight,
        form.root,
        form.bias,
        rows,
        edges,
        exchange,
        form.mean,
        pool,
        activation,
        torch.is_grad_enabled(),
    )
    return out


class _LinearForm(torch.autograd.Function):
    """See the module. ``rows``: where the rows of the sources are in x; None if x has them in order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dst: Tensor | None,
        weight: Tensor,
        root: Tensor | None,
        bias: Tensor | None,
        rows: Tensor | None,
        edges: EdgeSums,
        exchange: RowExchange | None,
        mean: bool,
        pool: BufferPool,
        activation: Activation | None,
        needs_mask: bool,
    ) -> Tensor:
        matrix = weight if root is None else torch.cat([weight, root], 1)
        x = x.detach().contiguous()
        received = () if exchange is None else exchange.receive(x)
        addresses = np.concatenate([row_addresses(x, rows), *(row_addresses(piece) for piece in received)])
        joined = pool.empty((edges.num_dst, matrix.size(1)), x.dtype)
        edges.sum_into(joined, addresses, weight.size(1), mean=mean)
        if root is not None:
            _copy_destinations(joined, x if dst is None else dst, rows if dst is None else None, weight.size(1))

        def multiply(*, relu: bool, kept: Tensor | None) -> Tensor:
            out = pool.empty((edges.num_dst, weight.size(0)), x.dtype)
            torch.mm(joined, matrix.t(), out=out)
            if relu or bias is not None:
                _add_bias(out, bias, relu, kept)
            return out

        kept = None
        if activation is not None:
            kept = pool.empty((edges.num_dst, weight.size(0)), torch.bool) if needs_mask else None
            activation.apply(lambda: multiply(relu=False, kept=None), kept)
        out = multiply(relu=activation is not None, kept=kept)
        ctx.save_for_backward(joined, matrix)
        ctx.edges = edges
        ctx.exchange = exchange
        ctx.mean = mean
        ctx.pool = pool
        ctx.activation = activation
        ctx.width = weight.size(1)
        ctx.num_first = edges.num_dst if root is not None and dst is None else 0
        ctx.has_bias = bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        joined, matrix = ctx.saved_tensors
        needs_x, needs_dst, needs_weight, needs_root, *_ = ctx.needs_input_grad
        pool: BufferPool = ctx.pool
        activation: Activation | None = ctx.activation
        g = g.contiguous()
        g_bias = None
        if ctx.has_bias or (activation is not None and activation.is_applied):
            g, g_bias = _mask_gradient(g, activation, pool)
        g_matrix = g.t() @ joined if needs_weight or needs_root else None
        g_x = None
        g_joined = None
        if needs_x or needs_dst:
            g_joined = pool.empty((g.size(0), matrix.size(1)), g.dtype)
            torch.mm(g, matrix, out=g_joined)
        if g_joined is not None and needs_x:
            g_x = _gradient_of_rows(g_joined, ctx.edges, ctx.exchange, ctx.num_first, ctx.width, ctx.mean, pool)
        g_dst = None if g_joined is None or not needs_dst else g_joined[:, ctx.width :]
        g_weight = None if g_matrix is None else g_matrix[:, : ctx.width]
        g_root = None if g_matrix is None or not needs_root else g_matrix[:, ctx.width :]
        return g_x, g_dst, g_weight, g_root, g_bias if ctx.has_bias else None, *[None] * 7


def _gradient_of_rows(
    g_joined: Tensor,
    edges: EdgeSums,
    exchange: RowExchange | None,
    num_first: int,
    width: int,
    mean: bool,
    pool: BufferPool,
) -> Tensor:
    """``g_x`` of this rank's rows, with what other ranks return for those they have read. A collective with those."""
    returned = sums_numba.NOTHING_RETURNED
    num_own = edges.num_src
    if exchange is not None:
        num_own = exchange.route.num_local
        g_received = exchange.gradient_buffer(width, g_joined.dtype)
        edges.sum_gradients_into(g_received, g_joined, num_first, num_own, mean=mean)
        pieces = exchange.send_back(g_received)
        addresses = np.concatenate([row_addresses(piece) for piece in pieces])
        returned = (*list_places(exchange.route.send_rows.numpy(), num_own), addresses)
    g_x = pool.empty((num_own, width), g_joined.dtype)
    edges.sum_gradients_into(g_x, g_joined, num_first, 0, returned, mean=mean)
    return g_x


def _copy_destinations(joined: Tensor, x: Tensor, rows: Tensor | None, column: int) -> None:
    """The rows of the destinations, the first of x or of ``rows`` of x, into the last columns of ``joined``."""
    source = x.detach().contiguous().numpy()
    chosen = np.arange(joined.size(0)) if rows is None else rows.numpy()[: joined.size(0)]
    target = joined.view(-1)[column:].numpy() if joined.numel() else joined.view(-1).numpy()
    stride = joined.size(1)
    run_in_threads(
        joined.size(0),
        lambda first, stop: copy_rows(source, chosen[first:stop], NO_PLACES, target[first * stride :], stride),
    )


def _add_bias(out: Tensor, bias: Tensor | None, relu: bool, kept: Tensor | None) -> None:
    """In place: out + bias, then its ReLU."""
    added = (out[:0].reshape(-1) if bias is None else bias.detach()).numpy()
    mask = (out[:0].bool() if kept is None else kept).numpy()
    target = out.numpy()
    run_in_threads(out.size(0), lambda first, stop: sums_numba.add_bias(target, added, relu, mask, first, stop))


def _mask_gradient(g: Tensor, activation: Activation | None, pool: BufferPool) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU, if the layer has applied one, and its sum over rows."""
    sums = g.new_empty(g.size(1))
    if activation is None or not activation.is_applied:
        sums_numba.mask_gradient(g.numpy(), g[:0].bool().numpy(), g.numpy(), sums.numpy())
        return g, sums
    assert activation.kept is not None
    masked = pool.empty(tuple(g.shape), g.dtype)
    sums_numba.mask_gradient(g.numpy(), activation.kept.numpy(), masked.numpy(), sums.numpy())
    return masked, sums
