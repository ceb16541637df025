"""What belongs to the vertices of a range, in a store that is being written: features, labels, targets, ids, names."""

from collections.abc import Callable

import numpy as np

from gsplit.errors import InputError, explain
from gsplit.progress import Progress
from gsplit.store.files import Array
from gsplit.store.source import GraphSource, RowChunk, RowStream, VertexRange
from gsplit.store.statistics import UNLABELLED, count_classes, count_not_finite, count_unlabelled, not_finite_key
from gsplit.store.writer import StoreWriter

__all__ = ["write_vertices"]


def write_vertices(
    writer: StoreWriter, source: GraphSource, held: VertexRange, progress: Progress, *, positions: bool
) -> tuple[int, dict[str, int]]:
    """Write the rows of ``held``; return the number of classes there, and counts of what is missing.

    With ``positions``, as shards have it, also where the targets stand in the whole lists.
    """
    counts, num_classes = {}, 0
    for name, rows in source.features.items():
        _, missing = _write_rows(writer, f"features/{name}", rows, source, held, count_not_finite, progress)
        counts[not_finite_key(name)] = missing
    for name, ids in source.targets.items():
        ordered = np.sort(ids)
        begin, end = (int(at) for at in np.searchsorted(ordered, [held.first, held.stop]))
        writer.write(f"targets/{name}", "int64", ordered[begin:end])
        if positions:
            writer.write(f"target_positions/{name}", "int64", np.arange(begin, end))
    if source.vertex_ids is not None:
        writer.write("vertex_ids", "int64", source.vertex_ids[held.first : held.stop])
    if source.vertex_names is not None:
        offsets, text = source.vertex_names[0][held.first : held.stop + 1], source.vertex_names[1]
        writer.write("name_offsets", "int64", offsets - offsets[0])
        writer.write("name_bytes", "uint8", text[offsets[0] : offsets[-1]])
    if source.y is not None:
        y, counts[UNLABELLED] = _write_rows(writer, "y", source.y, source, held, count_unlabelled, progress)
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
    """Write a per-vertex array; return it, and the sum of ``count`` over its pieces."""
    placed = writer.place(name, rows.type.dtype, (held.size, *rows.type.row_shape))
    done, total = 0, 0
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
