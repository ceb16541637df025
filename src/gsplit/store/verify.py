"""The full check of a store: every byte against its checksum, every id against its range and order.

It finds what opening a store does not: a flipped bit, an id out of range between the sampled places, neighbours out of
order, a target listed twice, statistics that do not fit the graph.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.errors import StoreError, explain
from gsplit.graph.graph import Graph
from gsplit.graph.types import GraphTypes
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress, silent
from gsplit.store.files import raw_bytes
from gsplit.store.manifest import file_of
from gsplit.store.reader import Store
from gsplit.store.source import row_slices
from gsplit.store.statistics import Statistics, count_classes, degree_histogram, without_empty_tail
from gsplit.store.time_order import orders_by_time, stored_times

__all__ = ["scan_edges", "verify_checksums", "verify_store"]

_FIX = "the file is damaged: restore it from a copy, or import the graph again"
_COLUMNS_AT_ONCE = 1 << 20


def verify_store(store: Store, progress: Progress = silent) -> None:
    """Read the whole store; raise ``StoreError`` naming the first file that is wrong."""
    verify_checksums(store, progress)
    try:
        _verify_offsets(store)
        statistics = scan_edges(store.graph, _original_ids(store), progress, edge_type=store.arrays.get("edge_type"))
        _verify_ids(store)
        if store.types is not None:
            _verify_types(store, store.types, progress)
        _verify_hotness(store)
        _verify_scales(store)
        _verify_time_orders(store)
        _verify_statistics(store, statistics)
        _verify_listing(store)
    except StoreError as error:
        raise StoreError(f"{store.where}: {error}") from None


def _fail(name: str, expected: str, got: object) -> StoreError:
    return StoreError(explain(file_of(name), expected, got, _FIX))


def verify_checksums(store: Store, progress: Progress = silent) -> None:
    """Compare every array with its checksum; raise ``StoreError`` naming the first file that differs."""
    total = sum(store.stored_array(name).nbytes for name in store.names)
    done = 0
    for name in store.names:
        array = store.stored_array(name)
        digest = hashlib.sha256()
        for piece in row_slices(array.shape[0], array[:1].nbytes):
            digest.update(raw_bytes(array[piece]))
            done += array[piece].nbytes
            progress("verify checksums", done, total)
        if digest.hexdigest() != store.manifest.arrays[name].sha256:
            expected = f"contents with SHA-256 {store.manifest.arrays[name].sha256[:16]}..., as in the manifest"
            where = f"{store.where}: {file_of(name)}"
            raise StoreError(explain(where, expected, f"{digest.hexdigest()[:16]}...", _FIX))


def _pieces(array: Array, overlap: int = 0) -> Iterator[tuple[int, Array]]:
    for piece in row_slices(array.size, array.itemsize):
        yield piece.start, array[piece.start : piece.stop + overlap]


def _verify_offsets(store: Store) -> None:
    for name in [name for name in store.names if name == "indptr" or name.startswith("name_offsets")]:
        for first, part in _pieces(store.stored_array(name), overlap=1):
            falls = np.flatnonzero(part[1:] < part[:-1])
            if falls.size:
                at = int(falls[0])
                got = f"{part[at]} then {part[at + 1]} at element {first + at}"
                raise _fail(name, "offsets that never decrease", got)


@kernel
def _scan_columns(
    indptr: Ids,
    indices: Array,
    kinds: Array,
    original: Ids,
    first_held: int,
    first_vertex: int,
    num_vertices: int,
    seen: npt.NDArray[np.uint8],
    totals: Ids,
) -> int:
    """Check some columns. Returns 0, or 1 for an id out of range, or 2 for a wrong order.

    ``totals`` collects self-loops, duplicates and the position of the fault. ``indptr`` has been checked. ``kinds`` are
    the types of the edges; empty in a homogeneous graph.
    """
    for row in range(indptr.size - 1):
        previous = np.int64(-1)
        previous_rank = np.int64(-1)
        previous_kind = np.int64(-1)
        for at in range(indptr[row] - indptr[0], indptr[row + 1] - indptr[0]):
            src = np.int64(indices[at])
            totals[2] = at
            if not 0 <= src < num_vertices:
                return 1
            kind = np.int64(kinds[at]) if kinds.size else np.int64(0)
            if kind < previous_kind:
                return 2
            if kind > previous_kind:
                previous = np.int64(-1)
                previous_rank = np.int64(-1)
                previous_kind = kind
            local = src - first_held
            rank = src
            if original.size:
                rank = original[local] if 0 <= local < original.size else previous_rank
            if rank < previous_rank:
                return 2
            totals[0] += src == first_vertex + row
            totals[1] += src == previous
            previous = src
            previous_rank = rank
            if first_held <= src < first_held + seen.size:
                seen[src - first_held] = 1
            seen[first_vertex + row - first_held] = 1
    return 0


def _original_ids(store: Store) -> Ids:
    return store.stored_array("original_ids") if "original_ids" in store.names else np.empty(0, np.int64)


def scan_edges(
    graph: Graph, original: Ids, progress: Progress = silent, *, edge_type: Array | None = None
) -> Statistics:
    """Check range and order of every column, and count. In a shard, the order of foreign sources is not checked.

    ``original`` are the original ids of the vertices held; empty if ids are original. Offsets have been checked.
    ``edge_type``: the types of the edges of a heterogeneous graph, whose columns are ordered by type first.
    """
    kinds = np.empty(0, np.uint8) if edge_type is None else edge_type
    first = graph.first_vertex
    seen = np.zeros(graph.stop_vertex - first, np.uint8)
    totals = np.zeros(3, np.int64)
    histogram = np.zeros(64, np.int64)
    max_degree = 0
    for row in range(0, graph.indptr.size - 1, _COLUMNS_AT_ONCE):
        part = graph.indptr[row : row + _COLUMNS_AT_ONCE + 1]
        columns = graph.indices[int(part[0]) : int(part[-1])]
        of_columns = kinds[int(part[0]) : int(part[-1])]
        fault = _scan_columns(part, columns, of_columns, original, first, first + row, graph.num_vertices, seen, totals)
        if fault:
            order = "sources ordered by original id" if edge_type is None else "edges ordered by type and original id"
            expected = f"ids in 0..{graph.num_vertices - 1}" if fault == 1 else order
            at = int(totals[2])
            raise _fail("indices", expected, f"{columns[at]} as edge {int(part[0]) + at}")
        degrees = np.diff(part)
        histogram += degree_histogram(degrees)
        max_degree = max(max_degree, int(degrees.max(initial=0)))
        progress("verify edges", int(part[-1]) - int(graph.indptr[0]), graph.num_edges)
    return Statistics(
        num_self_loops=int(totals[0]),
        num_duplicate_edges=int(totals[1]),
        num_isolated_vertices=seen.size - int(np.count_nonzero(seen)),
        max_in_degree=max_degree,
        in_degree_histogram=without_empty_tail(histogram),
    )


def _verify_ids(store: Store) -> None:
    first, stop = store.vertex_range
    for name in store.names:
        if name.startswith("targets/"):
            ids = store.stored_array(name)
            if ids.size and not first <= int(ids.min()) <= int(ids.max()) < stop:
                raise _fail(name, f"ids in {first}..{stop - 1}", f"{ids.min()}..{ids.max()}")
            order = store.original_ids()[ids - first]
            falls = np.flatnonzero(order[1:] <= order[:-1])
            if falls.size:
                got = f"{order[falls[0]]} then {order[falls[0] + 1]} at element {falls[0]}"
                raise _fail(name, "every target once, ordered by original id", got)
        if name.startswith("target_positions/"):
            _verify_positions(store, name)
    if "original_ids" in store.names:
        ids = store.stored_array("original_ids")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < store.num_vertices:
            raise _fail("original_ids", f"ids in 0..{store.num_vertices - 1}", f"{ids.min()}..{ids.max()}")
        ordered = np.sort(ids)  # not bincount: that is 8 bytes per vertex of the whole graph, also for a shard
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            num_rows = np.count_nonzero(ordered == repeated[0])
            raise _fail("original_ids", "every id once", f"{repeated[0]} in {num_rows} rows")
    _verify_internal_ids(store)
    for name in store.names:
        if name.startswith(("pairs/", "pair_negatives/")):
            _verify_range(name, store.stored_array(name).reshape(-1), store.num_vertices)


def _verify_types(store: Store, types: GraphTypes, progress: Progress) -> None:
    """Check that the ends of every edge, every id and every target have the types that are recorded."""
    indptr = store.stored_array("indptr")
    kinds = store.stored_array("edge_type")
    ends = types.ends()
    counts = np.zeros(types.num_relations, np.int64)
    for piece in row_slices(store.num_edges, 64):
        kind = kinds[piece].astype(np.int64)
        outside = np.flatnonzero((kind < 0) | (kind >= types.num_relations))
        if outside.size:
            got = f"{kind[outside[0]]} as edge {piece.start + outside[0]}"
            raise _fail("edge_type", f"types in 0..{types.num_relations - 1}", got)
        dst = np.searchsorted(indptr, np.arange(piece.start, piece.stop), side="right") - 1
        found = np.stack([types.of_host(store.graph.indices[piece]), types.of_host(dst)])
        wrong = np.flatnonzero((found != ends[:, kind]).any(axis=0))
        if wrong.size:
            at = int(wrong[0])
            got = f"an edge from {types.vertex_types[found[0, at]]} to {types.vertex_types[found[1, at]]}"
            expected = f"ends of the types of {types.edge_types[kind[at]]} at edge {piece.start + at}"
            raise _fail("edge_type", expected, got)
        counts += np.bincount(kind, minlength=types.num_relations)
        progress("verify types", piece.stop, store.num_edges)
    for entry, count in zip(store.manifest.edge_types, counts.tolist(), strict=True):
        if entry.num_edges != count:
            expected = f"num_edges = {count} of edge type {entry.src}, {entry.name}, {entry.dst}"
            raise StoreError(explain("manifest.json", expected, entry.num_edges, "import the graph again"))
    _verify_vertex_types(store, types)


def _verify_vertex_types(store: Store, types: GraphTypes) -> None:
    offsets = np.asarray(types.offsets[1:-1])
    for start, part in _pieces(_original_ids(store)):
        found = np.searchsorted(offsets, part, side="right")
        wrong = np.flatnonzero(found != types.of_host(start + np.arange(part.size)))
        if wrong.size:
            at = int(wrong[0])
            expected = f"ids of the type of vertex {start + at}, as in type_boundaries"
            raise _fail("original_ids", expected, f"{part[at]}, of type {types.vertex_types[found[at]]}")
    for name in store.manifest.names("targets"):
        targets = store.stored_array(f"targets/{name}")
        others = np.flatnonzero(types.of_host(targets) != types.number(name.split("/")[0]))
        if others.size:
            got = f"{targets[others[0]]} as element {others[0]}, of another type"
            raise _fail(f"targets/{name}", f"vertices of type {name.split('/')[0]}", got)


def _verify_range(name: str, ids: Array, num_vertices: int) -> None:
    for start, part in _pieces(ids):
        outside = np.flatnonzero((part < 0) | (part >= num_vertices))
        if outside.size:
            got = f"{part[outside[0]]} as element {start + outside[0]}"
            raise _fail(name, f"ids in 0..{num_vertices - 1}", got)


def _verify_internal_ids(store: Store) -> None:
    """Check that internal ids invert the original ids, which have been checked.

    A shard has the original ids of its own vertices only: there, other vertices must have ids outside its range.
    """
    if "internal_ids" not in store.names:
        return
    internal = store.stored_array("internal_ids")
    _verify_range("internal_ids", internal, store.num_vertices)
    first, stop = store.vertex_range
    for start, original in _pieces(store.stored_array("original_ids")):
        found = internal[original]
        wrong = np.flatnonzero(found != first + start + np.arange(original.size))
        if wrong.size:
            at = int(wrong[0])
            expected = f"{first + start + at} for original id {original[at]}, as in original_ids"
            raise _fail("internal_ids", expected, found[at])
    num_held = sum(int(np.count_nonzero((part >= first) & (part < stop))) for _, part in _pieces(internal))
    if num_held != stop - first:
        expected = f"every id once: {stop - first} in {first}..{stop - 1}"
        raise _fail("internal_ids", expected, num_held)


def _verify_hotness(store: Store) -> None:
    """Check that inside a part the hottest vertices come first, because a cache is a prefix."""
    if "hotness" not in store.names:
        return
    hotness = store.stored_array("hotness")
    boundaries = store.part_boundaries if store.types is None else store.types.boundaries
    begins = np.asarray(boundaries) - store.vertex_range[0]
    for start, part in _pieces(hotness, overlap=1):
        rises = start + 1 + np.flatnonzero(part[1:] > part[:-1])
        wrong = rises[~np.isin(rises, begins)]
        if wrong.size:
            got = f"{hotness[wrong[0] - 1]} then {hotness[wrong[0]]} at element {wrong[0]}"
            raise _fail("hotness", "counts that decrease inside a part, for each type", got)
        if part.size and int(part.min()) < 0:
            raise _fail("hotness", "counts from 0", int(part.min()))


def _verify_scales(store: Store) -> None:
    for name in store.manifest.names("scales"):
        for start, part in _pieces(store.stored_array(f"scales/{name}")):
            bad = np.flatnonzero(~(np.isfinite(part) & (part >= 0)))
            if bad.size:
                raise _fail(f"scales/{name}", "finite numbers from 0", f"{part[bad[0]]} at element {start + bad[0]}")


def _verify_time_orders(store: Store) -> None:
    for name in store.manifest.names("time_order"):
        stored = store.stored_array(f"time_order/{name}")
        for edges, order in orders_by_time(store.graph, stored_times(store, name)):
            wrong = np.flatnonzero(stored[edges] != order)
            if wrong.size:
                at = int(wrong[0])
                expected = f"position {order[at]} for edge {edges.start + at}, by the times edges/{name}"
                raise _fail(f"time_order/{name}", expected, stored[edges][at])


def _verify_positions(store: Store, name: str) -> None:
    assert store.manifest.shard is not None
    places = store.stored_array(name)
    length = store.manifest.shard.num_targets[name.partition("/")[2]]
    outside = np.flatnonzero((places < 0) | (places >= length))
    falls = np.flatnonzero(places[1:] <= places[:-1])
    if outside.size or falls.size:
        at = int(outside[0] if outside.size else falls[0] + 1)
        got = f"{places[at]} as element {at}" + ("" if outside.size else f", after {places[at - 1]}")
        raise _fail(name, f"ascending positions in a list of {length}", got)


def _verify_listing(store: Store) -> None:
    listed = {file_of(name) for name in store.names}
    for file in store.path.rglob("*.npy"):
        if str(file.relative_to(store.path)) not in listed:
            fix = "remove the file, or restore manifest.json from a copy"
            raise StoreError(explain("manifest.json", "an entry for every array", f"no entry for {file.name}", fix))
    recorded = {"y": store.num_classes} if store.types is None else {}
    recorded |= {f"y/{entry.name}": entry.num_classes for entry in store.manifest.vertex_types}
    for name in recorded.keys() & store.arrays.keys():
        classes = count_classes(store.stored_array(name), store.dtype(name))
        whole = store.vertex_range == (0, store.num_vertices)
        if classes > recorded[name] or (whole and classes != recorded[name]):
            expected = f"num_classes = {classes}, from the labels {name}"
            raise StoreError(explain("manifest.json", expected, recorded[name], "import the graph again"))


def _verify_statistics(store: Store, found: Statistics) -> None:
    recorded = store.manifest.statistics
    for key in Statistics.model_fields:
        if getattr(recorded, key) != getattr(found, key):
            expected = f"statistics.{key} = {getattr(found, key)}, from the edges"
            raise StoreError(explain("manifest.json", expected, getattr(recorded, key), "import the graph again"))
