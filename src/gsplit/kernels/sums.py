"""Sums of rows over the edges of a block: what SAGEConv, GraphConv, GINConv and GCNConv aggregate.

S sources, D destinations, E edges grouped by destination (``kernels.csr``), rows x [S, C]:

    out[i] = sum over the edges e from s to i of weight[e] * x[s];   mean: divided by the number of edges
    g_x[s] = sum over the edges e from s to i of weight[e] * g[i];   mean: g[i] divided first

On the host also a max, without weights: out[i] = the largest x[s] of every column, 0 without edges.

Both add and divide in float32 for rows of 16 bits, in an order that the edges alone decide. torch's own gradient of a
sparse product converts the matrix in backward, for which the host waits for a device. Here the edges of each source
are found once per block, and only if a gradient is needed: on devices while the batch is made for a layer that has
needed them before, otherwise in the first backward.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.array_types import Ids
from gsplit.kernels import sums_numba
from gsplit.kernels.csr import EdgesBySource, csr_matrix, group_by_source
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.rows import stored_words
from gsplit.kernels.sums_numba import run_in_threads

__all__ = ["EdgeSums", "row_addresses"]

_Edges = tuple[Tensor, Tensor, Tensor | None]
"""Offsets [rows + 1], the other end of every edge [E], and the edge's weight [E]."""


class EdgeSums:
    """The edges of a block: ``indptr`` [D + 1], ``src_rows`` [E], and perhaps ``weights`` [E] without a gradient.

    ``by_source``: the same edges by source, if they were grouped ahead.
    """

    def __init__(
        self,
        indptr: Tensor,
        src_rows: Tensor,
        num_src: int,
        weights: Tensor | None,
        by_source: EdgesBySource | None = None,
    ) -> None:
        self._indptr = indptr
        self._src_rows = src_rows
        self._weights = weights
        self._by_source = by_source
        self.num_src = num_src
        self.num_dst = indptr.numel() - 1
        if indptr.device.type == "cpu" and not sums_numba.are_rows(src_rows.numpy(), num_src):
            raise ValueError(f"edges: expected source rows in [0, {num_src}) (got {src_rows.min()}..{src_rows.max()})")

    def __call__(self, x: Tensor, *, mean: bool) -> Tensor:
        """The sum or mean of the rows of every destination's sources; differentiable in the rows."""
        out: Tensor = _Sum.apply(x, self, mean)  # type: ignore[no-untyped-call]
        return out

    def forward(self, x: Tensor, *, mean: bool) -> Tensor:
        """See the module: ``out``."""
        edges = (self._indptr, self._src_rows, self._weights)
        if kernel_for("sum rows", x.device, x.dtype) == "numba":
            x = x.detach().contiguous()
            out = x.new_empty(self.num_dst, x.size(1))
            self.sum_into(out, row_addresses(x), x, mean=mean)
            return out
        if not mean:
            return _sum_rows(edges, x, x.dtype)
        return (_sum_rows(edges, x, _wide(x.dtype)) / self._degrees(x.dtype)).to(x.dtype)

    def backward(self, g: Tensor, *, mean: bool) -> Tensor:
        """See the module: ``g_x``."""
        if kernel_for("sum rows", g.device, g.dtype) == "numba":
            out = g.new_empty(self.num_src, g.size(1))
            self.sum_gradients_into(out, g.detach().contiguous(), 0, mean=mean)
            return out
        return _sum_rows(self._transposed(), g / self._degrees(g.dtype) if mean else g, g.dtype)

    def sum_into(
        self,
        out: Tensor,
        addresses: Ids,
        like: Tensor,
        scales: Tensor | None = None,
        own: tuple[Ids, float] = sums_numba.NOTHING_OWN,
        *,
        mean: bool,
    ) -> None:
        """``out`` on the host, into the first columns of a tensor; ``addresses``: where the row of each source is.

        ``like``: a tensor of such rows, whose type may be one that ``lanes`` decodes. ``scales``: one per source, if
        rows are int8. ``own``: where rows of the type of ``out`` are that the sums start with, and a factor for them
        (``sums_numba.sum_rows``).
        """
        width = like.size(1)
        assert addresses.size == self.num_src and out.size(1) >= width and out.is_contiguous()
        edges = (self._indptr.numpy(), self._src_rows.numpy(), _host_weights(self._weights, out.dtype))
        rows = (addresses, _row_like(like), None if scales is None else scales.numpy())
        target = out.numpy()
        nothing = sums_numba.NOTHING_RETURNED
        run_in_threads(
            self.num_dst,
            lambda first, stop: sums_numba.sum_rows(
                *edges, *rows, own, nothing, mean, target[first:], width, first, stop
            ),
        )

    def sum_gradients_into(
        self,
        out: Tensor,
        g: Tensor,
        begin: int,
        own: tuple[Ids, float] = sums_numba.NOTHING_OWN,
        returned: tuple[Ids, Ids, Ids] = sums_numba.NOTHING_RETURNED,
        *,
        mean: bool,
    ) -> None:
        """Rows of ``g_x`` from ``begin`` on, on the host. The gradients of the sums are the first columns of ``g``.

        ``own``: gradients of the first rows, and a factor; ``returned``: further ones (``sums_numba.sum_rows``).
        """
        assert begin + out.size(0) <= self.num_src and g.is_contiguous() and out.is_contiguous()
        offsets, dst_rows, weights = self._transposed()
        if mean:
            inverse = 1.0 / self._degrees(g.dtype).squeeze(1)
            weights = inverse[dst_rows] if weights is None else weights.to(g.dtype) * inverse[dst_rows]
        edges = (offsets.numpy(), dst_rows.numpy(), _host_weights(weights, g.dtype))
        rows = (row_addresses(g), _row_like(out), None)
        target = out.numpy()
        width = out.size(1)
        run_in_threads(
            out.size(0),
            lambda first, stop: sums_numba.sum_rows(
                *edges, *rows, own, returned, False, target[first:], width, begin + first, begin + stop
            ),
        )

    def max_into(self, out: Tensor, addresses: Ids, width: int, counts: Tensor) -> None:
        """The largest numbers of every destination's sources on the host, as ``sum_into``; ``sums_numba.max_rows``."""
        assert addresses.size == self.num_src and out.size(1) >= width and self._weights is None
        edges = (self._indptr.numpy(), self._src_rows.numpy())
        target = out.numpy()
        ties = counts.numpy()
        run_in_threads(
            self.num_dst,
            lambda first, stop: sums_numba.max_rows(*edges, addresses, target, width, ties, first, stop),
        )

    def sum_max_gradients_into(
        self, out: Tensor, x: Tensor, largest: Tensor, g: Tensor, own: tuple[Ids, float] = sums_numba.NOTHING_OWN
    ) -> None:
        """The gradient of all rows ``x`` for ``g``, those of the largest numbers (``sums_numba.sum_max_gradients``)."""
        assert out.shape == x.shape and x.size(0) == self.num_src and x.is_contiguous() and g.is_contiguous()
        offsets, dst_rows, _ = self._transposed()
        edges = (offsets.numpy(), dst_rows.numpy(), x.numpy(), largest.numpy(), g.numpy(), own)
        target = out.numpy()
        run_in_threads(self.num_src, lambda first, stop: sums_numba.sum_max_gradients(*edges, target, first, stop))

    def _degrees(self, dtype: torch.dtype) -> Tensor:
        """The number of edges of every destination, at least 1, in the type that sums of ``dtype`` have."""
        return self._indptr.diff().clamp(min=1).unsqueeze(1).to(_wide(dtype))

    def _transposed(self) -> _Edges:
        """The edges grouped by source, in the order of their destinations."""
        if self._by_source is None:
            self._by_source = group_by_source(self._indptr, self._src_rows, self.num_src)
        found = self._by_source
        return found.offsets, found.dst_rows, None if self._weights is None else self._weights[found.places]


