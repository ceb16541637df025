"""Stock models from settings, and what ``gsplit infer`` and ``gsplit verify`` run on every rank.

The scripts in ``examples/`` do the same for models of their own.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import numpy as np
import torch
from torch.nn import Module

from gsplit.distributed.comm.comm import run_on_rank_zero
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference.infer import write_predictions
from gsplit.inference.prediction_table import What
from gsplit.loading.batch_loader import BatchLoader
from gsplit.loading.link_loader import LinkNeighborLoader
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.progress import Progress, silent
from gsplit.run.arrays import array_names, typed_widths
from gsplit.run.choices import check_degrees, choose_loss, fitting_loss, make_loss, num_outputs, plan_strategy
from gsplit.run.config import TrainSettings
from gsplit.run.folder import load_run, load_weights
from gsplit.run.labels import labels_of
from gsplit.run.models import EDGE_WEIGHT_MODELS, make_model, make_typed_model
from gsplit.run.preflight import check_features, check_new_file, choose_what, columns_of, num_columns
from gsplit.run.results import InferenceResult, ModelShape
from gsplit.sampling.pairs import Negatives, StoredPairs
from gsplit.store.reader import Store
from gsplit.training.verification import Verification, verify

__all__ = [
    "PairOptions",
    "build_model",
    "infer_run",
    "make_loader",
    "pair_options",
    "shape_of",
    "verify_run",
    "wrap_model",
]


def shape_of(store: Store, settings: TrainSettings) -> ModelShape:
    """Input and output width of a model for a store. The outputs of link prediction are embeddings."""
    outputs = settings.embedding
    class_names: tuple[str, ...] = ()
    if not settings.of_pairs:
        labels = labels_of(store, settings.targets)
        outputs = num_outputs(labels, settings.loss or fitting_loss(store, settings.targets))
        class_names = labels.class_names
    if outputs < 1:
        raise InputError(explain("y", "at least one class", f"{outputs} classes", "import labels with the graph"))
    if store.types is not None:
        return ModelShape(
            num_features=0,
            num_classes=outputs,
            class_names=class_names,
            widths=typed_widths(settings, store),
            edge_types=store.types.edge_types,
        )
    edge_features = None
    if settings.edge_attr is not None:
        shape = store.stored_array(f"edges/{settings.edge_attr}").shape
        edge_features = shape[1] if len(shape) == 2 else 1
    return ModelShape(
        num_features=num_columns(store, settings),
        num_classes=outputs,
        num_edge_features=edge_features,
        class_names=class_names,
        feature_columns=columns_of(store, settings),
    )


class PairOptions(TypedDict, total=False):
    """The pairs of a run, as keyword arguments of the loader of pairs and of verification."""

    edge_label_index: str
    neg_sampling: Negatives | None


def pair_options(settings: TrainSettings) -> PairOptions:
    """The pairs and negatives of a run of link prediction whose loss was chosen."""
    assert settings.neg_sampling is not None  # choose_loss
    stored = StoredPairs.given(settings.pairs, settings.neg_sampling, settings.num_negatives)
    return {"edge_label_index": stored.name, "neg_sampling": stored.negatives}


def build_model(settings: TrainSettings, shape: ModelShape, store: Store, own_model: str | None = None) -> Module:
    """The model of some settings, or that of the user's function. Its initial weights depend on the seed only."""
    if own_model is not None:
        return _build_own_model(own_model, shape, settings.seed)
    if settings.edge_weight is not None and settings.model not in EDGE_WEIGHT_MODELS:
        expected = f"a model that takes weights, {' or '.join(EDGE_WEIGHT_MODELS)}"
        raise InputError(explain("edge_weight", expected, settings.model, "leave one of them out"))
    degrees = None
    if settings.model == "pna":
        degrees = torch.from_numpy(np.bincount(check_degrees(store.graph)))
    torch.manual_seed(settings.seed)
    if shape.widths:
        return make_typed_model(
            settings.model,
            widths=shape.widths,
            edge_types=shape.edge_types,
            vertex_type=settings.vertex_type or settings.targets,
            hidden_channels=settings.hidden,
            num_layers=settings.num_layers,
            out_channels=shape.num_classes,
            dropout=settings.dropout,
            norm=settings.norm,
            heads=settings.heads,
        )
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


def wrap_model(settings: TrainSettings, shape: ModelShape, store: Store, mesh: Mesh) -> Module:
    """The model of some settings, wrapped by ``parallelize``. A collective."""
    return wrap(build_model(settings, shape, store), shape, store, mesh)


