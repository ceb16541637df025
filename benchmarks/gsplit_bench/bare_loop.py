"""A training step of one process against a bare loop of PyG's layers over the same blocks.

    python -m gsplit_bench bare-loop STORE --models sage --out benchmarks/results/DATE-bare-loop

Batches are made ahead. The bare loop calls PyG's layers on each block by hand, on the fastest edges that they take: SAGE,
GIN and GCN on a CSR matrix made of the block, whose values are GCN's weights, and GAT on ``edge_index``; ReLU between
them, the mean of the cross-entropy, backward, Adam. GCN's degrees are those of the whole graph. Ours is a wrapped
model and ``Trainer.train_step`` with its telemetry and checks. Both take every batch in turn, the first of the two in
turn as well; what counts is CPU seconds. The losses of all steps are compared: both compute the same.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from gsplit.distributed.launch.allocator import ALLOCATOR

__all__ = ["main"]

FANOUT, BATCH, WARM_UP = [15, 15, 15], 1024, 2
MODELS: dict[str, dict[str, Any]] = {"sage": {}, "gcn": {}, "gin": {}, "gat": {"heads": 4}}
HIDDEN = 256


def bare_step(kind: str, model: Any, optimizer: Any) -> Callable[[Any], float]:
    """A step as one would write it by hand."""
    import torch
    import torch.nn.functional as F

    from gsplit.kernels.csr import csr_matrix
    from gsplit.nn.layer_edges import normalised_edges

    if kind == "gcn":  # the matrix has the weights
        for conv in model.convs:
            conv.normalize = False

    def run_layer(number: int, h: Any, batch: Any) -> Any:
        conv, block = model.convs[number], batch.blocks[number]
        if kind == "gat":
            return conv((h, h[: block.num_dst]), block.edge_index())
        weights = torch.ones(block.num_edges)
        if kind == "gcn":
            norm, _ = batch.gcn_norm(number, add_self_loops=True, fill_value=1.0, weighted=False, dtype=h.dtype)
            block, weights = normalised_edges(block, norm)
        matrix = csr_matrix(block.indptr, block.src_rows, weights, num_columns=block.num_src)
        return conv(h, matrix) if kind == "gcn" else conv((h, h[: block.num_dst]), matrix)

    def step(batch: Any) -> float:
        h = batch.x
        for number in range(len(model.convs)):
            h = run_layer(number, h, batch)
            if number + 1 < len(model.convs):
                h = F.relu(h)
        loss = F.cross_entropy(h, batch.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(store: str, kind: str, num_batches: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of every step, both ways, and the largest difference of their losses."""
    import torch

    import gsplit
    from gsplit.run.models import make_model

    mesh = gsplit.init("cpu")
    graph = gsplit.open(store)
    loader = gsplit.NeighborLoader(graph, FANOUT, "train", batch_size=BATCH, mesh=mesh)
    batches = [loader.make_batch(0, number) for number in range(num_batches)]
    sizes: dict[str, Any] = {
        "in_channels": graph.num_features,
        "hidden_channels": HIDDEN,
        "num_layers": len(FANOUT),
        "out_channels": graph.num_classes,
    }

    def model() -> Any:
        torch.manual_seed(0)
        return make_model(kind, **sizes, **MODELS[kind])

    plain, wrapped = model(), gsplit.parallelize(model(), mesh)
    trainer = gsplit.Trainer(wrapped, torch.optim.Adam(wrapped.parameters()), loader)

    def ours(batch: Any) -> float:
        loss = trainer.train_step(batch)
        loader.telemetry.end_step(batch.telemetry)
        return loss

    ways = {"bare": bare_step(kind, plain, torch.optim.Adam(plain.parameters())), "ours": ours}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    worst = 0.0
    for number in range(WARM_UP + rounds * num_batches):
        losses = []
        for name in sorted(ways, reverse=number % 2 == 1):
            start = time.process_time()
            losses.append(ways[name](batches[number % num_batches]))
            if number >= WARM_UP:
                seconds[name].append(time.process_time() - start)
        worst = max(worst, abs(losses[0] - losses[1]))
    assert worst < 1e-3, worst
    return {"graph": Path(store).stem, "model": kind, "seconds": seconds, "largest_difference_of_losses": worst}


def row(found: dict[str, Any]) -> str:
    bare, ours = found["seconds"]["bare"], found["seconds"]["ours"]
    ratios = [o / b for o, b in zip(ours, bare, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return (
        f"| {found['graph']} | {found['model']} | {len(bare)} | {median(bare):.3f} | {median(ours):.3f} "
        f"| {median(ratios):.3f} ({low:.3f} to {high:.3f}) |"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="where to write .json and .md")
    options = parser.parse_args(arguments)
    settings = {"OMP_NUM_THREADS": "1", **ALLOCATOR}  # read when a process starts
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "gsplit_bench", "bare-loop", *arguments], {**os.environ, **settings}
        )
    lines = [
        "| graph | model | steps | bare, CPU s | ours, CPU s | ours / bare (quartiles) |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    records = []
    for store in options.stores:
        for kind in options.models:
            records.append(measure(store, kind, options.batches, options.rounds))
            lines.append(row(records[-1]))
            print(lines[-1], flush=True)
    if options.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        about: dict[str, Any] = {
            "commit": commit.stdout.strip(),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
        }
        about["load"] = os.getloadavg()
        options.out.with_suffix(".json").write_text(json.dumps({**about, "records": records}))
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
