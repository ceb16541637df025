"""Partition quality and cost beyond ``python -m gsplit_bench partition``: more epochs, merged parts, memory.

    python -m gsplit_bench partition-studies epochs WORK     # 10, 30 and 100 epochs of presampling
    python -m gsplit_bench partition-studies seeds WORK      # the objectives with seven seeds of METIS each
    python -m gsplit_bench partition-studies classes WORK    # the objectives for targets of one class, for every WORK/*.gsplit
    python -m gsplit_bench partition-studies merge WORK      # 16 parts merged to 8, 4, 3, 2 against direct partitions
    python -m gsplit_bench partition-studies memory WORK     # solvers' memory against the estimate, at three sizes
    python -m gsplit_bench partition-studies solvers WORK    # all solvers at 4 to 1,024 parts and equal balance, for every WORK/*.gsplit
    python -m gsplit_bench partition-studies held-out WORK   # 1 to 10 presampled epochs: expected and held-out cut, for every WORK/*.gsplit
    python -m gsplit_bench partition-studies weights WORK    # choices of c_v : c_e
    python -m gsplit_bench partition-studies cost WORK       # seconds and bytes of every stage, real graphs and WORK/concentrated.gsplit
    python -m gsplit_bench partition-studies train WORK      # four ranks on the concentrated planted graph, WORK/concentrated.gsplit
    python -m gsplit_bench partition-studies figure OUT.png NAME=RESULT.json ...

WORK is a folder for stores; the real graphs are found through GSPLIT_TEST_DATA. How WORK/concentrated.gsplit is made stands in
benchmarks/results/archive/2026-11-15-partition.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np

from gsplit.graph.graph import Graph
from gsplit.graph.ownership import lightest_runs
from gsplit.partitioning.forecast import imbalance
from gsplit.partitioning.partition import partition
from gsplit.partitioning.plan import PartitionPlan, find_parts
from gsplit.partitioning.presample import Counts, PresampleCounter, Workload, draw_epochs, presample
from gsplit.partitioning.quality import Quality, expect, measure
from gsplit.partitioning.quotient import count_links
from gsplit.partitioning.settings import C_E, C_V, EPOCHS, TOLERANCE, PartitionSettings
from gsplit.partitioning.solvers.run import anonymous_bytes, run_solver, solver_module
from gsplit.partitioning.weighted_graph import WeightedGraph, open_weighted
from gsplit.partitioning.weights import vertex_work, weigh
from gsplit.run.folder import telemetry_path
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import open_store
from gsplit_bench.partition import bench_partition, save_partitions
from gsplit_bench.real_graphs import real_store

__all__ = ["main"]

GRAPHS = {"arxiv": "ogbn_arxiv_nofeat", "debian": "debian_packages", "ego-twitter": "ego_twitter_topology"}

STORES = {
    "gsplit": "concentrated-metis.gsplit",  # as cost leaves it
    "edge": "concentrated-edge.gsplit",
    "random": "concentrated-random.gsplit",
}
TRAIN_REPEATS = 3

FEWER_EPOCHS = (1, 2, 3, 5, EPOCHS)
PARTS = (4, 8, 64, 1024)
SOLVERS = {"kaminpar": 1.01, "cluster": 1.01, "restream": 1.01, "metis": TOLERANCE, "mtkahypar": 1.01}
"""Tolerances at which solvers reach about the same balance."""
MOST_BYTES = 4 << 30
"""Solvers that would need more are left out, with their estimate."""


def _workload(name: str, work: Path) -> Workload:
    store = real_store(GRAPHS[name], work)
    return Workload.of_store(store, "train" if "targets/train" in store.names else None, [15, 15, 15], 1024)


def _plan(workload: Workload, counts: Counts, settings: PartitionSettings, work: Path) -> PartitionPlan:
    with TemporaryDirectory(dir=work) as folder:
        return find_parts(workload, counts, settings, Path(folder))


def epochs(work: Path) -> list[dict[str, Any]]:
    """The same held-out mini-batches for all: those after the hundredth epoch."""
    rows = []
    for name in GRAPHS:
        workload = _workload(name, work)
        plans = []
        for number in (10, 30, 100):
            counts = presample(workload, epochs=number)
            plans += [
                (number, seed, _plan(workload, counts, PartitionSettings(4, seed=seed), work)) for seed in range(3)
            ]
        found = measure(
            workload.graph, draw_epochs(workload, range(100, 101)), [(p.parts, 4) for *_, p in plans], C_V, C_E
        )
        for (number, seed, _), quality in zip(plans, found, strict=True):
            rows.append({"graph": name, "epochs": number, "seed": seed, **quality.as_dict()})
    return rows


def seeds(work: Path) -> list[dict[str, Any]]:
    """A solver's luck is as large as some differences between objectives: all with the same seeds."""
    return [
        {"graph": name, **row} for name in GRAPHS for row in _compare_objectives(_workload(name, work), (4, 8), 7, work)
    ]


