"""From settings to a trained model: what ``gsplit train``, ``infer`` and ``verify`` do on every rank.

A script does the same in the lines of ``examples/``; this is that script for the stock models.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from gsplit.distributed.comm import run_on_rank_zero
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference import infer
from gsplit.loader import NeighborLoader
from gsplit.nn.calls import needs_weights
from gsplit.nn.parallelize import parallelize
from gsplit.progress import Progress, silent
from gsplit.run.config import TrainSettings
from gsplit.run.folder import begin_run, check_new_run, finish_run, load_run, load_weights, telemetry_path
from gsplit.run.models import make_model
from gsplit.store.reader import Store
from gsplit.trainer import StepReport, Trainer
from gsplit.verification import Verification, verify

__all__ = ["build_model", "check_new_file", "infer_run", "learning_rate", "shape_of", "train_run", "verify_run"]


def shape_of(store: Store, settings: TrainSettings) -> dict[str, int]:
    """Input width and classes of a store."""
    width = store.stored_array(f"features/{settings.features}").shape[1]
    if store.num_classes < 1:
        fix = "import labels with the graph; other losses are written in a script (gsplit.Trainer)"
        raise InputError(explain("the store", "integer labels to train on", "none", fix))
    return {"num_features": width, "num_classes": store.num_classes}


def build_model(settings: TrainSettings, shape: dict[str, int], store: Store) -> Module:
    """The model that settings describe, with weights from the seed alone."""
    degrees = None
    if settings.model == "pna":
        degrees = torch.from_numpy(np.bincount(np.asarray(store.graph.in_degrees())))
    torch.manual_seed(settings.seed)
    return make_model(
        settings.model,
        in_channels=shape["num_features"],
        hidden_channels=settings.hidden,
        num_layers=settings.num_layers,
        out_channels=shape["num_classes"],
        dropout=settings.dropout,
        jk=settings.jk,
        norm=settings.norm,
        heads=settings.heads,
        degrees=degrees,
    )


def learning_rate(settings: TrainSettings, num_steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at every step: a linear start, then constant or half a cosine."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return 1.0
        done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def train_run(
    settings: TrainSettings,
    store: Store,
    mesh: Mesh,
    out: Path | None,
    overwrite: bool = False,
    observer: Callable[[StepReport], None] | None = None,
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Train, evaluate exactly, and keep the weights of the best epoch on the validation targets. A collective.

    Returns what ``gsplit train --json`` prints. Without an evaluation the last weights are kept.
    """
    shape = shape_of(store, settings)
    run_on_rank_zero(mesh.world, "check labels", lambda: _check_labels(store, settings))
    if out is not None:
        run_on_rank_zero(mesh.world, "begin run", lambda: _begin(out, overwrite))
    model = parallelize(build_model(settings, shape, store), mesh)
    loader = NeighborLoader(
        store,
        settings.fanout,
        settings.targets,
        settings.batch_size,
        strategy=settings.strategy,
        seed=settings.seed,
        mesh=mesh,
        features=settings.features,
        gcn_norm=needs_weights(model),
        deterministic=settings.deterministic,
        telemetry=None if out is None else telemetry_path(out, mesh.rank),
        quiet=observer is None,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    num_steps = settings.steps or settings.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(settings, num_steps))
    trainer = Trainer(
        model, optimizer, loader, mesh=mesh, schedule=schedule, clip_norm=settings.clip_norm, observer=observer
    )
    names = [name for name in ("val", "test") if _num_targets(store, name)]
    every = settings.evaluate_every if "val" in names else 0
    best: dict[str, Any] = {"epoch": 0, "val": -1.0}
    state = model.state_dict()
    epoch = 0
    with loader.telemetry:
        while len(trainer.history.losses) < num_steps:
            trainer.train_epoch(num_steps - len(trainer.history.losses))
            epoch += 1
            last = len(trainer.history.losses) >= num_steps
            if every and (epoch % every == 0 or last):
                scores = trainer.evaluate(store, names, features=settings.features)
                if on_evaluation is not None:
                    on_evaluation(epoch, scores)
                if scores["val"] > best["val"]:
                    best = {"epoch": epoch, **scores}
                    state = {name: value.clone() for name, value in model.state_dict().items()}
    if every == 0:
        state = model.state_dict()
    if out is not None:
        _finish = lambda: finish_run(out, settings, shape, state, trainer.history)  # noqa: E731
        run_on_rank_zero(mesh.world, "finish run", _finish)
    return {
        "ranks": mesh.size,
        "replicas": mesh.num_replicas,
        "strategy": settings.strategy,
        "steps": len(trainer.history.losses),
        "losses": trainer.history.losses,
        "epoch_seconds": trainer.history.epoch_seconds,
        "evaluations": trainer.history.evaluations,
        "best": best if every else None,
        "run": None if out is None else str(out),
    }


def _num_targets(store: Store, name: str) -> int:
    return int(store.stored_array(f"targets/{name}").size) if f"targets/{name}" in store.names else 0


def _check_labels(store: Store, settings: TrainSettings) -> None:
    """Every target needs a label; unlabelled vertices have -1."""
    targets = store.stored_array(f"targets/{settings.targets}")
    if targets.size == 0:
        raise InputError(explain(f"targets/{settings.targets}", "at least one target", "none", "name other targets"))
    unlabelled = int((store.stored_array("y")[targets - store.vertex_range[0]] < 0).sum())
    if unlabelled:
        fix = "leave unlabelled vertices out of the targets"
        raise InputError(
            explain(f"targets/{settings.targets}", "a label of every target", f"{unlabelled} without", fix)
        )


def _begin(out: Path, overwrite: bool) -> None:
    check_new_run(out, overwrite=overwrite)
    begin_run(out)


def infer_run(
    run: Path, store: Store, out: Path, mesh: Mesh, *, overwrite: bool = False, progress: Progress = silent
) -> dict[str, Any]:
    """Exact outputs of a trained model for all vertices, into a file. A collective."""
    settings, shape = load_run(run)
    run_on_rank_zero(mesh.world, "check output", lambda: check_new_file(out, overwrite=overwrite))
    width = store.stored_array(f"features/{settings.features}").shape[1]
    if width != shape["num_features"]:
        fix = "give the store it was trained on, or one like it"
        raise InputError(explain(store.path, f"{shape['num_features']} features", width, fix))
    model = build_model(settings, shape, store)
    load_weights(run, model)
    result = infer(parallelize(model, mesh), store, out, mesh=mesh, features=settings.features, progress=progress)
    return {"out": str(out), "shape": list(result.shape), "dtype": str(result.dtype), "ranks": mesh.size}


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Refuse to write over a file by accident."""
    if path.exists() and not overwrite:
        raise InputError(explain(path, "a new file", "one that exists", "choose another --out, or pass --overwrite"))


def verify_run(settings: TrainSettings, store: Store, mesh: Mesh, steps: int) -> Verification:
    """Check a stock model on a store: the ranks against one process. A collective."""
    return verify(
        build_model(settings, shape_of(store, settings), store),
        store,
        settings.fanout,
        settings.targets,
        settings.batch_size,
        mesh=mesh,
        strategy=settings.strategy,
        features=settings.features,
        seed=settings.seed,
        steps=steps,
        lr=settings.lr,
    )
