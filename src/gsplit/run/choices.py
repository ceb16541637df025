"""Choices before a run from its settings and store: loss, class weights, metrics and strategy.

A setting that does not fit the stored labels is refused here, not after hours of training. Without --loss, the loss
depends on the labels: classes (one integer per vertex) use cross_entropy, columns of 0 and 1 bce, other floats mse.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, StoreError, explain
from gsplit.files.byte_sizes import parse_bytes
from gsplit.graph.graph import Graph
from gsplit.inference.layerwise import flat_mesh, inference_ownership
from gsplit.inference.metric_names import DEFAULT_METRICS, ERRORS_OF_FLOATS
from gsplit.inference.metrics import Metric
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit.planner.auto import PlannedSteps, resolve_strategy
from gsplit.planner.plan import Choice, planned_types
from gsplit.planner.shapes import PlannedModel
from gsplit.run.arrays import feature_arrays
from gsplit.run.config import TYPED_MODELS, TrainSettings
from gsplit.run.labels import BALANCED, OTHER_LABELS, TargetLabels, labels_of
from gsplit.run.preflight import refuse_link_settings
from gsplit.run.results import ModelShape, RunView
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.pairs import StoredPairs
from gsplit.sampling.targets import StoredTargets
from gsplit.store.reader import Store
from gsplit.training.losses import (
    LINK_LOSSES,
    LossFunction,
    PairLossFunction,
    named_loss,
    weighted_cross_entropy,
)

__all__ = [
    "balanced_weights",
    "check_degrees",
    "check_labels",
    "check_metric_labels",
    "choose_for_pairs",
    "choose_loss",
    "plan_strategy",
    "fitting_loss",
    "hint_at_partitioning",
    "is_binary",
    "is_labelled",
    "make_loss",
    "num_outputs",
    "own_labels",
    "refuse_typed_settings",
]

_VERIFY = "run gsplit inspect --verify, then restore the store or import it again"


def choose_loss(settings: TrainSettings, store: Store, mesh: Mesh, view: RunView | None = None) -> TrainSettings:
    """The settings with a loss and a metric in place of None; the view shows the choice. A collective."""
    refuse_typed_settings(settings, store)
    if settings.of_pairs:
        return choose_for_pairs(settings, store)
    refuse_link_settings(settings)
    labels = labels_of(store, settings.targets)
    if settings.loss is not None:
        return settings.model_copy(update={"metric": settings.metric or DEFAULT_METRICS[settings.loss]})
    loss = fitting_loss(store, settings.targets)
    others = torch.tensor([loss != "bce"], dtype=torch.int64)
    mesh.control.all_reduce(Call("choose the loss"), others).wait()  # ranks may hold different parts of the labels
    if loss == "bce" and int(others):
        loss = "mse"
    metric = settings.metric or DEFAULT_METRICS[loss]
    held = f"{labels.name} holds {_describe(labels, loss)}"
    (view or RunView()).note(f"loss {loss}, metric {metric}: {held} (--loss, --metric)")
    return settings.model_copy(update={"loss": loss, "metric": metric})


def refuse_typed_settings(settings: TrainSettings, store: Store) -> None:
    """Refuse settings that are not built for heterogeneous graphs, and targets of a type in any other graph."""
    if store.types is None:
        return
    program = "leave it out, or train in a program (docs/heterogeneous.md)"
    refused: dict[str, tuple[bool, str]] = {
        "task": (settings.of_pairs, "use gsplit.LinkNeighborLoader in a program (docs/heterogeneous.md)"),
        "model": (settings.model not in TYPED_MODELS, f"choose one of {', '.join(TYPED_MODELS)}, or write a program"),
        "jk": (settings.jk is not None, program),
        "edge_attr": (settings.edge_attr is not None, program),
        "edge_weight": (settings.edge_weight is not None, program),
        "sampler": (bool(str(DrawOptions(**settings.sampler_options))), "leave it and its options out"),
        "copies": (parse_bytes(settings.copies, "copies") > 0, "leave it out, or use --cache"),
        "device_cache": (settings.device_cache not in ("auto", "0"), "leave it out, or use --cache"),
    }
    for name, (is_given, fix) in refused.items():
        if is_given:
            got = str(DrawOptions(**settings.sampler_options)) if name == "sampler" else getattr(settings, name)
            raise InputError(explain(name, "a setting that is built for heterogeneous graphs", got, fix))


def choose_for_pairs(settings: TrainSettings, store: Store) -> TrainSettings:
    """The settings of link prediction with loss, metric and negatives in place of None; refused if they do not fit."""
    labels = store.pair_labels(settings.pairs)
    loss = settings.loss or "cross_entropy"
    if loss not in LINK_LOSSES:
        raise InputError(explain("loss", f"{' or '.join(LINK_LOSSES)} for --task link", loss, "choose one of these"))
    fitting = "triplet" if loss == "bpr" else "binary"
    mode = settings.neg_sampling or (fitting if labels is None else "none")
    if loss == "bpr" and mode not in ("triplet", "joint"):
        fix = "choose one of these, or --loss cross_entropy"
        raise InputError(explain("neg_sampling", "triplet or joint for --loss bpr", mode, fix))
    if (labels is None) == (mode == "none"):
        expected = "none, because the pairs have labels" if mode != "none" else "negatives, or pairs with labels"
        raise InputError(explain("neg_sampling", expected, mode, "leave it out"))
    if settings.count_targets(store) == 0:
        raise InputError(explain(f"pairs/{settings.pairs}", "at least one pair", "an empty list", "name other pairs"))
    if labels is not None and not ((labels == 0) | (labels == 1)).all():
        other = labels[(labels != 0) & (labels != 1)][0]
        raise InputError(explain(f"pair_labels/{settings.pairs}", "labels 0 and 1", other, "store other labels"))
    if settings.class_weights is not None:
        raise InputError(explain("class_weights", "a task with classes", "--task link", "leave one of them out"))
    return settings.model_copy(update={"loss": loss, "metric": settings.metric or "mrr,hits@10", "neg_sampling": mode})


def fitting_loss(store: Store, targets: str) -> str:
    """The loss that fits the labels of these targets, as far as they are held here."""
    labels = labels_of(store, targets)
    if labels.is_classes:
        return "cross_entropy"
    if labels.num_columns > 1 and all(is_binary(rows).all() for rows in _label_rows(store, targets, labels)):
        return "bce"
    if not labels.is_float:
        raise InputError(explain(labels.name, "classes, columns of 0 and 1, or floats", labels.form, OTHER_LABELS))
    return "mse"


def num_outputs(labels: TargetLabels, loss: str) -> int:
    """Columns of the model's output: one per class, or one per column of labels."""
    labels.check_form(loss)
    return labels.num_classes if loss == "cross_entropy" else labels.num_columns


