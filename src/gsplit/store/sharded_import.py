"""Import by several hosts: each builds the shard of its own range of vertices, through a shared folder.

``NAME.gsplit`` on N hosts becomes the shards ``NAME-0-of-N.gsplit`` and so on. They are what ``shard.write_shard`` cuts
from the store that one host would build: the same arrays byte for byte, and the same manifests except for times.

    .NAME.gsplit.hosts-N/       beside the output, during the import
      agreed.json               settings of the first host; those of the others must be equal
      0.gsplit, 1.gsplit, ...   shards that are complete except for values of the whole graph
      lock                      held while settings are compared and while shards are joined
      0.lock, 1.lock, ...       held by the process that builds a host's shard
      edges-*/                  edges of an input that is not sorted, for each host (``edge_exchange``)
      whole.json                values of the whole graph: fingerprint, number of classes, counts

A host writes its shard atomically, then checks whether all shards exist. If so it joins them: it writes ``whole.json``,
completes every manifest and renames the shards into place. No host needs another to run: hosts may run at the same time
or one after the other. Every step can be repeated: a host that died, even while joining, is started again with the same
command. The fingerprint is the SHA-256 of the whole arrays, so the host that joins reads all ``indptr`` and ``indices``
once.
"""

import hashlib
import json
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from gsplit.errors import InputError, StoreError, explain
from gsplit.files.atomic import write_atomic
from gsplit.files.untrusted import Expected, read_bounded
from gsplit.graph.ownership import Ownership, own_equally
from gsplit.progress import Progress, silent
from gsplit.store.build import check_source, step_settings, write_arrays
from gsplit.store.edge_exchange import EdgeExchange
from gsplit.store.files import raw_bytes
from gsplit.store.host_agreement import agree, building, lock_hosts
from gsplit.store.manifest import Manifest, ProvenanceStep, Shard, graph_fingerprint, new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.source import EdgeRules, GraphSource, VertexRange, row_slices
from gsplit.store.writer import StoreWriter, check_output, put_in_place

__all__ = ["ShardedImport", "build_shard", "hash_whole", "shard_paths"]

_NOT_YET = ""
"""Fingerprint of the whole graph in a shard that has not been joined."""
_WHOLE = "whole.json"
_MAX_WHOLE_BYTES = 16 << 20
_TRIES = 5


