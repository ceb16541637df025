"""What large graphs would take: the formulas of docs/scale-formulas.md, with constants from benchmarks/results.

What is not measured here is named in ``scale.py`` with its source, or as an assumption. Every figure for a graph is
arithmetic: no such graph was imported, partitioned or trained.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from gsplit.kernels.buffers import SLACK
from gsplit_bench.measured import RESULTS, read_record
from gsplit_bench.paper_table import COUNTS, TARGETS

__all__ = [
    "record",
    "fit",
    "import_points",
    "counted",
    "sent_points",
    "cpu_of_all",
    "trained_steps",
    "copied_batches",
    "presample_points",
    "billion_edges",
    "partition_bytes",
    "restream_points",
    "restream_seconds",
    "constants",
    "forecast",
]

LAYERS, HIDDEN, EPOCHS = 3, 256, 11
CORES_PER_HOST, RANKS_PER_HOST, HOST_BYTES, HOST_DOLLARS_PER_H = 64, 32, 256e9, 32 * 0.0816
NETWORK_BYTES_PER_S, DISK_BYTES_PER_S, MESSAGE_S, SHA256_BYTES_PER_S = 30e9 / 8, 1e9, 20e-6, 1.4e9
PROGRAM_BYTES, PLANTED_ENTRIES, KAMINPAR_BYTES_PER_ENTRY = 270e6, 100.4e6, 32


def record(name: str) -> Any:
    """A record of benchmarks/results by its path, which is not the newest of its name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


@dataclass(frozen=True)
class Line:
    """A line through two or more measured points."""

    base: float
    slope: float

    def at(self, x: float) -> float:
        """Its value."""
        return self.base + self.slope * x


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """The line of least squares."""
    xs, ys = zip(*points, strict=True)
    slope = sum((x - mean(xs)) * (y - mean(ys)) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean(xs)) ** 2 for x in xs
    )
    return Line(mean(ys) - slope * mean(xs), slope)


@dataclass(frozen=True)
class Measured:
    """Constants that this machine's records give; CPU seconds of one core."""

    import_s_per_edge: float
    shared_import_s_per_edge: float
    presample_edges_per_s: float
    cluster_s_per_entry: float
    train_s_per_edge: float
    sent_per_loaded: Line  # rows, by log2 of the ranks
    hidden_share: float  # of the rows sent
    imbalance: float  # largest over mean work of 64 ranks
    counted_collectives: float  # all but that of the loss
    kaminpar_s_per_entry: float


def import_points() -> list[tuple[float, float, float, float]]:
    """Edges, vertices, seconds and peak bytes of imports by one process, without the start of Python."""
    found = read_record("import")
    start = median(run["seconds"] for run in found["fixed"])
    return [
        (
            float(size),
            runs[0]["vertices"],
            median(run["seconds"] for run in runs) - start,
            max(run["peak_anonymous_bytes"] for run in runs),
        )
        for size, runs in found["parquet"].items()
    ]


def counted(batch_size: int) -> list[dict[str, Any]]:
    """Split mini-batches of arxiv and debian, counted on 2 to 64 ranks."""
    counts = read_record("training-counted")["counts"]
    return [count for count in counts if count["strategy"] == "split" and count["batch_size"] == batch_size]


def sent_points(ranks: Iterable[int]) -> list[tuple[float, float]]:
    """log2 of the ranks, and rows sent per row loaded."""
    chosen = [count for count in counted(4096) if count["ranks"] in ranks]
    return [
        (math.log2(count["ranks"]), sum(count["rows_sent_per_rank"]) / sum(count["rows_loaded_per_rank"]))
        for count in chosen
    ]


def cpu_of_all(order: str, hosts: int) -> float:
    """CPU seconds of all processes of an import, without the start of Python."""
    found = record("2026-11-16-sharded-import")
    start = median(found["start_cpu_seconds"])
    runs = [run for run in found[order] if run["hosts"] == hosts]
    return float(mean(sum(process["cpu_seconds"] - start for process in run["processes"]) for run in runs))


def trained_steps() -> list[dict[str, Any]]:
    """Measured steps of GraphSAGE under split, 1024 targets, 2 and 4 ranks."""
    names = ("host-sage", "host-sage-1m", "host-sage-1m-4")
    runs = [run for name in names for run in read_record(name)["records"]]
    return [run for run in runs if (run["system"], run["model"]) == ("split", "sage") and run["ranks"] > 1]


def copied_batches() -> list[dict[str, Any]]:
    """Steps of an older record, whose mini-batches have copies of their input rows; later ones read them in place."""
    runs = record("archive/2026-11-16-training-main")["records"]
    return [run for run in runs if (run["system"], run["model"]) == ("split", "sage")]


