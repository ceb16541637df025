"""Training in bf16 against float32: the same seed, mini-batches and weights to begin with.

    python -m gsplit_bench bf16 STORE... --steps 200 --out benchmarks/results/DATE-bf16

Two-layer GraphSAGE on one process. ``float32 again`` begins with weights that differ in the last bit: as far as
training drifts by rounding alone. Distances are of the losses from those of float32, step by step; accuracies are exact, on
val and test. CPU seconds of the first run hold the compilation of kernels.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gsplit.distributed.launch.allocator import ALLOCATOR

__all__ = ["main"]

FANOUT, HIDDEN = [10, 10], 64
RUNS = ("float32", "bf16", "float32 again")


def train(path: str, run: str, steps: int, batch_size: int) -> dict[str, Any]:
    """Losses of every step, exact accuracies after the last, and CPU seconds of a step."""
    import torch

    import gsplit
    from gsplit.run.models import make_model

    mesh, store = gsplit.init(), gsplit.open(path)
    torch.manual_seed(0)
    widths: dict[str, Any] = {
        "in_channels": store.num_features,
        "hidden_channels": HIDDEN,
        "out_channels": store.num_classes,
    }
    model = gsplit.parallelize(make_model("sage", num_layers=len(FANOUT), dropout=0.5, **widths), mesh)
    if run == "float32 again":
        with torch.no_grad():
            for weights in model.parameters():
                weights.copy_(torch.nextafter(weights, torch.tensor(torch.inf)))
    loader = gsplit.NeighborLoader(store, FANOUT, "train", batch_size=batch_size, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    precision = "bf16" if run == "bf16" else "float32"
    trainer = gsplit.Trainer(model, optimizer, loader, precision=precision)
    losses: list[float] = []
    begun = time.process_time()
    while len(losses) < steps:
        losses += trainer.train_epoch(steps - len(losses))
    seconds = (time.process_time() - begun) / steps
    scores = trainer.evaluate(store, ["val", "test"])
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters()})
    return {"run": run, "losses": losses, "accuracies": scores, "cpu_s_per_step": seconds, "weights": kinds}


def compare(path: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """A line of the table for every run."""
    lines, want = [], found["float32"]["losses"]
    for run, record in found.items():
        distances = [abs(a - b) for a, b in zip(record["losses"], want, strict=True)]
        last = fmean(record["losses"][-20:])
        val, test = (f"{100 * record['accuracies'][name]:.2f} %" for name in ("val", "test"))
        far = f"{fmean(distances):.1e} | {max(distances):.1e}"
        lines.append(
            f"| {Path(path).stem} | {run} | {last:.4f} | {far} | {val} | {test} | {record['cpu_s_per_step']:.3f} |"
        )
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--out", type=Path, help="where to write .json and .md")
    options = parser.parse_args(arguments)
    settings = {"OMP_NUM_THREADS": "1", **ALLOCATOR}  # read when a process starts
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "gsplit_bench", "bf16", *arguments], {**os.environ, **settings}
        )
    from gsplit_bench.machine import current_commit, describe_machine, installed_versions

    title = "| graph | run | mean loss of the last 20 steps | mean distance | largest | val | test | CPU s per step |"
    lines, records = [title, "|---|---|---|---|---|---|---|---|"], {}
    print("\n".join(lines))
    for path in options.stores:
        found = {run: train(path, run, options.steps, options.batch_size) for run in RUNS}
        records[Path(path).stem] = list(found.values())
        new = compare(path, found)
        print("\n".join(new), flush=True)
        lines += new
    if options.out is not None:
        about = {"commit": current_commit(), "machine": describe_machine(), "versions": installed_versions()}
        how = {"steps": options.steps, "batch_size": options.batch_size, "fanout": FANOUT, "hidden": HIDDEN}
        options.out.with_suffix(".json").write_text(json.dumps({**about, "settings": how, "records": records}))
        text = f"`python -m gsplit_bench bf16`, {options.steps} steps of {options.batch_size} targets, commit {about['commit']}.\n"
        options.out.with_suffix(".md").write_text("\n".join(["# bf16 against float32", "", text, *lines]) + "\n")