class _Whole(BaseModel):
    """Values of the whole graph, which follow from all shards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    fingerprint: str
    num_classes: int
    step: ProvenanceStep


@dataclass(frozen=True)
class ShardedImport:
    """State of an import by several hosts: ``missing`` are the hosts whose shards are not built yet.

    ``was_built``: this host's shard existed from an earlier run. ``shards`` exist once none is missing. ``counts``:
    counts of all hosts once none is missing, else those of this host if it has built its shard now.
    """

    vertex_range: tuple[int, int]
    was_built: bool
    missing: list[int]
    shards: list[Path]
    counts: dict[str, int]


def shard_paths(path: Path, num_hosts: int) -> list[Path]:
    """Paths of the shards of a store.

    >>> shard_paths(Path("g.gsplit"), 2)
    [PosixPath('g-0-of-2.gsplit'), PosixPath('g-1-of-2.gsplit')]
    """
    return [path.with_name(f"{path.stem}-{host}-of-{num_hosts}{path.suffix}") for host in range(num_hosts)]


def build_shard(
    source: GraphSource,
    path: str | Path,
    host: int,
    num_hosts: int,
    *,
    ranges: Sequence[int] | None = None,
    rules: EdgeRules | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> ShardedImport:
    """Build the shard of one of several hosts. If it is the last to be built, join all shards.

    ``ranges``: first vertex of each host, then the number of vertices; they become the parts of the store. None for
    equal ranges. With ``overwrite``, a shard from an earlier run is built again.
    """
    path = Path(path)
    rules = rules or EdgeRules()
    if num_hosts < 1 or not 0 <= host < num_hosts:
        got = f"host {host} of {num_hosts}"
        raise InputError(explain("host", "a number from 0 below the number of hosts", got, "count hosts from 0"))
    hosts = _cut(source, num_hosts, ranges)
    first, stop = hosts.range_of(host)
    held = VertexRange(first, stop, counts_dangling_edges=host == 0)
    check_source(source, held)
    outputs = shard_paths(path, num_hosts)
    folder = path.with_name(f".{path.name}.hosts-{num_hosts}")
    being_joined = (folder / _WHOLE).exists()  # by a host that died or is still running
    if not being_joined:
        check_output(outputs[host], overwrite=overwrite)
        folder.mkdir(exist_ok=True)
    parts = list(ranges) if ranges else [0, source.num_vertices]
    built = folder / f"{host}.gsplit"
    counts: dict[str, int] = {}
    with building(folder, host) as locks_work:
        settings = _shared_settings(source, rules, parts)
        agree(folder, settings, host)
        was_built = being_joined or (built.exists() and not overwrite)
        if not being_joined:
            _check_unchanged(source, folder, [n for n in range(num_hosts) if n != host or was_built])
        if not was_built:
            both_ends = rules.symmetrise
            if locks_work and EdgeExchange.pays(source, held, num_hosts, both_ends=both_ends):
                exchange = EdgeExchange(_exchange_folder(folder, settings), source, hosts, both_ends=both_ends)
                source = replace(source, edges_near=lambda *_: exchange.edges_of(host, progress))
            counts = _build(source, built, held, rules, parts, progress)
    missing = _join(folder, outputs, overwrite, progress)
    if not missing:
        counts = open_store(outputs[host]).manifest.provenance[0].counts
    return ShardedImport((first, stop), was_built, missing, outputs, counts)


def _cut(source: GraphSource, num_hosts: int, ranges: Sequence[int] | None) -> Ownership:
    if ranges is None:
        return own_equally(source.num_vertices, num_hosts)
    if len(ranges) != num_hosts + 1 or ranges[-1] != source.num_vertices:
        expected = f"{num_hosts + 1} numbers for {num_hosts} hosts, the last {source.num_vertices}, the vertices"
        fix = "give where each host's range begins, then the number of vertices"
        raise InputError(explain("ranges", expected, list(ranges), fix))
    return Ownership(tuple(ranges))


def _shared_settings(source: GraphSource, rules: EdgeRules, parts: list[int]) -> dict[str, object]:
    """Settings that must be equal on every host."""
    return {
        "num_vertices": source.num_vertices,
        "ranges": parts,
        "num_targets": {name: int(ids.size) for name, ids in source.targets.items()},
        "input": source.identity,
        **step_settings(source, rules),
    }


def _exchange_folder(folder: Path, settings: dict[str, object]) -> Path:
    """Where hosts with these settings leave edges for each other; those of a mistaken command are not taken."""
    return folder / f"edges-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}"


def _check_unchanged(source: GraphSource, folder: Path, hosts: Sequence[int]) -> None:
    """Refuse an input that changed after a host had read it: the shards would be of different graphs."""
    for host in hosts:
        manifest = folder / f"{host}.gsplit" / "manifest.json"
        with suppress(FileNotFoundError):  # not built, or renamed into place just now
            if manifest.stat().st_mtime < source.modified:
                got = f"an input that was written after host {host} was built"
                fix = f"build host {host} again with --overwrite; copies of the input must keep its time (cp -p)"
                raise InputError(explain("input", "files that did not change during the import", got, fix))


def _build(
    source: GraphSource, path: Path, held: VertexRange, rules: EdgeRules, parts: list[int], progress: Progress
) -> dict[str, int]:
    shard = Shard(whole_fingerprint=_NOT_YET, num_targets={name: int(ids.size) for name, ids in source.targets.items()})
    with StoreWriter(path, overwrite=True) as writer:
        manifest = write_arrays(writer, source, rules, held, progress, shard)
        writer.commit(manifest.model_copy(update={"part_boundaries": parts}))
    return manifest.provenance[0].counts


def _join(folder: Path, outputs: list[Path], overwrite: bool, progress: Progress) -> list[int]:
    """Complete the shards if all of them are built. Returns the hosts whose shards are missing.

    Every step can be repeated. On a file system without locks, hosts that join at once may remove each other's files;
    then they try again.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            return _join_once(folder, outputs, overwrite, progress)
        except (FileNotFoundError, StoreError):
            if not folder.exists():  # another host has joined in the meantime
                return []
            if not tries_left:
                raise
            time.sleep(random.uniform(0.0, 0.2))
    raise AssertionError("the last try returns or raises")


