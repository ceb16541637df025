"""HeteroData in, HeteroData out: the same object; and the same graph in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch_geometric.data import HeteroData
from typed_graphs import CITES, WRITES, TypedGraph, academic, assert_holds, typed_graphs

import gsplit
from gsplit.errors import InputError
from gsplit.store.conversion import as_graph_store
from gsplit.store.in_memory import MemoryStore
from gsplit.store.verify import verify_store


def hetero_data(graph: TypedGraph) -> HeteroData:
    """The same graph as PyG has it."""
    data = HeteroData()
    for name, count in graph.counts.items():
        data[name].num_nodes = count
    for full, array in graph.arrays.items():
        folder, name, *words = full.split("/")
        data[name][words[0] if words else folder] = torch.from_numpy(array)
    for full, ids in graph.targets.items():
        name, word = full.split("/")
        data[name][f"{word}_mask"] = torch.zeros(graph.counts[name], dtype=torch.bool)
        data[name][f"{word}_mask"][torch.from_numpy(ids)] = True
    for relation, pair in graph.edges.items():
        data[relation].edge_index = torch.from_numpy(np.stack(pair))
    return data


def assert_equal(found: HeteroData, wanted: HeteroData) -> None:
    """Types, attributes, types of numbers and values."""
    assert found.metadata() == wanted.metadata()
    for kind in [*wanted.node_types, *wanted.edge_types]:
        assert set(found[kind].keys()) == set(wanted[kind].keys()), kind
        for name, value in wanted[kind].items():
            if name == "num_nodes":
                assert found[kind].num_nodes == value
            else:
                assert found[kind][name].dtype == value.dtype and torch.equal(found[kind][name], value), (kind, name)


@given(typed_graphs())
@settings(max_examples=25)
def test_a_round_trip_gives_the_same_object(tmp_path_factory: pytest.TempPathFactory, graph: TypedGraph) -> None:
    data = hetero_data(graph)
    store = gsplit.from_pyg(data, tmp_path_factory.mktemp("typed") / "g.gsplit")
    verify_store(store)
    assert_holds(store, graph)
    assert_equal(gsplit.to_pyg(gsplit.open(store.path)), data)


def test_types_of_numbers_and_what_pyg_infers_come_back(tmp_path: Path) -> None:
    data = hetero_data(academic())
    del data["paper"].num_nodes
    data["paper"].x = data["paper"].x.to(torch.bfloat16)
    data["paper"].y = data["paper"].y.to(torch.float32).unsqueeze(1)
    data["paper"].y[3] = torch.nan
    data["author"].y = torch.rand(30) < 0.5
    back = gsplit.to_pyg(gsplit.from_pyg(data, tmp_path / "g.gsplit"))
    data["paper"].y = data["paper"].y.nan_to_num(-1)
    back["paper"].y = back["paper"].y.nan_to_num(-1)
    assert_equal(back, data)


@given(typed_graphs())
@settings(max_examples=25)
def test_a_graph_in_memory_holds_every_edge_row_and_target(graph: TypedGraph) -> None:
    store = as_graph_store(hetero_data(graph))
    assert isinstance(store, MemoryStore)
    assert_holds(store, graph)


def test_stripes_have_an_equal_share_of_every_type() -> None:
    graph = academic(authors=640, papers=1000, edges=50)
    store = as_graph_store(hetero_data(graph))
    assert store.types is not None and len(store.part_boundaries) == 65
    for name, least, most in (("author", 10, 10), ("paper", 15, 16)):
        sizes = [stop - first for first, stop in store.types.ranges(name)]
        assert (min(sizes), max(sizes)) == (least, most)


def test_a_partition_in_memory_has_parts_for_every_type() -> None:
    graph = academic()
    rng = np.random.default_rng(0)
    parts = {name: torch.from_numpy(rng.integers(0, 3, count)) for name, count in graph.counts.items()}
    store = as_graph_store(hetero_data(graph), parts)
    assert isinstance(store, MemoryStore)
    assert_holds(store, graph)
    assert store.types is not None
    papers = [stop - first for first, stop in store.types.ranges("paper")]
    assert papers == np.bincount(parts["paper"].numpy(), minlength=3).tolist()
    with pytest.raises(InputError, match="a dict with author, venue, paper"):
        as_graph_store(hetero_data(graph), torch.zeros(84, dtype=torch.int64))


def _with_values() -> HeteroData:
    data = hetero_data(academic())
    data[WRITES].edge_attr = torch.rand(200, 2, 2)  # not one row per edge
    return data


def _with_wrong_ids() -> HeteroData:
    data = hetero_data(academic())
    data[CITES].edge_index[0, 3] = 50
    return data


def _with_unknown_type() -> HeteroData:
    data = hetero_data(academic())
    data["paper", "in", "topic"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    return data


def _with_unsupported() -> HeteroData:
    data = hetero_data(academic())
    data["author"].names = ["a"] * 30
    return data


@pytest.mark.parametrize(
    "make, message",
    [
        (_with_values, r"author writes paper\.edge_attr.*ignore=\('edge_attr',\)"),
        (_with_wrong_ids, r"\('paper', 'cites', 'paper'\).*ids in 0\.\.49 of paper"),
        (_with_unknown_type, "edges between author, venue, paper"),
        (_with_unsupported, "author: data: .*also names"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError, match=message):
        gsplit.from_pyg(make(), tmp_path / "g.gsplit")


def test_edge_values_can_be_left_out(tmp_path: Path) -> None:
    store = gsplit.from_pyg(_with_values(), tmp_path / "g.gsplit", ignore=["edge_attr"])
    assert_holds(store, academic())
    memory = as_graph_store(_with_values())
    assert memory.unused == ("author writes paper.edge_attr",)


def test_names_of_vertex_types_are_words_in_memory_and_on_disk(tmp_path: Path) -> None:
    data = HeteroData()
    data["a/b"].x = torch.rand(3, 2)
    for convert in (as_graph_store, lambda found: gsplit.from_pyg(found, tmp_path / "g.gsplit")):
        with pytest.raises(InputError, match="a word: letters.*'a/b'"):
            convert(data)
