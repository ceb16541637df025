"""Exact evaluation computes the targets' closure and no more, and gives what the whole pass gives."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import memory_store, shaped_graphs
from small_graph import Case, make_model, small_store

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.inference import closure
from gsplit.inference.closure import all_vertices, edge_chunks, targets_closure
from gsplit.inference.evaluate import evaluate_targets
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.nn.parallelize import parallelize
from gsplit.sampling.neighbor import HostNeighborSampler


@given(shaped_graphs(), st.data())
def test_every_level_holds_the_targets_neighbourhoods(graph: tuple[int, Any, Any], data: st.DataObject) -> None:
    n, src, dst = graph
    store = memory_store(n, src, dst)
    local = LocalGraph(store, solo_mesh(), Ownership((0, n)))
    targets = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=4))), np.int64)
    sampler = HostNeighborSampler(store.graph, np.empty(0, np.int64))
    needed = targets_closure(targets, local, sampler, solo_mesh(), 3)
    want, edges = {*targets.tolist()}, 0
    assert needed.levels[-1].tolist() == sorted(want)
    for level in (2, 1, 0):
        into = np.isin(dst, needed.levels[level + 1])
        edges += int(into.sum())
        want |= set(src[into].tolist())
        large = needed.levels[level + 1].size > n / 2
        assert needed.levels[level].tolist() == (list(range(n)) if large else sorted(want))
        want = set(needed.levels[level].tolist())
    assert (needed.num_edges, needed.full_num_edges) == (edges, 3 * src.size)
    assert all_vertices(local, solo_mesh(), 3).num_edges == 3 * src.size


def test_chunks_hold_every_vertex_once_and_bounded_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "CHUNK_EDGES", 20)
    monkeypatch.setattr(closure, "CHUNK_ROWS", 5)
    store, _ = small_store("random", 1)
    degrees = store.graph.in_degrees()
    ids = np.flatnonzero(np.arange(90) % 3)
    chunks = edge_chunks(ids, store.graph)
    assert np.concatenate(chunks).tolist() == ids.tolist()
    for chunk in chunks:
        assert 1 <= chunk.size <= 5 and (degrees[chunk].sum() <= 20 or chunk.size == 1)
    assert len(chunks) > 5


@pytest.mark.parametrize("kind", ["sage", "gat", "gcn", "pna"])
def test_few_targets_cost_less_and_score_the_same(kind: str) -> None:
    n = 400  # a ring: three hops back are four vertices
    ring = memory_store(n, np.arange(n), (np.arange(n) + 1) % n)
    x = np.random.default_rng(0).normal(size=(n, 6))
    arrays = {**ring.arrays, "features/x": x, "y": np.arange(n) % 5, "targets/few": np.array([5, 6, 200])}
    dtypes = {**ring.dtypes, "features/x": "float64", "y": "int64", "targets/few": "int64"}
    store = type(ring)(ring.graph, [0, n], arrays, dtypes)
    torch.manual_seed(0)
    model = parallelize(make_model(Case(kind, "split", "random", 0.5, "cat", None)), solo_mesh())
    few = evaluate_targets(model, store, ["few"])
    assert few.num_edges == 3 + 5 + 7 and few.full_num_edges == 3 * n and not few.all_below
    assert str(few) == "exact evaluation of the targets' neighbourhoods only: 15 of 1,200 edges"
    from gsplit import infer

    guess = infer(model, store).argmax(1)
    wanted = store.arrays["targets/few"]
    assert few.scores == {"few": float((guess[wanted] == wanted % 5).mean())}


def test_targets_that_need_most_of_the_graph_take_all_of_it_below() -> None:
    store, _ = small_store("random", 1)
    model = parallelize(make_model(Case("sage", "split", "random", 0.0, None, None)), solo_mesh())
    found = evaluate_targets(model, store, ["train"])
    assert found.all_below and found.num_edges < found.full_num_edges
    assert str(found).startswith("exact evaluation of the targets' neighbourhoods, then all vertices: ")
