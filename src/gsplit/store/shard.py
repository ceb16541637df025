"""Cutting out a host's shard: the vertices that its ranks own, with their in-edges, rows and targets.

A shard serves split training and inference of the ranks it was cut for: ids stay those of the whole graph, and
targets keep their positions in the whole lists, so mini-batches are the same (law 1).
"""

from pathlib import Path

import numpy as np

from gsplit.errors import InputError, explain
from gsplit.ownership import own_parts
from gsplit.progress import Progress, silent
from gsplit.store.array_roles import role_of
from gsplit.store.files import Array
from gsplit.store.manifest import Manifest, Shard, new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.source import row_slices
from gsplit.store.verify import scan_edges, verify_store
from gsplit.store.writer import StoreWriter

__all__ = ["write_shard", "host_range"]


def host_range(store: Store, host: int, num_hosts: int, ranks_per_host: int = 1) -> tuple[int, int]:
    """First vertex that the ranks of a host own and one past their last; ranks are numbered host after host."""
    if num_hosts < 1 or ranks_per_host < 1 or not 0 <= host < num_hosts:
        got = f"host {host} of {num_hosts}, {ranks_per_host} rank(s) each"
        raise InputError(explain("host", "a number from 0 below the number of hosts", got, "count hosts from 0"))
    cuts = own_parts(store.part_boundaries, num_hosts * ranks_per_host, store.part_loads).boundaries
    return cuts[host * ranks_per_host], cuts[(host + 1) * ranks_per_host]


def write_shard(
    store: Store, path: str | Path, first: int, stop: int, *, overwrite: bool = False, progress: Progress = silent
) -> Store:
    """Write the vertices ``first .. stop - 1`` of a whole store as a shard and open it."""
    if store.manifest.shard is not None:
        raise InputError(explain(store.path, "a whole store", "a shard", "cut shards from the whole"))
    graph, path = store.graph.restrict(first, stop), Path(path)
    original = store.original_ids(first, stop) if "original_ids" in store.names else np.empty(0, np.int64)
    with StoreWriter(path, overwrite=overwrite) as writer:
        verify_store(store, progress)  # damage would get new checksums
        statistics = scan_edges(graph, np.asarray(original), progress)
        _copy(writer, store, "indptr", graph.indptr - graph.indptr[0], progress)
        for name in store.names:
            rows = role_of(name).rows
            if rows == "vertex":
                _copy(writer, store, name, store.stored_array(name)[first:stop], progress)
            elif rows == "edge":
                _copy(writer, store, name, store.stored_array(name)[graph.indptr[0] : graph.indptr[-1]], progress)
        _copy_names(writer, store, first, stop, progress)
        for name in store.manifest.names("targets"):
            targets = store.stored_array(f"targets/{name}")
            positions = np.flatnonzero((targets >= first) & (targets < stop))
            _copy(writer, store, f"targets/{name}", targets[positions], progress)
            writer.write(f"target_positions/{name}", "int64", positions)
        whole = store.manifest
        step = new_step("shard", {"first_vertex": first, "stop_vertex": stop}, {"edges_stored": graph.num_edges})
        writer.commit(
            Manifest(
                num_vertices=store.num_vertices,
                num_edges=graph.num_edges,
                vertex_range=(first, stop),
                part_boundaries=whole.part_boundaries,
                **whole.meanings,
                arrays=writer.finish_arrays(),
                statistics=statistics,
                part_statistics=whole.part_statistics,
                shard=Shard(
                    whole_fingerprint=store.fingerprint,
                    num_targets={name: store.stored_array(f"targets/{name}").size for name in whole.names("targets")},
                ),
                provenance=[*whole.provenance, step],
            )
        )
    return open_store(path)


def _copy(writer: StoreWriter, store: Store, name: str, rows: Array, progress: Progress) -> None:
    appender = writer.append(name, store.dtype(name), rows.shape[1:])
    for piece in row_slices(rows.shape[0], rows[:1].nbytes):
        appender.append(rows[piece])
        progress(f"copy {name}", piece.stop, rows.shape[0])


def _copy_names(writer: StoreWriter, store: Store, first: int, stop: int, progress: Progress) -> None:
    if "name_offsets" in store.names:
        offsets = store.stored_array("name_offsets")[first : stop + 1]
        _copy(writer, store, "name_offsets", offsets - offsets[0], progress)
        _copy(writer, store, "name_bytes", store.stored_array("name_bytes")[offsets[0] : offsets[-1]], progress)
