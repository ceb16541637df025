"""Writing the renumbered shards: every rank that of its new range; they appear together, at the end.

``NAME.gsplit`` by N ranks becomes ``NAME-0-of-N.gsplit`` and so on, equal byte for byte (but for times) to what
``shard.write_shard`` cuts from the store that one process would have renumbered by the same parts.

    .NAME.gsplit.ranks-N/       beside the output, on a file system that all ranks see, while it lasts
      0.gsplit, 1.gsplit, ...   shards that are complete but for the fingerprint of the whole

When all shards are complete and flushed, rank 0 reads ``indptr``, ``indices`` and ``original_ids`` of all of them for
the fingerprint. Then the shards are put in place. A run that dies before that leaves only the folder, which the next
run replaces; one that dies while shards are put in place leaves some of them, and is run again with ``overwrite``.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gsplit.distributed.comm.comm import Call, run_on_rank_zero
from gsplit.files.atomic import write_atomic
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.move import move_arrays
from gsplit.partitioning.sharded.renumber import NewOrder
from gsplit.progress import Progress, silent
from gsplit.store.manifest import Manifest, PartStatistics, ProvenanceStep, Shard, new_step
from gsplit.store.reader import open_store
from gsplit.store.sharded_import import hash_whole, shard_paths
from gsplit.store.verify import scan_edges
from gsplit.store.writer import StoreWriter, check_output, put_in_place

__all__ = ["new_shards", "write_new_shard"]

_NOT_YET = ""
"""The fingerprint of the whole graph in a shard while the others may be incomplete."""


@contextmanager
def new_shards(held: HeldShard, path: Path, *, overwrite: bool, progress: Progress = silent) -> Iterator[StoreWriter]:
    """The writer of this rank's new shard; all appear under their names when the block ends. A collective."""
    comm, outputs = held.comm, shard_paths(path, held.comm.size)
    folder = path.with_name(f".{path.name}.ranks-{comm.size}")

    def begin() -> None:
        for output in outputs:
            check_output(output, overwrite=overwrite)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that died
        folder.mkdir()

    run_on_rank_zero(comm, "begin shards", begin)
    built = [folder / f"{rank}.gsplit" for rank in range(comm.size)]
    try:
        with StoreWriter(built[comm.rank]) as writer:
            yield writer
    except BaseException:
        with suppress(OSError):  # not empty: the last rank to fail removes it
            folder.rmdir()
        raise
    comm.gather_text(Call("shards are complete", long_wait=True), "")
    found = hash_whole([open_store(shard) for shard in built], progress) if comm.rank == 0 else ""
    fingerprint = comm.gather_text(Call("fingerprint", long_wait=True), found)[0]
    _finish(built[comm.rank], fingerprint)
    comm.gather_text(Call("manifests are complete", long_wait=True), "")
    put_in_place(built[comm.rank], outputs[comm.rank], overwrite=overwrite)
    comm.gather_text(Call("shards are in place", long_wait=True), "")
    run_on_rank_zero(comm, "end shards", lambda: shutil.rmtree(folder))


def write_new_shard(
    writer: StoreWriter, order: NewOrder, statistics: PartStatistics, step: ProvenanceStep, progress: Progress = silent
) -> None:
    """Write the shard of this rank's new range, and commit. A collective."""
    graph = move_arrays(writer, order, progress)
    store, (first, stop) = order.held.store, order.ownership.range_of(order.held.comm.rank)
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


def _finish(built: Path, fingerprint: str) -> None:
    """Write the fingerprint of the whole into a shard's manifest."""
    manifest = open_store(built).manifest
    assert manifest.shard is not None
    shard = manifest.shard.model_copy(update={"whole_fingerprint": fingerprint})
    text = manifest.model_copy(update={"shard": shard}).model_dump_json(indent=1)
    write_atomic(built / "manifest.json", [text.encode()])
