"""``gsplit.evaluate``: exact metrics on stored targets, computing no more than these targets need.

Each rank adds up its own targets chunk by chunk; sums are added over ranks at the end. For ``roc_auc`` each rank keeps
the outputs of its own targets, and rank 0 receives one column of scores after the other from all ranks: about 50 bytes
per target of the list there, for the sort.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.protocol import take_rows
from gsplit.graph.ownership import Ownership
from gsplit.inference.closure import RequiredVertices, targets_closure
from gsplit.inference.layerwise import InferenceOptions, evaluating, flat_mesh, inference_ownership
from gsplit.inference.metrics import Metric, Scored, check_metrics, is_classes, is_labelled, rank_area, score_columns
from gsplit.inference.typed_layerwise import labels_of, make_pass
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph
from gsplit.nn.parallelize import check_features, forward_plan_of, mesh_of
from gsplit.progress import Progress, silent
from gsplit.sampling.neighbor import make_sampler
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore

__all__ = [
    "EvaluationOptions",
    "ExactEvaluation",
    "TargetScores",
    "count_evaluation_edges",
    "evaluate",
    "evaluate_targets",
    "list_names",
]

_LOG = logging.getLogger(__name__)


class TargetScores:
    """The targets of one list on one rank."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self._sums: dict[str, Tensor] = {}
        self._kept: list[Scored] = []
        self._num_labelled = 0

    def add(self, out: Tensor, y: Tensor) -> None:
        """Count some targets, with outputs [n, C] and their labels, on the host."""
        targets = _labelled_targets(out, y)
        self._num_labelled += targets.y.size(0)
        for metric in self._metrics:
            if metric.count is not None:
                sums = metric.count(targets)
                self._sums[metric.name] = self._sums.get(metric.name, torch.zeros_like(sums)) + sums
        if any(metric.count is None for metric in self._metrics):
            self._kept.append(targets)

    def count_labelled(self, comm: Comm) -> int:
        """Targets with a label, over all ranks. A collective."""
        total = torch.tensor([self._num_labelled], dtype=torch.int64, device=comm.device)
        comm.all_reduce(Call("count labelled targets"), total).wait()
        return int(total)

    def total(self, metric: Metric, comm: Comm) -> Tensor:
        """The input of ``metric.finish`` summed over all ranks, the same on every rank. A collective."""
        return self._areas(comm) if metric.count is None else self._sum(metric, comm)

    def _sum(self, metric: Metric, comm: Comm) -> Tensor:
        own = self._sums.get(metric.name)
        shape = [] if own is None else list(own.shape)
        texts = comm.gather_text(Call("sizes of sums"), ",".join(map(str, shape)))  # a rank may have no targets
        shape = max([int(size) for size in text.split(",") if size] for text in texts)
        sums = torch.zeros(shape, dtype=torch.float64) if own is None else own
        there = sums.to(comm.device)
        comm.all_reduce(Call(f"sums of {metric.name}"), there).wait()
        return there.cpu()

    def _areas(self, comm: Comm) -> Tensor:
        """The area of every column, and whether it has one, [C, 2], from rank 0. A collective."""
        columns = score_columns(_join(self._kept)) if self._kept else []
        (width,) = {int(text) for text in comm.gather_text(Call("columns of scores"), str(len(columns)))} - {0}
        areas = torch.zeros(width, 2, dtype=torch.float64)
        none = torch.empty(0, dtype=torch.float64)
        for place in range(width):
            scores, positive = columns[place] if columns else (none, none)
            gathered = _gather(comm, torch.stack([scores.double(), positive.double()], dim=1)).numpy()
            if comm.rank == 0:
                area = rank_area(gathered[:, 0], gathered[:, 1] > 0)
                areas[place] = torch.tensor([0.0, 0.0] if area is None else [area, 1.0])
        there = areas.to(comm.device)
        comm.broadcast(Call("areas", long_wait=True), there)
        return there.cpu()


def _labelled_targets(out: Tensor, y: Tensor) -> Scored:
    """Targets with at least one label, in the form that metrics take."""
    out = out.double()
    y = y.to(torch.uint8) if y.dtype == torch.bool else y
    if out.dim() == 2 and is_classes(y, out.size(1)):
        has = is_labelled(y)
        return Scored(out[has], y[has].long())
    entries = y.unsqueeze(1) if y.dim() == 1 else y
    if out.shape != entries.shape:
        expected = f"{list(entries.shape[1:])} values per vertex, as y has, or one class each"
        fix = "give the model as many outputs as there are columns of labels"
        raise InputError(explain("the model's output", expected, list(out.shape[1:]), fix))
    has = is_labelled(entries).any(dim=1)
    return Scored(out[has], entries[has])


