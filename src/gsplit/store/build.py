"""From a graph source to a store: edges to CSC by external sort, vertex arrays copied in pieces.

Memory is that of the vertices (one byte each, and the ids an importer maps) plus a few buckets of edges,
whatever the number of edges. In what order the edges came leaves no trace in the store (law 1).
"""

from pathlib import Path

import numpy as np

from gsplit.errors import InputError, explain
from gsplit.free_memory import free_bytes
from gsplit.progress import Progress, silent
from gsplit.store.array_roles import role_of
from gsplit.store.edge_arrays import write_edges
from gsplit.store.manifest import MAX_VERTICES, Manifest, Shard, new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.source import EdgeRules, GraphSource, VertexRange
from gsplit.store.vertex_arrays import write_vertices
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
    path, rules = Path(path), rules or EdgeRules()
    check_source(source, source.whole)
    with StoreWriter(path, overwrite=overwrite) as writer:
        writer.commit(write_arrays(writer, source, rules, source.whole, progress))
    return open_store(path)


def write_arrays(
    writer: StoreWriter,
    source: GraphSource,
    rules: EdgeRules,
    held: VertexRange,
    progress: Progress,
    shard: Shard | None = None,
) -> Manifest:
    """Write all arrays of the vertices in ``held``; the manifest that describes them has still to be written."""
    statistics, counts = write_edges(writer, source, rules, held, progress)
    positions = shard is not None
    num_classes, vertex_counts = write_vertices(writer, source, held, progress, positions=positions)
    progress("flush to disk", 0, None)
    return Manifest(
        num_vertices=source.num_vertices,
        num_edges=counts["edges_stored"],
        vertex_range=(held.first, held.stop),
        part_boundaries=[0, source.num_vertices],
        num_classes=len(source.class_names) or num_classes,
        class_names=list(source.class_names),
        feature_columns=list(source.feature_columns),
        arrays=writer.finish_arrays(),
        statistics=statistics,
        shard=shard,
        provenance=[new_step(f"import {source.kind}", step_settings(source, rules), counts | vertex_counts)],
    )


def step_settings(source: GraphSource, rules: EdgeRules) -> dict[str, object]:
    """How a source is imported, as the provenance keeps it."""
    return {**source.settings, **vars(rules), **({"notes": list(source.notes)} if source.notes else {})}


def check_source(source: GraphSource, held: VertexRange) -> None:
    """Refuse a source that cannot become a store, before any work is done."""
    if not 0 <= source.num_vertices <= MAX_VERTICES:
        fix = "split the graph; this version takes no more"
        raise InputError(explain("num_vertices", f"0 to {MAX_VERTICES}", source.num_vertices, fix))
    free = free_bytes()
    if held.size > free:
        got, fix = f"{held.size} vertices", "use a larger machine, or correct the number of vertices"
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
