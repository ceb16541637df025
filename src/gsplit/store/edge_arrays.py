"""Edges of a source as CSC in a store that is being written: the in-edges of a range of vertices, by external sort.

Memory is a byte per vertex of the range and a few buckets of edges. In what order the edges came leaves no trace in
the store (law 1). Of several hosts with ranges of their own, the counts add up to those of one that has them all.
"""

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress
from gsplit.store.edge_sort import EdgeSorter
from gsplit.store.files import Array
from gsplit.store.manifest import MAX_EDGES
from gsplit.store.source import EdgeChunk, EdgeRules, GraphSource, VertexRange
from gsplit.store.statistics import Statistics, degree_histogram, without_empty_tail
from gsplit.store.writer import StoreWriter

__all__ = ["write_edges"]


@kernel
def _take_sorted(
    keys: npt.NDArray[np.uint64],
    first_vertex: int,
    first_seen: int,
    source_bits: int,
    drop_duplicates: bool,
    sources: Array,
    kept_rows: npt.NDArray[np.int64],
    in_degrees: npt.NDArray[np.int64],
    seen: npt.NDArray[np.uint8],
) -> tuple[int, int, int]:
    """Decode sorted keys into ``sources`` and count; return edges kept, self-loops kept and duplicates met.

    ``seen`` marks the ends of edges among the vertices from ``first_seen`` on.
    """
    kept, self_loops, duplicates = 0, 0, 0
    mask = (np.uint64(1) << np.uint64(source_bits)) - np.uint64(1)
    for i in range(keys.size):
        if i > 0 and keys[i] == keys[i - 1]:
            duplicates += 1
            if drop_duplicates:
                continue
        src = np.int64(keys[i] & mask)
        row = np.int64(keys[i] >> np.uint64(source_bits))
        sources[kept] = src
        if kept_rows.size:
            kept_rows[kept] = i
        in_degrees[row] += 1
        if first_seen <= src < first_seen + seen.size:
            seen[src - first_seen] = 1
        seen[first_vertex + row - first_seen] = 1
        if src == first_vertex + row:
            self_loops += 1
        kept += 1
    return kept, self_loops, duplicates


def write_edges(
    writer: StoreWriter, source: GraphSource, rules: EdgeRules, held: VertexRange, progress: Progress
) -> tuple[Statistics, dict[str, int]]:
    """Write the in-edges of the vertices in ``held``; return what is counted of them, stored and on the way in."""
    forecast = source.num_edges * (2 if rules.symmetrise else 1) * held.size // max(1, source.num_vertices)
    sorter = EdgeSorter(writer.spill_directory, source.num_vertices, forecast, source.edge_values, destinations=held)
    num_read, num_unknown, num_dropped_loops = 0, 0, 0
    for chunk in source.near(held, both_ends=rules.symmetrise):
        num_read += _count_held(chunk.dst, held, source) + chunk.num_dropped
        num_unknown += chunk.num_dropped
        loops = chunk.src == chunk.dst
        if rules.drop_self_loops and loops.any():
            num_dropped_loops += _count_held(chunk.dst[loops], held, source)
            chunk, loops = _select(chunk, ~loops), loops[~loops]
        sorter.add(chunk)
        if rules.symmetrise:
            once = chunk if not loops.any() else _select(chunk, ~loops)
            sorter.add(EdgeChunk(once.dst, once.src, once.values))
        progress("read edges", num_read, source.num_edges if held == source.whole else forecast)
    num_sorted, num_kept, duplicates, statistics = _write_csc(writer, source, rules, held, sorter, progress)
    if num_sorted != sorter.num_added:
        got = f"{num_sorted} of {sorter.num_added}"
        raise InputError(
            explain("edges", "all edges back from the temporary files", got, "free disk space, run it again")
        )
    if num_kept > MAX_EDGES:
        raise InputError(explain("edges", f"at most {MAX_EDGES}", num_kept, "import a part of the graph"))
    counts = {
        "edges_read": num_read,
        "edges_with_unknown_ids_dropped": num_unknown,
        "self_loops_dropped": num_dropped_loops,
        "duplicates_dropped": duplicates if rules.symmetrise or rules.drop_duplicates else 0,
        "reverse_edges_added": sorter.num_added - (num_read - num_unknown - num_dropped_loops),
        "edges_stored": num_kept,
    }
    return statistics, counts


def _count_held(ids: npt.NDArray[np.int64], held: VertexRange, source: GraphSource) -> int:
    return ids.size if held == source.whole else int(np.count_nonzero(held.holds(ids)))


def _write_csc(
    writer: StoreWriter,
    source: GraphSource,
    rules: EdgeRules,
    held: VertexRange,
    sorter: EdgeSorter,
    progress: Progress,
) -> tuple[int, int, int, Statistics]:
    drop = rules.symmetrise or rules.drop_duplicates
    index_type = "int32" if source.num_vertices <= 1 << 31 else "int64"
    indptr, indices = writer.append("indptr", "int64"), writer.append("indices", index_type)
    columns = {n: writer.append(f"edges/{n}", t.dtype, t.row_shape) for n, t in source.edge_values.items()}
    indptr.append(np.zeros(1, np.int64))
    seen = np.zeros(held.size, np.uint8)
    histogram = np.zeros(64, np.int64)
    num_sorted, num_kept, self_loops, duplicates, max_degree = 0, 0, 0, 0, 0
    for bucket in sorter.buckets():
        in_degrees = np.zeros(bucket.stop_vertex - bucket.first_vertex, np.int64)
        before = num_kept
        for run in bucket.runs():
            sources = np.empty(run.keys.size, index_type)
            rows = np.empty(run.keys.size if columns else 0, np.int64)
            kept, loops, twice = _take_sorted(
                run.keys, bucket.first_vertex, held.first, sorter.source_bits, drop, sources, rows, in_degrees, seen
            )
            indices.append(sources[:kept])
            for name, column in columns.items():
                column.append(run.values[name][rows[:kept]])
            num_kept, self_loops, duplicates = num_kept + kept, self_loops + loops, duplicates + twice
            num_sorted += run.keys.size
            progress("sort edges", num_sorted, sorter.num_added)
        indptr.append(before + np.cumsum(in_degrees))
        histogram += degree_histogram(in_degrees)
        max_degree = max(max_degree, int(in_degrees.max(initial=0)))
    statistics = Statistics(
        num_self_loops=self_loops,
        num_duplicate_edges=0 if drop else duplicates,
        num_isolated_vertices=held.size - int(np.count_nonzero(seen)),
        max_in_degree=max_degree,
        in_degree_histogram=without_empty_tail(histogram),
    )
    return num_sorted, num_kept, duplicates, statistics


def _select(chunk: EdgeChunk, keep: npt.NDArray[np.bool_]) -> EdgeChunk:
    return EdgeChunk(chunk.src[keep], chunk.dst[keep], {n: v[keep] for n, v in chunk.values.items()})
