"""One rank's view of a graph: its range, ids, rows and targets, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import sample_store
from small_graph import small_store
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gsplit import InputError
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.features.protocol import take_rows
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph, make_ownership

CPU = torch.device("cpu")


def _local(cuts: tuple[int, ...] | None = None) -> LocalGraph:
    store, _ = small_store("random", 1)
    return LocalGraph(store, solo_mesh(), make_ownership(store, solo_mesh(), Ownership(cuts) if cuts else None))


def test_rows_are_named_by_internal_ids_and_vertices_by_original_ones() -> None:
    local = _local()
    ids = torch.tensor([5, 0, 88])
    x = local.store.stored_array("features/x")
    assert np.array_equal(take_rows(local.rows("features/x"), ids, CPU).numpy(), x[ids.numpy()])
    assert local.to_original_ids(ids).tolist() == local.store.original_ids()[ids.numpy()].tolist()
    weights = local.store.stored_array("edges/edge_weight")
    assert take_rows(local.edge_rows("edge_weight"), torch.tensor([3, 1]), CPU).tolist() == weights[[3, 1]].tolist()


def test_original_ids_are_left_out_where_ids_are_original(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    local = LocalGraph(store, solo_mesh(), Ownership((0, 300)))
    assert local.original_ids.size == 0
    assert local.to_original_ids(torch.tensor([7])).tolist() == [7]


def test_targets_by_name_list_mask_and_all_of_them() -> None:
    local = _local()
    stored = local.targets("train")
    names = np.sort(local.store.original_ids()[stored.ids])
    listed = local.targets(torch.from_numpy(names))
    mask = torch.zeros(local.store.num_vertices, dtype=torch.bool)
    mask[torch.from_numpy(names)] = True
    assert np.array_equal(np.sort(stored.ids), np.sort(listed.ids))
    assert np.array_equal(np.sort(listed.ids), np.sort(local.targets(mask).ids))
    assert local.targets(None).num_targets == local.store.num_vertices


def test_degrees_are_those_of_the_whole_graph_and_made_once() -> None:
    local = _local()
    graph = local.graph
    dst = torch.from_numpy(np.repeat(np.arange(graph.num_vertices), graph.in_degrees()))
    edges = torch.stack([torch.from_numpy(np.asarray(graph.indices, np.int64)), dst])
    _, weights = gcn_norm(edges, None, graph.num_vertices, dtype=torch.float64)
    found = local.gcn_rows(add_self_loops=True, fill_value=1.0, edge_weight=None)
    factors = take_rows(found.deg_inv_sqrt, torch.arange(graph.num_vertices), CPU)
    loops = weights[-graph.num_vertices :]  # the self-loops come last
    assert torch.allclose(factors**2, loops, rtol=1e-12)
    assert local.gcn_rows(add_self_loops=True, fill_value=1.0, edge_weight=None) is found
    assert local.gcn_rows(add_self_loops=True, fill_value=1.0, edge_weight="edge_weight").loop_weight is not None


def test_ownership_must_fit_graph_and_mesh() -> None:
    with pytest.raises(InputError, match=r"ownership: expected 1 ranges over 90 vertices .got 2 over 90"):
        _local((0, 10, 90))


def test_a_range_that_is_not_held_is_refused(tmp_path: Path) -> None:
    from gsplit.store.shard import write_shard

    shard = write_shard(sample_store(tmp_path / "g.gsplit"), tmp_path / "s.gsplit", 100, 200)
    with pytest.raises(InputError, match=r"rank 0: expected vertices 0..300 .got a shard 100..200"):
        LocalGraph(shard, solo_mesh(), Ownership((0, 300)))
    with pytest.raises(InputError, match="Fix: open the whole store"):
        LocalGraph(shard, solo_mesh(), Ownership((0, 300)), whole=True)


def test_default_edge_arrays_are_optional_and_named_ones_are_not() -> None:
    store, _ = small_store("random", 1)
    names = ArrayNames(store, "x", "edge_attr", "edge_weight")
    assert (names.features, names.edge_attr, names.edge_weight) == (["x"], "edge_attr", "edge_weight")
    assert names.has_edge_values
    assert not ArrayNames(store, "x", None, None).has_edge_values
    assert ArrayNames(store, ("x", "z"), None, None).features == ["x", "z"]
    with pytest.raises(InputError, match="features: expected at least one name"):
        ArrayNames(store, [], None, None)
    with pytest.raises(
        InputError, match=r"edge_attr: expected the name of a stored .*got 'z'; stored are edge_attr, edge"
    ):
        ArrayNames(store, "x", "z", None)
