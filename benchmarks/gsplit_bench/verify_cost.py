"""What the comparison with one process before the first step costs: its CPU seconds over those of the first 100 steps.

    python -m gsplit_bench verify-cost STORE [RANKS [OUT.json]]

Every setup runs twice in new processes, because the first run may compile kernels of float64, which are kept on disk.
CPU seconds are summed over ranks; those of 100 steps are 100 times the mean of the measured ones.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.minibatch.batch import Batch
from gsplit.nn.checks.one_process import LossOfBatch, OneProcessCheck
from gsplit.run.models import make_model
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.ranks import run_ranks

__all__ = ["main"]

SETUPS: list[tuple[str, int, list[int]]] = [
    ("sage", 256, [15, 15, 15]),
    ("gat", 256, [10, 10]),
    ("sage", 64, [10, 10]),
]
"""Model, hidden width and fanouts; the first is the default of ``gsplit train``."""
STEPS = 20
WARM_UP = 2
BATCH_SIZE = 1024


class _TimedCheck:
    """Times the comparisons of this process while it is installed."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._compare = OneProcessCheck.compare

    def __call__(
        self, check: OneProcessCheck, model: torch.nn.Module, batch: Batch, loss_of: LossOfBatch | None
    ) -> str:
        wall_s = time.perf_counter()
        cpu_s = time.process_time()
        reason = self._compare(check, model, batch, loss_of)
        self.wall_s += time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s
        return reason


def measure(mesh: Mesh, path: str, kind: str, hidden: int, fanout: list[int]) -> dict[str, float]:
    """Train; seconds of the comparison and of a step after it, on this rank."""
    torch.manual_seed(0)
    store = gsplit.open(path)
    plain = make_model(
        kind,
        in_channels=store.num_features,
        hidden_channels=hidden,
        num_layers=len(fanout),
        out_channels=store.num_classes,
        dropout=0.5,
    )
    model = gsplit.parallelize(plain, mesh)
    loader = gsplit.NeighborLoader(store, fanout, "train", batch_size=BATCH_SIZE, mesh=mesh)
    timed = _TimedCheck()
    OneProcessCheck.compare = lambda *given: timed(*given)  # type: ignore[method-assign]
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-3), loader)
    trainer.train_epoch(WARM_UP)
    wall_s = time.perf_counter()
    cpu_s = time.process_time()
    trainer.train_epoch(STEPS)
    return {
        "compare_wall_s": timed.wall_s,
        "compare_cpu_s": timed.cpu_s,
        "step_wall_s": (time.perf_counter() - wall_s) / STEPS,
        "step_cpu_s": (time.process_time() - cpu_s) / STEPS,
    }


def main(arguments: Sequence[str]) -> None:
    """Measure every setup and print, or write, a record."""
    store, ranks, out = (*arguments, *("2", "")[len(arguments) - 1 :])
    found = []
    for kind, hidden, fanout in SETUPS:
        for run in range(2):
            of_ranks = run_ranks(measure, int(ranks), store, kind, hidden, fanout, timeout_s=900.0)
            compared = sum(of_rank["compare_cpu_s"] for of_rank in of_ranks)
            step = sum(of_rank["step_cpu_s"] for of_rank in of_ranks)
            found.append(
                {
                    "model": kind,
                    "hidden": hidden,
                    "fanout": fanout,
                    "run": run,
                    "compare_cpu_s": compared,
                    "step_cpu_s": step,
                    "share_of_100_steps": compared / (100 * step),
                    "of_ranks": of_ranks,
                }
            )
    record = {
        "kind": "verify cost",
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "graph": Path(store).name,
        "ranks": int(ranks),
        "batch_size": BATCH_SIZE,
        "steps": STEPS,
        "runs": found,
    }
    text = json.dumps(record, indent=1)
    if out:
        Path(out).write_text(text + "\n")
    print(text)
