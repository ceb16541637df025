"""From settings to a model: what ``gsplit infer`` and ``verify`` do on every rank, and ``gsplit train`` begins with.

A script does the same in the lines of ``examples/``; this is that script for the stock models.
"""

from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch.nn import Module

from gsplit.distributed.comm.comm import run_on_rank_zero
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference.infer import write_predictions
from gsplit.inference.prediction_table import What, default_what
from gsplit.nn.parallelize import parallelize
from gsplit.progress import Progress, silent
from gsplit.run.choices import check_degrees, choose_loss, choose_strategy, fitting_loss, make_loss, num_outputs
from gsplit.run.config import TrainSettings
from gsplit.run.folder import load_run, load_weights
from gsplit.run.models import EDGE_WEIGHT_MODELS, make_model
from gsplit.run.results import InferenceResult, ModelShape
from gsplit.store.reader import Store
from gsplit.training.verification import Verification, verify

__all__ = [
    "ArrayNames",
    "array_names",
    "build_model",
    "check_new_file",
    "choose_what",
    "infer_run",
    "shape_of",
    "verify_run",
]


def shape_of(store: Store, settings: TrainSettings) -> ModelShape:
    """Input and output width of a model for a store."""
    width = _num_columns(store, settings)
    outputs = num_outputs(store, settings.loss or fitting_loss(store, settings.targets))
    if outputs < 1:
        raise InputError(explain("y", "at least one class", "none", "import labels with the graph"))
    edge_features = None
    if settings.edge_attr is not None:
        shape = store.stored_array(f"edges/{settings.edge_attr}").shape
        edge_features = shape[1] if len(shape) == 2 else 1
    return ModelShape(width, outputs, edge_features, store.class_names, _columns(store, settings))


def _num_columns(store: Store, settings: TrainSettings) -> int:
    return sum(store.stored_array(f"features/{name}").shape[1] for name in settings.feature_names)


def _columns(store: Store, settings: TrainSettings) -> tuple[str, ...]:
    """What the inputs of the model were called in the user's table, as far as that is known."""
    return tuple(store.manifest.feature_columns) if settings.feature_names == ["x"] else ()


def _check_features(store: Store, settings: TrainSettings, trained: ModelShape) -> None:
    """Refuse features that are not those of the training: fewer, more, or others in their places."""
    width, columns = _num_columns(store, settings), _columns(store, settings)
    if width != trained.num_features:
        fix = "give the store it was trained on, or one like it"
        raise InputError(explain(store.path, f"{trained.num_features} features", width, fix))
    if columns and trained.feature_columns and columns != trained.feature_columns:
        place = next(i for i in range(width) if columns[i] != trained.feature_columns[i])
        expected = f"{trained.feature_columns[place]} as column {place} of the features, as in training"
        fix = (
            "import with --feature-column for each of them, in the order that gsplit inspect --json shows of that store"
        )
        raise InputError(explain(store.path, expected, columns[place], fix))


class ArrayNames(TypedDict):
    """Stored arrays by what they are for."""

    features: list[str]
    edge_attr: str | None
    edge_weight: str | None


def array_names(settings: TrainSettings) -> ArrayNames:
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


def infer_run(
    run: Path,
    store: Store,
    out: Path,
    mesh: Mesh,
    *,
    what: What | None = None,
    only: str | None = None,
    overwrite: bool = False,
    workspace: Path | None = None,
    progress: Progress = silent,
) -> InferenceResult:
    """What a trained model says of all vertices, exactly, into a file. A collective."""
    settings, shape = load_run(run)
    what = choose_what(settings, out, what)
    run_on_rank_zero(mesh.world, "check output", lambda: check_new_file(out, overwrite=overwrite))
    _check_features(store, settings, shape)
    model = build_model(settings, shape, store)
    load_weights(run, model)
    made = write_predictions(
        parallelize(model, mesh),
        store,
        out,
        what=what,
        only=only,
        class_names=shape.class_names,
        workspace=workspace,
        progress=progress,
        **array_names(settings),
    )
    return InferenceResult(made, mesh.size)


def choose_what(settings: TrainSettings, out: Path, what: What | None) -> What:
    """What is written of a model: what was asked for, if it can be said of it, or what fits the file."""
    classifies = settings.loss in (None, "cross_entropy")  # None: a run from before there were others
    if what not in (None, "outputs") and not classifies:
        fix = "leave --what out: the file holds the values"
        raise InputError(explain("--what", f"outputs, for a model trained with {settings.loss}", what, fix))
    return what or default_what(out, classifies=classifies)


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Refuse to write over a file by accident."""
    if path.exists() and not overwrite:
        raise InputError(explain(path, "a new file", "one that exists", "choose another --out, or pass --overwrite"))


def verify_run(settings: TrainSettings, store: Store, mesh: Mesh, steps: int) -> Verification:
    """Check a stock model on a store: the ranks against one process. A collective."""
    settings = choose_loss(settings, store, mesh)
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
        loss_fn=make_loss(settings, store, mesh),
        **array_names(settings),
    )
