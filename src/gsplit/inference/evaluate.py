"""``gsplit.evaluate``: exact metrics on stored targets, computing no more than these targets need."""

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

from gsplit.distributed.comm import Comm
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference.closure import Ids, RequiredVertices, targets_closure
from gsplit.inference.layerwise import InferenceOptions, LayerwisePass, evaluating, flat_mesh, inference_ownership
from gsplit.inference.tallies import Tally
from gsplit.local_graph import ArrayNames, Features, LocalGraph
from gsplit.metrics import Metric, check_metrics
from gsplit.nn.parallelize import forward_plan_of, mesh_of
from gsplit.ownership import Ownership
from gsplit.progress import Progress, silent
from gsplit.sampling.neighbor import make_sampler
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore

__all__ = ["EvaluationOptions", "ExactEvaluation", "count_evaluation_edges", "evaluate", "evaluate_targets"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExactEvaluation:
    """Scores by target name, and what they took: edges computed over all layers, against those of all vertices.

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


def evaluate(model: Module, graph: Any, names: list[str], **options: Unpack[EvaluationOptions]) -> dict[str, float]:
    """Exact scores on stored targets from all neighbours; the same on every rank. A collective.

    ``metrics`` are names of ``gsplit.metrics.METRICS``, accuracy by default: ``scores["val"]`` is the first one,
    ``scores["val mae"]`` another. Each target is counted once, whatever the ranks. A score that is no finite number,
    such as that of outputs of NaN, is left out, with a warning.

    Computes the named targets and what they need of their neighbourhoods, or all vertices below a layer that needs more
    than half of them, and logs which. Other options are those of ``gsplit.infer``.
    """
    return evaluate_targets(model, graph, names, **options).scores


def evaluate_targets(
    model: Module,
    graph: Any,
    names: list[str],
    *,
    metrics: Sequence[str] = ("accuracy",),
    ownership: Ownership | None = None,
    features: Features = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> ExactEvaluation:
    """Exact scores, with what they cost. Each target is counted by its owner and by nobody else. A collective."""
    chosen = check_metrics(metrics)
    mesh, store = flat_mesh(mesh_of(model)), as_graph_store(graph)
    _check(store, names)
    local = LocalGraph(store, mesh, inference_ownership(store, mesh, ownership))
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    own = {name: np.sort(local.targets(name).ids) for name in names}
    tallies = {name: Tally(chosen) for name in names}
    labels, offset = store.stored_array("y"), store.vertex_range[0]
    with evaluating(model):
        needed = _closure(local, mesh, list(own.values()), forward_plan_of(model).depth)
        run = LayerwisePass(model, local, mesh, arrays, needed, workspace=workspace, progress=progress)
        for ids, rows in run.outputs():
            out, y = rows.cpu(), torch.from_numpy(np.array(labels[ids - offset]))
            for name, listed in own.items():
                places = torch.from_numpy(_places(ids, listed))
                tallies[name].add(out[places], y[places])
    return _report(_scores(store, tallies, chosen, mesh.world), needed, mesh.rank)


def _places(ids: Ids, listed: Ids) -> Ids:
    """Positions in ``ids`` of the listed ids. Both are ascending, so only ``ids`` is searched: O(chunk log targets)."""
    found = np.searchsorted(listed, ids)
    found[found == listed.size] = 0
    is_listed = listed[found] == ids if listed.size else np.zeros(ids.size, bool)
    return np.flatnonzero(is_listed)


def _scores(store: GraphStore, tallies: dict[str, Tally], metrics: Sequence[Metric], comm: Comm) -> dict[str, float]:
    """Scores of all lists; targets without a label are left out, and that is said. All ranks: same names.

    So is a list without any label, such as a test set that is to be predicted; the first one must have some.
    """
    scores, first = {}, next(iter(tallies))
    for name, tally in tallies.items():
        labelled = tally.count_labelled(comm)
        missing = store.stored_targets(name)[2] - labelled
        if labelled == 0 and name == first:
            raise InputError(explain(f"targets/{name}", "at least one label", "none", "name targets with labels"))
        if missing:
            _LOG.warning("targets/%s: %d without a label are left out of the score", name, missing)
        for number, metric in enumerate(metrics if labelled else ()):
            score = _finish(metric, tally.total(metric, comm), name, is_first=name == first)
            if score is not None:
                scores[name if number == 0 else f"{name} {metric.name}"] = score
    return scores


def _finish(metric: Metric, sums: Tensor, name: str, *, is_first: bool) -> float | None:
    """The score of one list, the same on every rank; None, with a warning, where there is none.

    The weights of a training must not be lost for a score. The metric must fit the first list, though.
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
            "targets/%s: %s is %s and left out of the scores: look at features and outputs", name, metric.name, score
        )
        return None
    return score


def count_evaluation_edges(graph: Any, names: list[str], mesh: Mesh, num_layers: int) -> int:
    """Edges that one exact evaluation computes, over all layers and ranks. A collective."""
    ranks, store = flat_mesh(mesh), as_graph_store(graph)
    local = LocalGraph(store, ranks, inference_ownership(store, ranks, None))
    return _closure(local, ranks, [local.targets(name).ids for name in names], num_layers).num_edges


def _closure(local: LocalGraph, mesh: Mesh, own: list[Ids], num_layers: int) -> RequiredVertices:
    wanted = np.unique(np.concatenate([np.empty(0, np.int64), *own]))
    sampler = make_sampler(local.graph, local.original_ids, mesh.sample_device)
    return targets_closure(wanted, local, sampler, mesh, num_layers)


def _report(scores: dict[str, float], needed: RequiredVertices, rank: int) -> ExactEvaluation:
    found = ExactEvaluation(scores, needed.num_edges, needed.full_num_edges, needed.all_below)
    if rank == 0:
        _LOG.info("%s", found)
    return found


def _check(store: GraphStore, names: list[str]) -> None:
    if store.dtype("y") == "bfloat16":
        fix = "import the labels as floats of another type"
        raise InputError(explain("y", "integers or floats of 16, 32 or 64 bits", "bfloat16", fix))
    for name in names:
        if store.stored_targets(name)[2] == 0:
            raise InputError(explain(f"targets/{name}", "at least one target", "none", "name other targets"))
