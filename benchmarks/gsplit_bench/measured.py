"""The table of docs/measured.md, made from the records in benchmarks/results: ``python -m gsplit_bench measured``.

A row states what was measured, the result as its record has it, the record and the command. The record of a name is
benchmarks/results/NAME.json, or the newest one with a date before its name; tests/docs/test_site.py compares the page
with what is printed here.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from gsplit_bench.measurements import MEASUREMENTS
from gsplit_bench.paper_table import predict_table
from gsplit_bench.report.comparison import compare_with_peers, geometric_mean
from gsplit_bench.report.documents import read_material

__all__ = ["ROWS", "Row", "checkpoint_shares", "find_record", "main", "read_record", "speed_ups", "table"]

RESULTS = Path(__file__).parents[1] / "results"


def find_record(name: str) -> Path:
    """The file of a record."""
    dated = [path for path in RESULTS.glob(f"*-{name}.json") if re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{name}", path.stem)]
    new = RESULTS / f"{name}.json"
    return new if new.exists() else max(dated)


def read_record(name: str) -> Any:
    """The document of a record."""
    return json.loads(find_record(name).read_text())


@dataclass(frozen=True)
class Row:
    """``result`` makes the cell of the records of these names, in their order; without records, ``proof`` is a link."""

    what: str
    records: tuple[str, ...]
    result: Callable[..., str]
    command: str | None = None
    proof: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        """As Markdown."""
        found = {name: find_record(name) for name in self.records}
        pages = {name: page if (page := path.with_suffix(".md")).exists() else path for name, path in found.items()}
        links = [f"[{name}](../benchmarks/results/{page.name})" for name, page in pages.items()]
        result = self.result(*map(read_record, self.records))
        return self.what, result, ", ".join(links) or self.proof, self.command or self._command()

    def _command(self) -> str:
        """The program of the first command, with its preset."""
        (measurement,) = (known for known in MEASUREMENTS if known.name == self.records[0])
        words = shlex.split(re.sub("^python (-m (gsplit_bench )?)?", "", measurement.commands[0]))
        preset = words[words.index("--preset") :][:2] if "--preset" in words else []
        return f"`{' '.join([*words[: 2 if words[0] == 'gsplit' else 1], *preset])}`"


def _cases(rows: Sequence[dict[str, Any]]) -> str:
    kinds = ("output", "loss", "gradient", "weights")
    alone = sum(row["replicas"] * row["splits"] == 1 for row in rows)
    of_one = f" ({alone:,} on one process)" if alone else ""
    return f"{len(rows):,} cases{of_one}, largest difference {max(row[kind] for row in rows for kind in kinds):.1e}"


# ------------------------------------------------------------------------------------------- training against peers

HOST = ("host-sage", "host-sage-1m", "host-sage-1m-4", "host-others")
"""The records of the peers on one host."""


def speed_ups(
    model: str, peer: str, *, records: Sequence[str] = HOST, strategy: str | None = None, clock: str = "cpu"
) -> list[float]:
    """A peer's seconds over those of our best strategy, or of one: geometric means over the graphs, on 2 and 4 ranks."""
    material = read_material([find_record(name) for name in records])
    found = compare_with_peers([record for bench in material.benches for record in bench.records], strategy)
    return [
        geometric_mean(
            [
                each.ratio
                for each in found
                if (each.scenario.model, each.scenario.ranks, each.peer, each.clock) == (model, ranks, peer, clock)
            ]
        )
        for ranks in (2, 4)
    ]


def _against(model: str, *peers: str, **how: Any) -> Callable[..., str]:
    names = {"dgl": "DGL", "pyg_our_sampler": "PyG", "pyg": "PyG"}

    def result(*documents: Any) -> str:
        found = {peer: speed_ups(model, peer, **how) for peer in peers}
        return "; ".join(
            f"{names[peer.partition(',')[0]]} {' and '.join(f'{ratio:.2f}' for ratio in ratios)}"
            for peer, ratios in found.items()
        )

    return result


