"""The paper's Table 3 explained from its Table 1: does the planner's arithmetic fit somebody else's measurements?

Table 3 has seconds per epoch of sampling, loading, and forward and backward together, on four V100 with NVLink: three
graphs, two models, fanout 15 in three layers, 256 hidden units, 1024 targets per step in all. Table 1 has edges and
input rows per epoch at 1024 targets per GPU. ``COUNTS`` are those carried to 256 per GPU (data parallel) and 1024 in
all (split), by a random-graph model of each graph fitted to Table 1; rows of the middle layers come from it too.

This is a fit, not a forecast: the V100's constants were fitted to Table 3 itself. What the tables do not say is taken
the same for all graphs: rows received per own row (``RECEIVED``, chosen within the 0.30 to 0.44 that fit GSplit's own
seconds) and the largest rank's work over the mean (``IMBALANCE``). Shares of cached rows are from the paper's text for
Orkut (all, P3* too) and Papers100M (60 %); the text says that Friendster's features do not all fit, but GSplit's 2.2 s
of loading leave room for hardly any misses, so 1 is taken.

Quiver is data parallel with the same distributed cache. Three quarters of its hits are in the memory of another GPU,
read at ``PEER_BYTES_PER_S``. Its sampling is 2 to 3 times as long as DGL's for the same counts, which nothing in the
tables explains: ``QUIVER_SAMPLE_S`` more per step was chosen among 9 values for the smallest errors of its six totals,
and so was that Orkut's edges are in the GPUs' memories. Edge is GSplit on another partition, so only ``RECEIVED`` and
``IMBALANCE`` may differ: chosen among 21 pairs for the smallest largest error of its six totals. (0.5, 1.5) and (0.7,
1.3) are as good, so they do not say what Edge's partitions are like.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gsplit.minibatch.strategy_names import StrategySpec, parse_strategy
from gsplit.planner.counts import RankCounts, StrategyCounts
from gsplit.planner.estimate import estimate_step
from gsplit.planner.hardware import PRESETS, Hardware
from gsplit.planner.placement import Placement
from gsplit.planner.shapes import PlannedModel

__all__ = ["GRAPHS", "MODELS", "SYSTEMS", "Prediction", "main", "predict_table"]

System = Literal["DGL", "P3*", "Quiver", "Edge", "GSplit"]
SYSTEMS: tuple[System, ...] = ("DGL", "P3*", "Quiver", "Edge", "GSplit")
GRAPHS = ("Orkut", "Papers100M", "Friendster")
MODELS = ("sage", "gat")

RANKS, BATCH_SIZE, HIDDEN, CLASSES, LAYERS = 4, 1024, 256, 10, 3
RECEIVED = {"GSplit": 0.35, "Edge": 0.35}
IMBALANCE = {"GSplit": 1.1, "Edge": 1.7}
PEER_BYTES_PER_S = 58e9
QUIVER_SAMPLE_S = 9e-3
TARGETS = {"Orkut": 307_244, "Papers100M": 1_207_179, "Friendster": 6_560_836}
FEATURES = {"Orkut": 512, "Papers100M": 128, "Friendster": 128}
CACHED = {"Orkut": 1.0, "Papers100M": 0.6, "Friendster": 1.0}  # of GSplit's distributed cache

_PerLayer = tuple[float, float, float]
COUNTS: dict[tuple[str, bool], tuple[float, _PerLayer, _PerLayer]] = {
    # (graph, split): input rows, destinations and edges from the bottom layer up; per epoch, all ranks
    ("Orkut", False): (743.5e6, (63.88e6, 4.309e6, 0.3072e6), (949.8e6, 63.68e6, 4.022e6)),
    ("Orkut", True): (422.0e6, (57.82e6, 4.256e6, 0.3072e6), (859.1e6, 62.94e6, 3.995e6)),
    ("Papers100M", False): (315.1e6, (62.15e6, 9.221e6, 1.207e6), (417.0e6, 62.28e6, 8.081e6)),
    ("Papers100M", True): (231.0e6, (56.82e6, 9.291e6, 1.207e6), (381.3e6, 62.36e6, 8.326e6)),
    ("Friendster", False): (13.13e9, (870.1e6, 59.88e6, 6.561e6), (12.72e9, 844.1e6, 53.88e6)),
    ("Friendster", True): (11.40e9, (855.5e6, 59.61e6, 6.561e6), (12.51e9, 840.6e6, 53.69e6)),
}
MEASURED: dict[tuple[System, str], dict[str, tuple[float, float, float]]] = {
    # Table 3: sampling, loading, forward and backward
    ("DGL", "sage"): {"Orkut": (1.5, 62.7, 9.2), "Papers100M": (4.6, 9.5, 11.3), "Friendster": (62.7, 283.4, 61.1)},
    ("DGL", "gat"): {"Orkut": (1.5, 62.8, 17.1), "Papers100M": (4.7, 9.0, 31.7), "Friendster": (62.6, 284.8, 245.9)},
    ("P3*", "sage"): {"Orkut": (4.0, 1.5, 8.5), "Papers100M": (3.3, 11.5, 25.8), "Friendster": (85.9, 350.8, 151.5)},
    ("P3*", "gat"): {"Orkut": (4.0, 1.7, 37.6), "Papers100M": (3.3, 11.3, 65.7), "Friendster": (76.5, 351.4, 613.8)},
    ("Quiver", "sage"): {"Orkut": (4.9, 4.3, 8.7), "Papers100M": (11.8, 10.4, 11.7), "Friendster": (132.5, 24.9, 63.6)},
    ("Quiver", "gat"): {
        "Orkut": (4.7, 4.2, 16.4),
        "Papers100M": (11.0, 11.0, 30.5),
        "Friendster": (135.5, 24.8, 243.5),
    },
    ("Edge", "sage"): {"Orkut": (1.9, 1.3, 25.1), "Papers100M": (11.7, 0.1, 16.3), "Friendster": (65.7, 1.0, 121.8)},
    ("Edge", "gat"): {"Orkut": (1.9, 1.3, 33.3), "Papers100M": (11.5, 0.1, 40.1), "Friendster": (106.1, 0.7, 368.2)},
    ("GSplit", "sage"): {"Orkut": (1.9, 0.1, 14.8), "Papers100M": (3.9, 2.6, 11.8), "Friendster": (41.2, 2.2, 98.9)},
    ("GSplit", "gat"): {"Orkut": (1.9, 0.1, 20.5), "Papers100M": (3.8, 2.3, 31.1), "Friendster": (62.1, 2.2, 283.5)},
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of an epoch, and what the paper measured."""

    system: System
    model: str
    graph: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted_s / self.measured_s - 1


