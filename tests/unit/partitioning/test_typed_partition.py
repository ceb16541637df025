"""Partitions of heterogeneous graphs: nothing is lost, and every (part, type) is a range, hottest first."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from typed_graphs import TypedGraph, academic, assert_holds, typed_graphs

import gsplit
from gsplit.errors import InputError
from gsplit.graph.graph import Graph
from gsplit.partitioning.presample import Workload, presample
from gsplit.partitioning.weights import sort_columns
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.store.reader import Store
from gsplit.store.verify import verify_store


def _check(store: Store, graph: TypedGraph, num_parts: int) -> None:
    verify_store(store)
    assert_holds(store, graph)
    assert store.types is not None
    assert len(store.types.boundaries) == num_parts * len(graph.counts) + 1
    assert list(store.types.boundaries[:: len(graph.counts)]) == store.part_boundaries
    hotness = store.stored_array("hotness")
    original = np.asarray(store.original_ids())
    for number, (first, stop) in enumerate(pairwise(store.types.boundaries)):
        of_type = number % len(graph.counts)
        assert (np.diff(hotness[first:stop]) <= 0).all()
        low, high = store.types.offsets[of_type : of_type + 2]
        assert ((original[first:stop] >= low) & (original[first:stop] < high)).all()


@pytest.mark.parametrize("solver", ["random", "metis", "restream"])
def test_every_solver_keeps_everything_in_ranges(tmp_path: Path, solver: str) -> None:
    graph = academic(authors=60, papers=90, edges=600)
    store = graph.build(tmp_path / "g.gsplit")
    objective = "random" if solver == "random" else "gsplit"
    options = {"batch_size": 16, "solver": solver, "objective": objective, "epochs": 2}
    found = gsplit.partition(store, tmp_path / "p.gsplit", 4, [3, 2], "paper/train", **options)  # type: ignore[arg-type]
    _check(found, graph, 4)
    assert found.manifest.vertex_types == store.manifest.vertex_types
    assert found.fingerprint != store.fingerprint
    sizes = np.diff(found.part_boundaries)
    assert sizes.min() > 0


@given(typed_graphs())
@settings(max_examples=8)
def test_any_graph_can_be_partitioned(tmp_path_factory: pytest.TempPathFactory, graph: TypedGraph) -> None:
    num_vertices = sum(graph.counts.values())
    if num_vertices < 3:
        return
    folder = tmp_path_factory.mktemp("typed")
    store = graph.build(folder / "g.gsplit")
    options = {"solver": "random", "objective": "random", "batch_size": 4, "epochs": 1}
    found = gsplit.partition(store, folder / "p.gsplit", 3, [2], None, **options)  # type: ignore[arg-type]
    _check(found, graph, 3)


def test_pairs_of_a_heterogeneous_graph_are_refused(tmp_path: Path) -> None:
    store = academic(edges=900).build(tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="pairs: expected a homogeneous graph .got a graph with the vertex types"):
        gsplit.partition(store, tmp_path / "p.gsplit", 2, [2], pairs="train")


def test_presampling_draws_what_training_draws(tmp_path: Path) -> None:
    store = academic(edges=900).build(tmp_path / "g.gsplit")
    workload = Workload.of_store(store, "paper/train", [2, 2], 8)
    counts = presample(workload, epochs=1, threads=1)
    assert counts.num_batches == 4
    kinds = store.stored_array("edge_type")
    one = sample_minibatch(workload.sampler(), torch.tensor(workload.targets[:8]), workload.fanouts, StepKey(0, 0, 0))
    top = one.blocks[-1]
    assert top.edge_ids is not None
    for row in range(top.num_dst):
        drawn = kinds[top.edge_ids[top.indptr[row] : top.indptr[row + 1]].numpy()]
        column = kinds[store.graph.indptr[workload.targets[row]] : store.graph.indptr[workload.targets[row] + 1]]
        wanted = np.minimum(np.bincount(column, minlength=4), 2)
        assert np.bincount(drawn, minlength=4).tolist() == wanted.tolist()
    of_papers = counts.computed[store.types.offsets[2] :] if store.types else None
    assert of_papers is not None and of_papers.sum() > 0


def test_sorted_columns_keep_edges_and_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    indptr = np.array([0, 5, 5, 9], np.int64)
    indices = rng.integers(0, 3, 9).astype(np.int32)
    counts = rng.integers(0, 99, 9).astype(np.uint32)
    graph, moved = sort_columns(Graph(indptr, indices, 3), counts, tmp_path)
    for first, stop in pairwise(indptr):
        assert (np.diff(graph.indices[first:stop]) >= 0).all()
        before = sorted(zip(indices[first:stop].tolist(), counts[first:stop].tolist(), strict=True))
        assert sorted(zip(graph.indices[first:stop].tolist(), moved[first:stop].tolist(), strict=True)) == before


def test_a_partitioned_store_is_not_partitioned_again(tmp_path: Path) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    options = {"solver": "random", "objective": "random", "epochs": 1}
    found = gsplit.partition(store, tmp_path / "p.gsplit", 2, [2], "paper/train", **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one that has not been renumbered"):
        gsplit.partition(found, tmp_path / "q.gsplit", 2, [2], "paper/train", **options)  # type: ignore[arg-type]
