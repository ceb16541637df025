"""Hosts that build one store in a shared folder: one at a time where they must be, and all with the same orders.

``lock`` is held by the host that agrees or joins, ``0.lock`` and so on by the process that builds a host's shard.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from gsplit.errors import InputError, explain
from gsplit.files.atomic import locked, try_lock, write_atomic
from gsplit.untrusted import Expected, read_document

__all__ = ["agree", "building", "lock_hosts"]

_AGREED, _LOCK = "agreed.json", "lock"


def lock_hosts(folder: Path) -> AbstractContextManager[None]:
    """Keep the other hosts out. By a file: not every shared file system locks folders. Without locks, go on.

    Then two hosts may join at once. They do the same, in steps that are whole or not done; who fails tries again.
    """
    return locked(folder / _LOCK)


@contextmanager
def building(folder: Path, host: int) -> Iterator[None]:
    """Keep out a second process that would build the shard of the same host; without locks, go on."""
    with (folder / f"{host}.{_LOCK}").open("a") as file:
        if try_lock(file.fileno()) is False:
            got, fix = f"host {host} is being built by another process", "wait until it has ended"
            raise InputError(explain(folder.name, "one process per host", got, fix))
        yield


def agree(folder: Path, told: dict[str, object], host: int) -> None:
    """Write down what the first host was told; refuse one that was told something else.

    Unless nothing has been built of it and nobody builds: then the first command was a mistake. For a host that is
    ``building``.
    """
    fix = f"give all hosts the same command and input; to start anew, remove {folder.name}"
    with lock_hosts(folder):
        if not (folder / _AGREED).exists() or _is_unused(folder, host):
            write_atomic(folder / _AGREED, [json.dumps(told, indent=1).encode()])
            return
        found = read_document(folder / _AGREED, Expected("what the hosts agreed on", fix), follow=False)
    told = json.loads(json.dumps(told))
    for key in sorted(found.keys() | told.keys()):
        if found.get(key) != told.get(key):
            expected = f"{key} as on the other hosts, {str(found.get(key))[:80]}"
            raise InputError(explain(f"host {host}", expected, str(told.get(key))[:80], fix))


def _is_unused(folder: Path, host: int) -> bool:
    """Whether there is no shard, and no other host that builds one; not where that cannot be known, without locks."""
    if any(folder.glob("*.gsplit")):
        return False
    for path in set(folder.glob(f"*.{_LOCK}")) - {folder / f"{host}.{_LOCK}"}:
        with path.open("a") as file:
            if not try_lock(file.fileno()):
                return False
    return not (folder / "whole.json").exists()
