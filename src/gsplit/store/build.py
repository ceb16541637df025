"""Build a store from a ``GraphSource``: edges to CSC by external sort, vertex arrays copied in pieces.

Memory is one byte per vertex of the range that is built, the ids an importer maps, and a few buckets of edges, whatever
the number of edges. The order in which the edges arrive does not change the store (law 1). When several hosts build a
range each, their counts add up to those of one host that builds everything.
"""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.graph.types import GraphTypes
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress, silent
from gsplit.store.edge_sort import EdgeSorter
from gsplit.store.manifest import (
    MAX_EDGE_TYPES,
    MAX_EDGES,
    MAX_VERTICES,
    EdgeTypeEntry,
    Manifest,
    Shard,
    VertexTypeEntry,
    check_vertex_type,
    edge_type_dtype,
    index_type,
    new_step,
    role_of,
)
from gsplit.store.pairs import check_pairs
from gsplit.store.reader import Store, open_store
from gsplit.store.source import EdgeChunk, EdgeRules, GraphSource, RowChunk, RowStream, VertexRange
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

__all__ = ["build_store", "check_source", "step_settings", "write_arrays"]


def build_store(
    source: GraphSource,
    path: str | Path,
    *,
    rules: EdgeRules | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Write ``source`` as a store at ``path`` and open it."""
    path = Path(path)
    check_source(source, source.whole)
    with StoreWriter(path, overwrite=overwrite) as writer:
        writer.commit(write_arrays(writer, source, rules or EdgeRules(), source.whole, progress))
    return open_store(path)


def write_arrays(
    writer: StoreWriter,
    source: GraphSource,
    rules: EdgeRules,
    held: VertexRange,
    progress: Progress,
    shard: Shard | None = None,
) -> Manifest:
    """Write all arrays of the vertices in ``held``. Returns the manifest that describes them, not yet written."""
    statistics, counts, edges_by_type = _write_edges(writer, source, rules, held, progress)
    num_classes, vertex_counts = _write_vertices(writer, source, held, progress, positions=shard is not None)
    vertex_types: list[VertexTypeEntry] = []
    offsets = _type_offsets(source)
    for first, (name, of_type) in zip(offsets, source.vertices.items(), strict=False):
        type_classes, type_counts = _write_vertices(
            writer, of_type, of_type.whole, progress, vertex_type=name, first_id=first
        )
        vertex_counts |= type_counts
        entry = VertexTypeEntry(
            name=name,
            count=of_type.num_vertices,
            num_classes=len(of_type.class_names) or type_classes,
            class_names=list(of_type.class_names),
            feature_columns=list(of_type.feature_columns),
        )
        vertex_types.append(entry)
    progress("flush to disk", 0, None)
    return Manifest(
        num_vertices=source.num_vertices,
        num_edges=counts["edges_stored"],
        vertex_range=(held.first, held.stop),
        part_boundaries=[0, source.num_vertices],
        num_classes=len(source.class_names) or num_classes,
        class_names=list(source.class_names),
        feature_columns=list(source.feature_columns),
        vertex_types=vertex_types,
        edge_types=[
            EdgeTypeEntry(src=src, name=name, dst=dst, num_edges=number, values=list(values))
            for (src, name, dst), number, values in zip(
                source.edge_types,
                edges_by_type,
                source.values_of_types or [()] * len(source.edge_types),
                strict=True,
            )
        ],
        type_boundaries=offsets if vertex_types else [],
        arrays=writer.finish_arrays(),
        statistics=statistics,
        shard=shard,
        provenance=[new_step(f"import {source.kind}", step_settings(source, rules), counts | vertex_counts)],
    )


def _type_offsets(source: GraphSource) -> list[int]:
    """First fused id of every vertex type, then the number of vertices."""
    return [0, *accumulate(of_type.num_vertices for of_type in source.vertices.values())]


def step_settings(source: GraphSource, rules: EdgeRules) -> dict[str, object]:
    """Settings of an import, as recorded in the provenance."""
    return {**source.settings, **vars(rules), **({"notes": list(source.notes)} if source.notes else {})}


def check_source(source: GraphSource, held: VertexRange) -> None:
    """Refuse a source that cannot become a store, before any work is done."""
    if not 0 <= source.num_vertices <= MAX_VERTICES:
        fix = f"split the graph; this version supports up to {MAX_VERTICES} vertices"
        raise InputError(explain("num_vertices", f"0 to {MAX_VERTICES}", source.num_vertices, fix))
    free = free_bytes()
    if held.size > free:
        fix = "use a larger machine, or correct the number of vertices"
        expected = f"at most {free}: a byte of free memory each"
        raise InputError(explain("num_vertices", expected, f"{held.size} vertices", fix))
    if source.vertices:
        _check_types(source, held)
    folders = {"features": source.features, "edges": source.edge_values, "targets": source.targets}
    try:
        for folder, words in folders.items():
            for word in words:
                name = f"{folder}/{word}"
                if role_of(name).vertex_type is not None:
                    raise ValueError(f"array name {name[:80]!r} is not one of {folder}/NAME")
    except ValueError as error:
        raise InputError(explain("names", "plain words", error, "rename the array")) from None
    for name, ids in source.targets.items():
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < source.num_vertices:
            expected = f"ids in 0..{source.num_vertices - 1}"
            got = f"{ids.min()}..{ids.max()}"
            raise InputError(explain(f"targets {name}", expected, got, "remove or correct these ids"))
        found, times = np.unique(ids, return_counts=True)
        if found.size != ids.size:
            got = f"{ids.size - found.size} repeated, such as {found[times.argmax()]}"
            raise InputError(explain(f"targets {name}", "every id once", got, "remove the duplicates"))
    for name, pair_list in source.pairs.items():
        check_pairs(name, pair_list, source.num_vertices)


def _check_types(source: GraphSource, held: VertexRange) -> None:
    """Refuse types that a store cannot have, and sources of their vertices that cannot become arrays."""
    offsets = _type_offsets(source)
    GraphTypes(tuple(source.vertices), source.edge_types, tuple(offsets), tuple(offsets))
    if held != source.whole or offsets[-1] != source.num_vertices:
        got = f"vertices {held.first}..{held.stop - 1} of {offsets[-1]}"
        fix = "import it on one host, without --hosts"
        raise InputError(explain("a heterogeneous graph", "an import of all vertices", got, fix))
    if len(source.edge_types) > MAX_EDGE_TYPES:
        raise InputError(
            explain("edge types", f"at most {MAX_EDGE_TYPES}", len(source.edge_types), "join some of them")
        )
    for name, of_type in source.vertices.items():
        check_vertex_type(name)
        try:
            check_source(of_type, of_type.whole)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None


@kernel
def _take_sorted(
    keys: npt.NDArray[np.uint64],
    first_vertex: int,
    first_seen: int,
    source_bits: int,
    id_bits: int,
    drop_duplicates: bool,
    sources: Array,
    relations: Array,
    kept_rows: Ids,
    in_degrees: Ids,
    seen: npt.NDArray[np.uint8],
) -> tuple[int, int, int]:
    """Decode sorted keys into ``sources`` and count. Returns edges kept, self-loops kept and duplicates found.

    ``seen`` marks the endpoints of edges among the vertices from ``first_seen`` on. ``relations`` is empty unless edges
    have types.
    """
    kept = 0
    self_loops = 0
    duplicates = 0
    mask = (np.uint64(1) << np.uint64(id_bits)) - np.uint64(1)
    type_mask = (np.uint64(1) << np.uint64(source_bits - id_bits)) - np.uint64(1)
    for i in range(keys.size):
        if i > 0 and keys[i] == keys[i - 1]:
            duplicates += 1
            if drop_duplicates:
                continue
        src = np.int64(keys[i] & mask)
        row = np.int64(keys[i] >> np.uint64(source_bits))
        sources[kept] = src
        if relations.size:
            relations[kept] = np.int64((keys[i] >> np.uint64(id_bits)) & type_mask)
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


def _write_edges(
    writer: StoreWriter, source: GraphSource, rules: EdgeRules, held: VertexRange, progress: Progress
) -> tuple[Statistics, dict[str, int], list[int]]:
    """Write the in-edges of ``held``. Returns their statistics, the counts of the import, and edges per edge type."""
    if rules.symmetrise and source.vertices:
        fix = "import reverse relations with names of their own, such as rev_writes"
        raise InputError(explain("symmetrise", "False for a heterogeneous graph", rules.symmetrise, fix))
    forecast = source.num_edges * (2 if rules.symmetrise else 1) * held.size // max(1, source.num_vertices)
    sorter = EdgeSorter(
        writer.spill_directory,
        source.num_vertices,
        forecast,
        source.edge_values,
        destinations=held,
        num_relations=len(source.edge_types) or 1,
    )
    num_read = 0
    num_dangling = 0
    num_dropped_loops = 0
    for chunk in source.near(held, both_ends=rules.symmetrise):
        num_read += _count_held(chunk.dst, held, source) + chunk.num_dropped
        num_dangling += chunk.num_dropped
        loops = chunk.src == chunk.dst
        if rules.drop_self_loops and loops.any():
            num_dropped_loops += _count_held(chunk.dst[loops], held, source)
            chunk = _select(chunk, ~loops)
            loops = loops[~loops]
        sorter.add(chunk)
        if rules.symmetrise:
            once = chunk if not loops.any() else _select(chunk, ~loops)
            sorter.add(EdgeChunk(once.dst, once.src, once.values))
        progress("read edges", num_read, source.num_edges if held == source.whole else forecast)
    num_kept, duplicates, statistics, by_type = _write_csc(writer, source, rules, held, sorter, progress)
    if num_kept > MAX_EDGES:
        raise InputError(explain("edges", f"at most {MAX_EDGES}", num_kept, "import a part of the graph"))
    counts = {
        "edges_read": num_read,
        "edges_with_unknown_ids_dropped": num_dangling,
        "self_loops_dropped": num_dropped_loops,
        "duplicates_dropped": duplicates if rules.symmetrise or rules.drop_duplicates else 0,
        "reverse_edges_added": sorter.num_added - (num_read - num_dangling - num_dropped_loops),
        "edges_stored": num_kept,
    }
    return statistics, counts, by_type


def _count_held(ids: Ids, held: VertexRange, source: GraphSource) -> int:
    return ids.size if held == source.whole else int(np.count_nonzero(held.holds(ids)))


def _select(chunk: EdgeChunk, keep: npt.NDArray[np.bool_]) -> EdgeChunk:
    values = {name: column[keep] for name, column in chunk.values.items()}
    return EdgeChunk(chunk.src[keep], chunk.dst[keep], values, relation=chunk.relation)


def _write_csc(
    writer: StoreWriter,
    source: GraphSource,
    rules: EdgeRules,
    held: VertexRange,
    sorter: EdgeSorter,
    progress: Progress,
) -> tuple[int, int, Statistics, list[int]]:
    """Write the sorted edges. Returns the number of edges kept, of duplicates, the statistics, and edges per type."""
    drop = rules.symmetrise or rules.drop_duplicates
    source_type = index_type(source.num_vertices)
    indptr = writer.append("indptr", "int64")
    indices = writer.append("indices", source_type)
    columns = {n: writer.append(f"edges/{n}", t.dtype, t.row_shape) for n, t in source.edge_values.items()}
    num_relations = len(source.edge_types)
    kinds = writer.append("edge_type", edge_type_dtype(num_relations)) if source.vertices else None
    by_type = np.zeros(num_relations, np.int64)
    indptr.append(np.zeros(1, np.int64))
    seen = np.zeros(held.size, np.uint8)
    histogram = np.zeros(64, np.int64)
    num_sorted = 0
    num_kept = 0
    self_loops = 0
    duplicates = 0
    max_degree = 0
    for bucket in sorter.buckets():
        in_degrees = np.zeros(bucket.stop_vertex - bucket.first_vertex, np.int64)
        before = num_kept
        for run in bucket.runs():
            sources = np.empty(run.keys.size, source_type)
            rows = np.empty(run.keys.size if columns else 0, np.int64)
            relations = np.empty(run.keys.size if kinds else 0, np.int16)
            kept, loops, twice = _take_sorted(
                run.keys,
                bucket.first_vertex,
                held.first,
                sorter.source_bits,
                sorter.id_bits,
                drop,
                sources,
                relations,
                rows,
                in_degrees,
                seen,
            )
            indices.append(sources[:kept])
            if kinds is not None:
                kinds.append(relations[:kept])
                by_type += np.bincount(relations[:kept], minlength=num_relations)
            for name, column in columns.items():
                column.append(run.values[name][rows[:kept]])
            num_kept += kept
            self_loops += loops
            duplicates += twice
            num_sorted += run.keys.size
            progress("sort edges", num_sorted, sorter.num_added)
        indptr.append(before + np.cumsum(in_degrees))
        histogram += degree_histogram(in_degrees)
        max_degree = max(max_degree, int(in_degrees.max(initial=0)))
    _check_all_sorted(num_sorted, sorter.num_added)
    statistics = Statistics(
        num_self_loops=self_loops,
        num_duplicate_edges=0 if drop else duplicates,
        num_isolated_vertices=held.size - int(np.count_nonzero(seen)),
        max_in_degree=max_degree,
        in_degree_histogram=without_empty_tail(histogram),
    )
    return num_kept, duplicates, statistics, by_type.tolist()


def _check_all_sorted(num_sorted: int, num_added: int) -> None:
    if num_sorted != num_added:
        got = f"{num_sorted} of {num_added}"
        fix = "free disk space, run it again"
        raise InputError(explain("edges", "all edges back from the temporary files", got, fix))


def _write_vertices(
    writer: StoreWriter,
    source: GraphSource,
    held: VertexRange,
    progress: Progress,
    *,
    positions: bool = False,
    vertex_type: str | None = None,
    first_id: int = 0,
) -> tuple[int, dict[str, int]]:
    """Write the vertex arrays of ``held``. Returns its number of classes, and counts of missing values.

    ``positions`` also writes the positions of the targets in the whole lists, as shards need them. With a
    ``vertex_type``, the arrays are those of this type, and ``first_id`` is the fused id of its first vertex.
    """
    of_type = f"/{vertex_type}" if vertex_type else ""
    folder = f"{vertex_type}/" if vertex_type else ""
    counts = {}
    num_classes = 0
    for name, rows in source.features.items():
        _, missing = _write_rows(writer, f"features/{folder}{name}", rows, source, held, count_not_finite, progress)
        counts[not_finite_key(f"{folder}{name}")] = missing
    for name, ids in source.targets.items():
        ordered = np.sort(ids)
        begin, end = np.searchsorted(ordered, [held.first, held.stop]).tolist()
        writer.write(f"targets/{folder}{name}", "int64", first_id + ordered[begin:end])
        if positions:
            writer.write(f"target_positions/{name}", "int64", np.arange(begin, end))
    for name, pair_list in source.pairs.items():
        for full, array in pair_list.arrays(name).items():
            writer.write(full, array.dtype.name, array)
    if source.vertex_ids is not None:
        writer.write(f"vertex_ids{of_type}", "int64", source.vertex_ids[held.first : held.stop])
    if source.vertex_names is not None:
        all_offsets, text = source.vertex_names
        offsets = all_offsets[held.first : held.stop + 1]
        writer.write(f"name_offsets{of_type}", "int64", offsets - offsets[0])
        writer.write(f"name_bytes{of_type}", "uint8", text[offsets[0] : offsets[-1]])
    if source.y is not None:
        y, missing = _write_rows(writer, f"y{of_type}", source.y, source, held, count_unlabelled, progress)
        counts[f"{UNLABELLED}{of_type}"] = missing
        num_classes = count_classes(y, source.y.type.dtype)
    return num_classes, counts


def _write_rows(
    writer: StoreWriter,
    name: str,
    rows: RowStream,
    source: GraphSource,
    held: VertexRange,
    count: Callable[[Array, str], int],
    progress: Progress,
) -> tuple[Array, int]:
    """Write a per-vertex array. Returns it, and the sum of ``count`` over its pieces."""
    placed = writer.place(name, rows.type.dtype, (held.size, *rows.type.row_shape))
    done = 0
    total = 0
    for chunk in rows.near(held):
        _check_chunk(name, chunk, rows.type.row_shape, source.num_vertices)
        own = chunk if held == source.whole else held.take(chunk)
        stored = own.rows.astype(placed.dtype, copy=False)
        placed[own.vertices] = stored
        total += count(stored, rows.type.dtype)
        done += own.rows.shape[0]
        progress(f"write {name}", done, held.size)
    if done != held.size:
        fix = "give one row per vertex"
        raise InputError(explain(name, f"{held.size} rows, one per vertex", f"{done} rows", fix))
    return placed, total


def _check_chunk(name: str, chunk: RowChunk, row_shape: tuple[int, ...], num_vertices: int) -> None:
    if chunk.rows.shape[1:] != row_shape:
        got = f"one of shape {list(chunk.rows.shape[1:])}"
        raise InputError(explain(name, f"every row of shape {list(row_shape)}", got, "make all rows alike"))
    if isinstance(chunk.vertices, slice) and chunk.vertices.stop > num_vertices:
        got = f"{chunk.vertices.stop} rows or more"
        raise InputError(explain(name, f"{num_vertices} rows, one per vertex", got, "give one row per vertex"))
