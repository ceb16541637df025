"""From settings to a trained model: what ``gsplit train``, ``infer`` and ``verify`` do on every rank.

A script does the same in the lines of ``examples/``; this is that script for the stock models.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch.nn import Module

from gsplit.distributed.comm import run_on_rank_zero
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference.evaluate import count_evaluation_edges
from gsplit.inference.infer import infer
from gsplit.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.progress import Progress, silent
from gsplit.run.config import TrainSettings
from gsplit.run.evaluation import EvaluationSchedule
from gsplit.run.folder import begin_run, check_new_run, finish_run, load_run, load_weights, telemetry_path
from gsplit.run.models import EDGE_WEIGHT_MODELS, make_model
from gsplit.run.results import EpochReport, InferenceResult, ModelShape, RunView, SilentView, TrainResult
from gsplit.run.store_checks import check_degrees, check_labels
from gsplit.run.strategy_choice import choose_strategy
from gsplit.store.reader import Store
from gsplit.strategies.registry import strategy_class
from gsplit.strategies.spec import parse_strategy
from gsplit.train_state import Evaluation
from gsplit.trainer import Trainer
from gsplit.verification import Verification, verify

__all__ = ["build_model", "check_new_file", "infer_run", "learning_rate", "shape_of", "train_run", "verify_run"]


def shape_of(store: Store, settings: TrainSettings) -> ModelShape:
    """Input width and classes of a store."""
    width = _num_columns(store, settings)
    if store.num_classes < 1:
        fix = "import labels with the graph; other losses are written in a script (gsplit.Trainer)"
        raise InputError(explain("the store", "integer labels to train on", "none", fix))
    edge_features = None
    if settings.edge_attr is not None:
        shape = store.stored_array(f"edges/{settings.edge_attr}").shape
        edge_features = shape[1] if len(shape) == 2 else 1
    return ModelShape(width, store.num_classes, edge_features)


def _num_columns(store: Store, settings: TrainSettings) -> int:
    return sum(store.stored_array(f"features/{name}").shape[1] for name in settings.feature_names)


class _ArrayOptions(TypedDict):
    features: list[str]
    edge_attr: str | None
    edge_weight: str | None


def _arrays(settings: TrainSettings) -> _ArrayOptions:
    """Which stored arrays a run trains from, as the loader, inference and verification take them."""
    return {"features": settings.feature_names, "edge_attr": settings.edge_attr, "edge_weight": settings.edge_weight}


def build_model(settings: TrainSettings, shape: ModelShape, store: Store) -> Module:
    """The model that settings describe, with weights from the seed alone."""
    if settings.edge_weight is not None and settings.model not in EDGE_WEIGHT_MODELS:
        expected, fix = f"a model that takes weights, {' or '.join(EDGE_WEIGHT_MODELS)}", "leave one of them out"
        raise InputError(explain("edge_weight", expected, settings.model, fix))
    degrees = None
    if settings.model == "pna":
        degrees = torch.from_numpy(np.bincount(check_degrees(store.graph)))
    torch.manual_seed(settings.seed)
    return make_model(
        settings.model,
        in_channels=shape.num_features,
        hidden_channels=settings.hidden,
        num_layers=settings.num_layers,
        out_channels=shape.num_classes,
        dropout=settings.dropout,
        jk=settings.jk,
        norm=settings.norm,
        heads=settings.heads,
        degrees=degrees,
        edge_dim=shape.num_edge_features,
    )


def learning_rate(settings: TrainSettings, num_steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at every step: a linear start, then constant or half a cosine."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.lr_scheduler == "constant":
            return 1.0
        done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def train_run(
    settings: TrainSettings,
    store: Store,
    mesh: Mesh,
    out: Path | None,
    *,
    overwrite: bool = False,
    view: RunView | None = None,
) -> TrainResult:
    """Train, evaluate exactly, and keep the weights of the best epoch on the validation targets. A collective.

    Without an evaluation the last weights are kept.
    """
    view = view or SilentView()
    shape = shape_of(store, settings)
    settings = choose_strategy(settings, shape, store, mesh, view)
    run_on_rank_zero(mesh.world, "check labels", lambda: check_labels(store, settings.targets))
    if out is not None:
        run_on_rank_zero(mesh.world, "begin run", lambda: _begin(out, overwrite))
    trainer, num_steps = _make_trainer(settings, store, mesh, shape, out, view)
    state = trainer.state
    names = [name for name in ("val", "test") if _num_targets(store, name)]
    if settings.evaluate_every and "val" not in names:
        fix = "import the store with val targets, or leave the option out"
        raise InputError(explain("evaluate_every", "val targets to evaluate on", "a store without", fix))
    every = settings.evaluate_every if "val" in names else 0
    cost = 0 if every is not None else count_evaluation_edges(store, names, mesh, settings.num_layers)
    schedule = EvaluationSchedule(every, cost)
    _hint_at_partitioning(store, settings, mesh, view)
    view.begin(num_steps)
    with state.loader.telemetry:
        while state.num_steps < num_steps:
            first, scores = state.num_steps, None
            losses = trainer.train_epoch(num_steps - first)
            last = state.num_steps >= num_steps
            if every is None and first == 0 and not last:
                view.note(schedule.describe(state))
            if schedule.is_due(state, last=last):
                scores = trainer.evaluate(store, names, keep_best="val", **_arrays(settings))
            seconds = sum(state.history.step_seconds[first:])
            view.epoch(EpochReport(state.epoch, sum(losses) / len(losses), seconds, scores))
    best = state.best
    weights = state.model.state_dict() if best is None else best.weights
    if out is not None:
        finish = lambda: finish_run(out, settings, shape, weights, state.history)  # noqa: E731
        run_on_rank_zero(mesh.world, "finish run", finish)
    kept = None if best is None else Evaluation(best.epoch, best.scores)
    return TrainResult(mesh.size, mesh.num_replicas, settings.strategy, state.history, kept, out)


def _make_trainer(
    settings: TrainSettings, store: Store, mesh: Mesh, shape: ModelShape, out: Path | None, view: RunView
) -> tuple[Trainer, int]:
    """The trainer of a run, and the number of its steps. A collective."""
    model = parallelize(build_model(settings, shape, store), mesh)
    loader = NeighborLoader(
        store,
        settings.fanout,
        settings.targets,
        batch_size=settings.batch_size,
        strategy=settings.strategy,
        seed=settings.seed,
        mesh=mesh,
        deterministic=settings.deterministic,
        prefetch=settings.prefetch,
        cache=settings.cache,
        device_cache=settings.device_cache,
        copies=settings.copies,
        features_on_disk=settings.features_on_disk,
        telemetry=None if out is None else telemetry_path(out, mesh.rank),
        **_arrays(settings),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    num_steps = settings.steps or settings.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(settings, num_steps))
    clip = settings.max_grad_norm
    trainer = Trainer(model, optimizer, loader, lr_scheduler=scheduler, max_grad_norm=clip, callback=view.step)
    return trainer, num_steps


def _hint_at_partitioning(store: Store, settings: TrainSettings, mesh: Mesh, view: RunView) -> None:
    """Several ranks that split mini-batches of a store in one part exchange most rows: say how to make it less."""
    reads = strategy_class(parse_strategy(settings.strategy)).reads
    if mesh.num_splits == 1 or reads != "own rows" or len(store.part_boundaries) > 2:
        return
    fanout, made = ",".join(map(str, settings.fanout)), store.path.with_name(f"{store.path.stem}-{mesh.size}.gsplit")
    options = f"--parts {mesh.size} --targets {settings.targets} --fanout {fanout} --batch-size {settings.batch_size}"
    view.note(
        "hint: this store is not partitioned, so ranks exchange more than they need to; before training:\n"
        f"  gsplit partition {store.path} {made} {options}"
    )


def _num_targets(store: Store, name: str) -> int:
    return int(store.stored_array(f"targets/{name}").size) if f"targets/{name}" in store.names else 0


def _begin(out: Path, overwrite: bool) -> None:
    check_new_run(out, overwrite=overwrite)
    begin_run(out)


def infer_run(
    run: Path, store: Store, out: Path, mesh: Mesh, *, overwrite: bool = False, progress: Progress = silent
) -> InferenceResult:
    """Exact outputs of a trained model for all vertices, into a file. A collective."""
    settings, shape = load_run(run)
    run_on_rank_zero(mesh.world, "check output", lambda: check_new_file(out, overwrite=overwrite))
    width = _num_columns(store, settings)
    if width != shape.num_features:
        fix = "give the store it was trained on, or one like it"
        raise InputError(explain(store.path, f"{shape.num_features} features", width, fix))
    model = build_model(settings, shape, store)
    load_weights(run, model)
    result = infer(parallelize(model, mesh), store, out, progress=progress, **_arrays(settings))
    return InferenceResult(out, result.shape, str(result.dtype), mesh.size)


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Refuse to write over a file by accident."""
    if path.exists() and not overwrite:
        raise InputError(explain(path, "a new file", "one that exists", "choose another --out, or pass --overwrite"))


def verify_run(settings: TrainSettings, store: Store, mesh: Mesh, steps: int) -> Verification:
    """Check a stock model on a store: the ranks against one process. A collective."""
    shape = shape_of(store, settings)
    settings = choose_strategy(settings, shape, store, mesh)
    return verify(
        build_model(settings, shape, store),
        store,
        settings.fanout,
        settings.targets,
        batch_size=settings.batch_size,
        mesh=mesh,
        strategy=settings.strategy,
        seed=settings.seed,
        steps=steps,
        lr=settings.lr,
        **_arrays(settings),
    )
