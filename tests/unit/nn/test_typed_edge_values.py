"""Values of the edges of relations: imported, sampled with their edges, and equal to PyG on the whole graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typed_models import COUNTS, RELATIONS, WRITES, make_data
from typed_values import WEIGHTED, WITH_ATTR, Valued, valued_data

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.parallelize import parallelize


def test_values_come_back_from_the_store_and_after_partitioning(tmp_path: Path) -> None:
    data = valued_data()
    data["paper"].train_mask = torch.arange(COUNTS["paper"]) % 2 == 0
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    options: dict[str, Any] = {"batch_size": 8, "solver": "random", "objective": "random", "epochs": 1}
    parts = gsplit.partition(store, tmp_path / "p.gsplit", 3, [3, 2], "paper/train", **options)
    for found in (gsplit.to_pyg(store), gsplit.to_pyg(parts)):
        for relation in RELATIONS:
            assert set(found[relation].keys()) == set(data[relation].keys())
            for name, value in data[relation].items():
                assert torch.equal(found[relation][name], value), (relation, name)


@pytest.mark.parametrize("stored", [False, True])
def test_models_with_edge_values_equal_pyg_and_are_inferred(stored: bool, tmp_path: Path) -> None:
    data = valued_data()
    graph: Any = gsplit.from_pyg(data, tmp_path / "g.gsplit") if stored else data
    torch.manual_seed(0)
    model = parallelize(Valued().double(), solo_mesh(), graph=graph).eval()
    with torch.no_grad():
        wanted = model(data.x_dict, data.edge_index_dict, data.edge_attr_dict, data.edge_weight_dict)
        for strategy in ("split", "hybrid(1)"):
            loader = gsplit.NeighborLoader(graph, [-1, -1], ("paper", None), batch_size=30, strategy=strategy)
            batch = loader.make_batch(0, 0)
            assert isinstance(batch, TypedBatch)
            assert set(batch.edge_attr_dict) == set(WITH_ATTR) and set(batch.edge_weight_dict) == set(WEIGHTED)
            out = model(batch.x_dict, batch.edge_index_dict, batch.edge_attr_dict, batch.edge_weight_dict)
            ids = batch.n_id_dict["paper"][: batch.num_targets]
            assert float((out - wanted[ids]).abs().max()) < 1e-12
    assert np.abs(gsplit.infer(model, graph, vertex_type="paper") - wanted.numpy()).max() < 1e-12


def test_sampled_edges_have_their_own_values() -> None:
    data = valued_data()
    batch = gsplit.NeighborLoader(data, [3, 2], ("paper", None), batch_size=30).make_batch(0, 0)
    assert isinstance(batch, TypedBatch)
    for relation in WITH_ATTR:
        layer = batch.part(relation).layers[0]
        src, dst = layer.block.edge_index()
        assert layer.edge_attr is not None and layer.edge_attr.size(0) == src.numel() > 0
        ends = zip(batch.n_id_dict[relation[0]][src].tolist(), batch.n_id_dict[relation[2]][dst].tolist(), strict=True)
        known: dict[tuple[int, int], list[list[float]]] = {}
        for pair, row in zip(data[relation].edge_index.T.tolist(), data[relation].edge_attr.tolist(), strict=True):
            known.setdefault(tuple(pair), []).append(row)
        assert all(row in known[pair] for pair, row in zip(ends, layer.edge_attr.tolist(), strict=True))


def test_verify_and_refusals(tmp_path: Path) -> None:
    data = valued_data()
    torch.manual_seed(0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none")

    found = gsplit.verify(Valued().double(), data, [3, 2], ("paper", None), batch_size=20, loss_fn=loss, steps=2)
    assert found.ok and found.largest_gradient > 0
    plain = gsplit.NeighborLoader(make_data(), [2], ("paper", None), batch_size=4).make_batch(0, 0)
    assert isinstance(plain, TypedBatch)
    with pytest.raises(InputError, match="a graph with stored values for edge_attr"):
        _ = plain.edge_attr_dict
    data[WRITES].edge_attr = data[WRITES].edge_attr[:, :2]
    with pytest.raises(InputError, match="of one width and type in all edge types.*author writes paper.edge_attr"):
        gsplit.from_pyg(data, tmp_path / "g.gsplit")


def test_values_of_other_names_are_given_by_name() -> None:
    data, named = valued_data(), valued_data()
    for relation in WITH_ATTR:
        named[relation].distance = named[relation].edge_attr
        named[relation].edge_attr = torch.rand(named[relation].edge_index.size(1), 7, dtype=torch.float64)
    for relation in WEIGHTED:
        named[relation].capacity = named[relation].edge_weight
        del named[relation].edge_weight
    names: dict[str, Any] = {"edge_attr": "distance", "edge_weight": "capacity"}
    torch.manual_seed(0)
    model = parallelize(Valued().double(), solo_mesh(), graph=named, **names).eval()
    batch = gsplit.NeighborLoader(named, [-1, -1], ("paper", None), batch_size=30, **names).make_batch(0, 0)
    assert isinstance(batch, TypedBatch)
    with torch.no_grad():
        out = model(batch.x_dict, batch.edge_index_dict, batch.edge_attr_dict, batch.edge_weight_dict)
        wanted = model(data.x_dict, data.edge_index_dict, data.edge_attr_dict, data.edge_weight_dict)
    assert float((out - wanted[batch.n_id_dict["paper"][: batch.num_targets]]).abs().max()) < 1e-12
    with pytest.raises(InputError, match="edge_attr: expected the name of a stored per-edge array .got 'width'"):
        parallelize(Valued().double(), solo_mesh(), graph=named, edge_attr="width")
