"""``gsplit infer`` against a full-graph forward of the plain PyG model on one process: difference, memory, seconds.

python -m gsplit_bench inference STORE --work /tmp/work --out benchmarks/results/DATE-inference

Memory is the largest anonymous memory (RssAnon) of a rank, read every 10 ms, less what the process holds before it begins (imports).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["main"]

PLAIN = """
import json, sys
from pathlib import Path
import numpy as np, torch, gsplit
from gsplit.run.recipe import build_model
from gsplit.run.folder import load_run, load_weights
store, run = gsplit.open(sys.argv[1]), Path(sys.argv[2])
settings, shape = load_run(run)
model = build_model(settings, shape, store).eval()
load_weights(run, model)
data = gsplit.to_pyg(store)
with torch.no_grad():
    np.save(sys.argv[3], model(data.x, data.edge_index).numpy())
"""


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(member for child in children for member in _family(int(child)))]


def watched(command: list[str]) -> dict[str, Any]:
    """Run a command: seconds, and the largest memory of any process of it."""
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None:
            peak = max([peak, *(_anonymous(pid) for pid in _family(process.pid))])
            time.sleep(0.01)
    assert process.returncode == 0, command
    return {"seconds": time.perf_counter() - started, "peak_anonymous_bytes": peak}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path, help="with features and labels, not partitioned")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the runs and the outputs")
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--out", type=Path, required=True, help="record to write, without .json")
    options = parser.parse_args(arguments)
    cli = [sys.executable, "-m", "gsplit"]
    empty = watched([sys.executable, "-c", "import torch, torch_geometric.nn, gsplit.run.recipe"])
    rows: list[dict[str, Any]] = []
    for model, more in {"sage": ["--hidden", "256", "--norm", "batch_norm"], "gat": ["--hidden", "128"]}.items():
        run = options.work / f"run-{model}"
        train = [
            *cli,
            "train",
            str(options.store),
            "--model",
            model,
            *more,
            "--steps",
            str(options.steps),
            "--evaluate-every",
            "0",
        ]
        watched([*train, "--nproc", "2", "--out", str(run), "--overwrite", "--json"])
        plain = options.work / f"plain-{model}.npy"
        rows.append({"model": model, "how": "plain PyG, full graph", "ranks": 1})
        rows[-1] |= watched([sys.executable, "-W", "ignore", "-c", PLAIN, str(options.store), str(run), str(plain)])
        want = np.load(plain)
        for ranks in (1, 2):
            out = options.work / f"infer-{model}-{ranks}.npy"
            rows.append({"model": model, "how": "gsplit infer", "ranks": ranks})
            infer = [*cli, "infer", str(options.store), "--weights", str(run), "--out", str(out), "--overwrite"]
            rows[-1] |= watched([*infer, "--nproc", str(ranks), "--json"])
            rows[-1]["largest_difference"] = float(np.abs(np.load(out) - want).max())
            rows[-1]["largest_output"] = float(np.abs(want).max())
        print(json.dumps(rows[-3:], indent=1), flush=True)
    document = {"graph": options.store.stem, "imports_anonymous_bytes": empty["peak_anonymous_bytes"], "rows": rows}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