def _bare(document: Any) -> str:
    ratios = {
        record["model"]: median(
            ours / bare for ours, bare in zip(record["seconds"]["ours"], record["seconds"]["bare"], strict=True)
        )
        for record in document["records"]
    }
    return ", ".join(f"{model} {ratios[model.lower()]:.2f}" for model in ("SAGE", "GCN", "GIN", "GAT"))


def _ratio(runs: dict[str, list[float]], peer: str) -> float:
    return median(theirs / ours for ours, theirs in zip(runs["ours"], runs[peer], strict=True))


def checkpoint_shares(document: Any) -> tuple[float, float]:
    """Percent of a step that a checkpoint holds training up for, and until it is on the disk, if training waited."""
    cost = document["cost"]
    return 100 * cost["share_of_a_step"], 100 * cost["written_after_s"] / cost["step_s"]


def _attention(what: str) -> Callable[[Any], str]:
    """PyG's, and where measured DGL's, CPU seconds over ours, of the runs whose names begin so."""

    def result(document: Any) -> str:
        runs = [run for name, run in document["records"].items() if name.startswith(what)]
        cells = {peer: ", ".join(f"{_ratio(run, peer):.1f}" for run in runs if peer in run) for peer in ("pyg", "dgl")}
        return f"PyG {cells['pyg']}; DGL {cells['dgl']}"

    return result


# ------------------------------------------------------------------------------------------- loading, partitions


def _redundancy(document: Any) -> str:
    loaded = {
        each["graph"]: (each["num_vertices"], ranks["rows_split_to_mini"], ranks["rows_data_to_mini"])
        for each in document["documents"]
        for ranks in each.get("redundancy", ())
        if (each["batch_size"], ranks["ranks"]) == (1024, 4)
    }
    *others, largest = (data for _, _, data in sorted(loaded.values()))
    (split,) = {f"{split:.2f}" for _, split, _ in loaded.values()}
    low, high = (f"{of(others):.2f}" for of in (min, max))
    return f"split {split}; data parallelism {low} to {high}, {largest:.2f} on 5 M vertices"


def _in_place(*documents: Any) -> str:
    """Rows that all ranks read over the rows of the mini-batch, of ``split`` on 4 ranks."""
    records = [record for document in documents for record in document["records"]]
    read = [
        record["rows_loaded"] / record["input_rows"]
        for record in records
        if (record["system"], record["ranks"]) == ("split", 4)
    ]
    return _range(read, 2)


def _hits(document: Any) -> str:
    counted = [each for each in document["documents"] if (each["batch_size"], each["num_parts"]) == (1024, 16)]
    off = [hit["most_off"] for each in counted for hit in each["hits"] if hit["order"] == "hot"]
    return f"{len(counted)} graphs: within {100 * max(off):.1f} points on every rank"


def _objective(row: dict[str, Any]) -> str:
    return str(row.get("objective") or row["strategy"])


def _expectation(document: Any) -> str:
    rows = [row for each in document["quality"].values() for row in each["rows"]]
    cross, load = (max(abs(row[key]) for row in rows) for key in ("cross_edges_off", "load_off"))
    return f"{len(document['quality'])} graphs: cross edges within {100 * cross:.2f} %, loads of the ranks within {100 * load:.2f} %"


def _cross_edges(graph: str) -> Callable[[Any], str]:
    """Medians of the seeds, or where there are none the one partition that was measured."""

    def result(document: Any) -> str:
        seeds = [row for row in document["seeds"] if (row["graph"], row["parts"]) == (graph, 8)]
        solvers = ("metis", "random")
        one = [row for row in document["quality"][graph]["rows"] if row["parts"] == 8 and row["solver"] in solvers]
        shares = []
        for objective in ("gsplit", "node", "edge", "random"):
            of_seeds, of_one = ([row for row in rows if _objective(row) == objective] for rows in (seeds, one))
            shares.append(median(row["cross_edge_share"] for row in of_seeds or of_one))
        return ", ".join(f"{100 * share:.1f}" for share in shares) + " %"

    return result