class _SlicedSpec(StrategySpec):
    """P3*: layer 0 is computed on slices of the columns, and its outputs are summed over the ranks."""

    @property
    def exchanged_levels(self) -> tuple[int, ...]:
        return (1,)


def predict_table(hardware: Hardware | None = None) -> list[Prediction]:
    """All totals of Table 3."""
    machine = hardware or PRESETS["v100-nvlink"]
    found = []
    for (system, model), measured in MEASURED.items():
        for graph in GRAPHS:
            width = _row_width(system, graph)
            shape = PlannedModel(model, width, HIDDEN, CLASSES, LAYERS, heads=4, projects_first=True)
            step = estimate_step(_counts(system, graph), shape, _machine(system, machine), _placement(system, graph))
            seconds = step.wall_s * TARGETS[graph] / BATCH_SIZE
            found.append(Prediction(system, model, graph, seconds, sum(measured[graph])))
    return found


def _row_width(system: System, graph: str) -> int:
    """The columns of an input row that one rank reads: a slice of them in P3*, which also slices the weights."""
    return FEATURES[graph] // RANKS if system == "P3*" else FEATURES[graph]


def _machine(system: System, machine: Hardware) -> Hardware:
    """What a system makes of the machine.

    P3* calls layer 0 once for each rank's micro-batch, so the fixed cost of a step is that of more layers. Quiver reads
    rows of its distributed cache from the memories of all GPUs, and takes longer to sample a step.
    """
    if system == "P3*":
        calls = (LAYERS - 1 + RANKS) / LAYERS
        return replace(machine, step_s=machine.step_s * calls, attention_step_s=machine.attention_step_s * calls)
    if system == "Quiver":
        away = (RANKS - 1) / RANKS
        cache_bytes_per_s = 1 / ((1 - away) / machine.cache_bytes_per_s + away / PEER_BYTES_PER_S)
        return replace(machine, cache_bytes_per_s=cache_bytes_per_s, sample_s=machine.sample_s + QUIVER_SAMPLE_S)
    return machine


