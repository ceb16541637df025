"""``gsplit.evaluate``: exact accuracy on stored targets, computing no more than these targets need."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference.closure import Ids, RequiredVertices, targets_closure
from gsplit.inference.layerwise import LayerwisePass, evaluating, flat_mesh, inference_ownership
from gsplit.local_graph import ArrayNames, FeatureNames, LocalGraph
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
    """Accuracies by target name, and what they took: edges computed over all layers, against those of all vertices.

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


class EvaluationOptions(TypedDict, total=False):
    """Options of ``evaluate``, as ``gsplit.infer`` has them."""

    ownership: Ownership | None
    features: FeatureNames
    edge_attr: str | None
    edge_weight: str | None
    workspace: str | Path | None
    progress: Progress


def evaluate(model: Module, graph: Any, names: list[str], **options: Unpack[EvaluationOptions]) -> dict[str, float]:
    """Exact accuracies on stored targets from all neighbours; the same on every rank. A collective.

    Computes the named targets and what they need of their neighbourhoods, or all vertices below a layer that needs more
    than half of them, and logs which. Options are those of ``gsplit.infer``.
    """
    return evaluate_targets(model, graph, names, **options).scores


def evaluate_targets(
    model: Module,
    graph: Any,
    names: list[str],
    *,
    ownership: Ownership | None = None,
    features: FeatureNames = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> ExactEvaluation:
    """Exact accuracies, with what they cost. Each target is counted by its owner and by nobody else. A collective."""
    mesh, store = flat_mesh(mesh_of(model)), as_graph_store(graph)
    _check(store, names)
    local = LocalGraph(store, mesh, inference_ownership(store, mesh, ownership))
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    own = {name: local.targets(name).ids for name in names}
    right = np.zeros(local.stop - local.first, bool)
    labels, offset = store.stored_array("y"), store.vertex_range[0]
    with evaluating(model):
        needed = _closure(local, mesh, list(own.values()), forward_plan_of(model).depth)
        run = LayerwisePass(model, local, mesh, arrays, needed, workspace=workspace, progress=progress)
        for ids, rows in run.outputs():
            right[ids - local.first] = rows.argmax(dim=-1).cpu().numpy() == labels[ids - offset]
    counts = torch.zeros(len(names), 2, dtype=torch.float64, device=mesh.device)
    for place, name in enumerate(names):
        labelled = own[name][labels[own[name] - offset] >= 0]
        counts[place, 0], counts[place, 1] = float(right[labelled - local.first].sum()), float(labelled.size)
    mesh.world.all_reduce(Call("count right answers"), counts).wait()  # all ranks: same names
    return _report(_scores(store, names, counts), needed, mesh.rank)


def _scores(store: GraphStore, names: list[str], counts: Tensor) -> dict[str, float]:
    """Right answers over labelled targets; targets without a label are left out, and that is said.

    So is a list without any label, such as a test set that is to be predicted; the first one must have some.
    """
    scores = {}
    for name, (right, labelled) in zip(names, counts.tolist(), strict=True):
        missing = store.stored_targets(name)[2] - int(labelled)
        if labelled == 0 and name == names[0]:
            raise InputError(explain(f"targets/{name}", "at least one label", "none", "name targets with labels"))
        if missing:
            _LOG.warning("targets/%s: %d without a label are left out of the accuracy", name, missing)
        if labelled:
            scores[name] = right / labelled
    return scores


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
    labels = store.stored_array("y")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        fix = "compute another metric from the output of gsplit.infer"
        raise InputError(explain("y", "one class per vertex", f"{labels.dtype} {list(labels.shape[1:])}", fix))
    for name in names:
        if store.stored_targets(name)[2] == 0:
            raise InputError(explain(f"targets/{name}", "at least one target", "none", "name other targets"))
