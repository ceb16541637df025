"""Telemetry as a trace file for Chrome and Perfetto (chrome://tracing, ui.perfetto.dev).

Each rank is a process, each thread a lane, each span an event, in microseconds since the first span of the run. Spans
of one thread are nested or disjoint, because they are blocks of a program.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from gsplit.errors import InputError, explain
from gsplit.report.reading import Run

__all__ = ["Event", "trace_events", "write_trace"]


class Event(TypedDict, total=False):
    """An event of the trace format: ``ph`` X for a span, M for the name of a process or thread."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, str | int]


def trace_events(runs: Sequence[Run]) -> list[Event]:
    """The events of all runs. Every rank of every run is a separate process."""
    return list(_events(runs))


def _events(runs: Sequence[Run]) -> Iterator[Event]:
    pid = 0
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        first_ns = min((span[2] for lines in run.steps.values() for line in lines for span in line.spans), default=0)
        for rank, lines in run.steps.items():
            threads = list(dict.fromkeys(span[1] for line in lines for span in line.spans))
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"{prefix}rank {rank}"}}
            for tid, thread in enumerate(threads):
                yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}}
            for line in lines:
                for stage, thread, start_ns, end_ns in line.spans:
                    yield {
                        "name": stage,
                        "ph": "X",
                        "pid": pid,
                        "tid": threads.index(thread),
                        "ts": (start_ns - first_ns) / 1000,
                        "dur": (end_ns - start_ns) / 1000,
                        "args": {"epoch": line.epoch, "step": line.step},
                    }
            pid += 1


def write_trace(runs: Sequence[Run], path: Path) -> int:
    """Write the trace file of the runs' newest steps; returns the number of spans."""
    events = trace_events(runs)
    num_spans = sum(event["ph"] == "X" for event in events)
    if not num_spans:
        fix = "train again with gsplit train --out RUN, and give RUN"
        got = f"no spans in {', '.join(run.name for run in runs)}" if runs else "no runs"
        raise InputError(explain("--trace", "a run whose telemetry has spans", got, fix))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return num_spans
