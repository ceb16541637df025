"""Train with Ray: Ray Train starts the ranks and their process group, and restarts them after a failure.

python examples/launch/ray_train.py demo8.gsplit run --workers 2 --steps 50      (pip install 'ray[train]')

Each worker is a rank. ``gsplit.init`` joins the process group of Ray; it needs no addresses or ports. Checkpoints are
GSplit's, in a folder that all hosts share. Losses are reported to Ray.
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch_geometric.nn import GraphSAGE

import gsplit


def train(settings: dict[str, Any]) -> None:
    mesh = gsplit.init(replicas=settings["replicas"])
    graph = gsplit.open(settings["store"])
    loader = gsplit.NeighborLoader(graph, [10, 10], "train", batch_size=512, mesh=mesh)
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(graph.num_features, 64, 2, graph.num_classes, dropout=0.3), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = gsplit.Trainer(model, optimizer, loader, save_to=settings["checkpoints"], save_every=10)
    if list(Path(settings["checkpoints"]).glob("step-*.safetensors")):  # Ray has restarted the workers
        trainer.load(settings["checkpoints"])
    while trainer.state.num_steps < settings["steps"]:
        first = trainer.state.num_steps
        losses = trainer.train_epoch(min(10, settings["steps"] - first))
        ray.train.report({"step": trainer.state.num_steps, "first_step": first, "loss": losses[-1]})
    mesh.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("run", type=Path, help="folder for checkpoints, shared by all hosts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    settings = {
        "store": str(options.store.resolve()),
        "checkpoints": str(options.run.resolve() / "checkpoints"),
        "steps": options.steps,
        "replicas": options.replicas,
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(
            name="gsplit",
            storage_path=str(options.run.resolve() / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