def presample_points() -> list[tuple[str, float, float]]:
    """Graph, edges drawn and core seconds of presampling on two cores; edges per mini-batch from training's records."""
    edges = {run["graph"]: run["edges"] for run in trained_steps()}
    cost = read_record("partition")["cost"]
    return [
        (run["graph"], run["mini_batches"] * edges[name], 2 * run["presample_seconds"])
        for run in cost
        if (name := {"ego-twitter": "ego"}.get(run["graph"], run["graph"])) in edges
    ]


def presample_rate() -> float:
    """Edges drawn and counted per CPU second, by two threads."""
    found = read_record("presampling")
    return float(found["edges"] / median(run["cpu_s"] for run in found["runs"]["after"]))


def billion_edges() -> dict[str, Any]:
    """The stages of the largest graph that was partitioned."""
    found: dict[str, Any] = read_record("billion-edges")
    return found


def _cluster_seconds() -> float:
    stages = billion_edges()["stages"]
    return float(sum(stage["cpu_s"] for stage in stages if stage["stage"].startswith(("weigh", "solve"))))


def partition_bytes(edges: float, vertices: float, cores: int) -> float:
    """Counts of presampling and its threads; renumbering needs less, and so does the solver, unless it is KaMinPar."""
    return 4 * edges + (16 + 4 * cores) * vertices


def restream_points() -> list[tuple[float, float]]:
    """Entries of the weighted graph, and seconds of weighing and restreaming, on small planted graphs."""
    runs = record("archive/2026-11-15-partition")["memory"]
    return [(run["edges"], run["seconds_with_weighing"]) for run in runs if run["solver"] == "restream"]


def restream_seconds() -> float:
    """Weighing and restreaming the planted graph of ``PLANTED_ENTRIES``."""
    runs = read_record("partition")["cost"]
    chosen = next(run for run in runs if (run["graph"], run["solver"]) == ("concentrated", "restream"))
    return float(chosen["weigh_and_solve_seconds"])


def constants() -> Measured:
    """All of them."""
    edges, _, seconds, _ = import_points()[-1]
    steps = [run for run in trained_steps() if run["graph"] == "planted1m"]
    last = [count for count in counted(4096) if count["ranks"] == 64]
    input_bytes, hidden_bytes = 512, 4 * HIDDEN  # arxiv and debian have 128 floats
    per_row = mean(sum(count["bytes_sent_per_rank"]) / sum(count["rows_sent_per_rank"]) for count in last)
    shared = record("2026-11-16-sharded-import")
    return Measured(
        import_s_per_edge=seconds / edges,
        shared_import_s_per_edge=cpu_of_all("sorted", shared["hosts"]) / shared["num_edges"],
        presample_edges_per_s=presample_rate(),
        cluster_s_per_entry=_cluster_seconds() / billion_edges()["graph"]["edges"],  # which has every edge both ways
        train_s_per_edge=mean(run["cpu_s"]["median"] / run["edges"] for run in steps),
        sent_per_loaded=fit(sent_points((8, 16, 32, 64))),
        hidden_share=(per_row - input_bytes) / (hidden_bytes - input_bytes),
        imbalance=mean(count["imbalance"] for count in last),
        counted_collectives=steps[0]["collectives"],
        kaminpar_s_per_entry=solved("planted5m", "kaminpar")["cpu_seconds"] / PLANTED_ENTRIES,
    )


def solved(graph: str, solver: str) -> dict[str, Any]:
    """A graph in 8 parts by a solver: CPU seconds and peak memory of its process."""
    rows = read_record("solvers")["rows"]
    return next(row for row in rows if (row["graph"], row["solver"], row["parts"]) == (graph, solver, 8))


def collectives(num_layers: int) -> int:
    """Of a step of ``split``: numbers of ids and ids of every layer, input rows, hidden rows and their gradients, the
    loss, and the gradients of up to a megabyte of parameters.
    """
    return 2 * num_layers + 1 + 2 * (num_layers - 1) + 1 + 1


def parameters(num_features: int) -> int:
    """Of GraphSAGE: two matrices per layer; those of the classes are small."""
    return 2 * HIDDEN * (num_features + (LAYERS - 2) * HIDDEN)


@dataclass(frozen=True)
class GraphSize:
    """A graph; ``edges`` as stored."""

    name: str
    vertices: float
    edges: float
    features: int
    feature_bytes: int
    targets: float

    @property
    def index_bytes(self) -> int:
        """Of a source id in the store."""
        return 4 if self.vertices <= 1 << 31 else 8

    @property
    def store_bytes(self) -> float:
        """indptr, indices, original ids, labels and features."""
        return self.vertices * (24 + self.features * self.feature_bytes) + self.edges * self.index_bytes


