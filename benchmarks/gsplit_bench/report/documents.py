"""What a report of benchmarks is made from: JSON documents of measurements and folders of runs, in any mix.

A file is told by its ``kind``. What is not known, is damaged or too large is refused with its name. Seconds are per
step, amounts are per step and summed over the ranks unless their name says ``per_rank``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue

from gsplit.errors import InputError, explain
from gsplit.files.untrusted import Expected, parse_json
from gsplit.report.reading import Amount, Document, Number, Run, Whole, parse_document, read_run, read_text

__all__ = [
    "BenchPartition",
    "BenchTrain",
    "Count",
    "Epoch",
    "Material",
    "PartitionRow",
    "PlannerCheck",
    "PlannerPoint",
    "Spread",
    "TrainRecord",
    "read_material",
]

_KINDS = "a document of gsplit_bench train, gsplit_bench partition or gsplit_bench planner-check, or a folder of gsplit train"
_DOCUMENT = Expected(f"JSON: {_KINDS}", "check the path, or leave it out")

Ranks = Annotated[int, Field(ge=1, le=1 << 20)]
Positive = Annotated[float, Field(gt=1e-30, le=1e30)]


class Spread(Document):
    """A median with the lowest and the highest of the repeats, and the quartiles, which older documents do not have."""

    median: Amount
    low: Amount
    high: Amount
    first_quartile: Amount | None = None
    third_quartile: Amount | None = None


class Epoch(Document):
    """What an epoch of a study of accuracy came to."""

    epoch: Whole
    loss: Number
    accuracies: dict[str, Number] = {}


class TrainRecord(Document):
    """One system on one graph, model and number of ranks, measured by ``gsplit_bench train``."""

    graph: str
    model: str
    system: str
    ranks: Ranks
    threads: Ranks = 1
    replicas: Ranks = 1
    allocator: str = "tuned"
    features: str = "memory"
    batch_size: Whole
    hidden: Whole
    fanout: list[Whole]
    partition: str | None = None
    steps: Whole
    repeats: Whole = 1
    wall_s: Spread
    cpu_s: Spread
    cpu_s_per_rank: list[Amount] = []
    stages_s: dict[str, Number] = {}
    edges: Amount = 0.0
    input_rows: Amount = 0.0
    rows_loaded: Amount = 0.0
    rows_sent: Amount = 0.0
    bytes_sent: Amount = 0.0
    peak_bytes_per_rank: list[Amount] = []
    losses: list[Number] = []
    epochs: list[Epoch] = []


class Count(Document):
    """What each of so many ranks would do: counted in one process, with no time in it."""

    graph: str
    strategy: str
    ranks: Ranks
    batch_size: Whole
    fanout: list[Whole]
    edges_per_rank: list[Amount]
    rows_loaded_per_rank: list[Amount]
    bytes_sent_per_rank: list[Amount] = []
    imbalance: Amount


class BenchTrain(Document):
    """A document of ``gsplit_bench train``."""

    preset: str | None = None
    command: str
    commit: str | None = None
    date: str
    versions: dict[str, JsonValue] = {}
    machine: dict[str, JsonValue] = {}
    notes: list[str] = []
    failures: list[str] = []
    losses_equal: bool = True
    records: list[TrainRecord]
    counts: list[Count] = []


class PartitionRow(Document):
    """A partition by one objective and solver; one that failed has its error instead of figures."""

    parts: Whole
    objective: str
    solver: str
    cross_edge_share: Amount | None = None
    rows_shuffled_per_input: Amount | None = None
    edge_imbalance: Amount | None = None
    vertex_imbalance: Amount | None = None


class BenchPartition(Document):
    """A document of ``gsplit_bench partition``: one graph."""

    num_vertices: Whole
    num_edges: Whole
    batch_size: Whole
    held_out_batches: Whole
    rows: list[PartitionRow]


class PlannerPoint(Document):
    """What the planner foresaw for a system, and what was measured; stages as (predicted, measured)."""

    graph: str
    model: str
    ranks: Ranks
    batch_size: Whole
    features: str
    system: str
    predicted_s: Positive
    measured_s: Positive
    stages: dict[str, tuple[Amount, Amount]] = {}


class PlannerCheck(Document):
    """The planner against measurements; regret: the chosen system's seconds over the best one's, minus one."""

    points: list[PlannerPoint]
    within_5_percent: Amount
    worst_regret: Amount


@dataclass(frozen=True)
class Material:
    """Everything that was given, in the order given; partitions and checks by the names of their files."""

    benches: list[BenchTrain] = field(default_factory=list)
    partitions: dict[str, BenchPartition] = field(default_factory=dict)
    checks: dict[str, PlannerCheck] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)


def read_material(paths: Sequence[Path]) -> Material:
    """Read files and folders."""
    material = Material()
    for path in paths:
        if path.is_dir():
            material.runs.append(read_run(path))
            continue
        text = read_text(path, _DOCUMENT)
        kind = _kind(path, text)
        if kind == "bench train":
            material.benches.append(parse_document(BenchTrain, text, path))
        elif kind == "planner check":
            material.checks[path.stem] = parse_document(PlannerCheck, text, path)
        elif kind == "bench partition":
            material.partitions[path.stem] = parse_document(BenchPartition, text, path)
        else:
            raise InputError(explain(path, _KINDS, f"the kind {kind!r}", "leave it out"))
    return material


def _kind(path: Path, text: str) -> str:
    document = parse_json(text, path, _DOCUMENT)
    if not isinstance(document, dict):
        raise InputError(explain(path, _KINDS, f"a JSON {type(document).__name__}", "leave it out"))
    if "held_out_batches" in document:  # its documents are older than kinds
        return "bench partition"
    return str(document.get("kind", "none"))[:80]
