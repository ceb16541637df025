"""Records of a study: what the ranks saw, put together into one record per scenario and system.

Times are per step: the slowest rank's wall time, CPU seconds of all ranks, medians over the turns with the quartiles,
the smallest and the largest. Amounts are per step and over all ranks, collectives those of one rank. All strategies train the same steps
from the same weights, on any number of ranks, so their losses must agree to rounding; ``check_losses`` says whether
they do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from gsplit.store.reader import open_store
from gsplit_bench.train_rank import RankResult, Turn
from gsplit_bench.train_study import Scenario, parse_system
from gsplit_bench.train_systems import is_ours

__all__ = ["LOSS_TOLERANCE", "Spread", "TrainRecord", "check_losses", "combine_ranks", "group_stages", "objective_of"]

LOSS_TOLERANCE = 1e-4
"""Largest difference of two losses, relative to them: float32, added up in other orders over some dozens of steps."""
_GROUPS = {
    "sample": ("sample", "split", "exchange_ids"),
    "load": ("load", "exchange_features"),
    "forward": ("forward", "shuffle"),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
}
_STAGES = {"load_features": "load", "gather_features": "load", "copy": "load"}


@dataclass(frozen=True)
class Spread:
    """A median and what it lies between: the smallest and the largest, and the quartiles."""

    median: float
    low: float
    high: float
    first_quartile: float
    third_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of some measurements.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.0, high=3.0, first_quartile=1.5, third_quartile=2.5)
        """
        first, third = np.quantile(values, (0.25, 0.75))
        return cls(median(values), min(values), max(values), float(first), float(third))


@dataclass(frozen=True)
class TrainRecord:
    """One system in one scenario.

    ``wait_s``: seconds per step that the training thread was blocked, mean over the ranks. ``peak_bytes_per_rank``: the
    largest memory of the process so far, which is that of all systems before, too; ``batch_bytes_per_rank``: the
    largest mini-batch of this one, as telemetry counts it. ``loss_difference``: the largest from the first of our
    strategies, relative; None for peers. ``epochs``: in studies of accuracy, loss and accuracies after each.
    """

    graph: str
    model: str
    system: str
    ranks: int
    replicas: int
    allocator: str
    features: str
    batch_size: int
    hidden: int
    num_layers: int
    fanout: list[int]
    partition: str
    steps: int
    repeats: int
    wall_s: Spread
    cpu_s: Spread
    cpu_s_per_rank: list[float]
    stages_s: dict[str, float]
    stages_s_per_rank: list[dict[str, float]]
    stages_cpu_s: dict[str, float]
    cache: float
    edges: float
    input_rows: float
    rows_loaded: float
    bytes_loaded: float
    rows_sent: float
    bytes_sent: float
    collectives: float
    wait_s: float
    peak_bytes_per_rank: list[int]
    batch_bytes_per_rank: list[int]
    losses: list[float]
    loss: float
    note: str
    epochs: list[dict[str, Any]]
    loss_difference: float | None = None
    losses_equal: bool | None = None
    device: str = "cpu"
    threads: int = 1

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the document."""
        return asdict(self)


def combine_ranks(scenario: Scenario, found: Sequence[RankResult]) -> TrainRecord:
    """One system's record from what every rank saw of it, in rank order."""
    path = Path(scenario.graph)
    turns = [_turns_of(rank) for rank in found]
    stages = [_stages([turn.seconds for turn in rank]) for rank in turns]
    on_cores = [_stages([turn.cpu_seconds for turn in rank]) for rank in turns]

    def total(name: str) -> float:
        return sum(_amount(rank, name) for rank in turns)

    losses = [fmean(step) for step in zip(*(_losses_of(rank) for rank in found), strict=True)]
    return TrainRecord(
        graph=path.stem,
        model=scenario.model,
        system=found[0].system,
        ranks=scenario.ranks,
        replicas=scenario.replicas,
        allocator=scenario.allocator,
        features=scenario.features,
        batch_size=scenario.batch_size,
        hidden=scenario.hidden,
        num_layers=len(scenario.fanout),
        fanout=list(scenario.fanout),
        partition=objective_of(path),
        steps=scenario.steps,
        repeats=len(turns[0]),
        wall_s=Spread.of([max(turn.wall_s for turn in each) for each in zip(*turns, strict=True)]),
        cpu_s=Spread.of([sum(turn.cpu_s for turn in each) for each in zip(*turns, strict=True)]),
        cpu_s_per_rank=[median(turn.cpu_s for turn in rank) for rank in turns],
        stages_s={name: fmean(rank.get(name, 0.0) for rank in stages) for name in stages[0]},
        stages_s_per_rank=stages,
        stages_cpu_s={name: fmean(rank.get(name, 0.0) for rank in on_cores) for name in on_cores[0]},
        cache=scenario.cache if scenario.features == "disk" else 0.0,
        edges=total("edges"),
        input_rows=total("input_rows"),
        rows_loaded=total("rows_loaded") + total("rows_in_place"),
        bytes_loaded=total("bytes_loaded"),
        rows_sent=total("rows_sent"),
        bytes_sent=total("bytes_sent"),
        collectives=max(_amount(rank, "collectives") for rank in turns),
        wait_s=fmean(median(turn.blocked_s for turn in rank) for rank in turns),
        peak_bytes_per_rank=[rank.peak_bytes for rank in found],
        batch_bytes_per_rank=[rank.batch_bytes for rank in found],
        losses=losses,
        loss=losses[-1],
        note=found[0].note,
        epochs=[asdict(epoch) for epoch in found[0].epochs],
        device=scenario.device,
        threads=scenario.threads,
    )


