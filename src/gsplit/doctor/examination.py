"""All checks of ``gsplit doctor``, one after another. A check that raises is an error, and the others continue."""

import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

from gsplit.doctor.finding import SEND_BACK, DoctorReport, Finding, amount
from gsplit.doctor.machine import (
    check_allocator,
    check_disk,
    check_limits,
    check_memory,
    check_threads,
    check_versions,
)
from gsplit.doctor.network import check_backends, check_collectives, check_interfaces
from gsplit.doctor.ranks import RunRanks, run_ranks
from gsplit.errors import GSplitError
from gsplit.files.host_limits import free_bytes
from gsplit.progress import Progress, silent
from gsplit.store.files import storage_dtype
from gsplit.store.reader import Store, open_store
from gsplit.store.statistics import not_finite_key
from gsplit.store.verify import verify_store

__all__ = ["check_store", "examine"]


def examine(
    store: Path | None,
    nproc: int,
    *,
    full: bool = False,
    device: str | None = None,
    run: RunRanks = run_ranks,
    progress: Progress = silent,
) -> DoctorReport:
    """Check this machine for ``nproc`` ranks, a store, and what a device computes."""
    place = Path() if store is None or not store.exists() else store
    checks: dict[str, Callable[[], Finding | list[Finding]]] = {
        "versions": lambda: check_versions(device),
        "backends": check_backends,
        "interfaces": check_interfaces,
        "memory": check_memory,
        "disk": lambda: check_disk(place.resolve()),
        "limits": check_limits,
        "threads": lambda: check_threads(nproc),
        "allocator": check_allocator,
        "ranks": lambda: check_collectives(nproc, run=run),
    }
    if store is not None:
        checks["store"] = lambda: check_store(store, nproc, full=full, progress=progress)
    if device is not None:
        from gsplit.doctor.device import device_checks
        from gsplit.doctor.training import training_checks  # models and PyG, only when used

        checks |= {**device_checks(device, nproc, run), **training_checks(device, nproc, run)}
    findings: list[Finding] = []
    for done, (name, check) in enumerate(checks.items()):
        progress("checks", done, len(checks))
        findings += _run_check(name, check)
    progress("checks", len(checks), len(checks))
    return DoctorReport(device, nproc, findings)


def _run_check(name: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    start = time.perf_counter()
    try:
        found = check()
    except Exception as error:  # of any kind: the report is still wanted
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        found = Finding(name, "error", last, SEND_BACK)
    seconds = round(time.perf_counter() - start, 1)
    return [replace(finding, seconds=seconds) for finding in (found if isinstance(found, list) else [found])]


def check_store(path: Path, nproc: int, *, full: bool, progress: Progress = silent) -> list[Finding]:
    """Open a store and check that it suits ``nproc`` ranks; ``full``: read and check all of it."""
    fix = "restore it from a copy, or import the graph again"
    try:
        store = open_store(path)
    except (GSplitError, OSError) as error:
        return [Finding("store", "error", str(error), fix)]
    num_bytes = sum(prod(each.shape) * storage_dtype(each.dtype).itemsize for each in store.manifest.arrays.values())
    size = f"{store.num_vertices:,} vertices, {store.num_edges:,} edges, {amount(num_bytes)}"
    findings = [Finding("store", "ok", size, figures={"num_bytes": float(num_bytes)})]
    findings += [*_check_values(store), _check_parts(store, nproc), _check_size(num_bytes)]
    if not full:
        text = "not read; sizes, headers and samples are right"
        return [*findings, Finding("checksums", "skipped", text, "--full reads all")]
    try:
        verify_store(store, progress)
    except GSplitError as error:
        return [*findings, Finding("checksums", "error", str(error), fix)]
    return [*findings, Finding("checksums", "ok", "every checksum, every id and every order is right")]


def _check_values(store: Store) -> list[Finding]:
    counts = store.manifest.provenance[0].counts if store.manifest.provenance else {}
    bad = {name: counts.get(not_finite_key(name)) or 0 for name in store.manifest.names("features")}
    return [
        Finding("features", "warning", f"{name}: {count:,} values are NaN or infinite", "clean them and import again")
        for name, count in bad.items()
        if count
    ]


def _check_parts(store: Store, nproc: int) -> Finding:
    parts = len(store.part_boundaries) - 1
    if nproc > 1 and parts == 1:
        fix = f"gsplit partition {store.where} OUT.gsplit --parts {nproc}"
        return Finding("parts", "warning", f"1 for {nproc} ranks: they exchange most rows", fix)
    if nproc > 1 and parts % nproc:
        fix = f"gsplit partition with --parts {nproc}, or another number of ranks"
        return Finding("parts", "warning", f"{parts} for {nproc} ranks, which share them unevenly", fix)
    return Finding("parts", "ok", f"{parts} for {nproc} rank(s)")


def _check_size(num_bytes: int) -> Finding:
    free = free_bytes()
    if num_bytes > free:
        fix = "expect reads from disk, or use --features-on-disk and --cache"
        return Finding("store in memory", "warning", f"{amount(num_bytes)}, and {amount(free)} are free", fix)
    return Finding("store in memory", "ok", f"{amount(num_bytes)} fit into {amount(free)}")
