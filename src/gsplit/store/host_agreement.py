"""Locks and agreed settings of hosts that build one store in a shared folder.

``lock`` is held by the host that compares settings or joins, ``0.lock`` and so on by the process that builds a shard.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from gsplit.errors import InputError, explain
from gsplit.files.atomic import locked, try_lock, write_atomic
from gsplit.files.untrusted import Expected, read_document

__all__ = ["agree", "building", "lock_hosts"]

_AGREED, _LOCK = "agreed.json", "lock"
_PATIENCE_S = 2.0  # another host takes the lock for a moment, to see whether it is held


def lock_hosts(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder against the other hosts, by a file: not every shared file system can lock folders.

    Without file locks, go on. Then two hosts may join at once: they take the same atomic steps, and a failed one is
    tried again.
    """
    return locked(folder / _LOCK)


@contextmanager
def building(folder: Path, host: int) -> Iterator[bool]:
    """Refuse a second process that builds the shard of the same host; yields whether the file system has locks."""
    with (folder / f"{host}.{_LOCK}").open("a") as file:
        deadline = time.monotonic() + _PATIENCE_S
        while (is_locked := try_lock(file.fileno())) is False and time.monotonic() < deadline:
            time.sleep(0.05)
        if is_locked is False:
            got, fix = f"host {host} is being built by another process", "wait until it has ended"
            raise InputError(explain(folder.name, "one process per host", got, fix))
        yield bool(is_locked)


def agree(folder: Path, settings: dict[str, object], host: int) -> None:
    """Record the settings of the first host; refuse a host with other settings.

    If no shard exists and no other host builds one, the settings are replaced: the first command was a mistake. The
    caller holds ``building``.
    """
    fix = f"give all hosts the same command and input; to start again, remove {folder.name}"
    with lock_hosts(folder):
        if not (folder / _AGREED).exists() or _is_unused(folder, host):
            write_atomic(folder / _AGREED, [json.dumps(settings, indent=1).encode()])
            return
        found = read_document(folder / _AGREED, Expected("the settings of the other hosts", fix), follow=False)
    settings = json.loads(json.dumps(settings))
    for key in sorted(found.keys() | settings.keys()):
        if found.get(key) != settings.get(key):
            expected = f"{key} as on the other hosts, {str(found.get(key))[:80]}"
            raise InputError(explain(f"host {host}", expected, str(settings.get(key))[:80], fix))


def _is_unused(folder: Path, host: int) -> bool:
    """Whether there is no shard and no other host builds one. False without file locks, where that is not known."""
    if any(folder.glob("*.gsplit")):
        return False
    for path in set(folder.glob(f"*.{_LOCK}")) - {folder / f"{host}.{_LOCK}"}:
        with path.open("a") as file:
            if not try_lock(file.fileno()):
                return False
    return not (folder / "whole.json").exists()