def _join(kept: Sequence[Scored]) -> Scored:
    return Scored(torch.cat([one.out for one in kept]), torch.cat([one.y for one in kept]))


def _gather(comm: Comm, rows: Tensor) -> Tensor:
    """The rows of all ranks on rank 0, none elsewhere. A collective."""
    counts = (rows.size(0), *(0 for _ in range(comm.size - 1)))
    received = comm.all_to_all_counts(Call("numbers of scores"), counts)
    out = torch.empty(int(np.sum(received)), 2, dtype=rows.dtype, device=comm.device)
    comm.all_to_all(Call("scores"), out, rows.to(comm.device), received, counts).wait()
    return out.cpu()


@dataclass(frozen=True)
class ExactEvaluation:
    """Scores by target name, and their cost: edges computed over all layers, and those of all vertices.

    ``all_below``: the targets need more than half of the graph, so that all vertices were computed in the lower layers.
    """

    scores: dict[str, float]
    num_edges: int
    full_num_edges: int
    all_below: bool

    def __str__(self) -> str:
        what = (
            "the targets' neighbourhoods, then all vertices" if self.all_below else "the targets' neighbourhoods only"
        )
        return f"exact evaluation of {what}: {self.num_edges:,} of {self.full_num_edges:,} edges"


class EvaluationOptions(InferenceOptions, total=False):
    """Options of ``evaluate``: those of ``gsplit.infer``, and names of metrics."""

    metrics: Sequence[str]


def list_names(names: str | Sequence[str]) -> list[str]:
    """The names of what is evaluated: one, or several."""
    found = [names] if isinstance(names, str) else list(names)
    if not found:
        raise InputError(explain("names", "at least one name", found, 'evaluate "val", for example'))
    return found


def evaluate(
    model: Module, graph: Any, names: str | Sequence[str], **options: Unpack[EvaluationOptions]
) -> dict[str, float]:
    """Exact scores on stored targets from all neighbours; the same on every rank. A collective.

    ``names``: a name of stored targets, such as "val", or several, such as ["val", "test"].

    ``metrics`` are keys of ``inference.metrics.METRICS``, accuracy by default: ``scores["val"]`` is the first one,
    ``scores["val mae"]`` another. Each target is counted once, on any number of ranks. A score that is not a finite
    number, such as that of outputs of NaN, is left out, with a warning.

    In a heterogeneous graph names have the vertex type before them, such as "paper/val", and are of one type.

    Computes the named targets and the neighbourhoods that they need. Below a layer that needs more than half of the
    vertices, all are computed; a log message states which. Other options are those of ``gsplit.infer``.
    """
    return evaluate_targets(model, graph, names, **options).scores


