"""Sort edges by (destination, relation, source) in bounded memory: an external bucket sort.

Each edge becomes one 64-bit key: destination above relation (the type of the edge in a heterogeneous graph) above
source. Destinations are divided into buckets of equal width, and the keys of a bucket are appended to its spill file.
Then the buckets are read and sorted in memory, one at a time. A bucket that exceeds the budget (a hub, or hot ids close
together) is first divided by keys sampled from it, recursively: a vertex with a billion in-edges is sorted in the same
memory. Memory: two buckets, plus all duplicates of one edge.

A sorter may be limited to a range of destinations; it leaves the other edges out.

Equal keys are ordered by their per-edge values, so the result depends on the set of edges only, not on their order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.kernels.jit import kernel
from gsplit.store.files import ordered_bits, storage_dtype
from gsplit.store.source import EdgeChunk, ValueType, VertexRange
from gsplit.store.spill import Spill

__all__ = ["Bucket", "EdgeSorter", "SortedRun"]

BUDGET_BYTES = 64 << 20
MAX_BUCKETS = 128
BUFFERED_BYTES = 32 << 20

Keys = npt.NDArray[np.uint64]
_KEYS = {"keys": np.dtype(np.uint64)}


@dataclass(frozen=True)
class SortedRun:
    """Consecutive keys, ascending, with their values.

    Key: (destination - bucket's first) << source_bits | relation << id_bits | source.
    """

    keys: Keys
    values: Mapping[str, Array]


@kernel
def _count_buckets(
    src: Ids,
    dst: Ids,
    num_vertices: int,
    first: int,
    stop: int,
    shift: int,
    counts: Ids,
) -> int:
    """Count edges into [first, stop) per bucket. Returns the position of the first edge with a bad id, or -1."""
    for i in range(src.size):
        if not (0 <= src[i] < num_vertices and 0 <= dst[i] < num_vertices):
            return i
        if first <= dst[i] < stop:
            counts[(dst[i] - first) >> shift] += 1
    return -1


@kernel
def _group_by_bucket(
    src: Ids,
    dst: Ids,
    first: int,
    stop: int,
    shift: int,
    source_bits: int,
    cursors: Ids,
    keys: Keys,
    order: Ids,
) -> None:
    """Write the keys of edges into [first, stop) at their bucket's cursor, and the edges' positions to ``order``.

    ``order`` is empty if it is not needed.
    """
    for i in range(src.size):
        if not first <= dst[i] < stop:
            continue
        bucket = (dst[i] - first) >> shift
        at = cursors[bucket]
        cursors[bucket] = at + 1
        keys[at] = np.uint64(((dst[i] - first - (bucket << shift)) << source_bits) | src[i])
        if order.size:
            order[at] = i


@dataclass(frozen=True)
class Bucket:
    """The in-edges of the vertices [first_vertex, stop_vertex)."""

    first_vertex: int
    stop_vertex: int
    _spill: Spill
    _budget: int

    def runs(self) -> Iterator[SortedRun]:
        """The bucket's edges in order. Each piece is read from disk when needed, then deleted there."""
        yield from _sorted_runs(self._spill, self._budget)


class EdgeSorter:
    """Takes edges in any order with ``add`` and returns them sorted with ``buckets``."""

    def __init__(
        self,
        directory: Path,
        num_vertices: int,
        num_edges: int,
        values: Mapping[str, ValueType],
        *,
        destinations: VertexRange | None = None,
        num_relations: int = 1,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        """``num_edges`` is an estimate that sets the number of buckets. A wrong one costs time, not memory.

        Edges into other vertices than ``destinations`` are left out; None for all vertices.
        """
        self._held = destinations or VertexRange(0, num_vertices)
        self.id_bits = max(1, (num_vertices - 1).bit_length())
        self.source_bits = self.id_bits + max(0, num_relations - 1).bit_length()
        edge_bytes = 8 + sum(storage_dtype(t.dtype).itemsize * prod(t.row_shape) for t in values.values())
        budget_edges = max(1024, budget_bytes // edge_bytes)
        self._buffer_edges = max(1, BUFFERED_BYTES // (8 + edge_bytes))
        wanted = min(MAX_BUCKETS, max(1, -(-3 * num_edges // (2 * budget_edges))))
        width_bits = max(0, -(-self._held.size // wanted) - 1).bit_length()
        self.shift = min(width_bits, 63 - self.source_bits)  # a key fits 63 bits
        self._num_buckets = max(1, -(-self._held.size >> self.shift))
        self._num_vertices = num_vertices
        self._values = values
        self._budget = budget_edges
        self._spills = [Spill(directory / f"bucket{b}", _KEYS, values) for b in range(self._num_buckets)]
        self._buffer: list[EdgeChunk] = []
        self._buffered = 0
        self.num_added = 0

    def add(self, chunk: EdgeChunk) -> None:
        """Add some edges. Small chunks are collected first, so that writes are large."""
        self._buffer.append(chunk)
        self._buffered += chunk.src.size
        if self._buffered >= self._buffer_edges:
            self._flush()

    def _flush(self) -> None:
        if not self._buffered:
            return
        chunks = self._buffer
        self._buffer = []
        src = np.concatenate([c.src for c in chunks]).astype(np.int64, copy=False)
        dst = np.concatenate([c.dst for c in chunks]).astype(np.int64, copy=False)
        counts = np.zeros(self._num_buckets, np.int64)
        held = self._held
        bad = _count_buckets(src, dst, self._num_vertices, held.first, held.stop, self.shift, counts)
        if bad >= 0:
            got = f"the edge {src[bad]} -> {dst[bad]}"
            fix = "give the right number of vertices, or map the ids first"
            raise InputError(explain("edges", f"ids in 0..{self._num_vertices - 1}", got, fix))
        relations = np.repeat([c.relation for c in chunks], [c.src.size for c in chunks])
        src |= relations << self.id_bits
        ends = np.cumsum(counts)
        keys = np.empty(ends[-1], np.uint64)
        order = np.empty(ends[-1] if self._values else 0, np.int64)
        _group_by_bucket(src, dst, held.first, held.stop, self.shift, self.source_bits, ends - counts, keys, order)
        values = {}
        for name, kind in self._values.items():
            column = np.concatenate([c.values[name] for c in chunks])
            values[name] = column.astype(storage_dtype(kind.dtype), copy=False)[order]
        for spill, start, stop in zip(self._spills, ends - counts, ends, strict=True):
            if start < stop:
                of_bucket = {name: column[start:stop] for name, column in values.items()}
                spill.append({"keys": keys[start:stop]}, of_bucket)
        self.num_added += keys.size
        self._buffered = 0

    def buckets(self) -> Iterator[Bucket]:
        """All buckets in order of their vertices, including empty ones. Afterwards the sorter is empty."""
        self._flush()
        for number, spill in enumerate(self._spills):
            first = self._held.first + (number << self.shift)
            yield Bucket(first, min(first + (1 << self.shift), self._held.stop), spill, self._budget)


def _sorted_runs(spill: Spill, budget: int) -> Iterator[SortedRun]:
    if spill.size <= 2 * budget:
        yield _sort(spill)
        return
    for part in _cut_by_sample(spill, budget):
        if part.size == spill.size:  # cannot be divided: duplicates of one edge
            yield _sort(part)
        else:
            yield from _sorted_runs(part, budget)


def _sort(spill: Spill) -> SortedRun:
    """Read a spill, delete it and sort it in memory."""
    columns, values = spill.read(0, spill.size)
    keys = columns["keys"]
    spill.remove()
    if not values:
        keys.sort()
        return SortedRun(keys, values)
    order = np.argsort(keys)
    keys = keys[order]
    values = {name: column[order] for name, column in values.items()}
    equal = keys[1:] == keys[:-1]
    tied = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False))
    if tied.size:  # positions of equal keys are adjacent, so sorting among them alone is enough
        bits = [part for n, c in values.items() for part in ordered_bits(c[tied], spill.values[n].dtype).T]
        by_value = tied[np.lexsort([*reversed(bits), keys[tied]])]
        for column in values.values():
            column[tied] = column[by_value]
    return SortedRun(keys, values)


def _cut_by_sample(spill: Spill, budget: int) -> list[Spill]:
    """Distribute a spill over new ones by ranges of keys, and delete it. Equal keys stay together."""
    starts = np.linspace(0, spill.size - 1024, 64).astype(np.int64)
    sample = np.sort(np.concatenate([spill.read(int(s), int(s) + 1024)[0]["keys"] for s in starts]))
    ways = min(MAX_BUCKETS, 2 * -(-spill.size // budget))
    picked = sample[np.linspace(0, sample.size - 1, ways + 1).astype(np.int64)[1:-1]]
    cuts = np.unique(np.concatenate([picked, picked + np.uint64(1)]))  # a heavy key gets a range of its own
    stem = spill.stem
    parts = [Spill(stem.with_name(f"{stem.name}-{i}"), _KEYS, spill.values) for i in range(cuts.size + 1)]
    for start in range(0, spill.size, budget):
        keys, values = spill.read(start, min(start + budget, spill.size))
        part_of = np.searchsorted(cuts, keys["keys"], side="right").astype(np.uint16)
        order = np.argsort(part_of, kind="stable")
        ends = np.cumsum(np.bincount(part_of, minlength=len(parts)))
        for part, first, stop in zip(parts, [0, *ends[:-1]], ends, strict=True):
            if first < stop:
                rows = order[first:stop]
                part.append({"keys": keys["keys"][rows]}, {name: column[rows] for name, column in values.items()})
    spill.remove()
    return [part for part in parts if part.size]
