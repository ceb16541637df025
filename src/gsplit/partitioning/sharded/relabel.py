"""Renumbering and writing shards by ranks, each of which holds the old ids of its own vertices only.

New ids: parts are assigned to the ranks in runs. The part and hotness of every vertex are sent to its new owner, which
sorts its vertices as ``partitioning.relabel`` does, hottest first inside a part, and sends the new ids back. The new id
of another rank's vertex is requested from its old owner.

Moving: each rank reads what it holds front to back, in pieces of bounded size, and sends each row with its place in the
new array to its new owner, which writes it there, into a memory map. Nothing passes through files but the result.

Writing: ``NAME.gsplit`` by N ranks becomes ``NAME-0-of-N.gsplit`` and so on, equal byte for byte (except for times) to
what ``shard.write_shard`` cuts from the store that one process would have renumbered by the same parts.

    .NAME.gsplit.ranks-N/       beside the output, on a file system that all ranks see, until the end
      0.gsplit, 1.gsplit, ...   shards that are complete except for the fingerprint of the whole graph

When all shards are complete and flushed, rank 0 reads ``indptr``, ``indices`` and ``original_ids`` of all of them for
the fingerprint. Then the shards are put in place. A run that fails before that leaves only the folder, which the next
run replaces; one that fails while shards are put in place leaves some of them, and is run again with ``overwrite``.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.distributed.comm.comm import Call, run_on_rank_zero
from gsplit.errors import StoreError, explain
from gsplit.files.atomic import locked, try_lock, write_atomic
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership, lightest_runs, own_parts
from gsplit.partitioning.relabel import order_vertices, places_of, run_pieces
from gsplit.partitioning.sharded.held_shard import HeldShard, add_up, gather_all, largest_of, owners_of, send_rows
from gsplit.progress import Progress, silent
from gsplit.store.manifest import Manifest, PartStatistics, ProvenanceStep, Shard, index_type, new_step, role_of
from gsplit.store.reader import open_store
from gsplit.store.sharded_import import hash_whole, shard_paths
from gsplit.store.source import row_slices
from gsplit.store.verify import scan_edges
from gsplit.store.writer import LOCK, StoreWriter, check_output, put_in_place

__all__ = ["NewOrder", "find_new_order", "new_shards", "write_new_shard"]

_PLACE_BYTES = 8
_NOT_YET = ""
"""The fingerprint of the whole graph in a shard while the others may be incomplete."""


@dataclass(frozen=True)
class NewOrder:
    """The new ids of the vertices a rank holds, and the vertices it will own: their old ids and hotness, in order."""

    held: HeldShard
    new_ids: Ids
    ownership: Ownership
    part_boundaries: list[int]
    old_ids: Ids
    hotness: Ids

    @property
    def first(self) -> int:
        """The first new id of this rank."""
        return self.ownership.range_of(self.held.comm.rank)[0]

    def owners(self) -> Ids:
        """The new owner of every vertex held."""
        return owners_of(self.ownership, self.new_ids)

    def send_back(self, call: Call, values: Array) -> Array:
        """Send a value of each new vertex to its old owner; return those of the vertices held. A collective."""
        old_owner = owners_of(self.held.ownership, self.old_ids)
        rows = np.stack([self.old_ids, values], axis=1)
        found = np.concatenate(send_rows(self.held.comm, call, rows, old_owner))
        mine = np.empty(self.held.num_held, values.dtype)
        mine[found[:, 0] - self.held.first] = found[:, 1]
        return mine

    def look_up(self, call: Call, ids: Ids) -> Ids:
        """The new ids of vertices of any rank. A collective."""
        wanted, places = np.unique(ids, return_inverse=True)
        comm = self.held.comm
        owners = owners_of(self.held.ownership, wanted)
        asked = send_rows(comm, call, wanted, owners)
        answers = self.new_ids[np.concatenate(asked) - self.held.first]
        askers = np.repeat(np.arange(comm.size), [ids.size for ids in asked])
        return np.concatenate(send_rows(comm, call, answers, askers))[places]  # owners' ranges ascend, as ``wanted``


def find_new_order(
    held: HeldShard, parts: npt.NDArray[np.int32], hotness: npt.NDArray[np.uint32], loads: list[int]
) -> NewOrder:
    """Renumber by parts. A collective; ``parts`` and ``hotness`` are of the vertices held, ``loads`` of all parts."""
    comm = held.comm
    num_parts = len(loads)
    sizes = add_up(comm, Call("sizes of parts"), np.bincount(parts, minlength=num_parts))
    boundaries = [0, *np.cumsum(sizes).tolist()]
    ownership = own_parts(boundaries, comm.size, loads)
    owner_of_part = np.searchsorted(lightest_runs(loads, comm.size), np.arange(num_parts), side="right") - 1
    ids = np.arange(held.first, held.first + held.num_held)
    rows = np.stack([parts.astype(np.int64), hotness.astype(np.int64), ids], axis=1)
    arrived = np.concatenate(send_rows(comm, Call("vertices"), rows, owner_of_part[parts]))
    mine = arrived[order_vertices(arrived[:, 0], arrived[:, 1])]
    order = NewOrder(held, np.empty(0, np.int64), ownership, boundaries, mine[:, 2].copy(), mine[:, 1].copy())
    new_ids = order.send_back(Call("new ids"), order.first + np.arange(mine.shape[0]))
    return NewOrder(held, new_ids, ownership, boundaries, order.old_ids, order.hotness)


def _move_arrays(writer: StoreWriter, order: NewOrder, progress: Progress = silent) -> Graph:
    """Fill the shard of this rank's new range with all arrays; returns its graph. A collective."""
    store = order.held.store
    edge_values = [name for name in store.names if role_of(name).rows == "edge" and name != "indices"]
    indptr, indices = _move_runs(writer, order, "indptr", ["indices", *edge_values], progress)
    for name in store.names:
        role = role_of(name)
        if role.rows == "vertex":
            _move_rows(writer, order, name, progress)
        elif role.is_whole:  # pairs, by original ids
            writer.copy(name, store.dtype(name), store.stored_array(name), progress)
    if "name_offsets" in store.names:
        _move_runs(writer, order, "name_offsets", ["name_bytes"], progress)
    for name in store.manifest.names("targets"):
        _move_targets(writer, order, name)
    writer.write("original_ids", "int64", order.old_ids)
    new_ids = writer.place("internal_ids", index_type(store.num_vertices), (store.num_vertices,))
    gather_all(order.held, "internal_ids", order.new_ids, new_ids, progress)
    writer.write("hotness", "int64", order.hotness)
    return Graph(indptr, indices, store.num_vertices, order.first)