def check_labels(store: Store, targets: str, loss: str) -> None:
    """Refuse targets without a label that the loss takes, as far as they are held here."""
    labels = labels_of(store, targets)
    labels.check_form(loss)
    if store.stored_targets(targets)[2] == 0:
        raise InputError(explain(f"targets/{targets}", "at least one target", "an empty list", "name other targets"))
    unlabelled = 0
    for rows in _label_rows(store, targets, labels):
        unlabelled += int((~is_labelled(rows).reshape(rows.shape[0], -1).any(axis=1)).sum())
        if loss == "cross_entropy" and int(rows.max()) >= labels.num_classes:
            raise StoreError(explain(labels.name, f"classes 0..{labels.num_classes - 1}", int(rows.max()), _VERIFY))
        if loss == "bce" and not is_binary(rows).all():
            other = rows[~is_binary(rows)][0]
            raise InputError(explain(labels.name, "0, 1 or no label everywhere for --loss bce", other, OTHER_LABELS))
        if np.isinf(rows).any():
            raise InputError(explain(labels.name, "finite values", rows[np.isinf(rows)][0], "import other labels"))
    if unlabelled:
        fix = "leave unlabelled vertices out of the targets"
        raise InputError(explain(f"targets/{targets}", "a label of every target", f"{unlabelled} without", fix))


def own_labels(store: Store, targets: str, mesh: Mesh) -> Array:
    """TargetLabels of the targets that this rank owns; each target is owned by one rank. A collective."""
    ranks = flat_mesh(mesh)
    local = LocalGraph(store, ranks, inference_ownership(store, ranks, None))
    return labels_of(store, targets).rows(store, local.targets(targets).ids)


