"""From a graph source to a store: edges to CSC by external sort, vertex arrays copied in pieces.

Memory is that of the vertices (one byte each, and the ids an importer maps) plus a few buckets of edges,
whatever the number of edges. In what order the edges came leaves no trace in the store (law 1).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.free_memory import free_bytes
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress, silent
from gsplit.store.edge_sort import EdgeSorter
from gsplit.store.files import Array
from gsplit.store.manifest import MAX_EDGES, MAX_VERTICES, ArrayEntry, Manifest, new_step, role_of
from gsplit.store.reader import Store, open_store
from gsplit.store.source import EdgeChunk, EdgeRules, GraphSource, RowChunk, RowStream
from gsplit.store.statistics import (
    UNLABELLED,
    Statistics,
    count_classes,
    count_not_finite,
    count_unlabelled,
    degree_histogram,
    not_finite_key,
    without_empty_tail,
)
from gsplit.store.writer import StoreWriter

__all__ = ["build_store"]


def build_store(
    source: GraphSource,
    path: str | Path,
    *,
    rules: EdgeRules | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Write ``source`` as a store at ``path`` and open it."""
    path, rules = Path(path), rules or EdgeRules()
    _check_source(source)
    with StoreWriter(path, overwrite=overwrite) as writer:
        statistics, counts = _write_edges(writer, source, rules, progress)
        num_classes, vertex_counts = _write_vertices(writer, source, progress)
        progress("flush to disk", 0, None)
        entries = writer.finish_arrays()
        writer.commit(_manifest(source, rules, entries, statistics, counts | vertex_counts, num_classes))
    return open_store(path)


def _check_source(source: GraphSource) -> None:
    if not 0 <= source.num_vertices <= MAX_VERTICES:
        fix = "split the graph; this version takes no more"
        raise InputError(explain("num_vertices", f"0 to {MAX_VERTICES}", source.num_vertices, fix))
    free = free_bytes()
    if source.num_vertices > free:
        got, fix = f"{source.num_vertices} vertices", "use a larger machine, or correct the number of vertices"
        raise InputError(explain("num_vertices", f"at most {free}: a byte of free memory each", got, fix))
    try:
        for folder, words in (
            ("features", source.features),
            ("edges", source.edge_values),
            ("targets", source.targets),
        ):
            for word in words:
                role_of(f"{folder}/{word}")
    except ValueError as error:
        raise InputError(explain("names", "plain words", error, "rename the array")) from None
    for name, ids in source.targets.items():
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < source.num_vertices:
            got, fix = f"{ids.min()}..{ids.max()}", "remove or correct these ids"
            raise InputError(explain(f"targets {name}", f"ids in 0..{source.num_vertices - 1}", got, fix))
        found, times = np.unique(ids, return_counts=True)
        if found.size != ids.size:
            got = f"{ids.size - found.size} repeated, such as {found[times.argmax()]}"
            raise InputError(explain(f"targets {name}", "every id once", got, "remove the duplicates"))


@kernel
def _take_sorted(
    keys: npt.NDArray[np.uint64],
    first_vertex: int,
    source_bits: int,
    drop_duplicates: bool,
    sources: Array,
    kept_rows: npt.NDArray[np.int64],
    in_degrees: npt.NDArray[np.int64],
    seen: npt.NDArray[np.uint8],
) -> tuple[int, int, int]:
    """Decode sorted keys into ``sources`` and count; return edges kept, self-loops kept and duplicates met."""
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
        seen[src] = 1
        seen[first_vertex + row] = 1
        if src == first_vertex + row:
            self_loops += 1
        kept += 1
    return kept, self_loops, duplicates


def _write_edges(
    writer: StoreWriter, source: GraphSource, rules: EdgeRules, progress: Progress
) -> tuple[Statistics, dict[str, int]]:
    forecast = source.num_edges * (2 if rules.symmetrise else 1)
    sorter = EdgeSorter(writer.spill_directory, source.num_vertices, forecast, source.edge_values)
    num_read, num_unknown, num_dropped_loops = 0, 0, 0
    for chunk in source.edges():
        num_read += chunk.src.size + chunk.num_dropped
        num_unknown += chunk.num_dropped
        loops = chunk.src == chunk.dst
        if rules.drop_self_loops and loops.any():
            num_dropped_loops += int(loops.sum())
            chunk, loops = _select(chunk, ~loops), loops[~loops]
        sorter.add(chunk)
        if rules.symmetrise:
            once = chunk if not loops.any() else _select(chunk, ~loops)
            sorter.add(EdgeChunk(once.dst, once.src, once.values))
        progress("read edges", num_read, source.num_edges)
    num_sorted, num_kept, duplicates, statistics = _write_csc(writer, source, rules, sorter, progress)
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


