"""Whatever is handed over as the graph is taken, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import sample_store
from torch_geometric.data import Data, HeteroData

from gsplit import InputError
from gsplit.store.conversion import as_graph_store
from gsplit.store.importers.pyg import memory_store


def test_stores_are_taken_as_they_are_and_pyg_data_in_memory(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    assert as_graph_store(store) is store
    data = Data(x=torch.zeros(4, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    graph = as_graph_store(data, torch.tensor([1, 0, 1, 0]))
    assert graph.part_boundaries == [0, 2, 4] and graph.original_ids().tolist() == [1, 3, 0, 2]
    assert as_graph_store(graph) is graph


def test_a_partition_is_for_pyg_data_only(tmp_path: Path) -> None:
    store, parts = sample_store(tmp_path / "g.gsplit"), torch.zeros(300, dtype=torch.long)
    with pytest.raises(InputError, match=r"partition: expected None for a store, .*got Tensor for Store\("):
        as_graph_store(store, parts)
    memory = memory_store(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), None)
    with pytest.raises(InputError, match="got Tensor for a MemoryStore.*gsplit partition"):
        as_graph_store(memory, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    "graph, message",
    [
        (
            "arxiv.gsplit",
            r"graph: expected an opened store or a PyG Data \(got 'arxiv.gsplit'\). Fix: pass gsplit.open",
        ),
        (Path("arxiv.gsplit"), r"\(got a PosixPath\)"),
        (torch.zeros(2, 1), r"\(got a Tensor\)"),
        (None, r"\(got a NoneType\)"),
        (HeteroData(), "a HeteroData with vertex types"),
    ],
)
def test_anything_else_is_refused_by_name(graph: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_graph_store(graph)
