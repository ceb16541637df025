"""CPU seconds of a training step before and after a change: two source trees, steps taken in turn in one run.

    git worktree add /tmp/before COMMIT
    python -m gsplit_bench compare-versions /tmp/before/src src --steps 30 --out comparison.json

Both versions run as real ranks at the same time and take single steps alternately, so that whatever the machine does
meanwhile falls on both. Reported: CPU seconds per step summed over the ranks, medians, and the median of the ratios of
neighbouring steps with its quartiles and its 95 % interval (bootstrap).
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from gsplit_bench.waiting_ranks import WaitingRanks, answer_steps

__all__ = ["main"]

WARM_UP = 4
BENCHMARKS = Path(__file__).resolve().parents[1]


def work(kind: str) -> None:
    """One rank: a step for every line of standard input. Written for both versions' loaders."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch_geometric.data import Data
    from torch_geometric.nn import GAT, GraphSAGE

    import gsplit

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    n, e = 200_000, 4_000_000
    src, dst = (n * rng.random(e) ** 1.5).astype(np.int64), rng.integers(0, n, e)
    data = Data(
        x=torch.from_numpy(rng.normal(size=(n, 128)).astype(np.float32)),
        y=torch.from_numpy(rng.integers(0, 16, n)),
        edge_index=torch.from_numpy(np.stack([src, dst])),
    )
    mesh = gsplit.init("cpu")
    parts = torch.from_numpy(rng.integers(0, max(2, mesh.size), n))
    loader = gsplit.NeighborLoader(data, [15, 10, 5], None, batch_size=1024, mesh=mesh, partition=parts)
    torch.manual_seed(0)
    plain = GraphSAGE(128, 256, 3, 16, dropout=0.5) if kind == "sage" else GAT(128, 128, 3, 16, heads=4, dropout=0.5)
    model = gsplit.parallelize(plain, mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def step(number: int) -> float:
        batch = loader.make_batch(0, number)
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    answer_steps(step)


def compare(sources: list[str], model: str, ranks: int, steps: int) -> dict[str, Any]:
    versions = [
        WaitingRanks(
            ["-m", "gsplit_bench.compare_versions", "--worker", model],
            ranks,
            {"PYTHONPATH": f"{Path(source).resolve()}:{BENCHMARKS}"},
        )
        for source in sources
    ]
    for version in versions:
        version.wait_until_ready()
    seconds: list[list[float]] = [[], []]
    for number in range(steps + WARM_UP):
        turn = (0, 1) if number % 2 else (1, 0)
        taken = {place: versions[place].step() for place in turn}
        assert abs(taken[0][1] - taken[1][1]) < 1e-3, "the versions train differently"
        if number >= WARM_UP:
            for place in (0, 1):
                seconds[place].append(taken[place][0])
    for version in versions:
        version.close()
    ratios = [after / before for before, after in zip(*seconds, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "model": model,
        "ranks": ranks,
        "steps": steps,
        "before": median(seconds[0]),
        "after": median(seconds[1]),
        "ratio": median(ratios),
        "quartiles": [low, high],
        "interval": [medians[50], medians[1949]],
        "records": seconds,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="the source trees before and after")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--models", nargs="+", default=["sage", "gat"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker")
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker)
        return
    rows = []
    for model in options.models:
        for ranks in options.ranks:
            row = compare(options.sources, model, ranks, options.steps)
            rows.append(row)
            low, high = row["interval"]
            print(
                f"{model} on {ranks} rank(s): {row['before']:.3f} -> {row['after']:.3f} CPU s per step, "
                f"ratio {row['ratio']:.3f} (95 %: {low:.3f} to {high:.3f})",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