GRAPHS = [
    GraphSize("Papers100M", 111_059_956, 1_615_685_872, 128, 4, TARGETS["Papers100M"]),
    GraphSize("MAG240M citations", 121_751_666, 1_297_748_926, 768, 2, 1_112_392),
    GraphSize("IGB-full", 269_346_174, 3_995_777_033, 1024, 4, 0.6 * 227_130_858),
    GraphSize("10 B vertices", 10e9, 100e9, 128, 2, 100e6),
]


@dataclass(frozen=True)
class Forecast:
    """What one graph takes."""

    graph: GraphSize
    hosts: int
    batch_size: int
    import_h: float
    presample_h: float
    solver: str
    solve_h: float
    partition_bytes: float
    rank_bytes: float
    mapped_bytes: float
    sent_bytes: float
    step_s: float
    epoch_h: float

    @property
    def ranks(self) -> int:
        """On all hosts."""
        return self.hosts * RANKS_PER_HOST

    @property
    def partitions_today(self) -> bool:
        """Whether one host can hold what presampling, the solver and renumbering need."""
        return self.partition_bytes <= HOST_BYTES

    @property
    def dollars(self) -> float:
        """Import on all hosts, presampling and solving on one if it can, ten epochs on all."""
        alone = self.presample_h + self.solve_h if self.partitions_today else 0.0
        return HOST_DOLLARS_PER_H * (self.hosts * (self.import_h + 10 * self.epoch_h) + alone)


def forecast(graph: GraphSize, known: Measured) -> Forecast:
    """The formulas of docs/scale-formulas.md."""
    hosts = max(1, math.ceil(graph.store_bytes / (HOST_BYTES / 2)))
    ranks = hosts * RANKS_PER_HOST
    batch = max(4096, 64 * ranks)
    inputs, rows, edges = COUNTS["Papers100M", True]
    per_target = [count / TARGETS["Papers100M"] for count in (inputs, sum(rows), sum(edges))]
    loaded, computed, drawn = (batch * count for count in per_target)
    row_bytes = graph.features * graph.feature_bytes
    join_s = (8 * graph.vertices + graph.index_bytes * graph.edges) / SHA256_BYTES_PER_S
    import_s = (
        known.shared_import_s_per_edge * graph.edges / ranks
        + graph.vertices * row_bytes / hosts / DISK_BYTES_PER_S
        + join_s
    )
    presample_s = EPOCHS * graph.targets * per_target[2] / (known.presample_edges_per_s * CORES_PER_HOST)
    sent = min(known.sent_per_loaded.at(math.log2(ranks)) * loaded, drawn)  # at most a row per edge
    hidden_sent = sent * known.hidden_share
    sent_bytes = ((sent - hidden_sent) * 4 * graph.features + 2 * hidden_sent * 4 * HIDDEN + 8 * sent) / ranks
    sent_bytes += 2 * (ranks - 1) / ranks * 4 * parameters(graph.features) + 8 * LAYERS * (ranks - 1)
    bottom = edges[0] / sum(edges)
    cpu_s = known.train_s_per_edge * drawn * (bottom * graph.features / 128 + 1 - bottom)
    network_s = sent_bytes * RANKS_PER_HOST / NETWORK_BYTES_PER_S if hosts > 1 else 0.0
    messages = collectives(LAYERS) * (
        RANKS_PER_HOST - 1 if hosts == 1 else 2 * hosts - 1
    )  # two levels; one of them far
    step_s = cpu_s * known.imbalance / ranks + network_s + messages * MESSAGE_S
    counts_bytes = 4 * graph.edges + 16 * graph.vertices
    kaminpar_bytes = counts_bytes + KAMINPAR_BYTES_PER_ENTRY * 2 * graph.edges + 100 * graph.vertices
    fits = kaminpar_bytes <= HOST_BYTES
    own, received = loaded / ranks, sent / ranks
    return Forecast(
        graph=graph,
        hosts=hosts,
        batch_size=batch,
        import_h=import_s / 3600,
        presample_h=presample_s / 3600,
        solver="KaMinPar" if fits else "cluster",
        solve_h=(known.kaminpar_s_per_entry if fits else known.cluster_s_per_entry) * 2 * graph.edges / 3600,
        partition_bytes=kaminpar_bytes if fits else partition_bytes(graph.edges, graph.vertices, CORES_PER_HOST),
        rank_bytes=PROGRAM_BYTES
        + 4 * graph.vertices / ranks
        + 32 * graph.targets / ranks
        + 2 * ((own + received) * graph.features * 4 * SLACK + 8 * (drawn + computed) / ranks)
        + 6 * computed / ranks * 4 * HIDDEN,
        mapped_bytes=graph.store_bytes / ranks,
        sent_bytes=sent_bytes,
        step_s=step_s,
        epoch_h=step_s * math.ceil(graph.targets / batch) / 3600,
    )
