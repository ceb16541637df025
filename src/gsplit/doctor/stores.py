"""A store: whether it opens, whether it suits the ranks, and, if asked for, whether every byte is right."""

from pathlib import Path

from gsplit.doctor.line import Line, amount
from gsplit.errors import GSplitError
from gsplit.free_memory import free_bytes
from gsplit.progress import Progress, silent
from gsplit.store.reader import Store, open_store
from gsplit.store.statistics import not_finite_key
from gsplit.store.verify import verify_store

__all__ = ["check_store"]


def check_store(path: Path, nproc: int, *, full: bool, progress: Progress = silent) -> list[Line]:
    """Open a store and look at what a run on it would meet; ``full``: read and check all of it."""
    try:
        store = open_store(path)
    except (GSplitError, OSError) as error:
        return [Line("store", "error", str(error), "restore it from a copy, or import the graph again")]
    num_bytes = sum(store.stored_array(name).nbytes for name in store.names)
    said = f"{store.num_vertices:,} vertices, {store.num_edges:,} edges, {amount(num_bytes)}"
    lines = [Line("store", "ok", said, figures={"num_bytes": float(num_bytes)})]
    lines += [*_check_values(store), _check_parts(store, nproc), _check_size(num_bytes)]
    if not full:
        return [*lines, Line("checksums", "ok", "not read; sizes, headers and samples are right", "--full reads all")]
    try:
        verify_store(store, progress)
    except GSplitError as error:
        return [*lines, Line("checksums", "error", str(error), "restore it from a copy, or import the graph again")]
    return [*lines, Line("checksums", "ok", "every checksum, every id and every order is right")]


def _check_values(store: Store) -> list[Line]:
    counts = store.manifest.provenance[0].counts if store.manifest.provenance else {}
    bad = {name: counts.get(not_finite_key(name)) or 0 for name in store.manifest.names("features")}
    return [
        Line("features", "warning", f"{name}: {count:,} values are NaN or infinite", "clean them and import again")
        for name, count in bad.items()
        if count
    ]


def _check_parts(store: Store, nproc: int) -> Line:
    parts = len(store.part_boundaries) - 1
    if nproc > 1 and parts == 1:
        fix = f"gsplit partition {store.path} OUT --parts {nproc}"
        return Line("parts", "warning", f"1 for {nproc} ranks: they exchange most rows", fix)
    if nproc > 1 and parts % nproc:
        fix = f"gsplit partition with --parts {nproc}, or another number of ranks"
        return Line("parts", "warning", f"{parts} for {nproc} ranks, which share them unevenly", fix)
    return Line("parts", "ok", f"{parts} for {nproc} rank(s)")


def _check_size(num_bytes: int) -> Line:
    free = free_bytes()
    if num_bytes > free:
        fix = "expect reads from disk, or use --features-on-disk and --cache"
        return Line("store in memory", "warning", f"{amount(num_bytes)}, and {amount(free)} are free", fix)
    return Line("store in memory", "ok", f"{amount(num_bytes)} fit into {amount(free)}")
