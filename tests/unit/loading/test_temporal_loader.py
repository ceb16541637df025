"""Batches of targets with times: what stock PyG computes on the edges up to each time, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from temporal_programs import CLASSES, VERTICES, WIDTH, seed_targets, temporal_edges, temporal_store
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAT, GCN, GraphSAGE
from torch_geometric.utils import k_hop_subgraph

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError

TIMED: dict[str, Any] = {"time_attr": "time", "batch_size": 25}


def _data() -> Data:
    store, _ = temporal_store("original")
    src, dst, time = temporal_edges()
    return Data(
        x=torch.from_numpy(store.stored_array("features/x")),
        y=torch.from_numpy(store.stored_array("y")),
        edge_index=torch.stack([torch.from_numpy(src), torch.from_numpy(dst)]),
        time=torch.from_numpy(time),
        train_mask=torch.arange(VERTICES) % 2 == 0,
    )


def _outputs(model: torch.nn.Module, loader: gsplit.NeighborLoader) -> Tensor:
    """The outputs of all targets, in the order of ``input_nodes``."""
    wrapped = gsplit.parallelize(model, solo_mesh()).eval()
    found = torch.full((loader.num_targets, CLASSES), torch.nan, dtype=torch.float64)
    for batch in loader:
        found[batch.input_id] = wrapped(batch.x, batch.edge_index).detach()
    return found


@pytest.mark.parametrize("make", [GraphSAGE, GAT])
@pytest.mark.parametrize("temporal_strategy", ["uniform", "last"])
def test_all_neighbours_are_the_computation_of_pyg_on_the_edges_up_to_the_time(
    make: Any, temporal_strategy: str
) -> None:
    """For each target: the subgraph of 2 hops of the edges that are not later than its time."""
    data = _data()
    ids, times = seed_targets()
    torch.manual_seed(0)
    model = make(WIDTH, 8, 2, CLASSES).double()
    loader = gsplit.NeighborLoader(data, [-1, -1], ids, input_time=times, temporal_strategy=temporal_strategy, **TIMED)
    found = _outputs(model, loader)
    model = model.eval()
    sizes = set()
    for place, (v, t) in enumerate(zip(ids.tolist(), times.tolist(), strict=True)):
        early = data.edge_index[:, data.time <= t]
        nodes, edges, target, _ = k_hop_subgraph(v, 2, early, relabel_nodes=True, num_nodes=VERTICES)
        wanted = model(data.x[nodes], edges)[target[0]]
        assert torch.allclose(found[place], wanted, rtol=0, atol=1e-12), (v, t)
        sizes.add(nodes.numel())
    assert 1 in sizes and max(sizes) > 50  # a target before all edges, and many rows


def test_times_after_all_edges_are_the_graph_without_times() -> None:
    data = _data()
    torch.manual_seed(0)
    model = GraphSAGE(WIDTH, 8, 2, CLASSES).double()
    late = torch.full((VERTICES,), 10**9)
    found = _outputs(model, gsplit.NeighborLoader(data, [-1, -1], input_time=late, **TIMED))
    assert torch.allclose(found, model.eval()(data.x, data.edge_index), rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["name", "mask", "ids", "all"])
def test_times_are_in_the_order_of_the_targets(how: str) -> None:
    data = _data()
    kept = data.train_mask.nonzero().view(-1)
    nodes: Any = {"name": "train", "mask": data.train_mask, "ids": kept.flip(0), "all": None}[how]
    listed = {"ids": kept.flip(0), "all": torch.arange(VERTICES)}.get(how, kept)
    times = torch.randint(0, 60, (listed.numel(),), generator=torch.Generator().manual_seed(1))
    partition = torch.arange(VERTICES) % 4
    loader = gsplit.NeighborLoader(data, [2], nodes, input_time=times, partition=partition, **TIMED)
    seen = []
    for batch in loader:
        assert torch.equal(batch.seed_time, times[batch.input_id])
        assert torch.equal(batch.n_id[: batch.num_targets], listed[batch.input_id])
        assert torch.equal(batch.y, data.y[listed[batch.input_id]])
        seen += batch.input_id.tolist()
    assert sorted(seen) == list(range(listed.numel()))


def test_a_store_draws_what_the_data_draws(tmp_path: Path) -> None:
    data = _data()
    times = torch.arange(45)
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    found = []
    for graph in (data, store, gsplit.partition(store, tmp_path / "p.gsplit", 3, [2, 2], batch_size=20)):
        loader = gsplit.NeighborLoader(graph, [2, 2], "train", input_time=times, seed=3, **TIMED)
        found.append(sorted(loader.make_batch(1, 0).frontier(0).names.tolist()))
    assert found[0] == found[1] == found[2] and len(found[0]) > 60
    options: tuple[dict[str, Any], ...] = ({}, {"features_on_disk": True}, {"cache": 400})
    inputs = [  # a vertex has several rows
        gsplit.NeighborLoader(graph, [2, 2], "train", input_time=times, **TIMED, **how).make_batch(1, 0).x
        for how in options
    ]
    assert all(torch.equal(inputs[0], x) for x in inputs[1:])


def test_the_description_has_the_times() -> None:
    data = _data()
    others = gsplit.NeighborLoader(data, [2], "train", input_time=torch.arange(45) + 1, **TIMED).description
    found = gsplit.NeighborLoader(data, [2], "train", input_time=torch.arange(45), **TIMED).description
    assert found["sampler"] == "time_attr time, uniform"
    assert {name for name in found if found[name] != others[name]} == {"input_nodes"}


def test_gcn_is_refused_unless_it_does_not_normalise() -> None:
    store, _ = temporal_store("mixed")
    ids, times = seed_targets()
    loader = gsplit.NeighborLoader(store, [3, 3], ids, input_time=times, **TIMED)
    batch = loader.make_batch(0, 0)
    model = gsplit.parallelize(GCN(WIDTH, 8, 2, CLASSES).double(), solo_mesh())
    with pytest.raises(InputError, match="GCN normalisation: expected a mini-batch without times"):
        model(batch.x, batch.edge_index)
    plain = gsplit.parallelize(GCN(WIDTH, 8, 2, CLASSES, normalize=False).double(), solo_mesh())
    loss = batch.mean(F.cross_entropy(plain(batch.x, batch.edge_index), batch.y, reduction="none"))
    loss.backward()
    assert float(loss.detach()) > 0


def test_batches_without_times_have_none() -> None:
    batch = gsplit.NeighborLoader(_data(), [2], "train", batch_size=9).make_batch(0, 0)
    for name in ("seed_time", "input_id"):
        with pytest.raises(InputError, match=f"batch.{name}: expected targets with times"):
            getattr(batch, name)


def _vertex_type() -> HeteroData:
    data = HeteroData()
    data["a"].x = torch.zeros(3, 2)
    data["a", "to", "a"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    return data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_time": None}, r"time_attr and input_time \(got time_attr='time', without input_time\)"),
        ({"time_attr": None}, r"time_attr and input_time \(got time_attr=None, with input_time\)"),
        ({"input_time": torch.zeros(44)}, r"input_time: expected a tensor of 45 integers \(got torch.float32 \[44\]\)"),
        ({"input_time": torch.arange(44)}, r"a tensor of 45 integers \(got torch.int64 \[44\]\)"),
        ({"input_time": [1, 2]}, "input_time: expected a tensor of 45 integers .got list"),
        ({"time_attr": "when"}, "time_attr: expected the name of a stored per-edge array .got 'when'; stored are time"),
        ({"temporal_strategy": "first"}, "temporal_strategy: expected 'uniform', or 'last' for the latest in-edges"),
        ({"sampler": "labor"}, "time_attr: expected the uniform sampler without weights or replacement .got labor, "),
        ({"weight_attr": "time"}, "time_attr: expected the uniform sampler .*weight_attr time, time_attr time"),
        ({"replace": True}, "time_attr: expected the uniform sampler .*replace"),
        ({"sampler": lambda part: None}, "a built-in sampler for these options .got a function and time_attr time"),
        ({"strategy": "auto"}, r"time_attr: expected options that .* built for \(got strategy='auto'\)"),
        ({"copies": "1MB"}, r"time_attr: expected options that .* built for \(got copies='1MB'\)"),
    ],
)
def test_what_does_not_combine_is_refused(options: dict[str, Any], message: str) -> None:
    given = TIMED | {"input_time": torch.arange(45)} | options
    with pytest.raises(InputError, match=message):
        gsplit.NeighborLoader(_data(), [2], "train", **given)


def test_types_pairs_and_a_strategy_without_times_are_refused() -> None:
    with pytest.raises(InputError, match="time_attr: .* built for .got a graph with the vertex types a"):
        gsplit.NeighborLoader(_vertex_type(), [2], ("a", None), input_time=torch.zeros(3).long(), **TIMED)
    with pytest.raises(InputError, match="temporal_strategy: expected time_attr .got time_attr=None"):
        gsplit.NeighborLoader(_data(), [2], "train", temporal_strategy="last")
    with pytest.raises(InputError, match="time_attr and edge_label_time .got time_attr='time', without"):
        gsplit.verify(
            GraphSAGE(WIDTH, 8, 1, CLASSES), _data(), [2], edge_label_index=torch.zeros(2, 3).long(), time_attr="time"
        )