def evaluate_targets(
    model: Module,
    graph: Any,
    names: str | Sequence[str],
    *,
    metrics: Sequence[str] = ("accuracy",),
    ownership: Ownership | None = None,
    features: Features = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> ExactEvaluation:
    """Exact scores with their cost. Each target is counted by its owner only. A collective."""
    names = list_names(names)
    chosen = check_metrics(metrics)
    check_features(model, features)
    mesh = flat_mesh(mesh_of(model))
    store = as_graph_store(graph)
    vertex_type = _type_of(store, names)
    _check(store, names, vertex_type)
    local = LocalGraph(store, mesh, inference_ownership(store, mesh, ownership))
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    own = {name: np.sort(_own_targets(local, name)) for name in names}
    tallies = {name: TargetScores(chosen) for name in names}
    labels = local.rows(labels_of(vertex_type), vertex_type)
    with evaluating(model):
        needed = _closure(local, mesh, list(own.values()), forward_plan_of(model).depth)
        run = make_pass(
            model, local, mesh, arrays, needed, workspace=workspace, progress=progress, vertex_type=vertex_type
        )
        for ids, rows in run.outputs():
            out = rows.cpu()
            vertices = torch.from_numpy(ids)
            y = take_rows(labels, vertices if store.types is None else store.types.rows(vertices), out.device)
            for name, listed in own.items():
                places = torch.from_numpy(_places(ids, listed))
                tallies[name].add(out[places], y[places])
    return _report(_scores(store, tallies, chosen, mesh.control), needed, mesh.rank)


def _places(ids: Ids, listed: Ids) -> Ids:
    """Positions in ``ids`` of the listed ids. Both are ascending, so only ``ids`` is searched: O(chunk log targets)."""
    found = np.searchsorted(listed, ids)
    found[found == listed.size] = 0
    is_listed = listed[found] == ids if listed.size else np.zeros(ids.size, bool)
    return np.flatnonzero(is_listed)


def _scores(
    store: GraphStore, tallies: dict[str, TargetScores], metrics: Sequence[Metric], comm: Comm
) -> dict[str, float]:
    """Scores of all lists. A collective: all ranks have the same names.

    Targets without a label are left out with a warning, and so is a list without any label, such as a test set that is
    to be predicted. The first list must have labels.
    """
    scores = {}
    first = next(iter(tallies))
    for name, tally in tallies.items():
        labelled = tally.count_labelled(comm)
        num_targets = store.stored_targets(name)[2]
        missing = num_targets - labelled
        if labelled == 0 and name == first:
            got = f"{num_targets} targets without a label"
            raise InputError(explain(f"targets/{name}", "at least one label", got, "name targets with labels"))
        if missing:
            _LOG.warning("targets/%s: %d without a label are left out of the score", name, missing)
        for number, metric in enumerate(metrics if labelled else ()):
            score = _finish(metric, tally.total(metric, comm), name, is_first=name == first)
            if score is not None:
                scores[name if number == 0 else f"{name} {metric.name}"] = score
    return scores


def _finish(metric: Metric, sums: Tensor, name: str, *, is_first: bool) -> float | None:
    """The score of one list, the same on every rank; None, with a warning, if it cannot be computed.

    A training must not end because of a score. Only a metric that does not fit the first list is an error.
    """
    try:
        score = metric.finish(sums)
    except InputError as error:
        if is_first:
            raise
        _LOG.warning("targets/%s: left out of the scores: %s", name, error)
        return None
    if not math.isfinite(score):
        _LOG.warning(
            "targets/%s: %s is %s and left out of the scores: check features and outputs", name, metric.name, score
        )
        return None
    return score


def count_evaluation_edges(graph: Any, names: list[str], mesh: Mesh, num_layers: int) -> int:
    """Edges that one exact evaluation computes, over all layers and ranks. A collective."""
    ranks = flat_mesh(mesh)
    store = as_graph_store(graph)
    local = LocalGraph(store, ranks, inference_ownership(store, ranks, None))
    return _closure(local, ranks, [_own_targets(local, name) for name in names], num_layers).num_edges


def _closure(local: LocalGraph, mesh: Mesh, own: list[Ids], num_layers: int) -> RequiredVertices:
    wanted = np.unique(np.concatenate([np.empty(0, np.int64), *own]))
    sampler = make_sampler(local.graph, local.original_ids, mesh.sample_device)
    return targets_closure(wanted, local, sampler, mesh, num_layers)


def _report(scores: dict[str, float], needed: RequiredVertices, rank: int) -> ExactEvaluation:
    found = ExactEvaluation(
        scores=scores,
        num_edges=needed.num_edges,
        full_num_edges=needed.full_num_edges,
        all_below=needed.all_below,
    )
    if rank == 0:
        _LOG.info("%s", found)
    return found


def _type_of(store: GraphStore, names: list[str]) -> str | None:
    """The vertex type of some target lists; None without types."""
    if store.types is None:
        return None
    found = {name.partition("/")[0] for name in names}
    if len(found) != 1 or not all("/" in name for name in names):
        fix = "name lists of one vertex type, such as paper/val and paper/test"
        raise InputError(explain("names", "targets of one vertex type", ", ".join(names), fix))
    vertex_type = found.pop()
    store.types.number(vertex_type)  # refuses unknown types
    return vertex_type


def _own_targets(local: LocalGraph, name: str) -> Ids:
    """The targets of a list that this rank owns. In a heterogeneous graph the name begins with the vertex type."""
    return local.targets(name).ids


def _check(store: GraphStore, names: list[str], vertex_type: str | None) -> None:
    if store.dtype(labels_of(vertex_type)) == "bfloat16":
        fix = "import the labels as floats of another type"
        raise InputError(explain("y", "integers or floats of 16, 32 or 64 bits", "bfloat16", fix))
    for name in names:
        if store.stored_targets(name)[2] == 0:
            raise InputError(explain(f"targets/{name}", "at least one target", "an empty list", "name other targets"))
