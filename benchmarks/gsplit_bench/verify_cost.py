"""What the checks of the first steps cost: their CPU seconds over those of the first 100 steps.

    python -m gsplit_bench verify-cost STORE [RANKS [OUT.json]]

A loop of a user's own runs with the checks and without them (``verify_every=0``), in turns, each in new processes. The
checks cost what the first steps take longer with them; the comparison with one process, which is most of it, is timed by
itself, too. The first turn may compile kernels of float64, which are kept on disk, and is not in the medians. CPU seconds
are summed over ranks; those of 100 steps are 100 times the median step.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.nn.checks.one_process import OneProcessCheck
from gsplit.run.models import make_model
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.ranks import run_ranks

__all__ = ["main"]

SETUPS: list[tuple[str, int, list[int]]] = [
    ("sage", 256, [15, 15, 15]),
    ("gat", 256, [10, 10]),
    ("sage", 64, [10, 10]),
]
"""Model, hidden width and fanouts; the first is the default of ``gsplit train``, the last that of README.md."""
CHECKED = 4
STEPS = 20
TURNS = 9
BATCH_SIZE = 1024


def measure(
    mesh: Mesh, path: str, kind: str, hidden: int, fanout: list[int], verify_every: int | None
) -> dict[str, float]:
    """Train; CPU seconds of the first steps, and of a later one, on this rank."""
    torch.manual_seed(0)
    compare = OneProcessCheck.compare
    compared_cpu_s = 0.0

    def compare_timed(*arguments: Any) -> str:
        nonlocal compared_cpu_s
        start = time.process_time()
        reason = compare(*arguments)
        compared_cpu_s += time.process_time() - start
        return reason

    setattr(OneProcessCheck, "compare", compare_timed)  # noqa: B010  # this process ends with the measurement
    store = gsplit.open(path)
    plain = make_model(
        kind,
        in_channels=store.num_features,
        hidden_channels=hidden,
        num_layers=len(fanout),
        out_channels=store.num_classes,
        dropout=0.5,
    )
    model = gsplit.parallelize(plain, mesh, verify_every=verify_every)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = gsplit.NeighborLoader(store, fanout, "train", batch_size=BATCH_SIZE, mesh=mesh)
    steps = []
    for number in range(CHECKED + STEPS):
        start = time.process_time()
        batch = loader.make_batch(*divmod(number, len(loader)))
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.process_time() - start)
    return {
        "first_cpu_s": sum(steps[:CHECKED]),
        "step_cpu_s": median(steps[CHECKED:]),
        "compared_cpu_s": compared_cpu_s,
    }


def _measure_turn(store: str, ranks: int, setup: tuple[str, int, list[int]]) -> dict[str, float]:
    of_ways = {}
    for name, verify_every in (("with", None), ("without", 0)):
        of_ranks = run_ranks(measure, ranks, store, *setup, verify_every, timeout_s=900.0)
        of_ways[name] = {key: sum(of_rank[key] for of_rank in of_ranks) for key in of_ranks[0]}
    checks = of_ways["with"]["first_cpu_s"] - of_ways["without"]["first_cpu_s"]
    steps_cpu_s = 100 * of_ways["with"]["step_cpu_s"]
    return {
        "checks_cpu_s": checks,
        "compared_cpu_s": of_ways["with"]["compared_cpu_s"],
        "step_cpu_s": of_ways["with"]["step_cpu_s"],
        "step_without_cpu_s": of_ways["without"]["step_cpu_s"],
        "share_of_100_steps": checks / steps_cpu_s,
        "share_without_comparison": (checks - of_ways["with"]["compared_cpu_s"]) / steps_cpu_s,
    }


def main(arguments: Sequence[str]) -> None:
    """Measure every setup and print, or write, a record."""
    store, ranks, out = (*arguments, *("2", "")[len(arguments) - 1 :])
    found = []
    for setup in SETUPS:
        turns = [_measure_turn(store, int(ranks), setup) for _ in range(TURNS + 1)][1:]
        kind, hidden, fanout = setup
        medians = {key: median(turn[key] for turn in turns) for key in turns[0]}
        found.append({"model": kind, "hidden": hidden, "fanout": fanout, **medians, "turns": turns})
    record = {
        "kind": "verify cost",
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "graph": Path(store).name,
        "ranks": int(ranks),
        "batch_size": BATCH_SIZE,
        "steps": STEPS,
        "checked_steps": CHECKED,
        "runs": found,
    }
    text = json.dumps(record, indent=1)
    if out:
        Path(out).write_text(text + "\n")
    print(text)
