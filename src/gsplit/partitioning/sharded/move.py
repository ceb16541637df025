"""Moving what is stored to the ranks that will own it, straight to its place in their new shards.

Everyone goes through what it holds, front to back in pieces of bounded size, and sends each row with its place in the
new array of its new owner, who writes it there: into a memory map, in any order. The ranks are there at the same time,
or they could not have presampled together; so nothing passes through files but the result.
"""

from collections.abc import Iterator

import numpy as np

from gsplit.array_types import Array, Ids
from gsplit.distributed.comm.comm import Call
from gsplit.graph.graph import Graph
from gsplit.partitioning.relabel import places_of, run_pieces
from gsplit.partitioning.sharded.exchange import largest_of, send_rows
from gsplit.partitioning.sharded.renumber import NewOrder
from gsplit.progress import Progress, silent
from gsplit.store.manifest import role_of
from gsplit.store.source import row_slices
from gsplit.store.writer import StoreWriter

__all__ = ["move_arrays"]

_PLACE_BYTES = 8


def move_arrays(writer: StoreWriter, order: NewOrder, progress: Progress = silent) -> Graph:
    """Fill the shard of this rank's new range with all arrays; returns its graph. A collective."""
    store = order.held.store
    edge_values = [f"edges/{name}" for name in store.manifest.names("edges")]
    indptr, indices = _move_runs(writer, order, "indptr", ["indices", *edge_values], progress)
    for name in store.names:
        if role_of(name).rows == "vertex":
            _move_rows(writer, order, name, progress)
    if "name_offsets" in store.names:
        _move_runs(writer, order, "name_offsets", ["name_bytes"], progress)
    for name in store.manifest.names("targets"):
        _move_targets(writer, order, name)
    writer.write("original_ids", "int64", order.old_ids)
    writer.write("hotness", "int64", order.hotness)
    return Graph(indptr, indices, store.num_vertices, order.first)


def _move_rows(writer: StoreWriter, order: NewOrder, name: str, progress: Progress) -> None:
    store, owners = order.held.store, order.owners()
    rows = store.stored_array(name)
    placed = writer.place(name, store.dtype(name), (order.old_ids.size, *rows.shape[1:]))
    for turn, piece in enumerate(_together(order, row_slices(rows.shape[0], rows[:1].nbytes + _PLACE_BYTES))):
        _send(
            order, Call(f"move {name}", turn), owners[piece], order.new_ids[piece], order.first, [(rows[piece], placed)]
        )
        progress(f"move {name}", piece.stop, rows.shape[0])


def _move_runs(
    writer: StoreWriter, order: NewOrder, offsets_name: str, names: list[str], progress: Progress
) -> tuple[Ids, Array]:
    """Runs of elements, one per vertex: in-edges with their values, or the letters of names.

    Returns the new offsets and the first of the arrays.
    """
    store, owners = order.held.store, order.owners()
    offsets, arrays = store.stored_array(offsets_name), [store.stored_array(name) for name in names]
    lengths = np.diff(offsets)
    new_lengths = np.zeros(order.old_ids.size, np.int64)
    call = Call(f"move {offsets_name}")
    _send(order, call, owners, order.new_ids, order.first, [(lengths, new_lengths)])
    new_offsets = np.concatenate([[0], np.cumsum(new_lengths)])
    writer.write(offsets_name, "int64", new_offsets)
    begins = order.give_back(call, new_offsets[:-1])
    shapes = [(int(new_offsets[-1]), *array.shape[1:]) for array in arrays]
    placed = [writer.place(name, store.dtype(name), shape) for name, shape in zip(names, shapes, strict=True)]
    element_bytes = _PLACE_BYTES + max(array[:1].nbytes for array in arrays)
    for turn, piece in enumerate(_together(order, run_pieces(lengths, element_bytes))):
        runs = np.arange(piece.start, piece.stop)
        taken = places_of(offsets, runs)
        places = np.repeat(begins[piece] - offsets[runs], lengths[piece]) + taken
        call, values = Call(f"move {names[0]}", turn), [array[taken] for array in arrays]
        if names[0] == "indices":
            values[0] = order.look_up(call, values[0].astype(np.int64)).astype(values[0].dtype)
        _send(order, call, np.repeat(owners[piece], lengths[piece]), places, 0, list(zip(values, placed, strict=True)))
        progress(f"move {names[0]}", piece.stop, lengths.size)
    return new_offsets, placed[0]


def _move_targets(writer: StoreWriter, order: NewOrder, name: str) -> None:
    held = order.held
    ids, positions, _ = held.store.stored_targets(name)
    moved = np.asarray(ids) - held.first
    rows = np.stack([order.new_ids[moved], np.arange(ids.size) if positions is None else positions], axis=1)
    found = np.concatenate(send_rows(held.comm, Call(f"move targets/{name}"), rows, order.owners()[moved]))
    found = found[np.argsort(found[:, 1])]
    writer.write(f"targets/{name}", "int64", found[:, 0])
    writer.write(f"target_positions/{name}", "int64", found[:, 1])


def _together(order: NewOrder, pieces: Iterator[slice]) -> Iterator[slice]:
    """This rank's pieces, then empty ones until the others have had theirs. A collective."""
    mine = list(pieces)
    rounds = largest_of(order.held.comm, Call("pieces"), len(mine))
    end = mine[-1].stop if mine else 0
    return iter(mine + [slice(end, end)] * (rounds - len(mine)))


def _send(order: NewOrder, call: Call, owners: Ids, places: Ids, first: int, values: list[tuple[Array, Array]]) -> None:
    """Send values to their places in arrays of their new owners, ``first`` being the place that is row 0 there."""
    comm = order.held.comm
    rows = np.concatenate(send_rows(comm, call, places, owners)) - first
    for sent, placed in values:
        placed[rows] = np.concatenate(send_rows(comm, call, sent, owners))