def _move_rows(writer: StoreWriter, order: NewOrder, name: str, progress: Progress) -> None:
    store = order.held.store
    owners = order.owners()
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
    store = order.held.store
    owners = order.owners()
    offsets = store.stored_array(offsets_name)
    arrays = [store.stored_array(name) for name in names]
    lengths = np.diff(offsets)
    new_lengths = np.zeros(order.old_ids.size, np.int64)
    call = Call(f"move {offsets_name}")
    _send(order, call, owners, order.new_ids, order.first, [(lengths, new_lengths)])
    new_offsets = np.concatenate([[0], np.cumsum(new_lengths)])
    writer.write(offsets_name, "int64", new_offsets)
    begins = order.send_back(call, new_offsets[:-1])
    shapes = [(int(new_offsets[-1]), *array.shape[1:]) for array in arrays]
    placed = [writer.place(name, store.dtype(name), shape) for name, shape in zip(names, shapes, strict=True)]
    element_bytes = _PLACE_BYTES + max(array[:1].nbytes for array in arrays)
    for turn, piece in enumerate(_together(order, run_pieces(lengths, element_bytes))):
        runs = np.arange(piece.start, piece.stop)
        taken = places_of(offsets, runs)
        places = np.repeat(begins[piece] - offsets[runs], lengths[piece]) + taken
        call = Call(f"move {names[0]}", turn)
        values = [array[taken] for array in arrays]
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


