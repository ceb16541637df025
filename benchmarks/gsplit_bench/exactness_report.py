"""What a case of the exactness matrix is, what ranks have seen of it, and how far two of these are apart."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

__all__ = [
    "TOLERANCE",
    "Case",
    "Differences",
    "ExactnessReport",
    "ExactnessRow",
    "TrainedCase",
    "compare",
    "tolerance_of",
    "worst_of",
]

TOLERANCE = 1e-9
_ATTENTION = ("gat", "gatv2")


def tolerance_of(case: "Case", device: str) -> float:
    """How far a case may be from what it is compared with.

    The simulated device runs the host's kernels, so nothing may differ; but attention is computed by kernels of ours on
    the host and by PyG's layers, or by Triton's, on a device.
    """
    return 0.0 if device.startswith("sim") and case.model not in _ATTENTION else TOLERANCE


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
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class ExactnessReport:
    """Every case with its differences, and whether all are within the tolerance."""

    rows: list[ExactnessRow]

    @property
    def worst(self) -> Differences:
        """The largest differences of all cases."""
        return worst_of([row.differences for row in self.rows])

    @property
    def tolerance(self) -> float:
        """The largest of all cases."""
        return max((row.tolerance for row in self.rows), default=TOLERANCE)

    @property
    def ok(self) -> bool:
        """Whether there are cases and all are within the tolerance."""
        return bool(self.rows) and all(row.differences.largest <= row.tolerance for row in self.rows)

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
