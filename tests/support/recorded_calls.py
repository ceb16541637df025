"""The collectives that a rank joins, written down."""

from typing import Any

from gsplit.distributed.comm.comm import Call, Comm

__all__ = ["record_calls"]


def record_calls(comm: Comm) -> list[Call]:
    """A list to which every collective of a group is added from now on, in order."""
    calls: list[Call] = []
    levels = getattr(comm, "levels", None)
    for each in (comm,) if levels is None else (comm, levels.near, levels.far):
        inner: Any = getattr(each, "_group", None)  # shared memory leaves some collectives to its process group
        for found in (each, inner):
            if hasattr(found, "check_open"):
                _record(found, calls)
    return calls


def _record(comm: Any, calls: list[Call]) -> None:
    check = comm.check_open

    def check_and_record(call: Call) -> None:
        check(call)
        calls.append(call)

    comm.check_open = check_and_record