@contextmanager
def new_shards(held: HeldShard, path: Path, *, overwrite: bool, progress: Progress = silent) -> Iterator[StoreWriter]:
    """The writer of this rank's new shard; all appear under their names when the block ends. A collective."""
    comm = held.comm
    outputs = shard_paths(path, held.comm.size)
    folder = path.with_name(f".{path.name}.ranks-{comm.size}")
    with ExitStack() as locks:

        def begin() -> None:
            for output in outputs:
                check_output(output, overwrite=overwrite)
            locks.enter_context(_made_anew(folder))

        run_on_rank_zero(comm, "begin shards", begin)
        built = [folder / f"{rank}.gsplit" for rank in range(comm.size)]
        try:
            with StoreWriter(built[comm.rank]) as writer:
                yield writer
        except BaseException:
            locks.close()
            with suppress(OSError):  # not empty: the last rank to fail removes it
                folder.rmdir()
            raise
        comm.gather_text(Call("shards are complete", long_wait=True), "")
        found = hash_whole([open_store(shard) for shard in built], progress) if comm.rank == 0 else ""
        fingerprint = comm.gather_text(Call("fingerprint", long_wait=True), found)[0]
        _write_fingerprint(built[comm.rank], fingerprint)
        comm.gather_text(Call("manifests are complete", long_wait=True), "")
        put_in_place(built[comm.rank], outputs[comm.rank], overwrite=overwrite)
        comm.gather_text(Call("shards are in place", long_wait=True), "")
    comm.gather_text(Call("end shards", long_wait=True), "")


@contextmanager
def _made_anew(folder: Path) -> Iterator[None]:
    """An empty folder in place of that of a run that died; refused if its run lives, which holds a lock in it."""
    lock = folder / LOCK
    with locked(folder.parent):
        with suppress(FileNotFoundError), lock.open("r+") as file:
            if try_lock(file.fileno()) is False:
                fix = "wait until it has ended, or choose another name"
                raise StoreError(explain(folder, "one partitioning of this name", "another that is under way", fix))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        held = lock.open("w")
        try_lock(held.fileno())
    with held:
        yield
        with locked(folder.parent):  # nobody begins in between
            lock.unlink(missing_ok=True)
            with suppress(OSError):  # other ranks write there
                folder.rmdir()


def write_new_shard(
    writer: StoreWriter, order: NewOrder, statistics: PartStatistics, step: ProvenanceStep, progress: Progress = silent
) -> None:
    """Write the shard of this rank's new range, and commit. A collective."""
    graph = _move_arrays(writer, order, progress)
    store = order.held.store
    (first, stop) = order.ownership.range_of(order.held.comm.rank)
    progress("flush to disk", 0, None)
    arrays = writer.finish_arrays()
    whole = store.manifest
    made_by = whole.provenance if whole.shard is None else whole.provenance[:-1]  # the last step cut the shard
    cut = new_step("shard", {"first_vertex": first, "stop_vertex": stop}, {"edges_stored": graph.num_edges})
    lengths = {name: store.stored_targets(name)[2] for name in whole.names("targets")}
    writer.commit(
        Manifest(
            num_vertices=store.num_vertices,
            num_edges=graph.num_edges,
            vertex_range=(first, stop),
            part_boundaries=order.part_boundaries,
            **whole.label_metadata,
            arrays=arrays,
            statistics=scan_edges(graph, order.old_ids, progress),
            part_statistics=statistics,
            shard=Shard(whole_fingerprint=_NOT_YET, num_targets=lengths),
            provenance=[*made_by, step, cut],
        )
    )


def _write_fingerprint(built: Path, fingerprint: str) -> None:
    """Write the fingerprint of the whole into a shard's manifest."""
    manifest = open_store(built).manifest
    assert manifest.shard is not None
    shard = manifest.shard.model_copy(update={"whole_fingerprint": fingerprint})
    text = manifest.model_copy(update={"shard": shard}).as_json()
    write_atomic(built / "manifest.json", [text.encode()])
