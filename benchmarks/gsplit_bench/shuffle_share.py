"""How much of a training step's CPU time goes into shuffles, on several ranks of this machine.

    python -m gsplit_bench shuffle-share STORE --out shares.json

CPU seconds per step summed over the ranks, strategy ``split``, loading included, one thread per rank; medians over the
steps. ``forward`` and ``backward`` are the shuffles of hidden rows and of their gradients, whole: copies of own rows,
gathers, messages, merges. ``features`` is the loader's exchange of input rows. Waiting takes no CPU time.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gsplit.distributed.launch.allocator import ALLOCATOR
from gsplit_bench.bare_loop import BATCH, FANOUT, HIDDEN, MODELS, WARM_UP
from gsplit_bench.ranks import run_ranks

__all__ = ["main"]

PARTS = ("forward", "backward", "features")


def time_steps(mesh: Any, store: str, kind: str, steps: int) -> list[dict[str, float]]:
    """CPU seconds of every step of this rank, whole and by part."""
    import torch

    import gsplit
    import gsplit.loading.step_loader
    from gsplit.minibatch.shuffle import _Exchange
    from gsplit.run.models import make_model

    spent = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                spent[part] += time.thread_time() - start

        return run

    for part, owner, name in (
        ("forward", _Exchange, "forward"),
        ("backward", _Exchange, "backward"),
        ("features", gsplit.loading.step_loader, "exchange_stored"),
    ):
        function = timed(part, getattr(owner, name))
        setattr(owner, name, staticmethod(function) if owner is _Exchange else function)
    graph = gsplit.open(store)
    loader = gsplit.NeighborLoader(graph, FANOUT, "train", batch_size=BATCH, mesh=mesh)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "in_channels": graph.num_features,
        "hidden_channels": HIDDEN,
        "num_layers": len(FANOUT),
        "out_channels": graph.num_classes,
    }
    model = gsplit.parallelize(make_model(kind, **sizes, **MODELS[kind]), mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters()), loader)
    found = []
    for number in range(WARM_UP + steps):
        spent.update(dict.fromkeys(PARTS, 0.0))
        start = time.process_time()
        trainer.train_step(loader.make_batch(0, number % len(loader)))
        found.append({"step": time.process_time() - start, **spent})
    return found[WARM_UP:]


def measure(store: str, kind: str, ranks: int, steps: int) -> dict[str, Any]:
    """Medians over the steps of sums over the ranks."""
    by_rank = run_ranks(time_steps, ranks, store, kind, steps, timeout_s=500.0)
    sums = {part: [sum(rank[s][part] for rank in by_rank) for s in range(steps)] for part in ("step", *PARTS)}
    seconds = {part: median(values) for part, values in sums.items()}
    share = median((f + b) / s for f, b, s in zip(sums["forward"], sums["backward"], sums["step"], strict=True))
    return {"graph": Path(store).stem, "model": kind, "ranks": ranks, "cpu_s": seconds, "shuffle_share": share}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, help="where to write the records")
    options = parser.parse_args(arguments)
    settings = {"OMP_NUM_THREADS": "1", **ALLOCATOR}  # read when a process starts
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "gsplit_bench", "shuffle-share", *arguments],
            {**os.environ, **settings},
        )
    print("| graph | model | ranks | step, CPU s | shuffles forward | backward | share | features |")
    print("|---|---|---|---|---|---|---|---|")
    records = []
    for store in options.stores:
        for kind in options.models:
            for ranks in options.ranks:
                found = measure(store, kind, ranks, options.steps)
                cpu = found["cpu_s"]
                print(
                    f"| {found['graph']} | {kind} | {ranks} | {cpu['step']:.3f} | {cpu['forward']:.3f} "
                    f"| {cpu['backward']:.3f} | {found['shuffle_share']:.1%} | {cpu['features']:.3f} |",
                    flush=True,
                )
                records.append(found)
    if options.out is not None:
        options.out.write_text(json.dumps({"load": os.getloadavg(), "records": records}, indent=1))
