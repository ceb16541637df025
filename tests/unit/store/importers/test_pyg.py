"""PyG in, PyG out: the same object."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import edge_lists, expected_edges, stored_edges
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData

import gsplit
from gsplit.store.source import EdgeRules
from gsplit.store.verify import verify_store


@given(edge_lists(max_vertices=20, max_edges=60), st.data())
def test_round_trip_is_identical(tmp_path: Path, graph: tuple[int, Any, Any], data: st.DataObject) -> None:
    n, src, dst = graph
    generator = torch.Generator().manual_seed(0)
    floats = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    edge_index = torch.from_numpy(np.stack([src, dst]))
    content: dict[str, Any] = {"edge_index": edge_index}
    if data.draw(st.booleans(), label="vertices"):
        content["x"] = torch.randn(n, data.draw(st.integers(0, 3)), generator=generator).to(data.draw(floats))
        content["y"] = torch.randint(0, 5, (n,), generator=generator).to(
            data.draw(st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bfloat16]))
        )
        content["train_mask"] = torch.rand(n, generator=generator) < 0.5
        content["pos"] = torch.randn(n, 2, generator=generator)
    if "x" not in content or data.draw(st.booleans(), label="num_nodes"):
        content["num_nodes"] = n
    if data.draw(st.booleans(), label="edge values"):
        content["edge_attr"] = torch.randn(src.size, 2, generator=generator).to(data.draw(floats))
        content["edge_weight"] = torch.randn(src.size, generator=generator)
    before = Data(**content)
    store = gsplit.from_pyg(before, tmp_path / "g.gsplit", overwrite=True)
    verify_store(store)
    after = gsplit.to_pyg(gsplit.open(store.path))
    assert sorted(before.keys()) == sorted(after.keys())
    assert before.num_nodes == after.num_nodes == n
    for name in before.keys():  # noqa: SIM118
        if name != "num_nodes":
            assert before[name].dtype == after[name].dtype
            assert torch.equal(before[name], after[name]), name


def test_rules_apply_and_the_result_still_converts(tmp_path: Path) -> None:
    edge_index = torch.tensor([[0, 1, 1, 2, 0], [1, 0, 1, 0, 1]])
    store = gsplit.from_pyg(Data(edge_index=edge_index, num_nodes=3), tmp_path / "g.gsplit", symmetrise=True)
    src, dst, _ = expected_edges(edge_index[0].numpy(), edge_index[1].numpy(), [], EdgeRules(symmetrise=True))
    assert np.array_equal(stored_edges(store), [src, dst])
    assert gsplit.to_pyg(store).edge_index.tolist() == [src.tolist(), dst.tolist()]


@pytest.mark.parametrize(
    "data, message",
    [
        (HeteroData(), "expected a HeteroData with vertex types"),
        (Data(x=torch.zeros(3, 1)), "got Data without an edge_index tensor"),
        (
            Data(edge_index=torch.zeros(2, 1, dtype=torch.long), x=torch.zeros(3, 1, dtype=torch.long)),
            "also x.*ignore=",
        ),
        (
            Data(
                edge_index=torch.zeros(2, 1, dtype=torch.long),
                num_nodes=3,
                train_mask=torch.ones(3, 2, dtype=torch.bool),
            ),
            "also train_mask",
        ),
        (Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=2, name="cora"), "also name"),
        (
            Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=2, y=torch.zeros(2, dtype=torch.complex64)),
            "expected a type that the store supports",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(gsplit.InputError, match=message):
        gsplit.from_pyg(data, tmp_path / "g.gsplit")


def test_what_is_ignored_is_left_out(tmp_path: Path) -> None:
    data = Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=2, name="cora")
    for number, ignore in enumerate((["name"], iter(["name"]))):
        store = gsplit.from_pyg(data, tmp_path / f"{number}.gsplit", ignore=ignore)
        assert store.names == ["edges/input_position", "indices", "indptr"]
    data = Data(edge_index=torch.zeros(2, 1, dtype=torch.long), x=torch.ones(2, 1), text="a text")
    assert "features/x" in gsplit.from_pyg(data, tmp_path / "one.gsplit", ignore="text").names


def test_values_of_edges_have_a_row_for_each(tmp_path: Path) -> None:
    data = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=4, edge_attr=torch.ones(3, 1))
    data.edge_label_index = torch.tensor([[0, 1, 3], [1, 2, 3]])  # as of RandomLinkSplit: as many columns as edges
    with pytest.raises(gsplit.InputError, match="also edge_label_index"):
        gsplit.from_pyg(data, tmp_path / "g.gsplit")
    assert data.is_edge_attr("edge_attr")  # which PyG remembers
    data.edge_index = data.edge_index[:, :2]
    with pytest.raises(gsplit.InputError, match="also edge_attr"):
        gsplit.from_pyg(data, tmp_path / "g.gsplit", ignore="edge_label_index")
