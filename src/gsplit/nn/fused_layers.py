"""SAGEConv, GraphConv, GCNConv and GINConv on the host, computed in one pass over the rows where that is exact.

The first three aggregate rows over edges and multiply, so that one form covers them:

    out = aggregate(x) @ weight^T + x_dst @ root^T + bias        aggregate: the sum, mean or max of ``kernels.sums``

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

A max has the gradient of PyG's, torch's ``scatter_reduce``: n numbers that are equal to the largest get 1/n of it each,
1/(n + 1) if that is 0, and all of a NaN's destination get NaN. It needs the rows in backward, so that those of other
ranks are not read where they lie but shuffled.

GIN adds the destinations' own rows to the sums and gives them to a network. Networks of Linear and ReLU (Sequential or
PyG's MLP) are products as above, each with its bias and ReLU; others are called.

    forward:  A = sum(x) + factor * x_dst;  out = network(A)        factor: 1 + eps
    backward: g_x[s] = sum over the edges s -> i of g_A[i], + factor * g_A[s] if s is a destination
              g_factor = sum of g_A * x_dst over rows and columns

The formula and the parameters are PyG's; sums run in another order, so results are equal to rounding. GCN's sums of
numbers near the largest float may overflow where PyG's do not. Everywhere else PyG's layer runs: subclasses, user hooks
inside the layer, explanations, other aggregations, autocast, weights with gradients, and types and devices for which
``kernels.dispatch`` has no host kernel.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric import nn as pyg

from gsplit.array_types import Ids
from gsplit.features.in_place import InPlaceRows
from gsplit.kernels import sums_numba
from gsplit.kernels.attention_types import aggregates_first
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import gather, list_places
from gsplit.kernels.sums import EdgeSums, row_addresses
from gsplit.kernels.sums_numba import run_in_threads
from gsplit.minibatch.shuffle import RowExchange
from gsplit.nn.layers import reduction_of
from gsplit.nn.wrappers_and_hooks import runs_own_code, runs_pyg_code

__all__ = [
    "Activation",
    "LayerRows",
    "LinearForm",
    "linear_form",
    "linears_of",
    "run_linear_form",
    "run_linears",
    "sums_as_gin",
    "takes_host_kernels",
]


@dataclass(frozen=True)
class LinearForm:
    """What a layer computes; see the module."""

    weight: Tensor
    root: Tensor | None
    bias: Tensor | None
    reduction: str

    def fits(self, x: Tensor, dst: Tensor, edge_weight: Tensor | None) -> bool:
        """Whether rows have the widths of the weights, and edges have no weights that a max would compare."""
        if self.reduction == "max" and edge_weight is not None:
            return False
        rows_of = [(x, self.weight)] if self.root is None else [(x, self.weight), (dst, self.root)]
        return all(rows.dim() == 2 and rows.size(1) == weight.size(1) for rows, weight in rows_of)

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
    if kind not in (pyg.SAGEConv, pyg.GraphConv, pyg.GCNConv) or not _only_aggregates(layer):
        return None
    reduction = str(reduction_of(layer))
    if kind is pyg.GCNConv:
        known = reduction == "sum" and layer.lin.bias is None
        return LinearForm(layer.lin.weight, None, layer.bias, reduction) if known else None
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
    return LinearForm(lin.weight, None if root is None else root.weight, lin.bias, reduction)


def sums_as_gin(layer: Any) -> bool:
    """Whether a layer is PyG's GINConv, with a sum and one eps for all columns."""
    if type(layer) is not pyg.GINConv or reduction_of(layer) != "sum" or layer.eps.numel() != 1:
        return False
    return _only_aggregates(layer, layer.nn)


def _only_aggregates(layer: Any, network: Any = None) -> bool:
    """Whether a layer's message passing is PyG's sum, mean or max alone; ``network``: what the layer calls after it."""
    if layer.flow != "source_to_target" or layer.decomposed_layers != 1:
        return False
    return reduction_of(layer) is not None and runs_pyg_code(layer, network)


def takes_host_kernels(x: Tensor, edge_weight: Tensor | None, others: Iterable[Tensor | None]) -> bool:
    """Whether host kernels compute a layer on these rows: on the host, and ``others`` are of the same type there."""
    if kernel_for("sum rows", x.device, x.dtype) != "numba" or torch.is_autocast_enabled(x.device.type):
        return False
    if edge_weight is not None and edge_weight.requires_grad:
        return False
    return all(each is None or (each.dtype == x.dtype and each.device == x.device) for each in others)