def row_addresses(rows: Tensor, places: Tensor | None = None, *, column: int = 0) -> Ids:
    """The address of every row of a contiguous matrix on the host, or of those at some places, which were checked.

    ``column``: where in a row.
    """
    assert rows.is_contiguous() and rows.device.type == "cpu"
    numbers = np.arange(rows.size(0)) if places is None else places.numpy()
    addresses: Ids = rows.data_ptr() + (numbers * rows.stride(0) + column) * rows.element_size()
    return addresses


def _row_like(rows: Tensor) -> sums_numba.Floats:
    """A row as kernels take it, of the width and type of some rows."""
    return stored_words(torch.empty(rows.size(1), dtype=rows.dtype, device="cpu"))


def _host_weights(weights: Tensor | None, dtype: torch.dtype) -> sums_numba.Floats:
    """The weights as kernels take them: an empty array if all are 1."""
    found: sums_numba.Floats = torch.empty(0, dtype=dtype, device="cpu").numpy()
    return found if weights is None else weights.to(dtype).numpy()


class _Sum(torch.autograd.Function):
    """See the module. Saved: the edges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: EdgeSums, mean: bool) -> Tensor:
        ctx.sums = sums
        ctx.mean = mean
        return sums.forward(x, mean=mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.sums.backward(g, mean=ctx.mean) if ctx.needs_input_grad[0] else None), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sum_rows(edges: _Edges, x: Tensor, dtype: torch.dtype) -> Tensor:
    """out[i] = the sum of weight[e] * x[other end of e] over the edges e of i, as ``dtype``."""
    if kernel_for("sum rows", x.device, x.dtype) == "triton":
        from gsplit.kernels.triton.sums import sum_rows

        return sum_rows(*edges, x, dtype)
    offsets, rows, weights = edges
    wide = x.to(_wide(x.dtype))
    values = wide.new_ones(rows.numel()) if weights is None else weights.to(wide.dtype)
    matrix = csr_matrix(offsets, rows, values, num_columns=x.size(0))
    with torch.autocast(x.device.type, enabled=False):  # in backward too, which a program may call under autocast
        out: Tensor = torch.sparse.mm(matrix, wide.contiguous())
    return out.to(dtype)
