"""The collectives that a rank joins, written down."""

from typing import Any

from gsplit.distributed.comm.comm import Call, Comm

__all__ = ["record_calls"]


def record_calls(comm: Comm) -> list[Call]:
    """A list to which every collective of a group is added from now on, in order."""
    calls: list[Call] = []
    inner: Any = getattr(comm, "_group", None)  # shared memory leaves some collectives to its process group
    for each in (comm, inner):
        if hasattr(each, "check_open"):
            _record(each, calls)
    return calls


def _record(comm: Any, calls: list[Call]) -> None:
    check = comm.check_open

    def check_and_record(call: Call) -> None:
        check(call)
        calls.append(call)

    comm.check_open = check_and_record
