"""All checks, one after another; one that fails is a line of its own, and the others go on."""

from collections.abc import Callable
from pathlib import Path

from gsplit.doctor.line import Diagnosis, Line
from gsplit.doctor.machine import (
    check_allocator,
    check_disk,
    check_limits,
    check_memory,
    check_threads,
    check_versions,
)
from gsplit.doctor.network import check_backends, check_collectives, check_interfaces
from gsplit.doctor.stores import check_store
from gsplit.progress import Progress, silent

__all__ = ["examine"]


def examine(store: Path | None, nproc: int, *, full: bool = False, progress: Progress = silent) -> Diagnosis:
    """Look at this machine, with ``nproc`` ranks in mind, and at a store."""
    place = Path() if store is None or not store.exists() else store
    checks: dict[str, Callable[[], Line | list[Line]]] = {
        "versions": check_versions,
        "backends": check_backends,
        "interfaces": check_interfaces,
        "memory": check_memory,
        "disk": lambda: check_disk(place.resolve()),
        "limits": check_limits,
        "threads": lambda: check_threads(nproc),
        "allocator": check_allocator,
        "ranks": lambda: check_collectives(nproc),
    }
    if store is not None:
        checks["store"] = lambda: check_store(store, nproc, full=full, progress=progress)
    lines: list[Line] = []
    for done, (name, check) in enumerate(checks.items()):
        progress("checks", done, len(checks))
        lines += _run(name, check)
    progress("checks", len(checks), len(checks))
    return Diagnosis(lines)


def _run(name: str, check: Callable[[], Line | list[Line]]) -> list[Line]:
    try:
        found = check()
    except Exception as error:  # whatever it is: a doctor does not die of it
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return [Line(name, "error", said, "report this, with the output of gsplit doctor --json")]
    return found if isinstance(found, list) else [found]
