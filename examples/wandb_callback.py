"""Log losses and scores of a training to Weights & Biases with a short callback.

    gsplit import synthetic demo.gsplit --vertices 2000 --edges 30000
    WANDB_MODE=offline python examples/wandb_callback.py demo.gsplit

Other experiment trackers work in the same way. Only rank 0 has the callback, so a run is logged once.
"""

import sys

import torch
import wandb
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.training.callbacks import Callback, EvaluationReport, StepReport


class WandbCallback(Callback):
    """Logs every step and every evaluation. A resumed training continues the run with the same ``run_id``."""

    def __init__(self, project: str, run_id: str) -> None:
        self._project, self._run_id = project, run_id

    def on_start(self, num_steps: int) -> None:
        self._run = wandb.init(project=self._project, id=self._run_id, resume="allow")

    def on_step(self, report: StepReport) -> None:
        values = {"loss": report.loss, "learning_rate": report.learning_rate, "seconds": report.seconds}
        self._run.log(values, step=report.number)  # W&B ignores steps that it already has

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._run.log(report.named_scores, step=report.number)


def main(path: str) -> None:
    mesh, store = gsplit.init(), gsplit.open(path)
    loader = gsplit.NeighborLoader(store, [5, 5], "train", batch_size=256, mesh=mesh)
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(store.num_features, 32, 2, store.num_classes), mesh)
    callbacks = [WandbCallback("gsplit", "demo")] if mesh.rank == 0 else []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = gsplit.Trainer(model, optimizer, loader, metrics=["accuracy", "f1_macro"], callbacks=callbacks)
    for _ in range(2):
        trainer.train_epoch()
        trainer.evaluate(store, ["val"], keep_best="val")


if __name__ == "__main__":
    main(sys.argv[1])
