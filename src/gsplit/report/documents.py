"""The JSON documents a report is made from, checked where they come in.

A document may hold more than is read here; what is read must be there and be of its kind. Seconds are per step, amounts
are per step and summed over the ranks unless their name says ``per_rank``.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

__all__ = [
    "BenchPartition",
    "BenchTrain",
    "Count",
    "Epoch",
    "PartitionRow",
    "PlannerCheck",
    "PlannerPoint",
    "RunHistory",
    "Spread",
    "StepLine",
    "TrainRecord",
]

Amount = Annotated[float, Field(ge=0.0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Ranks = Annotated[int, Field(ge=1, le=1 << 20)]
Whole = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
Positive = Annotated[float, Field(gt=1e-30, le=1e30)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Spread(_Document):
    """A median with the lowest and the highest of the repeats."""

    median: Amount
    low: Amount
    high: Amount


class Epoch(_Document):
    """What an epoch of a study of accuracy came to."""

    epoch: Whole
    loss: Number
    accuracies: dict[str, Number] = {}


class TrainRecord(_Document):
    """One system on one graph, model and number of ranks, measured by ``gsplit bench train``."""

    graph: str
    model: str
    system: str
    ranks: Ranks
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


class Count(_Document):
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


class BenchTrain(_Document):
    """A document of ``gsplit bench train``."""

    preset: str | None = None
    command: str
    commit: str | None = None
    date: str
    versions: dict[str, JsonValue] = {}
    machine: dict[str, JsonValue] = {}
    records: list[TrainRecord]
    counts: list[Count] = []


class PartitionRow(_Document):
    """A partition by one objective and solver; one that failed has its error instead of figures."""

    parts: Whole
    objective: str
    solver: str
    cross_edge_share: Amount | None = None
    rows_shuffled_per_input: Amount | None = None
    edge_imbalance: Amount | None = None
    vertex_imbalance: Amount | None = None


class BenchPartition(_Document):
    """A document of ``gsplit bench partition``: one graph."""

    num_vertices: Whole
    num_edges: Whole
    batch_size: Whole
    held_out_batches: Whole
    rows: list[PartitionRow]


class PlannerPoint(_Document):
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


class PlannerCheck(_Document):
    """The planner against measurements; regret: the chosen system's seconds over the best one's, minus one."""

    points: list[PlannerPoint]
    within_5_percent: Amount
    worst_regret: Amount


class RunHistory(_Document):
    """``history.json`` of a run: every step, and every evaluation with its epoch."""

    losses: list[Number]
    step_seconds: list[Amount]
    evaluations: list[dict[str, Number]]


class StepLine(_Document):
    """A line of telemetry: what one rank did in one step; a span is (stage, thread, start, end) in nanoseconds."""

    rank: Annotated[int, Field(ge=0, le=1 << 20)]
    epoch: Whole
    step: Whole
    cpu_seconds: Amount
    seconds: dict[str, Amount]
    counts: dict[str, Whole]
    spans: list[tuple[str, str, Whole, Whole]] = []