def _label_rows(store: Store, targets: str, labels: TargetLabels) -> Iterator[Array]:
    ids, positions, num_targets = store.stored_targets(targets)
    stored = StoredTargets(name=targets, ids=ids, positions=positions, num_targets=num_targets, held=store.vertex_range)
    for _, piece in stored.pieces():
        yield labels.rows(store, np.asarray(piece, np.int64))


def is_labelled(rows: Array) -> Array:
    """Entries that have a label."""
    return ~np.isnan(rows) if np.issubdtype(rows.dtype, np.floating) else rows >= 0


def is_binary(rows: Array) -> Array:
    """Entries that are 0, 1 or without a label."""
    missing = np.isnan(rows) if np.issubdtype(rows.dtype, np.floating) else rows == -1
    found: Array = missing | (rows == 0) | (rows == 1)
    return found


def _describe(labels: TargetLabels, loss: str) -> str:
    if loss == "cross_entropy":
        return f"{labels.num_classes} classes"
    return f"{labels.num_columns} column(s) of {'0 and 1' if loss == 'bce' else labels.dtype}"


def make_loss(settings: TrainSettings, store: Store, mesh: Mesh) -> LossFunction | PairLossFunction:
    """The loss function of settings whose loss was chosen. A collective for balanced weights."""
    assert settings.loss is not None
    if settings.of_pairs:
        return LINK_LOSSES[settings.loss]
    if settings.class_weights is None:
        return named_loss(settings.loss)
    if settings.loss != "cross_entropy":
        fix = "leave one of them out"
        raise InputError(explain("class_weights", "--loss cross_entropy", settings.loss, fix))
    if settings.class_weights == BALANCED:
        return weighted_cross_entropy(balanced_weights(_count_classes(store, settings.targets, mesh)))
    return weighted_cross_entropy(labels_of(store, settings.targets).parse_weights(settings.class_weights))


def balanced_weights(counts: Tensor) -> Tensor:
    """Targets / (classes that occur * targets of a class): every class has the same total weight; 1 for empty classes.

    >>> balanced_weights(torch.tensor([30, 10, 0])).tolist()
    [0.6666666666666666, 2.0, 1.0]
    """
    occurs = counts > 0
    each = counts.sum().double() / occurs.sum()
    return torch.where(occurs, each / counts.clamp(min=1), torch.ones_like(each))


def _count_classes(store: Store, targets: str, mesh: Mesh) -> Tensor:
    """Targets of every class, each counted by its owner. A collective."""
    rows = own_labels(store, targets, mesh)
    num_classes = labels_of(store, targets).num_classes
    counts = torch.from_numpy(np.bincount(rows[rows >= 0], minlength=num_classes))
    mesh.control.all_reduce(Call("count classes"), counts).wait()
    return counts


def check_metric_labels(store: Store, names: Sequence[str], metrics: Sequence[Metric], loss: str, mesh: Mesh) -> None:
    """Refuse metrics that do not fit the labels of these target lists. A collective."""
    labels = labels_of(store, names[0])
    for metric in metrics:
        labels.check_metric(metric.name, loss)
    of_classes = [metric.name for metric in metrics if metric.name not in ERRORS_OF_FLOATS]
    for place, name in enumerate(names):
        rows = own_labels(store, name, mesh)
        labelled, others = _sum(mesh, [is_labelled(rows).sum(), (~is_binary(rows)).sum()])
        if place == 0 and not labelled:
            fix = "import other labels, or train with --evaluate-every 0"
            raise InputError(explain(f"targets/{name}", "at least one label", "0 labels", fix))
        if of_classes and loss != "cross_entropy" and others:
            got = f"{others} other labels in targets/{name}"
            raise InputError(explain(f"metric {of_classes[0]}", "labels of 0 and 1", got, "choose rmse or mae"))
        if place == 0 and "roc_auc" in of_classes and not _has_both_kinds(rows, labels, loss, mesh):
            fix = "choose another metric, or other targets"
            raise InputError(explain("metric roc_auc", f"targets/{name} of both kinds", "targets of one kind", fix))