def _turns_of(rank: RankResult) -> list[Turn]:
    """The turns, or the epochs as turns: those have no stages of their own."""
    return rank.turns or [Turn(each.wall_s, each.cpu_s, each.blocked_s, {}, {}, {}) for each in rank.epochs]


def _losses_of(rank: RankResult) -> list[float]:
    return rank.losses or [loss for epoch in rank.epochs for loss in epoch.losses]


def _amount(turns: Sequence[Turn], name: str) -> float:
    return fmean(turn.counts.get(name, 0.0) for turn in turns)


def _stages(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of a rank's stages; forward is without the shuffles that telemetry counts into it."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    found: dict[str, float] = {}
    for name in names:
        stage = _STAGES.get(name, name)
        found[stage] = found.get(stage, 0.0) + median(turn.get(name, 0.0) for turn in turns)
    if "forward" in found:
        found["forward"] -= found.get("shuffle", 0.0)
    return found


def group_stages(stages: Mapping[str, float]) -> dict[str, float]:
    """The stages of a step in fewer: the paper's Table 3 adds the last three up.

    >>> group_stages({"sample": 1.0, "split": 2.0, "load": 3.0, "forward": 4.0, "shuffle": 5.0, "backward": 6.0})
    {'sample': 3.0, 'load': 3.0, 'forward': 9.0, 'backward': 6.0, 'optimizer': 0.0}
    """
    return {name: sum(stages.get(each, 0.0) for each in names) for name, names in _GROUPS.items()}


def check_losses(records: Sequence[TrainRecord]) -> list[TrainRecord]:
    """The records, those of our strategies with how far their losses are from the first one's.

    Of all that train the same model on the same mini-batches, drawn by the same sampler: neither the strategy nor the
    number of ranks, replicas, threads, the place of the features or the allocator changes a step.
    """
    first: dict[tuple[object, ...], TrainRecord] = {}
    for record in records:
        if is_ours(record.system):
            first.setdefault(_training_of(record), record)
    return [_compared(record, first[_training_of(record)]) if is_ours(record.system) else record for record in records]


def _training_of(record: TrainRecord) -> tuple[object, ...]:
    _, sampler = parse_system(record.system)
    return record.graph, record.model, record.hidden, tuple(record.fanout), record.batch_size, sampler


def _compared(record: TrainRecord, first: TrainRecord) -> TrainRecord:
    pairs = zip(record.losses, first.losses, strict=True)
    off = max(abs(loss - other) / max(abs(other), 1e-12) for loss, other in pairs)
    return replace(record, loss_difference=off, losses_equal=off <= LOSS_TOLERANCE)


def objective_of(path: Path) -> str:
    """The objective by which a store was partitioned; "none" if it was not."""
    steps = [step for step in open_store(path).manifest.provenance if step.step == "partition"]
    return str(steps[-1].settings["objective"]) if steps else "none"
