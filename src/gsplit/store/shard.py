"""Cut a host's shard from a store: the vertices that its ranks own, with their in-edges, rows and targets.

A shard is enough for split training and inference on the ranks it was cut for. Ids are those of the whole graph, and
targets keep their positions in the whole lists, so mini-batches do not change (law 1).
"""

from pathlib import Path

import numpy as np

from gsplit.errors import InputError, explain
from gsplit.graph.ownership import own_parts
from gsplit.progress import Progress, silent
from gsplit.store.manifest import Manifest, Shard, new_step, role_of
from gsplit.store.reader import Store, open_store
from gsplit.store.verify import scan_edges, verify_store
from gsplit.store.writer import StoreWriter

__all__ = ["write_shard", "host_range"]


def host_range(store: Store, host: int, num_hosts: int, ranks_per_host: int = 1) -> tuple[int, int]:
    """First vertex that the ranks of a host own and one past their last. Ranks are numbered host after host."""
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
        low, high = store.vertex_range
        got = f"a shard with vertices {low}..{high - 1}"
        raise InputError(explain(store.where, "a whole store", got, "cut shards from the whole"))
    if store.types is not None:
        got = f"one with the vertex types {', '.join(store.types.vertex_types)}"
        fix = "train from the whole store on a file system that all hosts see"
        raise InputError(explain(store.where, "a homogeneous graph: shards of others are not built", got, fix))
    graph = store.graph.restrict(first, stop)
    edges = slice(int(graph.indptr[0]), int(graph.indptr[-1]))
    original = store.original_ids(first, stop) if store.is_renumbered else np.empty(0, np.int64)
    whole = store.manifest
    with StoreWriter(Path(path), overwrite=overwrite) as writer:
        verify_store(store, progress)  # damage would get new checksums
        statistics = scan_edges(graph, np.asarray(original), progress)
        writer.copy("indptr", "int64", graph.indptr - graph.indptr[0], progress)
        for name in store.names:
            role = role_of(name)
            if role.rows in ("vertex", "edge") or role.is_whole:
                held = {"vertex": slice(first, stop), "edge": edges}.get(role.rows, slice(None))
                writer.copy(name, store.dtype(name), store.stored_array(name)[held], progress)
        if "name_offsets" in store.names:
            offsets = store.stored_array("name_offsets")[first : stop + 1]
            writer.copy("name_offsets", "int64", offsets - offsets[0], progress)
            writer.copy("name_bytes", "uint8", store.stored_array("name_bytes")[offsets[0] : offsets[-1]], progress)
        for name in whole.names("targets"):
            targets = store.stored_array(f"targets/{name}")
            positions = np.flatnonzero((targets >= first) & (targets < stop))
            writer.copy(f"targets/{name}", "int64", targets[positions], progress)
            writer.write(f"target_positions/{name}", "int64", positions)
        step = new_step("shard", {"first_vertex": first, "stop_vertex": stop}, {"edges_stored": graph.num_edges})
        writer.commit(
            Manifest(
                num_vertices=store.num_vertices,
                num_edges=graph.num_edges,
                vertex_range=(first, stop),
                part_boundaries=whole.part_boundaries,
                **whole.label_metadata,
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