def _partitions_trained(document: Any) -> str:
    seconds = {
        objective: median(run["cpu_seconds_per_step"] for run in document["train"] if _objective(run) == objective)
        for objective in ("gsplit", "random", "edge")
    }
    return f"CPU seconds per step {seconds['gsplit']:.2f} instead of {seconds['random']:.2f} (an `edge` partition: {seconds['edge']:.2f})"


def _rows_shuffled(document: Any) -> str:
    rows = {
        objective: median(run["rows_shuffled_per_step"] for run in document["train"] if _objective(run) == objective)
        for objective in ("gsplit", "random")
    }
    return f"{100 * (1 - rows['gsplit'] / rows['random']):.0f} % fewer rows shuffled"


def _kaminpar(document: Any) -> str:
    (row,) = (row for row in document["rows"] if (row["graph"], row["solver"]) == ("planted5m", "kaminpar"))
    return f"{row['cpu_seconds'] / 60:.1f} CPU minutes of the solver, {row['peak_bytes'] / 1e9:.1f} GB"


def _partition_cost(solver: str) -> Callable[[Any], str]:
    """The whole command: presampling, solving in a process of its own, renumbering."""

    def result(document: Any) -> str:
        (row,) = (row for row in document["cost"] if (row["graph"], row["solver"]) == ("concentrated", solver))
        seconds = sum(row[f"{stage}_seconds"] for stage in ("presample", "weigh_and_solve", "verify_and_renumber"))
        memory = row["peak_anonymous_bytes"] + row["solver_peak_bytes"]
        return f"{seconds / 60:.1f} minutes, {memory / 1e9:.1f} GB"

    return result


# ------------------------------------------------------------------------------------------- runs


def _curves(document: Any) -> str:
    """The largest distance of two curves of a graph and model at any step."""
    apart: dict[str, float] = {}
    groups: dict[str, list[list[float]]] = {}
    for name, curve in document["curves"].items():
        groups.setdefault(" ".join(name.split()[:2]), []).append(curve["losses"])
    for name, losses in groups.items():
        apart[name] = max(max(step) - min(step) for step in zip(*losses, strict=True))
    return ", ".join(f"{name} {distance:.1e}" for name, distance in apart.items())


def _accuracies(document: Any) -> str:
    found = {name: f"{100 * run['best']['test']:.2f}" for name, run in document["full"].items()}
    return ", ".join(
        f"{graph} {found[f'{graph} sage 1 split']} and {found[f'{graph} sage 2 split']} %"
        for graph in ("debian", "arxiv")
    )


def _chain(document: Any) -> str:
    worst = {
        dtype: max(case["loss"] for case in document["chain"] if case["dtype"] == dtype)
        for dtype in ("float64", "float32")
    }
    return f"losses within {worst['float64']:.1e} in float64, {worst['float32']:.1e} in float32"


def _kills(document: Any) -> str:
    kills = document["kills"]
    assert kills["largest_loss_difference"] == kills["largest_weight_difference"] == 0.0
    return f"{len(kills['kills'])} kills: bit-identical losses and weights"


def _saves(document: Any) -> str:
    files = document["files"]
    return f"{files['kills']} kills: {files['known_saves_lost']} checkpoints lost"


def _inference(document: Any) -> str:
    plain, ours = (row for row in document["rows"] if (row["model"], row["ranks"]) == ("sage", 1))
    less = 1 - ours["peak_anonymous_bytes"] / plain["peak_anonymous_bytes"]
    sizes = " instead of ".join(f"{row['peak_anonymous_bytes'] / 1e6:,.0f}" for row in (ours, plain))
    off = f"{ours['largest_difference']:.1e} of {ours['largest_output']:.1f} (float32)"
    return f"largest difference {off}; {sizes} MB of memory, {100 * less:.0f} % less"


