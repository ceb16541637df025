"""SAGEConv, GraphConv and GCNConv on the host, computed in one pass over the rows where that is exact.

All three aggregate rows over edges and multiply, so that one form covers them:

    out = aggregate(x) @ weight^T + x_dst @ root^T + bias        aggregate: the sum or mean of ``kernels.sums``

PyG's layers make the two products, their sum and the bias one after another, each a pass over memory, and so does their
backward. Here the aggregated rows and the destinations' own rows are the columns of one matrix, written once:

    forward:  A = [aggregate(x) | x_dst]  [D, K + R];  out = A @ [weight | root]^T + bias;  then max(out, 0) if a ReLU
              follows (``Activation``)
    backward: G = g where out is not 0, times the dropout's scale;  g_bias = sum of G over rows
              [g_weight | g_root] = G^T @ A;  g_A = G @ [weight | root]
              g_x[s] = sum over the edges s -> i of g_A[i, :K], + g_A[s, K:] if s is a destination

x [S, K], x_dst [D, R]: the first rows of x, or those of another vertex type; weight [C, K], root [C, R], bias [C].
Saved: A, and out if a ReLU follows. Rows are read where they lie: input rows in the store (``InPlaceRows``), those of
other ranks in what these have sent (``shuffle.RowExchange``), whose gradients are returned. GCN's weight is applied
after the sum, to D rows instead of S, where ``aggregates_first`` says so.

The formula and the parameters are PyG's; sums run in another order, so results are equal to rounding. Everywhere else
PyG's layer runs: subclasses, user hooks inside the layer, explanations, other aggregations, autocast, weights with
gradients, and types and devices for which ``kernels.dispatch`` has no host kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric import nn as pyg

from gsplit.array_types import Ids
from gsplit.features.in_place import InPlaceRows
from gsplit.kernels import sums_numba
from gsplit.kernels.attention_types import aggregates_first
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import list_places
from gsplit.kernels.sums import EdgeSums, row_addresses
from gsplit.kernels.sums_numba import run_in_threads
from gsplit.minibatch.shuffle import RowExchange
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
    """The ReLU, and perhaps the dropout, that the model calls on a layer's output and that alone read it.

    The layer has computed the ReLU already when the model calls it (``is_applied``). If the model does something else
    with the output after all, ``undo`` computes it again without. ``drops``: only a dropout reads what the ReLU gives,
    so that it can be applied in place; ``scale``: of that dropout.
    """

    def __init__(self, *, drops: bool = False) -> None:
        self.drops = drops
        self.is_applied = False
        self.scale = 1.0
        self._compute_without: Callable[[], None] | None = None

    def apply(self, compute_without: Callable[[], None]) -> None:
        """The layer has applied the ReLU; ``compute_without`` overwrites its output with that before the ReLU."""
        self.is_applied = True
        self._compute_without = compute_without

    def keep(self) -> None:
        """The model has called the ReLU."""
        self._compute_without = None

    def undo(self) -> None:
        """The model has not called the ReLU."""
        assert self._compute_without is not None, "undone after the model has called the ReLU"
        self.is_applied = False
        self._compute_without()
        self._compute_without = None


def linear_form(layer: Any) -> LinearForm | None:
    """The form of a layer of PyG's; None for other layers and options."""
    kind = type(layer)
    if kind not in (pyg.SAGEConv, pyg.GraphConv, pyg.GCNConv) or layer.aggr not in ("mean", "sum", "add"):
        return None
    if layer.flow != "source_to_target" or layer.decomposed_layers != 1 or not runs_pyg_code(layer):
        return None
    mean = layer.aggr == "mean"
    if kind is pyg.GCNConv:
        return None if mean else LinearForm(layer.lin.weight, None, layer.bias, mean)
    if kind is pyg.GraphConv:
        return LinearForm(layer.lin_rel.weight, layer.lin_root.weight, layer.lin_rel.bias, mean)
    if layer.project or layer.normalize:
        return None
    root = layer.lin_r.weight if layer.root_weight else None
    return LinearForm(layer.lin_l.weight, root, layer.lin_l.bias, mean)


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
        x, dst, form.weight, form.root, form.bias, rows, edges, exchange, form.mean, pool, activation
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
    ) -> Tensor:
        matrix = weight if root is None else torch.cat([weight, root], 1)
        x = x.detach().contiguous()
        received = () if exchange is None else exchange.receive(x)
        addresses = np.concatenate([row_addresses(x, rows), *(row_addresses(piece) for piece in received)])
        joined = pool.empty((edges.num_dst, matrix.size(1)), x.dtype)
        edges.sum_into(joined, addresses, weight.size(1), mean=mean)
        if root is not None:
            own = x if dst is None else dst.detach().contiguous()
            _copy_destinations(joined, addresses if dst is None else row_addresses(own), weight.size(1), root.size(1))
        out = pool.empty((edges.num_dst, weight.size(0)), x.dtype)
        target = out.data  # without the version that autograd checks: if the ReLU is undone, ``out`` is not read

        def multiply(relu: bool) -> None:
            torch.mm(joined, matrix.t(), out=target)
            if relu or bias is not None:
                _add_bias(target, bias, relu=relu)

        multiply(activation is not None)
        if activation is not None:
            activation.apply(torch.no_grad()(lambda: multiply(False)))
        ctx.save_for_backward(joined, matrix, out if activation is not None else None)
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
        joined, matrix, out = ctx.saved_tensors
        needs_x, needs_dst, needs_weight, needs_root, *_ = ctx.needs_input_grad
        pool: BufferPool = ctx.pool
        activation: Activation | None = ctx.activation
        g = g.contiguous()
        g_bias = None
        if ctx.has_bias or (activation is not None and activation.is_applied):
            g, g_bias = _mask_gradient(g, out, activation, pool)
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
        return g_x, g_dst, g_weight, g_root, g_bias if ctx.has_bias else None, *[None] * 6


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
    pieces: tuple[Tensor, ...] = ()
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


def _copy_destinations(joined: Tensor, addresses: Ids, column: int, width: int) -> None:
    """The rows of the destinations, which are the first, to the last columns of ``joined``."""
    assert addresses.size >= joined.size(0)
    target = joined.numpy()
    run_in_threads(
        joined.size(0), lambda first, stop: sums_numba.gather_rows(addresses, target, column, width, first, stop)
    )


def _add_bias(out: Tensor, bias: Tensor | None, *, relu: bool) -> None:
    """In place: out + bias, then its ReLU."""
    added = (out[:0].reshape(-1) if bias is None else bias.detach()).numpy()
    target = out.detach().numpy()
    run_in_threads(out.size(0), lambda first, stop: sums_numba.add_bias(target, added, relu, first, stop))


def _mask_gradient(
    g: Tensor, out: Tensor | None, activation: Activation | None, pool: BufferPool
) -> tuple[Tensor, Tensor]:
    """The gradient before the activation, if one was applied, and its sum over rows."""
    sums = g.new_empty(g.size(1))
    if activation is None or not activation.is_applied:
        sums_numba.mask_gradient(g.numpy(), g[:0].numpy(), 1.0, g.numpy(), sums.numpy())
        return g, sums
    assert out is not None
    masked = pool.empty(tuple(g.shape), g.dtype)
    sums_numba.mask_gradient(g.numpy(), out.detach().numpy(), activation.scale, masked.numpy(), sums.numpy())
    return masked, sums
