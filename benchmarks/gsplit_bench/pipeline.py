"""Batches made ahead in a thread: how fast the thread samples beside training, and how much of loading it hides.

    python -m gsplit_bench pipeline --out benchmarks/results/DATE-pipeline

One rank, one thread for torch, so that two cores are enough. Needs a machine with nothing else to do: everything here is
wall time. Depths are taken in turn, an epoch each, repeatedly.

- rate alone: edges per second of the sampling stage in the loader's thread while the main thread does nothing.
- rate beside training: the same while the main thread trains on the batches.
- hidden: 1 - (seconds that training waited for batches) / (seconds of all loading stages in the thread).
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["main"]

os.environ["OMP_NUM_THREADS"] = "1"

VERTICES, EDGES, FEATURES, BATCH, HIDDEN = 1_000_000, 20_000_000, 128, 1024, 256
FANOUT = [15, 10, 5]
LOADING = ("sample", "split", "exchange_ids", "load_features", "exchange_features")


def make_data(vertices: int, edges: int) -> Any:
    import numpy as np
    import torch
    from torch_geometric.data import Data

    rng = np.random.default_rng(0)
    src, dst = (vertices * rng.random(edges) ** 1.5).astype(np.int64), rng.integers(0, vertices, edges)
    return Data(
        x=torch.from_numpy(rng.normal(size=(vertices, FEATURES)).astype(np.float32)),
        y=torch.from_numpy(rng.integers(0, 16, vertices)),
        edge_index=torch.from_numpy(np.stack([src, dst])),
    )


def run(graph: Any, depth: int, steps: int, *, train: bool) -> dict[str, float]:
    """Seconds per step, the rate of sampling, and the seconds of loading and waiting, over some steps."""
    import torch
    from torch_geometric.nn import GraphSAGE

    import gsplit

    mesh = gsplit.init("cpu")
    loader = gsplit.NeighborLoader(graph, FANOUT, None, batch_size=BATCH, mesh=mesh, prefetch=depth)
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(FEATURES, HIDDEN, 3, 16, dropout=0.5), mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters()), loader)
    start = time.perf_counter()
    for number, batch in enumerate(loader):
        if train:
            trainer.train_step(batch)
        if number == 0:
            start = time.perf_counter()  # behind compiling and the first allocations
        if number == steps:
            break
    seconds = time.perf_counter() - start
    records = list(loader.telemetry.records)[1:]
    loading = sum(record.seconds.get(name, 0.0) for record in records for name in LOADING)
    sampling = sum(record.seconds["sample"] for record in records)
    return {
        "seconds_per_step": seconds / steps,
        "edges_per_s": sum(record.counts["edges"] for record in records) / sampling,
        "loading_s": loading / len(records),
        "waited_s": sum(record.seconds.get("wait_for_batch", 0.0) for record in records) / len(records),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=int, default=VERTICES)
    parser.add_argument("--edges", type=int, default=EDGES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--out", type=Path, help="where to write .json and .md")
    options = parser.parse_args(arguments)
    import torch

    import gsplit

    torch.set_num_threads(1)
    records: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        graph = gsplit.from_pyg(make_data(options.vertices, options.edges), Path(folder) / "graph.gsplit")
        run(graph, 0, 2, train=True)
        for _ in range(options.rounds):
            records.setdefault("alone", []).append(run(graph, 2, options.steps, train=False))
            for depth in options.depths:
                records.setdefault(f"depth {depth}", []).append(run(graph, depth, options.steps, train=True))
    alone = median(found["edges_per_s"] for found in records["alone"])
    lines = [
        "| | seconds per step | sampling, M edges/s | of its rate alone | loading, s | waited, s | hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rounds in records.items():
        step, rate, loading, waited = (median(found[key] for found in rounds) for key in rounds[0])
        hidden = f"{1 - waited / loading:.0%}" if name.startswith("depth") and name != "depth 0" else "-"
        lines.append(
            f"| {name} | {step:.3f} | {rate / 1e6:.1f} | {rate / alone:.0%} | {loading:.3f} | {waited:.3f} | {hidden} |"
        )
    print("\n".join(lines))
    if options.out is not None:
        about = {"machine": platform.platform(), "settings": {k: str(v) for k, v in vars(options).items()}}
        options.out.with_suffix(".json").write_text(json.dumps({**about, "records": records}))
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