@dataclass(frozen=True)
class LayerRows:
    """The rows that a layer aggregates, and how.

    ``x``: the rows of the sources, or with ``exchange`` those of this rank, which come first. ``dst``: the rows of the
    destinations, if they are not the first rows of ``x``.
    """

    x: Tensor
    dst: Tensor | None
    edges: EdgeSums
    exchange: RowExchange | None
    pool: BufferPool

    def aggregate(self, *, reduction: str = "sum", appends_dst: bool = False, factor: Tensor | None = None) -> Tensor:
        """See the module: ``A``, or with ``factor`` GIN's. A collective with ``exchange``."""
        rows = None
        scales = None
        x = self.x
        dtype = x.dtype
        if isinstance(x, InPlaceRows):
            if x.array.dtype != dtype and (factor is not None or reduction == "max"):
                x.read()  # their kernels do not decode
            rows = x.rows
            scales = x.scales
            x = x.array
        out: Tensor = _Aggregate.apply(  # type: ignore[no-untyped-call]
            x, self.dst, factor, rows, scales, self.edges, self.exchange, reduction, appends_dst, self.pool, dtype
        )
        return out


def run_linear_form(form: LinearForm, rows: LayerRows, activation: Activation | None) -> Tensor:
    """The output of a layer. A collective with ``rows.exchange``."""
    joined = rows.aggregate(reduction=form.reduction, appends_dst=form.root is not None)
    matrix = form.weight if form.root is None else torch.cat([form.weight, form.root], 1)
    return _multiply(joined, matrix, form.bias, rows.pool, activation)


def linears_of(network: Any, h: Tensor) -> list[tuple[Any, bool]] | None:
    """The Linear modules of a network of these and of ReLUs behind them, each with whether a ReLU follows.

    None for other networks, if there are user hooks, and if weights are of another type or width than the rows ``h``.
    """
    if not runs_own_code(network, (torch.nn.Sequential, pyg.MLP)):
        return None
    linears: list[tuple[Any, bool]] = []
    width = h.size(1)
    for part in _parts_of_mlp(network) if type(network) is pyg.MLP else network:
        if runs_own_code(part, (torch.nn.ReLU,)) and linears:
            linears[-1] = (linears[-1][0], True)
            continue
        if not runs_own_code(part, (torch.nn.Linear, pyg.Linear)) or part.weight.size(1) != width:
            return None
        if not takes_host_kernels(h, None, (part.weight, part.bias)):
            return None
        linears.append((part, False))
        width = part.weight.size(0)
    return linears or None


def _parts_of_mlp(mlp: Any) -> list[Any]:
    """What PyG's MLP calls, in order, without what changes nothing."""
    parts: list[Any] = []
    for number, linear in enumerate(mlp.lins):
        parts.append(linear)
        if number < len(mlp.norms):  # the last one has none, if it is plain
            parts += [mlp.norms[number], mlp.act]
        if mlp.training and mlp.dropout[number] > 0:
            parts.append(F.dropout)
    return [part for part in parts if part is not None and not runs_own_code(part, (torch.nn.Identity,))]


def run_linears(linears: list[tuple[Any, bool]], h: Tensor, pool: BufferPool, activation: Activation | None) -> Tensor:
    """The output of ``linears_of`` a network; ``activation``: the ReLU that follows the network."""
    for number, (linear, relu) in enumerate(linears, 1):
        follows = activation if number == len(linears) else None
        h = _multiply(h, linear.weight, linear.bias, pool, Activation() if relu else follows)
    return h


def _multiply(
    rows: Tensor, weight: Tensor, bias: Tensor | None, pool: BufferPool, activation: Activation | None
) -> Tensor:
    """rows @ weight^T + bias, with the ReLU that ``activation`` stands for applied."""
    out: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, pool, activation, torch.is_grad_enabled()
    )
    return out