def _placement(system: System, graph: str) -> Placement:
    """Orkut's edges fit into a GPU's memory, and so do P3*'s slices of its features."""
    hits = {"DGL": 0.0, "P3*": 1.0 if graph == "Orkut" else 0.0}
    return Placement(
        (4 * _row_width(system, graph),),
        hit_rate=hits.get(system, CACHED[graph]),
        near_graph=graph == "Orkut",
    )


def _counts(system: System, graph: str) -> StrategyCounts:
    """One step of every rank."""
    steps = TARGETS[graph] / BATCH_SIZE
    splits = system in IMBALANCE
    inputs, destinations, edges = COUNTS[graph, splits]
    if splits:
        heavy = IMBALANCE[system]
        shares = [heavy] + [(RANKS - heavy) / (RANKS - 1)] * (RANKS - 1)
        ranks = [_split_rank(inputs, destinations, edges, share / steps / RANKS, RECEIVED[system]) for share in shares]
        return StrategyCounts(parse_strategy("split", LAYERS), 1, tuple(ranks), 1)
    rank = _data_rank(inputs, destinations, edges, 1 / steps / RANKS)
    if system in ("DGL", "Quiver"):
        return StrategyCounts(parse_strategy("data", LAYERS), 1, (rank,) * RANKS, 1)
    return StrategyCounts(_SlicedSpec("P3*", LAYERS, None), 1, (_sliced_rank(rank),) * RANKS, 1)


def _data_rank(inputs: float, destinations: _PerLayer, edges: _PerLayer, share: float) -> RankCounts:
    nothing = (0.0,) * LAYERS
    bottom, middle, top = (rows * share for rows in destinations)
    along = tuple(count * share for count in edges)
    loaded = inputs * share
    return RankCounts(
        top, along, (bottom, middle, top), (loaded, bottom, middle), loaded, nothing, nothing, 0, 0, sum(along)
    )


def _split_rank(inputs: float, destinations: _PerLayer, edges: _PerLayer, share: float, received: float) -> RankCounts:
    """Every layer receives ``received`` rows for each of its own."""
    own = _data_rank(inputs, destinations, edges, share)
    crossing = tuple(received * rows for rows in own.sources)
    mixed = tuple((1 + received) * rows for rows in own.sources)
    ids = sum(crossing)
    return RankCounts(
        own.targets,
        own.edges,
        own.destinations,
        mixed,
        own.rows_loaded,
        crossing,
        crossing,
        ids,
        ids,
        own.edges_drawn,
    )


def _sliced_rank(own: RankCounts) -> RankCounts:
    """P3*: layer 0 of every micro-batch, one after the other, on a slice of the columns; each is drawn by one rank."""
    bottom, middle, top = own.destinations
    away = (RANKS - 1) * bottom
    return RankCounts(
        top,
        (RANKS * own.edges[0], *own.edges[1:]),
        (RANKS * bottom, middle, top),
        (RANKS * own.sources[0], *own.sources[1:]),
        RANKS * own.rows_loaded,
        (0.0, away, 0.0),
        (0.0, away, 0.0),
        away,
        away,
        own.edges_drawn,
    )


def main(arguments: Sequence[str]) -> None:
    """One row per model and system, one column per graph."""
    print("| model | system | " + " | ".join(GRAPHS) + " |")
    print("|---|---|" + "---|" * len(GRAPHS))
    table = predict_table()
    for model in MODELS:
        for system in dict.fromkeys(row.system for row in table):
            cells = [row for row in table if (row.model, row.system) == (model, system)]
            shown = [f"{row.predicted_s:.1f} / {row.measured_s:.1f} ({row.error:+.0%})" for row in cells]
            print(f"| {model} | {system} | " + " | ".join(shown) + " |")
    print(f"\npredicted / measured seconds per epoch; largest error {max(abs(row.error) for row in table):.0%}")