def _import(document: Any) -> str:
    runs = document["parquet"]["100000000"]
    seconds, speed = (median(run[key] for run in runs) for key in ("seconds", "edges_per_s"))
    memory = max(run["peak_anonymous_bytes"] for run in runs)
    return f"{seconds:.1f} s, {speed / 1e6:.1f} M edges/s, {memory / 1e6:.0f} MB of memory at the peak"


def _opening(document: Any) -> str:
    runs = document["open"]
    return (
        f"{1e3 * median(run['seconds'] for run in runs):.1f} ms, {max(run['rss_bytes'] for run in runs) / 1e6:.1f} MB"
    )


def _billion_import(document: Any) -> str:
    run = document["billion"]
    sizes = f"{run['peak_anonymous_bytes'] / 1e9:.1f} GB of memory, {run['peak_disk_bytes'] / 1e9:.0f} GB of disk at the peak"
    return f"{run['seconds']:.0f} s, {sizes}"


def _billion(document: Any) -> str:
    stages = document["stages"]
    minutes = sum(stage["wall_s"] for stage in stages[1:-1]) / 60
    memory, disk = (max(stage[key] or 0 for stage in stages) for key in ("anonymous_gb", "disk_gb"))
    return f"{minutes:.0f} min, {memory:.1f} GB of memory, {disk:.1f} GB of disk"


def _billion_step(document: Any) -> str:
    return f"{document['train']['seconds_per_step']} s"


def _range(values: Iterable[float], digits: int) -> str:
    low, high = (f"{of(list(values)):.{digits}f}" for of in (min, max))
    return low if low == high else f"{low} to {high}"


def _sampling(document: Any) -> str:
    speeds = [run["edges_per_s"] / 1e6 for run in document["runs"]]
    return f"{_range(speeds, 0)} M edges/s, {_range([run['ratio'] for run in document['runs']], 1)} times DGL 1.1.3"


def _presampling(document: Any) -> str:
    runs = document["runs"]["after"]
    return f"{document['edges'] / median(run['cpu_s'] for run in runs) / 1e6:.0f} M edges per CPU second"


def _shuffle(document: Any) -> str:
    found: dict[tuple[str, int, int], list[float]] = {}
    for row in [row for run in document["runs"] for row in run["rows"]]:
        for how in ("ratio", "ratio_over_gloo"):
            found.setdefault((how, row["ranks"], round(row["rows"], -1)), []).append(row[how])
    ratios = {key: f"{median(of_runs):.2f}" for key, of_runs in found.items()}
    ways = {"shared memory": "ratio", "gloo": "ratio_over_gloo"}
    return "; ".join(
        f"{way}: "
        + ", ".join(f"{ranks} ranks {ratios[how, ranks, 10_000]}, {ratios[how, ranks, 100_000]}" for ranks in (2, 4))
        for way, how in ways.items()
    )


def _fuzz(document: Any) -> str:
    surfaces = document["surfaces"].values()
    inputs = sum(surface["inputs"] for surface in surfaces)
    peak = max(surface["peak_bytes"] for surface in surfaces) / 1e6
    return f"{inputs:,} inputs of {len(surfaces)} kinds in {document['seconds'] / 60:.0f} min, {peak:.0f} MB at most; findings: {len(document['findings'])}"


def _links(ours: str) -> Callable[[Any], str]:
    def result(document: Any) -> str:
        sides = [(row["graph"], mean(row[ours]), mean(row["plain"])) for row in document["links"]]
        return ", ".join(f"{graph} {found:.3f} and {plain:.3f}" for graph, found, plain in sides)

    return result


def _typed(document: Any) -> str:
    one, two = document["rows"]
    batch, step = (f"{one[name]:.2f} and {two[name]:.2f}" for name in ("batch_ratio", "step_ratio"))
    return f"making the batch {batch}, whole step {step}"


def _typed_model(document: Any) -> str:
    return f"{document['rows'][0]['bare_ratio']:.2f}"