def _join_once(folder: Path, outputs: list[Path], overwrite: bool, progress: Progress) -> list[int]:
    with lock_hosts(folder):
        if not (folder / _WHOLE).exists():
            missing = [host for host in range(len(outputs)) if not (folder / f"{host}.gsplit").exists()]
            if not folder.exists():  # another host has joined while this one waited
                return []
            if missing:
                return missing
            shards = [open_store(folder / f"{host}.gsplit") for host in range(len(outputs))]
            write_atomic(folder / _WHOLE, [_find_whole(shards, progress).model_dump_json(indent=1).encode()])
        whole = _read_whole(folder / _WHOLE)
        for host, output in enumerate(outputs):
            built = folder / f"{host}.gsplit"
            if built.exists():  # not renamed by a host that died
                write_atomic(built / "manifest.json", [_completed(built, whole).as_json().encode()])
                put_in_place(built, output, overwrite=overwrite)
        done = folder.with_name(f"{folder.name}.done-{uuid4().hex}")
        folder.rename(done)  # first, so that no host writes into a folder that is being removed
    shutil.rmtree(done)
    return []


def _read_whole(path: Path) -> _Whole:
    expected = Expected("values of the whole graph", f"remove {path.parent.name} and import again")
    try:
        return _Whole.model_validate_json(read_bounded(path, _MAX_WHOLE_BYTES, expected, follow=False))
    except ValidationError as error:
        raise expected.refuse(path, error.errors(include_url=False)[0]["msg"]) from None


def _completed(built: Path, whole: _Whole) -> Manifest:
    """The manifest of a shard as if it had been cut from the whole store."""
    manifest = open_store(built).manifest
    assert manifest.shard is not None
    if manifest.shard.whole_fingerprint != _NOT_YET:
        return manifest
    first, stop = manifest.vertex_range
    cut = new_step("shard", {"first_vertex": first, "stop_vertex": stop}, {"edges_stored": manifest.num_edges})
    return manifest.model_copy(
        update={
            "num_classes": whole.num_classes,
            "shard": manifest.shard.model_copy(update={"whole_fingerprint": whole.fingerprint}),
            "provenance": [whole.step, cut],
        }
    )


def _find_whole(shards: list[Store], progress: Progress) -> _Whole:
    counts: dict[str, int] = {}
    for shard in shards:
        for name, count in shard.manifest.provenance[0].counts.items():
            counts[name] = counts.get(name, 0) + count
    return _Whole(
        fingerprint=hash_whole(shards, progress),
        num_classes=max(shard.num_classes for shard in shards),
        step=shards[0].manifest.provenance[0].model_copy(update={"counts": counts}),
    )


def hash_whole(shards: list[Store], progress: Progress) -> str:
    """Fingerprint of the graph whose consecutive ranges these shards hold."""
    indptr = hashlib.sha256(raw_bytes(np.zeros(1, np.int64)))
    indices = hashlib.sha256()
    num_edges = 0
    total = sum(shard.num_edges for shard in shards)
    for shard in shards:
        ends = shard.stored_array("indptr")[1:]
        sources = shard.stored_array("indices")
        for piece in row_slices(ends.size, ends.itemsize):
            indptr.update(raw_bytes(ends[piece] + num_edges))
        for piece in row_slices(sources.size, sources.itemsize):
            indices.update(raw_bytes(sources[piece]))
            progress("join shards", num_edges + piece.stop, total)
        num_edges += shard.num_edges
    checksums = {"indptr": indptr.hexdigest(), "indices": indices.hexdigest()}
    if all(shard.is_renumbered for shard in shards):
        checksums["original_ids"] = _hash_original_ids(shards)
    return graph_fingerprint(checksums)


def _hash_original_ids(shards: list[Store]) -> str:
    digest = hashlib.sha256()
    for shard in shards:
        ids = shard.stored_array("original_ids")
        for piece in row_slices(ids.size, ids.itemsize):
            digest.update(raw_bytes(ids[piece]))
    return digest.hexdigest()