class _Aggregate(torch.autograd.Function):
    """A of the module, and g_x from g_A. ``rows``: where the rows of the sources are in x; None if x has them in order.

    Saved: the edges; for a factor that needs a gradient the rows of the destinations; for a max the rows, A, and what
    the gradient is divided by.

    Without a factor and a max, x may be of a type that kernels decode (``kernels.lanes``); ``dtype`` is that of A.
    ``scales``: those of the rows of x, if they are int8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dst: Tensor | None,
        factor: Tensor | None,
        rows: Tensor | None,
        scales: Tensor | None,
        edges: EdgeSums,
        exchange: RowExchange | None,
        reduction: str,
        appends_dst: bool,
        pool: BufferPool,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.detach().contiguous()
        received = () if exchange is None else exchange.receive(x)
        addresses = np.concatenate([row_addresses(x, rows), *(row_addresses(piece) for piece in received)])
        own = (x, rows) if dst is None else (dst.detach().contiguous(), None)
        ctx.width = x.size(1)
        joined = pool.empty((edges.num_dst, ctx.width + (own[0].size(1) if appends_dst else 0)), dtype)
        saved: tuple[Tensor | None, ...] = own if ctx.needs_input_grad[2] else ()
        if reduction == "max":
            counts = pool.empty((edges.num_dst if ctx.needs_input_grad[0] else 0, ctx.width), x.dtype)
            edges.max_into(joined, addresses, ctx.width, counts)
            saved = (x, joined, counts) if ctx.needs_input_grad[0] else ()
        else:
            starts = sums_numba.NOTHING_OWN
            if factor is not None:
                starts = (row_addresses(*own)[: edges.num_dst], factor.item())
            of_sources = None if scales is None else scales[rows]
            edges.sum_into(joined, addresses, x, of_sources, starts, mean=reduction == "mean")
        if appends_dst:
            _copy_destinations(joined[:, ctx.width :], *own, scales if dst is None else None)
        ctx.save_for_backward(factor, *saved)
        ctx.edges = edges
        ctx.exchange = exchange
        ctx.reduction = reduction
        ctx.appends_dst = appends_dst
        ctx.dst_is_prefix = dst is None
        ctx.pool = pool
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        factor, *saved = ctx.saved_tensors
        needs_x, needs_dst, needs_factor, *_ = ctx.needs_input_grad
        edges: EdgeSums = ctx.edges
        g = g.contiguous()
        column = ctx.width if ctx.appends_dst else 0
        g_x = None
        if needs_x:
            own = sums_numba.NOTHING_OWN
            if ctx.dst_is_prefix and (ctx.appends_dst or factor is not None):
                own = (row_addresses(g, column=column), 1.0 if factor is None else factor.item())
            if ctx.reduction == "max":
                x, joined, counts = saved
                g_x = ctx.pool.empty(tuple(x.shape), g.dtype)
                edges.sum_max_gradients_into(g_x, x, joined, g[:, : ctx.width] / counts, own)
            else:
                mean = ctx.reduction == "mean"
                g_x = _gradient_of_rows(g, edges, ctx.exchange, own, ctx.width, mean, ctx.pool)
        g_factor = None
        if needs_factor:
            own_rows, places = saved
            products = g * (own_rows if places is None else own_rows[places[: edges.num_dst]])[: edges.num_dst]
            _, sums = _mask_gradient(products, None, ctx.pool)
            g_factor = sums.sum().reshape(factor.shape)
        g_dst = None
        if needs_dst and (ctx.appends_dst or factor is not None):
            g_dst = g[:, column:] if factor is None else g[:, column:] * factor
        return g_x, g_dst, g_factor, *[None] * 8


class _Multiply(torch.autograd.Function):
    """out = A @ weight^T + bias and its ReLU, and g_A from g; see the module. Saved: A, the weight and the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pool: BufferPool,
        activation: Activation | None,
        needs_mask: bool,
    ) -> Tensor:
        shape = (rows.size(0), weight.size(0))

        def multiply(*, relu: bool, kept: Tensor | None) -> Tensor:
            out = pool.empty(shape, rows.dtype)
            torch.mm(rows, weight.t(), out=out)
            if relu or bias is not None:
                _add_bias(out, bias, relu, kept)
            return out

        kept = None
        if activation is not None:
            kept = pool.empty(shape, torch.bool) if needs_mask else None
            activation.apply(lambda: multiply(relu=False, kept=None), kept)
        ctx.save_for_backward(rows, weight)
        ctx.pool = pool
        ctx.activation = activation
        ctx.has_bias = bias is not None
        return multiply(relu=activation is not None, kept=kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        pool: BufferPool = ctx.pool
        activation: Activation | None = ctx.activation
        g = g.contiguous()
        g_bias = None
        if ctx.has_bias or (activation is not None and activation.is_applied):
            g, g_bias = _mask_gradient(g, activation, pool)
        g_weight = g.t() @ rows if needs_weight else None
        g_rows = None
        if needs_rows:
            g_rows = pool.empty(tuple(rows.shape), g.dtype)
            torch.mm(g, weight, out=g_rows)
        return g_rows, g_weight, g_bias if ctx.has_bias else None, None, None, None


def _gradient_of_rows(
    g_joined: Tensor,
    edges: EdgeSums,
    exchange: RowExchange | None,
    own: tuple[Ids, float],
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
        edges.sum_gradients_into(g_received, g_joined, num_own, own, mean=mean)
        pieces = exchange.send_back(g_received)
        addresses = np.concatenate([row_addresses(piece) for piece in pieces])
        returned = (*list_places(exchange.route.send_rows.numpy(), num_own), addresses)
    g_x = pool.empty((num_own, width), g_joined.dtype)
    edges.sum_gradients_into(g_x, g_joined, 0, own, returned, mean=mean)
    return g_x


def _copy_destinations(out: Tensor, x: Tensor, rows: Tensor | None, scales: Tensor | None) -> None:
    """The rows of the destinations, the first of x or of ``rows`` of x, into columns of a matrix."""
    source = x.detach().contiguous()
    chosen = torch.arange(out.size(0), device=out.device) if rows is None else rows
    run_in_threads(out.size(0), lambda first, stop: gather(source, chosen[first:stop], out[first:stop], scales))


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