def wrap(model: Module, shape: ModelShape, store: Store, mesh: Mesh) -> Module:
    """A model wrapped by ``parallelize``. A collective."""
    if not shape.widths:
        return parallelize(model, mesh)
    return parallelize(model, mesh, graph=store, num_features=shape.widths)


def make_loader(settings: TrainSettings, store: Store, mesh: Mesh, telemetry: Path | None = None) -> BatchLoader[Any]:
    """The loader of some settings. ``telemetry``: a file for that of every step. A collective."""
    make: Callable[..., BatchLoader[Any]] = partial(NeighborLoader, input_nodes=settings.targets)
    if settings.of_pairs:
        make = partial(LinkNeighborLoader, **pair_options(settings))
    return make(
        store,
        settings.fanout,
        batch_size=settings.batch_size,
        strategy=settings.strategy,
        seed=settings.seed,
        mesh=mesh,
        deterministic=settings.deterministic,
        prefetch=settings.prefetch,
        sampling_threads=settings.sampling_threads,
        cache=settings.cache,
        device_cache=settings.device_cache,
        copies=settings.copies,
        features_on_disk=settings.features_on_disk,
        telemetry=telemetry,
        **settings.sampler_options,
        **array_names(settings, store),
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
    """Write the exact predictions of a trained model for all vertices to a file. A collective."""
    settings, shape = load_run(run)
    what = choose_what(settings, out, what)
    run_on_rank_zero(mesh.control, "check output", lambda: check_new_file(out, overwrite=overwrite))
    check_features(store, settings, shape)
    model = build_model(settings, shape, store)
    load_weights(run, model)
    made = write_predictions(
        wrap(model, shape, store, mesh),
        store,
        out,
        what=what,
        only=only if settings.vertex_type is None or only is None else only.removeprefix(f"{settings.vertex_type}/"),
        vertex_type=settings.vertex_type,
        class_names=shape.class_names,
        workspace=workspace,
        progress=progress,
        **array_names(settings, store),
    )
    return InferenceResult(made, mesh.size)


def _build_own_model(name: str, shape: ModelShape, seed: int) -> Module:
    """The model that a function of the user returns: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.

    The function gets those of ``in_channels`` and ``out_channels`` that it takes.
    """
    place, _, function = name.rpartition(":")
    fix = "write FILE.py:FUNCTION or MODULE:FUNCTION, of a function that returns a torch.nn.Module"
    if not place:
        raise InputError(explain("--own-model", "FILE.py:FUNCTION or MODULE:FUNCTION", name, fix))
    torch.manual_seed(seed)
    try:
        make = getattr(_import_place(place), function)
        channels = {"in_channels": shape.num_features, "out_channels": shape.num_classes}
        model = make(**{key: channels[key] for key in channels.keys() & inspect.signature(make).parameters.keys()})
    except Exception as error:  # of the user's code: its type says more than ours
        raise InputError(explain(f"--own-model {name}", "a model", f"{type(error).__name__}: {error}", fix)) from error
    if not isinstance(model, Module):
        raise InputError(explain(f"--own-model {name}", "a torch.nn.Module", type(model).__name__, fix))
    return model


def _import_place(place: str) -> ModuleType:
    """A module by its name, or a file as a module. Both may import their neighbours, as a script does."""
    folder = str(Path(place).parent if place.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location("gsplit_own_model", place)
    assert spec is not None and spec.loader is not None  # of a .py file, whether it exists or not
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where classes of the file are looked up
    spec.loader.exec_module(module)
    return module


def verify_run(
    settings: TrainSettings, store: Store, mesh: Mesh, steps: int, own_model: str | None = None
) -> Verification:
    """Compare the ranks with one process for a stock model, or one of the user's, on a store. A collective."""
    settings = choose_loss(settings, store, mesh)
    shape = shape_of(store, settings)
    strategy = plan_strategy(settings, shape, store, mesh).strategy
    pairs: PairOptions = pair_options(settings) if settings.of_pairs else {}
    return verify(
        build_model(settings, shape, store, own_model),
        store,
        settings.fanout,
        None if settings.of_pairs else settings.targets,
        **pairs,
        batch_size=settings.batch_size,
        mesh=mesh,
        strategy=strategy,
        seed=settings.seed,
        steps=steps,
        lr=settings.lr,
        loss_fn=make_loss(settings, store, mesh),
        **settings.sampler_options,
        **array_names(settings, store),
    )
