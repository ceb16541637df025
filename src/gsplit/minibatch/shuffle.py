"""The shuffle: rows cross between ranks along a route, and their gradients go back (paper section 3, Algorithm 2).

Forward, at one layer, for a local tensor ``h`` of shape [num_local, D]. Received rows are appended (law 4):

    h_mixed = [h | rows received, grouped by owner]        [num_mixed, D]
    h_dst   = h_mixed[:num_dst]                            [num_dst, D]

Rows sent to rank p are ``h[send_rows of p]``. Backward, from the gradients of both outputs:

    g = g_mixed[:num_local];  g[send_rows] += gradients returned by the receivers;  g[:num_dst] += g_dst

In the example of ``split``, rank 1 has h = [h7, h8, h6]. It sends h6 to rank 0 and receives h3, so h_mixed =
[h7, h8, h6, h3] and h_dst = [h7]. Backward, it returns the gradient of h3 and adds the returned gradient of h6.

At a boundary, own and received rows have explicit places:

    h_mixed[own_places] = h[:num_own];  h_mixed[recv_places] = rows received
    t = g_mixed + [g_dst | 0];  g = [t[own_places] | 0];  g[send_rows] += gradients returned

Only the route is saved for backward. Incoming gradients are not modified, because they may belong to another branch of
the graph too. A deterministic shuffle adds returned rows one receiver after the other, and ``send_rows`` are unique per
receiver, so no sum depends on the order of threads. With compiled kernels every shuffle is deterministic. Every rank
joins forward and backward, also without rows (law 5). An output without a gradient counts as zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.distributed.comm.comm import Call, Comm
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import copy_and_gather, gather, merge_gradient
from gsplit.minibatch.relay import relay_gradients, relay_rows
from gsplit.minibatch.route import Route, count_exchange
from gsplit.telemetry import StepTelemetry

__all__ = ["RowExchange", "exchange_rows", "exchange_stored", "fill_mixed", "keep_prefix", "merge_gradients"]


def fill_mixed(h: Tensor, route: Route, sent: Tensor, pool: BufferPool) -> Tensor:
    """A mixed tensor with its local rows filled in. Also fills ``sent`` with the rows to send, grouped by receiver."""
    mixed = pool.empty((route.num_mixed, *h.shape[1:]), h.dtype)
    own = mixed[: route.num_local]
    chosen = kernel_for("move rows", h.device, h.dtype)
    if chosen == "numba":
        copy_and_gather(h, route.send_rows, own, sent)
    elif chosen == "triton":
        from gsplit.kernels.triton import rows as device

        device.copy_and_gather(h, route.send_rows, own, sent)
    else:
        own.copy_(h)
        torch.index_select(h.detach(), 0, route.send_rows, out=sent)
    return mixed


def merge_gradients(
    g_mixed: Tensor,
    g_dst: Tensor | None,
    returned: tuple[Tensor, ...],
    route: Route,
    pool: BufferPool,
    *,
    deterministic: bool,
) -> Tensor:
    """The gradient of ``h`` from the gradients of both outputs and the returned rows, in one or several pieces."""
    g = pool.empty((route.num_local, *g_mixed.shape[1:]), g_mixed.dtype)
    chosen = kernel_for("move rows", g.device, g.dtype)
    g_first = g_mixed[:0] if g_dst is None else g_dst
    if chosen == "numba":
        merge_gradient(g_mixed, g_first, route.send_rows, returned, g)
        return g
    rows_returned = returned[0] if len(returned) == 1 else torch.cat(returned)
    if chosen == "triton":
        from gsplit.kernels.triton import rows as device

        device.merge_gradient(g_mixed, g_first, route.send_rows, rows_returned, g)
        return g
    g.copy_(g_mixed[: route.num_local])
    _add_returned(g, rows_returned, route, deterministic=deterministic)
    if g_dst is not None:
        g[: route.num_dst] += g_dst
    return g


def _send(sent: Tensor, received: Tensor, route: Route, comm: Comm, call: Call) -> None:
    """Send rows along a route, and receive into ``received``, grouped by owner. A collective."""
    if route.relay is None:
        comm.all_to_all(call, received, sent, route.recv_counts, route.send_counts).wait()
        return
    pieces = _send_views(sent, route, comm, call)
    for target, piece in zip(received.detach().split(route.recv_counts), pieces, strict=True):
        target.copy_(piece)
    torch.autograd.graph.increment_version(received)


def _send_views(sent: Tensor, route: Route, comm: Comm, call: Call) -> tuple[Tensor, ...]:
    """The same; the received rows are left where they arrived, a piece per owner, until the next exchange."""
    if route.relay is None:
        return comm.all_to_all_views(call, sent, route.recv_counts, route.send_counts)
    assert comm.levels is not None
    return relay_rows(comm.levels, call, sent, route.relay, route.recv_counts, route.send_counts)


def _return(g: Tensor, returned: Tensor, route: Route, comm: Comm, call: Call) -> None:
    """Return the gradients of received rows to their owners, and receive those of the rows sent. A collective."""
    if route.relay is None:
        comm.all_to_all(call, returned, g, route.send_counts, route.recv_counts).wait()
    else:
        torch.cat(_return_views(g, route, comm, call), out=returned)


def _return_views(g: Tensor, route: Route, comm: Comm, call: Call) -> tuple[Tensor, ...]:
    """The same; what returns is left where it arrived, a piece per receiver, until the next exchange."""
    if route.relay is None:
        return comm.all_to_all_views(call, g, route.send_counts, route.recv_counts)
    assert comm.levels is not None
    return relay_gradients(comm.levels, call, g, route.relay, route.recv_counts, route.send_counts)


def _send_back(g: Tensor, route: Route, comm: Comm, call: Call, pool: BufferPool) -> tuple[Tensor, ...]:
    """Return the gradients of received rows to their owners. The result may be views of shared memory. A collective."""
    if kernel_for("move rows", g.device, g.dtype) == "numba":
        return _return_views(g, route, comm, call)
    returned = pool.empty((route.num_sent, *g.shape[1:]), g.dtype)
    _return(g, returned, route, comm, call)
    return (returned,)


class _Exchange(torch.autograd.Function):
    """Exchanges rows along a route, and gradients back; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        route: Route,
        comm: Comm,
        call: Call,
        pool: BufferPool,
        telemetry: StepTelemetry,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.route = route
        ctx.comm = comm
        ctx.call = call
        ctx.pool = pool
        ctx.telemetry = telemetry
        ctx.deterministic = deterministic
        ctx.like = h.new_empty(0)
        ctx.width = h.shape[1:]
        if route.appends:
            sent = comm.send_buffer((route.num_sent, *h.shape[1:]), h.dtype)
            h_mixed = fill_mixed(h, route, sent, pool)
            received = h_mixed[route.num_local :]
            count_exchange(route, h, telemetry)
            _send(sent, received, route, comm, call)
        else:
            h_mixed = exchange_stored(h.detach(), route, comm, call, pool, telemetry)
        return h_mixed, h_mixed.detach()[: route.num_dst]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mixed: Tensor | None, g_dst: Tensor | None) -> tuple[Tensor | None, ...]:
        route: Route = ctx.route
        if g_mixed is None:
            g_mixed = ctx.like.new_zeros(route.num_mixed, *ctx.width)
        call = Call(f"{ctx.call.name} backward", ctx.call.step, ctx.call.layer, ctx.call.detail)
        count_exchange(route, g_mixed, ctx.telemetry, backward=True)
        if route.appends:
            g_mixed = g_mixed.contiguous()
            returned = _send_back(g_mixed[route.num_local :], route, ctx.comm, call, ctx.pool)
            g = merge_gradients(g_mixed, g_dst, returned, route, ctx.pool, deterministic=ctx.deterministic)
        else:
            g = _return_from_places(g_mixed, g_dst, route, ctx.comm, call, ctx.pool, deterministic=ctx.deterministic)
        return g, None, None, None, None, None, None


