"""Training, measured: our strategies and peers in turn on real ranks, and ranks that are not there counted.

``run_study`` starts the ranks of every launch (``train_rank``), puts together what they write (``train_records``), and
hands on the document after every launch, so that hours of measuring are not lost to a failure at the end. What cannot
be run, a peer that is missing or a strategy that refuses a model, is a note.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gsplit.distributed.launch.launcher import launch
from gsplit.errors import CommError, InputError, explain
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit.partitioning.presample import Workload
from gsplit.progress import Progress, silent
from gsplit.store.reader import open_store
from gsplit_bench.counted_ranks import RanksCount, count_ranks
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.train_rank import RankResult
from gsplit_bench.train_records import TrainRecord, check_losses, combine_ranks
from gsplit_bench.train_study import Launch, Scenario, Study

__all__ = ["TrainReport", "run_study"]


@dataclass(frozen=True)
class TrainReport:
    """What came of a study so far."""

    preset: str | None
    command: str
    study: Study
    records: list[TrainRecord] = field(default_factory=list)
    counts: list[RanksCount] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def losses_equal(self) -> bool:
        """Whether all strategies trained the same steps, in every scenario."""
        return all(record.losses_equal is not False for record in self.records)

    def note(self, text: str) -> None:
        """Add something that a reader has to know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json`` and ``--out``."""
        return {
            "kind": "bench train",
            "preset": self.preset,
            "command": self.command,
            "commit": current_commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": installed_versions(),
            "machine": describe_machine(),
            "study": asdict(self.study),
            "losses_equal": self.losses_equal,
            "notes": self.notes,
            "failures": self.failures,
            "records": [record.as_dict() for record in self.records],
            "counts": [count.as_dict() for count in self.counts],
        }


def run_study(
    study: Study,
    graphs: Sequence[Path],
    *,
    preset: str | None = None,
    command: str = "",
    progress: Progress = silent,
    keep: Callable[[TrainReport], None] = lambda report: None,
) -> TrainReport:
    """Measure and count everything that a study says; ``keep`` is given the report whenever there is more of it."""
    report = TrainReport(preset, command, study)
    if len({graph.stem for graph in graphs}) < len(graphs):
        got, fix = ", ".join(map(str, graphs)), "rename stores: records go by their names"
        raise InputError(explain("GRAPH...", "stores with different names", got, fix))
    paths = [str(open_store(graph).path.resolve()) for graph in graphs]
    for path, each in product(paths, study.launches()):
        scenarios = study.scenarios([path], each)
        if scenarios:
            _launch(each, scenarios, report, progress)
            keep(report)
    for graph in graphs:
        _count(study, graph, report, progress)
        keep(report)
    return report


def _launch(each: Launch, scenarios: list[Scenario], report: TrainReport, progress: Progress) -> None:
    """Run the scenarios of a launch, of one graph, on real ranks, and add what came of them to the report."""
    what = f"{Path(scenarios[0].graph).stem}, {each}"
    with tempfile.TemporaryDirectory(prefix="gsplit-bench-") as name:
        folder = Path(name)
        (folder / "scenarios.json").write_text(json.dumps([asdict(scenario) for scenario in scenarios]))
        try:
            with _Watcher(folder / "progress", what, scenarios, progress):
                launch(
                    [sys.executable, "-P", "-m", "gsplit_bench.train_rank", name],
                    each.ranks,
                    tuned_allocator=each.allocator == "tuned",
                    threads=each.threads,
                )
        except CommError as error:
            report.failures.append(f"{what}: {error}")
        _add(scenarios, _read_ranks(folder, each.ranks), report)


def _read_ranks(folder: Path, ranks: int) -> list[list[RankResult]]:
    """What every rank has written; after a failure, whole lines that all of them have."""
    adapter = TypeAdapter(RankResult)
    found: list[list[RankResult]] = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found.append([adapter.validate_json(line) for line in lines if line.endswith("\n")])
    return [list(each) for each in zip(*found, strict=False)]


def _add(scenarios: Sequence[Scenario], results: list[list[RankResult]], report: TrainReport) -> None:
    for found in results:
        scenario, first = scenarios[found[0].scenario], found[0]
        if first.turns or first.epochs:
            report.records.append(combine_ranks(scenario, found))
        if first.note:
            report.note(f"{first.system}, {scenario.model}: {first.note}")
    report.records[:] = check_losses(report.records)


def _count(study: Study, graph: Path, report: TrainReport, progress: Progress) -> None:
    """Count the study's strategies on ranks that need not be there."""
    store = open_store(graph)
    for fanout, batch_size, ranks in product(study.fanouts, study.batch_sizes, study.counted_ranks):
        workload = Workload.of_store(store, study.targets, list(fanout), batch_size, study.seed)
        options = {"hidden": study.hidden[0], "steps": study.counted_steps}
        strategies = _countable(study.counted_strategies, len(fanout), report)
        try:
            report.counts.extend(count_ranks(store, workload, ranks, strategies, **options, progress=progress))
        except InputError as error:
            report.note(f"{store.path.stem}, {ranks} ranks counted: {error}")


def _countable(strategies: Sequence[str], num_layers: int, report: TrainReport) -> list[str]:
    """Those that there are for a number of layers; the others are notes."""
    found = []
    for name in strategies:
        try:
            found.append(parse_strategy(name, num_layers).name)
        except InputError as error:
            report.note(f"{name} is not counted: {error}")
    return found


class _Watcher:
    """Shows how far the ranks of a launch are, while this process waits for them."""

    def __init__(self, path: Path, what: str, scenarios: Sequence[Scenario], progress: Progress) -> None:
        self._path, self._what, self._progress = path, what, progress
        self._turns = [_num_turns(scenario) for scenario in scenarios]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.3):
            self._show()

    def _show(self) -> None:
        done = 0
        if self._path.exists() and len(words := self._path.read_text().split()) == 2:
            done = sum(self._turns[: int(words[0])]) + int(words[1])
        self._progress(self._what, done, sum(self._turns))

    def __enter__(self) -> None:
        self._show()
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:  # systems that were refused have had no turns
            self._progress(self._what, sum(self._turns), sum(self._turns))


def _num_turns(scenario: Scenario) -> int:
    return len(scenario.systems) * (scenario.epochs or scenario.repeats + 1)
