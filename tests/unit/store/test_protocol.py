"""One face for graphs on disk and in memory, and the right list where an array is missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import sample_store, source_of
from torch_geometric.data import Data

import gsplit
from gsplit.store.build import build_store
from gsplit.store.importers.pyg import memory_store
from gsplit.store.in_memory import MemoryStore
from gsplit.store.protocol import GraphStore


def _data() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(6, 3, generator=generator),
        y=torch.tensor([0, 2, 1, 0, -1, 2]),
        edge_index=torch.tensor([[0, 1, 1, 5, 1], [1, 2, 2, 0, 2]]),
        edge_attr=torch.randn(5, 2, generator=generator),
        train_mask=torch.tensor([True, False, True, False, False, True]),
    )


def test_a_store_and_a_memory_store_answer_alike(tmp_path: Path) -> None:
    data = _data()
    graphs: list[GraphStore] = [gsplit.from_pyg(data, tmp_path / "g.gsplit"), memory_store(data, None)]
    for graph in graphs:
        assert isinstance(graph, GraphStore)
        assert (graph.num_vertices, graph.num_edges, graph.vertex_range) == (6, 5, (0, 6))
        assert (graph.num_features, graph.num_classes) == (3, 3)
        assert (graph.part_boundaries, graph.part_loads, graph.unused) == ([0, 6], None, ())
        assert graph.edge_names == ["edge_attr"]  # and not our own record of positions
        assert graph.stored_targets("train")[2] == 3
        assert graph.original_ids(2, 4).tolist() == [2, 3]
        assert graph.dtype("features/x") == "float32" and graph.dtype("targets/train") == "int64"
    disk, memory = graphs
    assert (disk.is_renumbered, memory.is_renumbered) == (False, True)
    assert np.array_equal(disk.stored_array("edges/edge_attr"), memory.stored_array("edges/edge_attr"))


def test_a_memory_store_may_hold_edges_only() -> None:
    plain = memory_store(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3), None)
    graph = MemoryStore(plain.graph, plain.part_boundaries, {}, {})
    assert (graph.num_features, graph.num_classes, graph.is_renumbered) == (0, 0, False)
    assert graph.original_ids().tolist() == [0, 1, 2] and graph.original_ids(1, 2).tolist() == [1]
    assert graph.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    "name, message",
    [
        ("features/z", r"expected one of the features it has, features/x \(got features/z\)"),
        ("targets/z", r"expected one of the targets it has, targets/test, targets/train \(got targets/z\)"),
        ("edges/z", r"expected one of the per-edge values it has, edges/weight \(got edges/z\)"),
        (
            "vertex_ids",
            r"expected mapped integer ids \(got no vertex_ids among .*Fix: use original ids \(0 .. n-1\), or",
        ),
        ("hotness", r"expected a partitioned store, which .* \(got no hotness among .*Fix: run gsplit partition"),
        ("z", r"expected one of edges/weight, features/x, indices, .* \(got z\)"),
    ],
)
def test_a_missing_array_is_answered_with_those_of_its_kind(tmp_path: Path, name: str, message: str) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    for ask in (store.stored_array, store.array, store.dtype):
        with pytest.raises(gsplit.InputError, match=message):
            ask(name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("features/x", "expected features .got no features/x among .*import the graph with features"),
        ("targets/train", "expected targets .got no targets/train among .*or pass a tensor of ids"),
        ("y", "expected labels .got no y among .*import the graph with labels"),
        ("name_offsets", "expected string ids .got no name_offsets among .*its ids are numbers"),
    ],
)
def test_a_kind_that_is_missing_altogether_is_named(tmp_path: Path, name: str, message: str) -> None:
    none = np.empty(0, np.int64)
    store = build_store(source_of(3, none, none), tmp_path / "g.gsplit")
    memory = memory_store(Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=3), None)
    for graph in (store, memory):
        with pytest.raises(gsplit.InputError, match=message):
            graph.stored_array(name)
