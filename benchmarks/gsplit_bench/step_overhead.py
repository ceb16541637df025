"""What a training step costs the host beside its arithmetic: Python calls, CPU time, launches, copies and waits.

    git worktree add /tmp/before COMMIT
    python -m gsplit_bench step-overhead /tmp/before/src src --out benchmarks/results/DATE-step-overhead

Tensors are tiny (16 targets, rows of 4 numbers, 3 layers, fanout 2), so that almost all CPU time goes into Python, hooks
and torch's dispatcher: on a GPU this is the least time of a step, whatever the device does. Batches are made ahead on
the host; a step is ``TrainingStep.add`` and ``finish`` with telemetry. Two source trees take their turns in one run, as
in ``compare_versions``, 20 steps at a time. On the simulated device launches, copies and waits of a step are counted by
stage, with kernels in Triton's interpreter; there Adam is torch's loop over parameters, on CUDA it is fused.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.waiting_ranks import WaitingRanks, answer_steps

__all__ = ["count_calls", "describe_device", "describe_host", "main"]

MODELS = ("sage", "gcn", "gat")
FANOUT, BATCH, WIDTH, VERTICES, CLASSES = [2, 2, 2], 16, 4, 200, 3
WARM_UP, BATCHES, STEPS_PER_TURN = 3, 5, 20
BENCHMARKS = Path(__file__).resolve().parents[1]
DEVICE_STAGES = ("load", "forward and backward", "optimizer")


class TinySteps:
    """Steps of a model on a tiny graph, whose batches were made ahead on the host. Written for both versions."""

    def __init__(self, mesh: Any, kind: str) -> None:
        import numpy as np
        import torch
        from torch_geometric import nn
        from torch_geometric.data import Data

        from gsplit.loading.loader import NeighborLoader
        from gsplit.nn.parallelize import parallelize
        from gsplit.training.losses import named_loss
        from gsplit.training.train_state import TrainState
        from gsplit.training.training_step import TrainingStep

        rng = np.random.default_rng(0)
        data = Data(
            x=torch.from_numpy(rng.normal(size=(VERTICES, WIDTH)).astype(np.float32)),
            y=torch.from_numpy(rng.integers(0, CLASSES, VERTICES)),
            edge_index=torch.from_numpy(rng.integers(0, VERTICES, (2, 5 * VERTICES))),
        )
        parts = torch.from_numpy(rng.integers(0, max(2, mesh.size), VERTICES))
        self.loader = NeighborLoader(data, FANOUT, None, batch_size=BATCH, mesh=mesh, partition=parts)
        torch.manual_seed(0)
        models: dict[str, Any] = {"sage": nn.GraphSAGE, "gcn": nn.GCN, "gat": nn.GAT}
        model = parallelize(models[kind](WIDTH, WIDTH, len(FANOUT), CLASSES, dropout=0.5), mesh)
        optimizer = torch.optim.Adam(model.parameters())
        self.training = TrainingStep(TrainState(model, optimizer, self.loader, None), named_loss("cross_entropy"))
        self._batches: dict[int, Any] = {}
        self._loss: Any = 0.0

    def make_batch(self, number: int) -> Any:
        """One of a few batches; the same ones come again."""
        return self.loader.make_batch(0, number % BATCHES)

    def batch(self, number: int) -> Any:
        """``make_batch`` once for every batch."""
        if number % BATCHES not in self._batches:
            self._batches[number % BATCHES] = self.make_batch(number)
        return self._batches[number % BATCHES]

    def finish(self, batch: Any) -> float:
        """Step the optimizer; the loss of the step before, as the trainer reads it."""
        before = float(self._loss)
        self._loss = self.training.finish(batch)
        self.loader.telemetry.end_step(batch.telemetry)
        return before

    def run(self, number: int) -> float:
        """A whole step on a batch that is there."""
        batch = self.batch(number)
        self.training.add(batch)
        return self.finish(batch)


def count_calls(mesh: Any, kind: str) -> dict[str, int]:
    """Calls in the main thread in one step: of Python functions, of the function mode, of walks over modules."""
    from torch.nn import Module

    from gsplit.nn.function_mode import ForwardPassMode

    steps = TinySteps(mesh, kind)
    for number in range(2 * BATCHES):
        steps.run(number)
    calls: Counter[str] = Counter()
    walk = Module.named_modules.__code__
    intercept = ForwardPassMode.__torch_function__.__code__

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls["python_calls"] += 1
            calls["torch_function_calls"] += frame.f_code is intercept
            calls["module_visits"] += frame.f_code is walk

    sys.setprofile(count)
    try:
        steps.run(2 * BATCHES)
    finally:
        sys.setprofile(None)
    return dict(calls)


def count_launches(mesh: Any, kind: str) -> dict[str, dict[str, int]]:
    """Launches, copies and waits of a step on the simulated device, by stage."""
    from gsplit_bench.simulated import switched_on

    log = switched_on().log
    steps = TinySteps(mesh, kind)
    marks = []
    for number in range(2):  # a loader learns in the first step what a model needs
        marks = [log.counts()]
        batch = steps.make_batch(number)
        marks.append(log.counts())
        steps.training.add(batch)
        marks.append(log.counts())
        steps.finish(batch)
        marks.append(log.counts())
    return {
        stage: {"launches": found.launches, "copies": found.copies, "waits": found.num_waits}
        for stage, found in zip(DEVICE_STAGES, (b - a for a, b in pairwise(marks)), strict=True)
    }


def work(kind: str) -> None:
    """One rank: ``STEPS_PER_TURN`` steps for every line of standard input."""
    import torch

    import gsplit

    torch.set_num_threads(1)
    steps = TinySteps(gsplit.init("cpu"), kind)

    def turn(number: int) -> float:
        for _ in range(STEPS_PER_TURN):
            loss = steps.run(number)
        return loss

    answer_steps(turn)


def _environment(source: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{Path(source).resolve()}:{BENCHMARKS}", "OMP_NUM_THREADS": "1"}


def _count(source: str, kind: str, ranks: int, device: str) -> Any:
    """What the program of a source tree counts, in a process of its own."""
    program = [sys.executable, "-m", "gsplit_bench.step_overhead", "--count", kind, device, "--ranks", str(ranks)]
    kernels = {"GSPLIT_TRITON": "1", "TRITON_INTERPRET": "1"}  # in the interpreter, for launches from one thread only
    environment = {**os.environ, **_environment(source), **kernels}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def time_steps(sources: list[str], kind: str, ranks: int, turns: int) -> dict[str, Any]:
    """CPU milliseconds of a step of one rank, before and after, in turn."""
    program = ["-m", "gsplit_bench.step_overhead", "--worker", kind]
    versions = [WaitingRanks(program, ranks, _environment(source)) for source in sources]
    for version in versions:
        version.wait_until_ready()
    taken: list[list[float]] = [[] for _ in sources]
    for number in range(WARM_UP + turns):
        places = list(range(len(sources)))
        losses = []
        for place in places if number % 2 else reversed(places):
            cpu_s, loss = versions[place].step()
            losses.append(loss)
            if number >= WARM_UP:
                taken[place].append(1000 * cpu_s / STEPS_PER_TURN / ranks)
        assert max(losses) - min(losses) < 1e-3, "the versions train differently"
    for version in versions:
        version.close()
    ratios = [last / first for first, last in zip(taken[0], taken[-1], strict=True)]
    return {"cpu_ms": taken, "ratios": ratios}


def measure(sources: list[str], kind: str, ranks: int, turns: int) -> dict[str, Any]:
    """The host's work for one model on some ranks."""
    calls = [_count(source, kind, ranks, "cpu") for source in sources]
    return {"model": kind, "ranks": ranks, "calls": calls, **time_steps(sources, kind, ranks, turns)}