def _return_from_places(
    g_mixed: Tensor,
    g_dst: Tensor | None,
    route: Route,
    comm: Comm,
    call: Call,
    pool: BufferPool,
    *,
    deterministic: bool,
) -> Tensor:
    """The backward pass of a boundary. A collective."""
    assert route.own_places is not None and route.recv_places is not None
    width = g_mixed.shape[1:]
    dtype = g_mixed.dtype
    if g_dst is not None:
        g_mixed = g_mixed.clone()  # it may belong to another branch too
        g_mixed[: route.num_dst] += g_dst
    sent = comm.send_buffer((route.num_received, *width), dtype)
    torch.index_select(g_mixed, 0, route.recv_places, out=sent)
    returned = pool.empty((route.num_sent, *width), dtype)
    _return(sent, returned, route, comm, call)
    g = pool.empty((route.num_local, *width), dtype)
    torch.index_select(g_mixed, 0, route.own_places, out=g[: route.num_own])
    g[route.num_own :] = 0  # read by other ranks only
    _add_returned(g, returned, route, deterministic=deterministic)
    return g


def _add_returned(g: Tensor, returned: Tensor, route: Route, *, deterministic: bool) -> None:
    """Add the returned gradients to the rows that were sent, one receiver after the other if deterministic.

    Rows of 16 bits are added in float32: a hub gets a gradient from every receiver, and small ones would be lost.
    """
    parts = route.send_counts if deterministic else (route.num_sent,)
    sums = g if g.dtype in (torch.float32, torch.float64) else g.float()
    for rows, part in zip(route.send_rows.split(parts), returned.split(parts), strict=True):
        sums.index_add_(0, rows, part.to(sums.dtype))
    if sums is not g:
        g.copy_(sums)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """The same exchange for layers that read received rows, and add returned gradients, where they lie.

    Nothing is appended: a layer on the host reads its own rows and the pieces that ``receive`` returns, which may be
    memory of other ranks and are valid until this rank's next exchange. Its backward writes the gradients of received
    rows into ``gradient_buffer`` and adds the pieces that ``send_back`` returns to those of its own rows.
    """

    route: Route
    comm: Comm
    call: Call
    telemetry: StepTelemetry

    def receive(self, h: Tensor) -> tuple[Tensor, ...]:
        """Send own rows, and return the received ones, a piece per rank. A collective."""
        route = self.route
        with self.telemetry.span("shuffle"):
            sent = self.comm.send_buffer((route.num_sent, h.size(1)), h.dtype)
            gather(h, route.send_rows, sent)
            count_exchange(route, h, self.telemetry)
            return _send_views(sent, route, self.comm, self.call)

    def gradient_buffer(self, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for the gradients of received rows, grouped by owner."""
        return self.comm.send_buffer((self.route.num_received, width), dtype)

    def send_back(self, g_received: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of received rows to their owners, and get those of the rows sent. A collective."""
        call = Call(f"{self.call.name} backward", self.call.step, self.call.layer, self.call.detail)
        count_exchange(self.route, g_received, self.telemetry, backward=True)
        return _return_views(g_received, self.route, self.comm, call)


class _KeepPrefix(torch.autograd.Function):
    """A shuffle without other ranks: h -> (h, h[:num_dst]) without a copy. Backward: g_mixed + [g_dst | 0]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.num_dst = num_dst
        ctx.shape = h.shape
        return h.detach(), h.detach()[:num_dst]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mixed: Tensor | None, g_dst: Tensor | None) -> tuple[Tensor | None, ...]:
        if g_dst is None:
            return g_mixed, None
        g = g_dst.new_zeros(ctx.shape) if g_mixed is None else g_mixed.clone()
        g[: ctx.num_dst] += g_dst
        return g, None


def keep_prefix(h: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """``(h, h[:num_dst])``, with a backward pass that does not allocate zeros. The mixed frontier is ``h`` itself."""
    if not h.requires_grad:
        return h, h[:num_dst]
    h_mixed, h_dst = _KeepPrefix.apply(h, num_dst)  # type: ignore[no-untyped-call]
    return h_mixed, h_dst


def exchange_rows(
    h: Tensor,
    route: Route,
    comm: Comm,
    call: Call,
    pool: BufferPool,
    telemetry: StepTelemetry,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Exchange the hidden rows of a layer, differentiably. Returns ``(h_mixed, h_dst)``. A collective."""
    assert h.size(0) == route.num_local, (h.shape, route.num_local)
    if comm.size == 1 and route.appends and not route.num_received:
        return keep_prefix(h, route.num_dst)
    h_mixed, h_dst = _Exchange.apply(h, route, comm, call, pool, telemetry, deterministic)  # type: ignore[no-untyped-call]
    return h_mixed, h_dst


def exchange_stored(
    buffer: Tensor, route: Route, comm: Comm, call: Call, pool: BufferPool, telemetry: StepTelemetry
) -> Tensor:
    """Exchange rows without gradients, such as stored features or ids. Returns the mixed tensor. A collective.

    ``buffer`` has ``route.num_buffer`` rows, the first of which are the local ones. If local rows keep their places,
    the received rows are written into ``buffer``, and it is returned.
    """
    width = buffer.shape[1:]
    dtype = buffer.dtype
    count_exchange(route, buffer, telemetry)
    sent = comm.send_buffer((route.num_sent, *width), dtype)
    torch.index_select(buffer[: route.num_local], 0, route.send_rows, out=sent)
    received = buffer[route.num_local :] if route.appends else pool.empty((route.num_received, *width), dtype)
    _send(sent, received, route, comm, call)
    mixed = buffer
    if route.own_places is not None:
        mixed = pool.empty((route.num_mixed, *width), dtype)
        mixed.index_copy_(0, route.own_places, buffer[: route.num_own])
    if route.recv_places is not None:
        mixed.index_copy_(0, route.recv_places, received)
    if route.copied is not None:
        copied = route.copied
        mixed.index_copy_(0, copied.places, copied.copies.rows.index_select(0, copied.rows))
    return mixed
