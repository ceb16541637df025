"""Real training: the same loss curve on 1, 2 and 4 ranks with both strategies, and the same accuracy at the end.

python benchmarks/training.py --work /tmp/work                 # about an hour on two cores; writes benchmarks/results
python benchmarks/training.py --work /tmp/work --draw-only     # only the pictures, from the record
"""

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gsplit.distributed.mesh import solo_mesh
from gsplit.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.run.config import TrainSettings
from gsplit.run.recipe import build_model, shape_of
from gsplit.run.schedule import learning_rate
from gsplit.store.reader import open_store
from gsplit.trainer import Trainer
from real_graphs import real_store

RESULTS = Path(__file__).parent / "results"
GRAPHS = {"debian": "debian_packages", "arxiv": "ogbn_arxiv_nofeat"}
CURVES = {
    "sage": ["--model", "sage", "--hidden", "256"],
    "gat": ["--model", "gat", "--hidden", "128", "--heads", "4"],
}
TITLES = {"sage": "GraphSAGE 256", "gat": "GAT 4 x 32"}
COMMON = ["--fanout", "15,15,15", "--batch-size", "1024", "--dropout", "0.5", "--json"]
FULL = {"debian": ["--epochs", "12"], "arxiv": ["--epochs", "8"]}
TUNED = ["--hidden", "256", "--norm", "batch_norm", "--lr", "3e-3", "--lr-scheduler", "cosine", "--evaluate-every", "1"]
STEPS = 60


def train(store: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "gsplit", "train", str(store), *COMMON, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return {"command": " ".join(["gsplit train", f"{store.name}", *COMMON, *options]), **document}


def distance(curves: list[list[float]]) -> float:
    return float(max(max(values) - min(values) for values in zip(*curves, strict=True)))


def control(store: Path, options: list[str]) -> list[float]:
    """How far rounding alone leads: the run of one process with every first weight moved by half a unit in its last place."""
    given = dict(zip((o.strip("-").replace("-", "_") for o in options[::2]), options[1::2], strict=True))
    settings = TrainSettings(**{k: v if k == "model" else int(v) for k, v in given.items()})
    opened = open_store(store)
    model = build_model(settings, shape_of(opened, settings), opened)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 6e-8 * torch.randn_like(parameter).sign())
    model = parallelize(model, solo_mesh())
    loader = NeighborLoader(opened, settings.fanout, "train", batch_size=settings.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(settings, STEPS))
    return Trainer(model, optimizer, loader, lr_scheduler=scheduler).train_epoch(STEPS)


def run(work: Path, record: Path) -> None:
    document: dict[str, Any] = {"curves": {}, "full": {}, "control": {}}
    if record.exists():
        document |= json.loads(record.read_text())
    for graph, model in product(GRAPHS, CURVES):
        store = real_store(GRAPHS[graph], work).path
        for ranks, strategy in product((1, 2, 4), ("split", "data")):
            name = f"{graph} {model} {ranks} {strategy}"
            if name not in document["curves"]:
                options = [*CURVES[model], "--steps", str(STEPS), "--evaluate-every", "0"]
                document["curves"][name] = train(store, *options, "--nproc", str(ranks), "--strategy", strategy)
                record.write_text(json.dumps(document, indent=1) + "\n")
                print(name, flush=True)
        mine = [c["losses"] for name, c in document["curves"].items() if name.startswith(f"{graph} {model} ")]
        print(f"{graph} {model}: {len(mine)} curves, largest distance {distance(mine):.2e}", flush=True)
        if model == "gat" and f"{graph} {model}" not in document["control"]:
            document["control"][f"{graph} {model}"] = control(store, CURVES[model])
            record.write_text(json.dumps(document, indent=1) + "\n")
        if model == "gat":
            ours, apart = (
                document["control"][f"{graph} {model}"],
                document["curves"][f"{graph} {model} 1 split"]["losses"],
            )
            print(
                f"{graph} {model}: one process, weights moved by half an ulp: {distance([ours, apart]):.2e}", flush=True
            )
    for graph, ranks in product(GRAPHS, (1, 2)):
        name = f"{graph} sage {ranks} split"
        if name not in document["full"]:
            store = real_store(GRAPHS[graph], work).path
            document["full"][name] = train(store, *TUNED, *FULL[graph], "--nproc", str(ranks))
            record.write_text(json.dumps(document, indent=1) + "\n")
        print(name, document["full"][name]["best"], flush=True)


def draw(record: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    document = json.loads(record.read_text())
    size = (2, len(GRAPHS) * len(CURVES))
    figure, axes = plt.subplots(*size, figsize=(4 * size[1], 6.4), height_ratios=(2, 1), constrained_layout=True)
    for column, (graph, model) in enumerate(product(GRAPHS, CURVES)):
        curves = {n: c["losses"] for n, c in document["curves"].items() if n.startswith(f"{graph} {model} ")}
        reference = curves[f"{graph} {model} 1 split"]
        for name, losses in curves.items():
            _, _, ranks, strategy = name.split()
            style = {"color": f"C{(1, 2, 4).index(int(ranks))}", "linestyle": "-" if strategy == "split" else ":"}
            axes[0, column].plot(losses, label=f"{ranks} rank{'s' * (ranks != '1')}, {strategy}", **style)
            apart = [max(abs(a - b), 1e-9) for a, b in zip(losses, reference, strict=True)]
            axes[1, column].semilogy(apart, **style)
        if f"{graph} {model}" in document["control"]:
            moved = document["control"][f"{graph} {model}"]
            apart = [max(abs(a - b), 1e-9) for a, b in zip(moved, reference, strict=True)]
            axes[1, column].semilogy(
                apart, color="black", linewidth=0.8, label="1 rank, first weights moved by half an ulp"
            )
            axes[1, column].legend(fontsize=7)
        axes[0, column].set_title(f"{graph}, {TITLES[model]}")
        axes[1, column].axhline(1e-4, color="grey", linewidth=0.8)
        axes[1, column].set_ylim(5e-10, 1e-3)
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("loss of the mini-batch")
    axes[1, 0].set_ylabel("distance from 1 rank, split\n(0 at 1e-9; grey: 1e-4)")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(record.with_suffix(".curves.png"), dpi=90)

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for panel, graph in zip(panels, GRAPHS, strict=True):
        for ranks, line in ((1, "-"), (2, ":")):
            history = document["full"][f"{graph} sage {ranks} split"]["evaluations"]
            for color, part in enumerate(("val", "test")):
                values = [100 * e[part] for e in history]
                panel.plot([e["epoch"] for e in history], values, f"C{color}{line}", label=f"{part}, {ranks} rank(s)")
        panel.set_title(f"{graph}, GraphSAGE 256, exact accuracy")
        panel.set_xlabel("epoch")
        panel.legend(fontsize=8)
    panels[0].set_ylabel("%")
    figure.savefig(record.with_suffix(".accuracy.png"), dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the stores")
    parser.add_argument("--record", type=Path, default=RESULTS / "2026-11-15-training.json")
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args()
    if not options.draw_only:
        run(options.work, options.record)
    draw(options.record)


if __name__ == "__main__":
    main()