def measure_device(sources: list[str], kind: str, ranks: int) -> dict[str, Any]:
    """What one model launches, copies and waits for on simulated devices."""
    return {"model": kind, "ranks": ranks, "stages": [_count(source, kind, ranks, "sim:0") for source in sources]}


def _changes(values: Sequence[Any]) -> str:
    return " -> ".join(str(value) for value in values)


def describe_host(rows: list[dict[str, Any]]) -> list[str]:
    """A table of the host's work."""
    lines = [
        "| model | ranks | Python calls | `__torch_function__` | module visits | CPU ms (quartiles) | last / first |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        names = ("python_calls", "torch_function_calls", "module_visits")
        counts = [_changes([calls.get(name, 0) for calls in row["calls"]]) for name in names]
        times = []
        for taken in row["cpu_ms"]:
            low, _, high = quantiles(taken, n=4)
            times.append(f"{median(taken):.2f} ({low:.2f} to {high:.2f})")
        cells = [row["model"], str(row["ranks"]), *counts, _changes(times), f"{median(row['ratios']):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def describe_device(rows: list[dict[str, Any]]) -> list[str]:
    """A table of the work of simulated devices."""
    lines = ["| model | ranks | stage | launches | copies | waits |", "|---|---|---|---|---|---|"]
    for row in rows:
        for stage in DEVICE_STAGES:
            counts = [
                _changes([found[stage][name] for found in row["stages"]]) for name in ("launches", "copies", "waits")
            ]
            lines.append(f"| {' | '.join([row['model'], str(row['ranks']), stage, *counts])} |")
    return lines


def _answer_count(kind: str, device: str, ranks: int) -> None:
    from gsplit_bench.ranks import run_ranks

    count: Callable[..., Any] = count_calls if device == "cpu" else count_launches
    print(json.dumps(run_ranks(count, ranks, kind, device=device)[0]))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="source trees, such as before and after a change")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", type=Path, help="record to write, without .json and .md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--count", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker)
        return
    if options.count:
        kind, device = options.count
        _answer_count(kind, device, options.ranks[0])
        return
    host = [measure(options.sources, kind, ranks, options.turns) for ranks in options.ranks for kind in options.models]
    print("\n".join(describe_host(host)), flush=True)
    device = [measure_device(options.sources, kind, max(options.ranks)) for kind in options.models]
    print("\n".join(describe_device(device)))
    if options.out is not None:
        about = {"commit": current_commit(), "versions": installed_versions(), "machine": describe_machine()}
        document = {**about, "turns": options.turns, "host": host, "device": device}
        options.out.with_suffix(".json").write_text(json.dumps(document))
        options.out.with_suffix(".md").write_text("\n".join([*describe_host(host), "", *describe_device(device), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
