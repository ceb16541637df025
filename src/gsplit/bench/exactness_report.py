"""What a case of the exactness matrix is, what ranks have seen of it, and how far two of these are apart."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

__all__ = [
    "DEVICE_TOLERANCE",
    "TOLERANCE",
    "Case",
    "Differences",
    "ExactnessReport",
    "ExactnessRow",
    "TrainedCase",
    "compare",
    "worst_of",
]

TOLERANCE = 1e-9
DEVICE_TOLERANCE = {"sim": 0.0, "cuda": TOLERANCE}
"""Of ranks on a device from ranks on the CPU: the simulated device runs the same kernels."""


@dataclass(frozen=True)
class Case:
    """One model on one graph, and how it is run."""

    model: str
    strategy: str
    ownership: str
    dropout: float
    jk: str | None
    norm: str | None
    edge_values: bool = False
    """Whether the model takes the stored features or weights of edges."""


@dataclass(frozen=True)
class TrainedCase:
    """What one rank has seen of a case: outputs of its targets by original id, losses and gradients of every step."""

    outputs: list[dict[int, Any]]
    losses: list[float]
    gradients: list[list[Any]]
    state: dict[str, Any]


@dataclass(frozen=True)
class Differences:
    """The largest differences of a case, or of all, from one process."""

    output: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    weights: float = 0.0

    @property
    def largest(self) -> float:
        """Of all four."""
        return max(self.output, self.loss, self.gradient, self.weights)


def worst_of(found: list[Differences]) -> Differences:
    """The largest of each kind."""
    found = found or [Differences()]
    return Differences(*(max(getattr(each, field.name) for each in found) for field in fields(Differences)))


@dataclass(frozen=True)
class ExactnessRow:
    """A case on a mesh, and how far it is from one process."""

    replicas: int
    splits: int
    case: Case
    differences: Differences


@dataclass(frozen=True)
class ExactnessReport:
    """Every case with its differences, and whether all are within the tolerance."""

    rows: list[ExactnessRow]
    tolerance: float = TOLERANCE

    @property
    def worst(self) -> Differences:
        """The largest differences of all cases."""
        return worst_of([row.differences for row in self.rows])

    @property
    def ok(self) -> bool:
        """Whether there are cases and all are within the tolerance."""
        return bool(self.rows) and self.worst.largest <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``: a flat row per case."""
        rows = [
            {"replicas": row.replicas, "splits": row.splits, **asdict(row.case), **asdict(row.differences)}
            for row in self.rows
        ]
        return {
            "cases": len(rows),
            "tolerance": self.tolerance,
            "worst": asdict(self.worst),
            "ok": self.ok,
            "rows": rows,
        }


def _distance(a: Any, b: Any) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    distance = float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def compare(one: TrainedCase, ranks: list[TrainedCase]) -> Differences:
    """The largest differences between one process and all ranks; infinite if something is missing."""
    assert all(rank.state.keys() == one.state.keys() for rank in ranks)
    pairs = [(rank.gradients[step], want) for rank in ranks for step, want in enumerate(one.gradients)]
    return Differences(
        output=_compare_outputs(one, ranks),
        loss=max(_distance(rank.losses, one.losses) for rank in ranks),
        gradient=max(_distance(g, w) for got, want in pairs for g, w in zip(got, want, strict=True)),
        weights=max(_distance(rank.state[name], want) for rank in ranks for name, want in one.state.items()),
    )


def _compare_outputs(one: TrainedCase, ranks: list[TrainedCase]) -> float:
    """Infinite if a target is computed by no rank or by two."""
    worst = 0.0
    for step, want in enumerate(one.outputs):
        computed = [vertex for rank in ranks for vertex in rank.outputs[step]]
        if sorted(computed) != sorted(want):
            return float("inf")
        got = {vertex: row for rank in ranks for vertex, row in rank.outputs[step].items()}
        worst = max([worst, *(_distance(got[vertex], row) for vertex, row in want.items())])
    return worst