def _has_both_kinds(rows: Array, labels: TargetLabels, loss: str, mesh: Mesh) -> bool:
    """Whether there are two classes, or a column with both 0 and 1. A collective."""
    if loss == "cross_entropy":
        counts = _sum(mesh, np.bincount(rows[rows >= 0], minlength=labels.num_classes))
        return sum(count > 0 for count in counts) > 1
    columns = rows if rows.ndim == 2 else rows[:, None]  # also without rows, of which reshape(0, -1) fails
    zeros, ones = (_sum(mesh, (columns == kind).sum(axis=0)) for kind in (0, 1))
    return any(zero and one for zero, one in zip(zeros, ones, strict=True))


def _sum(mesh: Mesh, counts: Sequence[int] | Array) -> list[int]:
    total = torch.tensor(np.asarray(counts), dtype=torch.int64)
    mesh.control.all_reduce(Call("count labels of a metric"), total).wait()
    found: list[int] = total.tolist()
    return found


def plan_strategy(settings: TrainSettings, shape: ModelShape, store: Store, mesh: Mesh) -> Choice:
    """The strategy of the settings, or for "auto" the planner's choice. A collective for "auto"."""
    model = PlannedModel(
        kind=settings.model,
        num_features=shape.num_features,
        hidden=settings.hidden,
        num_classes=shape.num_classes,
        num_layers=settings.num_layers,
        heads=settings.heads,
        types=planned_types(store, feature_arrays(settings, store)),
    )
    steps = PlannedSteps(
        input_nodes=None if settings.of_pairs else settings.targets,
        num_neighbors=settings.fanout,
        batch_size=settings.batch_size,
        features=feature_arrays(settings, store),
        on_disk=settings.features_on_disk,
        cache=settings.cache,
        device_cache=settings.device_cache,
        prefetch=settings.prefetch,
        sampling_threads=settings.sampling_threads,
        copies=settings.copies,
        shape=model,
        draw=DrawOptions(**settings.sampler_options),
        pairs=StoredPairs.given(settings.pairs, settings.neg_sampling or "binary", settings.num_negatives)
        if settings.of_pairs
        else None,
        strategies=("split",) if settings.norm == "batch_norm" else None,  # each vertex computed once
    )
    return resolve_strategy(settings.strategy, store, mesh, steps)


def hint_at_partitioning(store: Store, settings: TrainSettings, mesh: Mesh, view: RunView) -> None:
    """Show how to partition the store, if several ranks split the mini-batches of a store that is not partitioned."""
    spec = parse_strategy(settings.strategy, len(settings.fanout))
    if mesh.num_splits == 1 or not spec.reads_own_rows or len(store.part_boundaries) > 2:
        return
    fanout = ",".join(map(str, settings.fanout))
    made = store.path.with_name(f"{store.path.stem}-{mesh.size}.gsplit")
    trained = f"--targets {settings.targets}"
    if settings.of_pairs:
        negatives = f"--neg-sampling {settings.neg_sampling} --num-negatives {settings.num_negatives:g}"
        trained = f"--pairs {settings.pairs} {negatives}"
    options = f"--parts {mesh.size} {trained} --fanout {fanout} --batch-size {settings.batch_size}"
    if settings.sampler != "uniform":
        options += f" --sampler {settings.sampler}"
    if settings.weight_attr is not None:
        options += f" --weight-attr {settings.weight_attr}"
    options += " --replace" if settings.replace else ""
    options += " --layer-dependency" if settings.layer_dependency else ""
    view.note(
        "hint: this store is not partitioned, so ranks exchange more than they need to; before training:\n"
        f"  gsplit partition {store.where} {made} {options}"
    )


def check_degrees(graph: Graph) -> npt.NDArray[np.int64]:
    """In-degrees of all vertices; damaged offsets are refused."""
    degrees = graph.in_degrees()
    if degrees.size and not 0 <= int(degrees.min()) <= int(degrees.max()) <= graph.indices.size:
        got = f"{degrees.min()}..{degrees.max()}"
        raise StoreError(explain("indptr", f"in-degrees of 0..{graph.indices.size}", got, _VERIFY))
    return degrees