def _compare_objectives(workload: Workload, numbers: Sequence[int], num_seeds: int, work: Path) -> list[dict[str, Any]]:
    """Parts by the three objectives with the same seeds, on the epoch after those presampled."""
    counts = presample(workload)
    settings = [
        PartitionSettings(parts, objective=objective, seed=seed)
        for parts in numbers
        for objective in ("gsplit", "node", "edge")
        for seed in range(num_seeds)
    ]
    plans = [_plan(workload, counts, setting, work) for setting in settings]
    partitions = [(plan.parts, setting.parts) for plan, setting in zip(plans, settings, strict=True)]
    found = measure(workload.graph, draw_epochs(workload, range(EPOCHS, EPOCHS + 1)), partitions, C_V, C_E)
    return [
        {"parts": setting.parts, "objective": setting.objective, "seed": setting.seed} | quality.as_dict()
        for setting, quality in zip(settings, found, strict=True)
    ]


def classes(work: Path) -> list[dict[str, Any]]:
    """Few, concentrated targets: the training targets of one class, that with the most and that with the median number.

    Mini-batches have 256 targets. The parts are for these targets only, as if the others were not labelled.
    """
    rows = []
    for path in sorted(work.glob("*.gsplit")):
        store = open_store(path)
        every = Workload.of_store(store, "train", [15, 15, 15], 256)
        labels = np.asarray(store.stored_array("y"))[every.targets]
        by_size = np.argsort(np.bincount(labels), kind="stable")
        for label in (int(by_size[-1]), int(by_size[by_size.size // 2])):
            targets = every.targets[labels == label]
            workload = replace(every, targets=targets, batch_size=min(256, targets.size))
            about = {"graph": path.stem, "class": label, "num_targets": int(targets.size)}
            rows += [about | row for row in _compare_objectives(workload, (4,), 3, work)]
    return rows


def merge(work: Path) -> list[dict[str, Any]]:
    rows = []
    for name in GRAPHS:
        workload = _workload(name, work)
        counts = presample(workload)
        labels, partitions = [], []
        for solver in ("metis", "mtkahypar", "restream"):
            sixteen = _plan(workload, counts, PartitionSettings(16, solver=solver), work)
            loads = np.bincount(sixteen.parts, vertex_work(counts, C_V, C_E), 16).astype(int).tolist()
            for ranks in (8, 4, 3, 2):
                starts = lightest_runs(loads, ranks)
                merged = np.searchsorted(starts, np.arange(16), side="right").astype(np.int32) - 1
                direct = _plan(workload, counts, PartitionSettings(ranks, solver=solver), work)
                for how, parts in (("merged", merged[sixteen.parts]), ("direct", direct.parts)):
                    labels.append({"graph": name, "solver": solver, "ranks": ranks, "how": how})
                    partitions.append((parts, ranks))
        found = measure(workload.graph, draw_epochs(workload, range(10, 11)), partitions, C_V, C_E)
        for label, (parts, ranks), quality in zip(labels, partitions, found, strict=True):
            expected = expect(workload.graph, counts, parts, ranks, C_V, C_E)
            rows.append(label | quality.as_dict() | {"expected_work_imbalance": float(imbalance(expected.loads))})
    return rows


def weights(work: Path) -> list[dict[str, Any]]:
    rows = []
    for name in GRAPHS:
        for c_v, c_e in ((1, 0), (8, 1), (1, 1), (0, 1)):
            document = bench_partition(
                _workload(name, work), [8], cases=[("gsplit", "metis"), ("node", "metis")], c_v=c_v, c_e=c_e
            )
            rows += [{"graph": name, "c_v": c_v, "c_e": c_e, **row} for row in document["rows"]]
    return rows


def memory(work: Path) -> list[dict[str, Any]]:
    """Planted graphs of growing size, every edge with a weight; METIS into 8 parts."""
    rows = []
    for edges in (1_000_000, 5_000_000, 20_000_000):
        with TemporaryDirectory(dir=work) as folder:
            planted = PlantedGraph(edges // 10, edges, num_features=0, target_share=0.05)
            store = build_store(synthetic_source(planted), Path(folder) / "g.gsplit")
            workload = Workload.of_store(store, "train", [15, 15, 15], 1024)
            for solver in ("metis", "restream"):
                document = bench_partition(workload, [8], cases=[("gsplit", solver)], epochs=2, folder=Path(folder))
                rows += [{"edges": edges, "vertices": edges // 10, **row} for row in document["rows"]]
    return rows


def solvers(work: Path) -> list[dict[str, Any]]:
    """Every store of the folder; METIS lands at a balance of 1.00, so the others get a tolerance of 1.01.

    Weighted graphs (WORK/weighted) and rows (WORK/solvers.jsonl) are made once: a run that was stopped goes on.
    """
    path = work / "solvers.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["graph"], row["parts"], row["solver"]) for row in rows}
    for store in sorted(work.glob("*.gsplit"), key=lambda store: open_store(store).graph.num_edges):
        graph = _weighted(store, work / "weighted" / store.stem)
        for parts, (solver, tolerance) in product(PARTS, SOLVERS.items()):
            if (store.stem, parts, solver) not in done:
                label = {"graph": store.stem, "parts": parts, "solver": solver, "tolerance": tolerance}
                rows.append(label | _solve_weighted(solver, graph, work / "weighted" / store.stem, parts, tolerance))
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return rows


def _weighted(store: Path, folder: Path) -> WeightedGraph:
    """The weights of 10 presampled epochs."""
    if not folder.exists():
        workload = Workload.of_store(open_store(store), "train", [15, 15, 15], 1024)
        with TemporaryDirectory(dir=folder.parent) as unfinished:
            weigh("gsplit", workload.graph, presample(workload), workload.targets, Path(unfinished), C_V, C_E)
            Path(unfinished).rename(folder)
            Path(unfinished).mkdir()
    return open_weighted(folder)


def _solve_weighted(solver: str, graph: WeightedGraph, folder: Path, parts: int, tolerance: float) -> dict[str, Any]:
    estimate = solver_module(solver).estimate_bytes(graph.num_vertices, graph.adjncy.size, 1)
    if estimate > MOST_BYTES:
        return {"skipped": f"estimated {estimate / 1e9:.1f} GB of memory"}
    found = run_solver(solver, graph, folder, parts, tolerance, seed=0)
    links = count_links(Graph(graph.xadj, graph.adjncy, graph.num_vertices), graph.edge_weights, found.parts, parts)
    return {
        "cross_edge_share": float(1 - links.trace() / links.sum()),
        "work_imbalance": float(imbalance(np.bincount(found.parts, graph.vertex_weights[:, 0], parts))),
        "cpu_seconds": found.cpu_seconds,
        "peak_bytes": found.peak_bytes,
        "estimated_bytes": estimate,
    }


def held_out(work: Path) -> list[dict[str, Any]]:
    """Every store of the folder in 8 parts, by the weights of 1 to 10 epochs; held out is the epoch after the tenth.

    ``drawn_once`` is the share of edges drawn once among all draws: by Good and Turing, the share of the next draws that
    are of edges which were never drawn.
    """
    rows = []
    for store in sorted(work.glob("*.gsplit")):
        workload = Workload.of_store(open_store(store), "train", [15, 15, 15], 1024)
        counter = PresampleCounter(workload.graph)
        found, partitions, cpu_s = [], [], 0.0
        for epoch in range(EPOCHS):
            started = time.process_time()
            for drawn in draw_epochs(workload, range(epoch, epoch + 1), threads=1):
                counter.add(drawn)
            cpu_s += time.process_time() - started
            if epoch + 1 not in FEWER_EPOCHS:
                continue
            counts = counter.counts((epoch + 1) * workload.steps_per_epoch)
            drawn_once = np.count_nonzero(counts.edges == 1) / int(counts.edges.sum(dtype=np.int64))
            for solver, seed in product(("metis", "kaminpar"), range(3)):
                plan = _plan(workload, counts, PartitionSettings(8, solver=solver, seed=seed), work)
                expected = expect(workload.graph, counts, plan.parts, 8, C_V, C_E)
                label = {"graph": store.stem, "solver": solver, "seed": seed, "epochs": epoch + 1}
                fitted = {"cross_edge_share": expected.cross_edge_share, "most_work": float(imbalance(expected.loads))}
                found.append(label | {"presample_cpu_s": cpu_s, "drawn_once": drawn_once, "fitted": fitted})
                partitions.append((plan.parts, 8))
        batches = draw_epochs(workload, range(EPOCHS, EPOCHS + 1), threads=1)
        rows += [
            row | {"held_out": _held_out(quality)}
            for row, quality in zip(found, measure(workload.graph, batches, partitions, C_V, C_E), strict=True)
        ]
    return rows


def _held_out(quality: Quality) -> dict[str, Any]:
    edges, crossing = quality.totals[:, :, :2].sum(axis=1).T
    return {
        "num_batches": edges.size,
        "cross_edge_share": quality.cross_edge_share(),
        "cross_edge_share_deviation": float((crossing / edges).std(ddof=1)),
        "most_work": float(imbalance(quality.mean_loads()[0])),
    }


def cost(work: Path) -> list[dict[str, Any]]:
    """``gsplit partition`` into 8 parts, whole: seconds of its stages, anonymous memory of it and of its solver."""
    rows = []
    stores = {name: real_store(GRAPHS[name], work).path for name in GRAPHS}
    if (work / "concentrated.gsplit").exists():
        stores["concentrated"] = work / "concentrated.gsplit"
    for name, path in stores.items():
        targets = "train" if "targets/train" in open_store(path).names else "all"
        for solver in ("restream", "metis"):
            out = str(work / f"{name}-{solver}.gsplit")
            options = f"--parts 8 --json --overwrite --solver {solver} --targets {targets}"
            command = [sys.executable, "-m", "gsplit", "partition", str(path), out, *options.split()]
            document, peak = _watched(command)
            counts = document["provenance"][-1]["counts"]
            presampled, solved = counts["presample_ms"] / 1000, counts["solve_ms"] / 1000
            rows.append(
                {
                    "graph": name,
                    "solver": solver,
                    "presample_seconds": presampled,
                    "weigh_and_solve_seconds": solved,
                    "verify_and_renumber_seconds": document["seconds"] - presampled - solved,
                    "peak_anonymous_bytes": peak,
                    "solver_peak_bytes": counts["solver_peak_bytes"],
                    "store_bytes": document["num_bytes"],
                    "mini_batches": counts["mini_batches"],
                }
            )
    return rows


def _watched(command: list[str]) -> tuple[dict[str, Any], int]:
    """Run a command; its document and the most anonymous memory of its own process, seen every 50 ms."""
    with TemporaryFile("w+") as output:
        process, peak = subprocess.Popen(command, stdout=output), 0
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.05)
        assert process.returncode == 0
        output.seek(0)
        return json.load(output), peak


def train(work: Path) -> list[dict[str, Any]]:
    """``gsplit train --nproc 4`` from three partitions of the concentrated planted graph, in turn."""
    store, rows = open_store(work / "concentrated.gsplit"), []
    for objective, name in STORES.items():
        if not (work / name).exists():
            partition(store, work / name, 8, [15, 15, 15], "train", batch_size=1024, objective=objective)
    for repeat in range(TRAIN_REPEATS):
        for objective, name in STORES.items():
            out = work / f"run-{objective}"
            options = "--nproc 4 --hidden 256 --fanout 15,15,15 --batch-size 1024 --steps 22 --evaluate-every 0 --overwrite --json"
            command = [sys.executable, "-m", "gsplit", "train", str(work / name)]
            done = subprocess.run(
                [*command, *options.split(), "--out", str(out)], capture_output=True, text=True, check=True
            )
            records = [_records(telemetry_path(out, rank)) for rank in range(4)]
            cpu = np.array([[record["cpu_seconds"] for record in rank] for rank in records])
            sent = np.array([[record["counts"]["rows_sent"] for record in rank] for rank in records])
            inputs = np.array([[record["counts"]["input_rows"] for record in rank] for rank in records])
            rows.append(
                {
                    "objective": objective,
                    "repeat": repeat,
                    "last_loss": json.loads(done.stdout)["losses"][-1],
                    "rows_shuffled_per_step": float(sent.sum(axis=0).mean()),
                    "rows_shuffled_per_input": float(sent.sum() / inputs.sum()),
                    "cpu_seconds_per_step": float(cpu.sum(axis=0).mean()),
                    "slowest_rank_cpu_seconds": float(cpu.max(axis=0).mean()),
                }
            )
    return rows


def _records(path: Path) -> list[dict[str, Any]]:
    """All steps but the first two, which compile and fill buffers."""
    return [json.loads(line) for line in path.read_text().splitlines()][2:]


STUDIES = {
    "epochs": epochs,
    "seeds": seeds,
    "classes": classes,
    "merge": merge,
    "memory": memory,
    "solvers": solvers,
    "held-out": held_out,
    "weights": weights,
    "cost": cost,
    "train": train,
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*STUDIES, "figure"])
    parser.add_argument("where", type=Path)
    parser.add_argument("results", nargs="*")
    given = parser.parse_args(arguments)
    if given.what == "figure":
        named = dict(result.split("=", 1) for result in given.results)
        save_partitions({name: json.loads(Path(path).read_text()) for name, path in named.items()}, given.where)
        return
    work: Path = given.where
    work.mkdir(parents=True, exist_ok=True)
    json.dump(STUDIES[given.what](work), sys.stdout, indent=1)
