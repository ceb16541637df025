"""PyG data in memory: per-edge values stay with their edges, in the order of the store on disk."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from graphs import edge_lists
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

import gsplit
from gsplit.store.importers.pyg import memory_store
from gsplit.store.in_memory import MemoryStore


def _edges(store: MemoryStore) -> list[tuple[Any, ...]]:
    """Source, destination and values of every edge, in original ids."""
    original, graph = store.original_ids(), store.graph
    dst = original[np.repeat(np.arange(graph.num_vertices), graph.in_degrees())]
    values = [store.stored_array(f"edges/{name}").tolist() for name in store.edge_names]
    return sorted(zip(original[graph.indices].tolist(), dst.tolist(), *values, strict=True))


@given(edge_lists(max_vertices=12, max_edges=60), st.data())
def test_edge_values_stay_with_their_edges(graph: tuple[int, Any, Any], draw: st.DataObject) -> None:
    n, src, dst = graph
    generator = torch.Generator().manual_seed(src.size)
    data = Data(
        edge_index=torch.from_numpy(np.stack([src, dst])),
        num_nodes=n,
        edge_attr=torch.randint(0, 3, (src.size, 2), generator=generator).float(),
        edge_weight=torch.rand(src.size, generator=generator, dtype=torch.float64),
        edge_type=torch.randint(0, 4, (src.size,), generator=generator),
    )
    kept = ["edge_attr", "edge_type", "edge_weight"]
    names = [name for name in kept if data.is_edge_attr(name)]
    parts = torch.tensor(draw.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    want = sorted(zip(src.tolist(), dst.tolist(), *(data[name].tolist() for name in names), strict=True))
    for partition in (None, parts):
        store = memory_store(data, partition)
        assert store.edge_names == names
        assert store.unused == tuple(sorted(set(kept) - set(names)))
        assert _edges(store) == want
    store = memory_store(data, None)
    with TemporaryDirectory() as folder:
        disk = gsplit.from_pyg(data, Path(folder) / "g.gsplit", ignore=store.unused)
        assert np.array_equal(disk.graph.indices, store.graph.indices)
        for name in names:  # equal edges too are in the same order
            assert np.array_equal(disk.stored_array(f"edges/{name}"), store.stored_array(f"edges/{name}"))
            assert disk.dtype(f"edges/{name}") == store.dtype(f"edges/{name}")


@pytest.mark.parametrize("name", ["edge_attr", "edge_weight"])
def test_edge_values_are_part_of_the_fingerprint(name: str) -> None:
    def store(values: list[float]) -> MemoryStore:
        data = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
        data[name] = torch.tensor(values)
        return memory_store(data, None)

    assert store([1.0, 2.0, 3.0]).fingerprint == store([1.0, 2.0, 3.0]).fingerprint
    assert store([1.0, 2.0, 3.0]).fingerprint != store([1.0, 2.0, 4.0]).fingerprint


def test_what_mini_batches_cannot_carry_is_named() -> None:
    data = Data(
        x=torch.zeros(4, 2),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]),
        edge_attr=torch.zeros(3, 2, 2),
        edge_weight=torch.ones(3),
        name="cora",
        node_id=torch.arange(4),
        pos=torch.zeros(4, 3),
    )
    store = memory_store(data, None)
    assert store.unused == ("edge_attr", "name", "node_id")
    assert (store.edge_names, store.names) == (
        ["edge_weight"],
        ["edges/edge_weight", "features/pos", "features/x", "original_ids"],
    )


@pytest.mark.parametrize(
    "edges, parts, message",
    [
        (
            [[0, 1, 7], [1, 2, 0]],
            None,
            r"edge_index: expected ids in 0..2 \(got 1 with other ids, such as edge 2, 7 -> 0\)",
        ),
        ([[0, -1, 5], [1, 2, 0]], None, r"got 2 with other ids, such as edge 1, -1 -> 2\)"),
        ([[0], [1]], [0, 1], r"partition: expected integers of shape \[3\] \(got int64 \[2\]\)"),
        ([[0], [1]], [0.0, 1.0, 0.0], r"partition: expected integers of shape \[3\] \(got float32 \[3\]\)"),
        ([[0], [1]], [0, 1, -2], r"partition: expected parts from 0 \(got -2 for vertex 2\)"),
    ],
)
def test_wrong_edges_and_partitions_are_refused(edges: Any, parts: Any, message: str) -> None:
    data = Data(edge_index=torch.tensor(edges), num_nodes=3)
    with pytest.raises(gsplit.InputError, match=message):
        memory_store(data, None if parts is None else torch.tensor(parts))