def _table3() -> str:
    rows = predict_table()
    pairs = [
        (one.predicted_s < other.predicted_s) == (one.measured_s < other.measured_s)
        for one, other in combinations(rows, 2)
        if (one.graph, one.model) == (other.graph, other.model)
    ]
    worst = max(abs(row.error) for row in rows)
    return f"{len(rows)} totals within {100 * worst:.0f} %, {sum(pairs)} of {len(pairs)} pairs of systems in the right order"


# ------------------------------------------------------------------------------------------- the table

_DEFAULTS = ("training-default-allocator",)

ROWS: tuple[Row, ...] = (
    Row(
        "outputs, gradients and weights after 5 steps against one process, float64: 11 kinds of models, all strategies, "
        "1 to 4 ranks and 2 x 2",
        ("exactness",),
        lambda document: _cases(document["rows"]),
    ),
    Row(
        "of these, with edge features or weights",
        ("exactness",),
        lambda document: _cases([row for row in document["rows"] if row["edge_values"]]),
    ),
    Row(
        "times that the host waits for a device in a step, 10 models, simulated devices",
        (),
        lambda: "0, and once per step for the loss of the previous step",
        "`pytest`",
        "[test](../tests/dist/test_simulated_device.py)",
    ),
    Row(
        "input rows that 4 ranks load, over those of one process, if owners send them; 6 graphs, batch 1024",
        ("loading",),
        _redundancy,
    ),
    Row(
        "the same, `split`, if CPU ranks of one host read rows in place, as is the default; 4 graphs",
        HOST[:3],
        _in_place,
    ),
    Row("cache hits predicted against measured, budgets of 5 to 50 %", ("loading",), _hits),
    Row(
        "peers over ours: SAGE, 4 graphs, the fastest of our strategies",
        HOST[:3],
        _against("sage", "dgl", "pyg_our_sampler"),
    ),
    Row("the same, `split`", HOST[:3], _against("sage", "dgl", "pyg_our_sampler", strategy="split")),
    Row(
        "the same by wall time; all ranks share two cores",
        HOST[:3],
        _against("sage", "dgl", "pyg_our_sampler", strategy="split", clock="wall"),
    ),
    Row(
        "the same by CPU time, PyG with its own sampler (torch-sparse); 3 of the graphs on 4 ranks",
        HOST[:2],
        _against("sage", "pyg", strategy="split"),
    ),
    Row(
        "peers over ours: GAT, 2 graphs, the fastest of our strategies",
        HOST[3:],
        _against("gat", "dgl", "pyg_our_sampler"),
    ),
    *(
        Row(
            f"peers over `split`: {model.upper()}, 2 graphs",
            HOST[3:],
            _against(model, "dgl", "pyg_our_sampler", strategy="split"),
        )
        for model in ("gat", "gcn", "gin")
    ),
    *(
        Row(
            f"peers over `split`, all with glibc's allocator settings: {model.upper()}, 3 graphs",
            _DEFAULTS,
            _against(
                model,
                "dgl, default allocator",
                "pyg_our_sampler, default allocator",
                records=_DEFAULTS,
                strategy="split",
            ),
        )
        for model in ("sage", "gat")
    ),
    Row("CPU seconds of one process over a bare loop of PyG's layers on the same blocks, arxiv", ("bare-loop",), _bare),
    Row(
        "a GAT layer, all with glibc's allocator settings: CPU seconds over those of our kernel, gradients of weights "
        "only and of rows",
        ("attention",),
        _attention("gat layer"),
    ),
    Row("a GATv2 layer: the same", ("attention",), _attention("gatv2 layer")),
    Row(
        "a step of GSplit with PyG's or DGL's GAT layer over one with our kernel, all with glibc's allocator settings; "
        "batch 256; 1, 2, 4 ranks (DGL: 1)",
        ("attention",),
        _attention("gat step"),
    ),
    Row("a step of GATv2: the same", ("attention",), _attention("gatv2 step")),
    Row("200 steps on 2 ranks, a rank killed and the run resumed, again and again", ("resume",), _kills),
    Row("the same on 1 -> 4 -> 3 -> 2 ranks, and split -> data -> split", ("resume",), _chain),
    Row("processes killed while they write a checkpoint", ("resume",), _saves),
    Row(
        "a checkpoint after every step, arxiv, one process: wall time of a step that it holds training up for; until it "
        "is on the disk, in the background",
        ("resume",),
        lambda document: " and ".join(f"{share:.1f} %" for share in checkpoint_shares(document)),
    ),
    Row(
        "loss curves of 60 steps, float32, 1, 2 and 4 ranks, `split` and `data`: largest distance",
        ("training",),
        _curves,
    ),
    Row("exact test accuracy of GraphSAGE, 1 rank and 2", ("training",), _accuracies),
    Row(
        "traffic and loads expected by `gsplit partition` against held-out mini-batches",
        ("partition",),
        _expectation,
    ),
    *(
        Row(f"cross edges in 8 parts, {graph}: gsplit, node, edge, random (METIS)", ("partition",), _cross_edges(graph))
        for graph in ("arxiv", "debian", "ego-twitter", "planted concentrated")
    ),
    Row(
        "four ranks on 100 M edges, with a gsplit partition instead of a random one",
        ("partition",),
        _partitions_trained,
    ),
    Row("the same: rows between ranks", ("partition",), _rows_shuffled),
    Row(
        "solving 100 M edges into 8 parts, the solver alone: KaMinPar, the default",
        ("solvers",),
        _kaminpar,
        "`partition-studies solvers`",
    ),
    Row(
        "partitioning 100 M edges, wall time and memory of the whole command: restreaming",
        ("partition",),
        _partition_cost("restream"),
    ),
    Row("the same: METIS", ("partition",), _partition_cost("metis")),
    Row(
        "`gsplit infer` on all 169,343 vertices of arxiv against a full-graph forward pass of PyG",
        ("inference",),
        _inference,
    ),
    Row("Parquet to store, 100 M edges, 5 M vertices", ("import",), _import),
    Row("opening that store", ("import",), _opening),
    Row("a billion generated edges, 50 M vertices, imported", ("import",), _billion_import),
    Row(
        "0.97 billion edges partitioned into 8 parts, 2 epochs presampled",
        ("billion-edges",),
        _billion,
        "[commands](scale.md#a-billion-edges-on-one-machine)",
    ),
    Row(
        "the same: a step on 2 ranks, 2 layers of width 64",
        ("billion-edges",),
        _billion_step,
        "[commands](scale.md#a-billion-edges-on-one-machine)",
    ),
    Row("sampling with relabelling alone, one core, 1 M vertices", ("sampling",), _sampling),
    Row("presampling, counting included, 2 threads", ("presampling",), _presampling, "`sampling-threads`"),
    Row(
        "bytes per second of the shuffle over gather, all-to-all and index_add; 10,000 and 100,000 rows",
        ("shuffle",),
        _shuffle,
    ),
    Row(
        "damaged and malicious inputs; before, the same campaign had found one error, which was mended",
        ("fuzz",),
        _fuzz,
    ),
    Row(
        "MRR of link prediction, and of a plain loop in one process; three seeds",
        ("quality",),
        _links("gsplit, seed edges kept"),
    ),
    Row("the same with seed edges excluded by GSplit", ("quality",), _links("gsplit, excluded")),
    Row(
        "a step with vertex types over one without, CPU seconds per drawn edge, 1 and 2 ranks", ("typed-steps",), _typed
    ),
    Row(
        "its model over PyG's layers called by hand, both with glibc's allocator settings, CPU seconds",
        ("typed-steps",),
        _typed_model,
    ),
    Row(
        "the paper's Table 3 from its counts and one set of V100 constants: a fit, not a prediction",
        (),
        _table3,
        "`planner-paper`",
        "[paper-table](../benchmarks/results/2026-11-17-paper-table.md)",
    ),
)


def table() -> str:
    """All rows, as Markdown."""
    lines = ["| measurement | result | record | command |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells())} |" for row in ROWS)])


def main(arguments: Sequence[str]) -> None:
    print(table())
