"""A hyper-parameter search over one store: one training for each combination, and a table at the end.

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000
python examples/sweep.py demo.gsplit runs --lr 1e-2,1e-3 --hidden 32,128 --epochs 3
torchrun --nproc-per-node 2 examples/sweep.py demo.gsplit runs         # the same table

Each training has its own folder and saves a checkpoint there after every epoch. If you start the command again, also
with more values, finished trainings are skipped and stopped ones continue.
"""

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch_geometric.nn import GraphSAGE

import gsplit


@dataclass(frozen=True)
class Choice:
    """The settings that differ between the trainings."""

    lr: float
    hidden: int
    dropout: float

    def __str__(self) -> str:
        return f"lr{self.lr:g}-hidden{self.hidden}-dropout{self.dropout:g}"


def train(choice: Choice, graph: gsplit.Store, mesh: gsplit.Mesh, folder: Path, epochs: int) -> dict[str, float]:
    """Train to the last epoch, or continue; return the exact accuracies of the best weights on val."""
    loader = gsplit.NeighborLoader(graph, [10, 10], "train", batch_size=512, mesh=mesh)
    torch.manual_seed(0)
    model = GraphSAGE(graph.num_features, choice.hidden, 2, graph.num_classes, dropout=choice.dropout)
    model = gsplit.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=choice.lr)
    trainer = gsplit.Trainer(model, optimizer, loader, save_to=folder, description={"choice": str(choice)})
    if list(folder.glob("step-*.safetensors")):
        trainer.load(folder)
    for _ in range(trainer.state.num_steps // len(loader), epochs):
        trainer.train_epoch()
        trainer.evaluate(graph, ["val", "test"], keep_best="val")
        trainer.save()
    scores = [evaluation.scores for evaluation in trainer.state.history.evaluations]  # including earlier starts
    return dict(max(scores, key=lambda found: found["val"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("runs", type=Path, help="folder for checkpoints, with one subfolder per training")
    parser.add_argument("--lr", default="1e-2,3e-3,1e-3")
    parser.add_argument("--hidden", default="64,256")
    parser.add_argument("--dropout", default="0.3")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    mesh = gsplit.init()
    graph = gsplit.open(options.store)
    table = []
    for lr, hidden, dropout in product(*(each.split(",") for each in (options.lr, options.hidden, options.dropout))):
        choice = Choice(float(lr), int(hidden), float(dropout))
        scores = train(choice, graph, mesh, options.runs / str(choice), options.epochs)
        table.append((scores["val"], scores["test"], str(choice)))
    if mesh.rank == 0:
        print("   val    test  training")
        for val, test, name in sorted(table, reverse=True):
            print(f"{val:.4f}  {test:.4f}  {name}", flush=True)


if __name__ == "__main__":
    main()
