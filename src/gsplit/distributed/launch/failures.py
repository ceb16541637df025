"""Why a group of ranks failed: finds the rank that was the cause from how each ended and what it reported.

One failed rank makes the others fail too: their collectives lose a peer, or the launcher ends them. The cause is, in
this order: the earliest error that is not about a lost peer; a rank that was killed; one that ended without a report,
was stopped, or ended as if all were done; and only then an error about a lost peer.
"""

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gsplit.errors import (
    CommError,
    GSplitError,
    InputError,
    MissingDependencyError,
    RankFaultError,
    StoreError,
    UnavailableError,
    explain,
)

__all__ = ["Cause", "RankEnd", "Report", "find_cause", "parse_report"]

_LASTING = {kind.__name__ for kind in (InputError, StoreError, MissingDependencyError)}
_OURS = _LASTING | {kind.__name__ for kind in (GSplitError, UnavailableError, CommError, RankFaultError)}


@dataclass(frozen=True)
class Report:
    """An error that a rank reported: its type, message, time, and the innermost line of its traceback."""

    kind: str
    message: str
    time_s: float
    line: str = ""

    @property
    def about_peer(self) -> bool:
        """Whether it is mostly the consequence of another rank's end."""
        return self.kind == CommError.__name__

    def __str__(self) -> str:
        """Our own errors by their message; others by type, message and place."""
        if self.kind in _OURS:
            return self.message
        said = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"{said} ({self.line})" if self.line else said


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: the exit code, negative for a signal, and what it reported.

    ``on_request``: after the launcher had sent SIGTERM. ``joined``: it had joined the others before.
    """

    rank: int
    code: int
    report: Report | None = None
    on_request: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Cause:
    """The rank that failed first and why; ``lasting`` if it would fail in the same way again."""

    rank: int
    message: str
    lasting: bool = False


def parse_report(text: str) -> Report | None:
    """What stands in a TorchElastic error file; None if a rank wrote nothing, or was killed while it wrote."""
    try:
        report = json.loads(text)["message"]
        details = report["extraInfo"]
        kind, _, message = str(report["message"]).partition(": ")
        lines = re.findall(r'File "(.*)", line (\d+), in (.*)', str(details.get("py_callstack", "")))
        line = "{}:{}, in {}".format(*lines[-1]) if lines else ""
        return Report(kind, message, float(details.get("time_s", details["timestamp"])), line)
    except (ValueError, KeyError, TypeError):
        return None


def find_cause(ends: Sequence[RankEnd], stopped: Collection[int] = ()) -> Cause:
    """The cause, from all ends in the order in which the launcher saw them; ``stopped``: ranks that SIGSTOP held."""
    told = sorted((end.report.time_s, end.rank, end.report) for end in ends if end.report is not None)
    for _, rank, report in told:
        if not report.about_peer:
            text = str(report)
            said = text if text.startswith(f"rank {rank}: ") else f"rank {rank}: {text}"
            return Cause(rank, said, report.kind in _LASTING)
    missed = "".join(_place(rank, report) for _, rank, report in told[:1])
    by_itself = [end for end in ends if end.code and end.report is None and not end.on_request]
    for end in sorted(by_itself, key=lambda end: end.code >= 0 or end.code == -signal.SIGTERM):
        return _explain_end(end, missed)
    for rank in sorted(stopped):
        got = f"a process that a signal has stopped (SIGSTOP){missed}"
        return Cause(rank, explain(f"rank {rank}", "to go on", got, "let it go on (kill -CONT), or start again"))
    for end in sorted(ends, key=lambda end: end.joined):
        if end.code == 0:
            return _explain_early_end(end, missed)
    for _, rank, report in told:
        return Cause(rank, str(report))
    end = ends[0]  # the launcher ended all, and none reported why
    return Cause(end.rank, explain(f"rank {end.rank}", "to finish", _describe(end.code), "start again"))


def _describe(code: int) -> str:
    """How a process ended. Real-time signals have numbers only.

    >>> _describe(-9), _describe(-62), _describe(2)
    ('signal 9 (SIGKILL)', 'signal 62', 'exit code 2')
    """
    if code >= 0:
        return f"exit code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    return f"signal {-code}{names.get(-code, '')}"


def _place(rank: int, report: Report) -> str:
    """Where a rank was when it lost a peer: the collective that its error begins with."""
    where = report.message.removeprefix(f"rank {rank}: ").split(": expected")[0]
    return f"; rank {rank} missed it in: {where}"


def _explain_end(end: RankEnd, missed: str) -> Cause:
    how = _describe(end.code)
    fix = "see what the ranks printed above"
    if end.code == -signal.SIGKILL:
        fix = (
            "somebody killed it, or the kernel did when memory ran out (dmesg says so); then take a smaller mini-batch"
        )
    where = "" if end.joined else " before it had joined the others"
    return Cause(end.rank, explain(f"rank {end.rank}", "to finish", how + where + missed, fix))


def _explain_early_end(end: RankEnd, missed: str) -> Cause:
    where = "while the others went on" if end.joined else "before it had joined the others"
    fix = "look for what ends its program, such as sys.exit"
    return Cause(end.rank, explain(f"rank {end.rank}", "to work with the others", f"exit code 0 {where}{missed}", fix))