def _write_csc(
    writer: StoreWriter, source: GraphSource, rules: EdgeRules, sorter: EdgeSorter, progress: Progress
) -> tuple[int, int, int, Statistics]:
    drop = rules.symmetrise or rules.drop_duplicates
    index_type = "int32" if source.num_vertices <= 1 << 31 else "int64"
    indptr, indices = writer.append("indptr", "int64"), writer.append("indices", index_type)
    columns = {n: writer.append(f"edges/{n}", t.dtype, t.row_shape) for n, t in source.edge_values.items()}
    indptr.append(np.zeros(1, np.int64))
    seen = np.zeros(source.num_vertices, np.uint8)
    histogram = np.zeros(64, np.int64)
    num_sorted, num_kept, self_loops, duplicates, max_degree = 0, 0, 0, 0, 0
    for bucket in sorter.buckets():
        in_degrees = np.zeros(bucket.stop_vertex - bucket.first_vertex, np.int64)
        before = num_kept
        for run in bucket.runs():
            sources = np.empty(run.keys.size, index_type)
            rows = np.empty(run.keys.size if columns else 0, np.int64)
            kept, loops, twice = _take_sorted(
                run.keys, bucket.first_vertex, sorter.source_bits, drop, sources, rows, in_degrees, seen
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
        num_isolated_vertices=source.num_vertices - int(np.count_nonzero(seen)),
        max_in_degree=max_degree,
        in_degree_histogram=without_empty_tail(histogram),
    )
    return num_sorted, num_kept, duplicates, statistics


def _select(chunk: EdgeChunk, keep: npt.NDArray[np.bool_]) -> EdgeChunk:
    return EdgeChunk(chunk.src[keep], chunk.dst[keep], {n: v[keep] for n, v in chunk.values.items()})


def _write_vertices(writer: StoreWriter, source: GraphSource, progress: Progress) -> tuple[int, dict[str, int]]:
    """Write what belongs to vertices; return the number of classes, and counts of what is missing."""
    counts, num_classes = {}, 0
    for name, rows in source.features.items():
        key = not_finite_key(name)
        _, counts[key] = _write_rows(writer, f"features/{name}", rows, source.num_vertices, count_not_finite, progress)
    for name, ids in source.targets.items():
        writer.write(f"targets/{name}", "int64", np.sort(ids))
    if source.vertex_ids is not None:
        writer.write("vertex_ids", "int64", source.vertex_ids)
    if source.vertex_names is not None:
        writer.write("name_offsets", "int64", source.vertex_names[0])
        writer.write("name_bytes", "uint8", source.vertex_names[1])
    if source.y is not None:
        y, counts[UNLABELLED] = _write_rows(writer, "y", source.y, source.num_vertices, count_unlabelled, progress)
        num_classes = count_classes(y, source.y.type.dtype)
    return num_classes, counts


def _write_rows(
    writer: StoreWriter,
    name: str,
    rows: RowStream,
    num_vertices: int,
    count: Callable[[Array, str], int],
    progress: Progress,
) -> tuple[Array, int]:
    """Write a per-vertex array; return it, and the sum of ``count`` over its pieces."""
    placed = writer.place(name, rows.type.dtype, (num_vertices, *rows.type.row_shape))
    done, total = 0, 0
    for chunk in rows.chunks():
        _check_chunk(name, chunk, rows.type.row_shape, num_vertices)
        stored = chunk.rows.astype(placed.dtype, copy=False)
        placed[chunk.vertices] = stored
        total += count(stored, rows.type.dtype)
        done += chunk.rows.shape[0]
        progress(f"write {name}", done, num_vertices)
    if done != num_vertices:
        fix = "give one row per vertex"
        raise InputError(explain(name, f"{num_vertices} rows, one per vertex", f"{done} rows", fix))
    return placed, total


def _check_chunk(name: str, chunk: RowChunk, row_shape: tuple[int, ...], num_vertices: int) -> None:
    if chunk.rows.shape[1:] != row_shape:
        got = f"one of shape {list(chunk.rows.shape[1:])}"
        raise InputError(explain(name, f"every row of shape {list(row_shape)}", got, "make all rows alike"))
    if isinstance(chunk.vertices, slice) and chunk.vertices.stop > num_vertices:
        got = f"{chunk.vertices.stop} rows or more"
        raise InputError(explain(name, f"{num_vertices} rows, one per vertex", got, "give one row per vertex"))


def _manifest(
    source: GraphSource,
    rules: EdgeRules,
    entries: dict[str, ArrayEntry],
    statistics: Statistics,
    counts: dict[str, int],
    num_classes: int,
) -> Manifest:
    settings = {**source.settings, **vars(rules), **({"notes": list(source.notes)} if source.notes else {})}
    step = new_step(f"import {source.kind}", settings, counts)
    return Manifest(
        num_vertices=source.num_vertices,
        num_edges=counts["edges_stored"],
        vertex_range=(0, source.num_vertices),
        part_boundaries=[0, source.num_vertices],
        num_classes=num_classes,
        class_names=list(source.class_names),
        arrays=entries,
        statistics=statistics,
        provenance=[step],
    )
