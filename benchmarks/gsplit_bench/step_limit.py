"""The least time of a training step on this machine: its dense products and unavoidable bytes at measured rates.

Counted for one rank, from the blocks of a step, in float32. Layer l has D destinations, S sources, E edges, and rows of
a numbers become rows of b. Nothing else is counted: no activations, no copies, no exchange, no sampling, no optimizer.

    products   forward: sage [D, 2a] x [2a, b]; gcn [D, a] x [a, b]; gin [D, a] x [a, b] and [D, b] x [b, b];
               gat [S, a] x [a, H * C], or H times [D, a] x [a, C] where it aggregates first. Backward: for each of them
               one for the weights, and one for its rows unless these come from the input rows alone. Scores of
               attention are not counted.
    gathered   the source row of every edge once in forward: E * a numbers, gat E * H * C where it projects first, with
               a self-loop of every destination. Once more in backward above layer 0, where gradients go along the
               edges; with attention in every layer, because the gradient of a weight needs the row again.
    written    outputs of a layer once, b * D numbers (gat also S * H * C projected rows); above layer 0 the gradients
               of source rows once, S * a.

``measure_limit`` times every product at its own shape, in the fastest order of rows and columns, reading of rows along the block's own edges into one sum that
stays in the cache (with prefetching; backward is taken to read at the same rate), and a copy, whose bytes
count as read and written. All by CPU time, one thread, the least of some repetitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.graph.blocks import Block
from gsplit.kernels.attention_types import aggregates_first
from gsplit.kernels.jit import kernel
from gsplit.kernels.lanes import add_scaled, prefetch_row
from gsplit.planner.calibration import least_seconds

__all__ = ["COUNTED_MODELS", "LayerWork", "Limit", "Product", "count_layer", "measure_limit"]

COUNTED_MODELS = ("sage", "gcn", "gin", "gat")
_FLOAT_BYTES = 4
_AHEAD = 8
_MOST_ROWS = 50_000
"""Products of more rows are timed with so many, at the same rate."""
_REPEATS = 3


@dataclass(frozen=True)
class Product:
    """[rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns

    def backward(self, *, of_rows: bool) -> "list[Product]":
        """The products of the gradient of the weights and, if wanted, of the rows."""
        of_weights = Product(self.inner, self.rows, self.columns)
        return [of_weights, Product(self.rows, self.columns, self.inner)] if of_rows else [of_weights]


@dataclass(frozen=True)
class LayerWork:
    """What one layer has to do on one rank, forward and backward; ``gathered_width`` is that of rows along edges."""

    products: tuple[Product, ...]
    gathered_width: int
    gathered_bytes: float
    written_bytes: float


def count_layer(
    model: str, block: Block, width_in: int, width_out: int, *, first: bool, last: bool, heads: int
) -> LayerWork:
    """Count a layer; ``first``: its rows are input rows. ``last``: heads of attention are averaged, not joined."""
    num_dst = block.num_dst
    num_edges = block.num_edges
    written = num_dst * width_out + (0 if first else block.num_src * width_in)
    if model == "gat":
        num_edges += num_dst
        width = width_out if last else width_out // heads
        if aggregates_first(block.num_src, num_dst, num_edges, heads, width_in, width):
            gathered_width = width_in
            forward = [Product(num_dst, width_in, width)] * heads
        else:
            gathered_width = heads * width
            forward = [Product(block.num_src, width_in, heads * width)]
            written += block.num_src * heads * width
        products = [each for product in forward for each in product.backward(of_rows=not first or len(forward) > 1)]
        passes = 2
    else:
        gathered_width = width_in
        inner = 2 * width_in if model == "sage" else width_in
        forward = [Product(num_dst, inner, width_out)]
        products = forward[0].backward(of_rows=not first)
        if model == "gin":
            forward.append(Product(num_dst, width_out, width_out))
            products += forward[1].backward(of_rows=True)
        passes = 1 if first else 2
    return LayerWork(
        products=(*forward, *products),
        gathered_width=gathered_width,
        gathered_bytes=float(passes * num_edges * gathered_width * _FLOAT_BYTES),
        written_bytes=float(written * _FLOAT_BYTES),
    )


@dataclass(frozen=True)
class Limit:
    """The least seconds of a step of one rank: work, and the rates that this rank measured."""

    flops: float
    products_s: float
    gathered_bytes: float
    gathered_s: float
    written_bytes: float
    written_s: float


def measure_limit(model: str, blocks: Sequence[Block], widths: Sequence[int], heads: int) -> Limit:
    """The limit of a step with these blocks; ``widths``: of the input rows and of the outputs of every layer."""
    if model not in COUNTED_MODELS:
        raise InputError(explain("--model", f"one of {', '.join(COUNTED_MODELS)}", model, "choose one of these"))
    flops = products_s = gathered_bytes = gathered_s = written_bytes = 0.0
    for layer, block in enumerate(blocks):
        work = count_layer(
            model,
            block,
            widths[layer],
            widths[layer + 1],
            first=layer == 0,
            last=layer == len(blocks) - 1,
            heads=heads,
        )
        flops += sum(product.flops for product in work.products)
        products_s += sum(_product_seconds(product) for product in work.products)
        gathered_bytes += work.gathered_bytes
        written_bytes += work.written_bytes
        if block.num_edges:
            read_bytes = block.num_edges * work.gathered_width * _FLOAT_BYTES
            gathered_s += work.gathered_bytes / read_bytes * _gather_seconds(block, work.gathered_width)
    return Limit(flops, products_s, gathered_bytes, gathered_s, written_bytes, written_bytes / _copy_rate())


@cache
def _product_seconds(product: Product) -> float:
    if not product.flops:
        return 0.0
    small = Product(min(product.rows, _MOST_ROWS), min(product.inner, _MOST_ROWS), product.columns)
    a = torch.randn(small.rows, small.inner)
    b = torch.randn(small.inner, small.columns)
    out = torch.empty(small.rows, small.columns)
    orders = [(a, b), (a, b.t().contiguous().t()), (a.t().contiguous().t(), b)]
    return min(_mm_seconds(one, other, out) for one, other in orders) * product.flops / small.flops


def _mm_seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    return least_seconds(lambda: torch.mm(a, b, out=out), _REPEATS)


@kernel
def _sum_all(array: npt.NDArray[Any], rows: Ids, factor: Any, total: npt.NDArray[Any]) -> None:
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            prefetch_row(array, rows[i + _AHEAD])
        add_scaled(total, factor, array[rows[i]])


def _gather_seconds(block: Block, width: int) -> float:
    """Reading the source row of every edge of a block."""
    array = np.zeros((block.num_src, width), np.float32)
    array[:] = 1.0  # pages of their own: a new array of zeros is one page
    total = np.zeros(width, np.float32)
    rows = block.src_rows.numpy()
    return least_seconds(lambda: _sum_all(array, rows, np.float32(1.0), total), _REPEATS)


@cache
def _copy_rate() -> float:
    """Bytes per second, read and written, of a copy that is larger than the caches."""
    source = torch.ones(ceil(1e8 / _FLOAT_BYTES))
    target = torch.empty_like(source)
    return 2 * source.nbytes / least_seconds(lambda: target.copy_(source), _REPEATS)
