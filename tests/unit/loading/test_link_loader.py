"""The loader of pairs in one process: what it takes, what its batches have, and what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import NegativeSampling

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.store.build import build_store
from gsplit.store.importers.pyg import memory_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.in_memory import MemoryStore

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 5], [1, 2, 3, 4, 5, 3, 0]])
PAIRS = torch.tensor([[0, 4, 2], [1, 5, 2]])


def _data() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(x=torch.randn(6, 3, generator=generator), edge_index=EDGES, num_nodes=6)


def _loader(pairs: Any = PAIRS, **options: Any) -> gsplit.LinkNeighborLoader:
    options = {"batch_size": 3, "shuffle": False, "exclude_seed_edges": False} | options
    return gsplit.LinkNeighborLoader(_data(), [-1], pairs, mesh=solo_mesh(), **options)


def test_batches_have_the_names_and_shapes_of_pyg() -> None:
    """As in ``edge_sample`` of PyG's NeighborSampler, which itself needs a compiled library."""
    batch = next(iter(_loader(neg_sampling=NegativeSampling("binary", 2))))
    assert batch.edge_label_index.shape == (2, 9) and batch.edge_label.dtype == torch.float32
    assert batch.edge_label.tolist() == [1.0] * 3 + [0.0] * 6
    assert torch.equal(batch.endpoint_ids[batch.edge_label_index][:, :3], PAIRS)
    assert batch.input_id.tolist() == [0, 1, 2]
    for amount, shape in ((1, (3,)), (2, (3, 2))):
        batch = next(iter(_loader(neg_sampling=NegativeSampling("triplet", amount))))
        assert batch.dst_neg_index.shape == shape
        assert torch.equal(batch.endpoint_ids[torch.stack([batch.src_index, batch.dst_pos_index])], PAIRS)
    assert torch.equal(next(iter(_loader())).edge_label_index, torch.tensor([[0, 1, 2], [3, 4, 2]]))


def test_a_loop_of_pyg_runs_with_gradients_of_the_whole_graph() -> None:
    """All neighbours: the loss and gradients are those of PyG's model on the whole graph."""
    torch.manual_seed(0)
    plain = GraphSAGE(3, 4, 1, 4).double()
    model = gsplit.parallelize(GraphSAGE(3, 4, 1, 4).double(), solo_mesh())
    model.load_state_dict(plain.state_dict())
    data = _data()
    label = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    batch = next(iter(_loader(edge_label=label))).cast(torch.float64)
    assert isinstance(batch, LinkBatch)
    losses = []
    for z, index, mean in (
        (model(batch.x, batch.edge_index), batch.edge_label_index, batch.mean),
        (plain(data.x.double(), EDGES), PAIRS, torch.mean),
    ):
        score = (z[index[0]] * z[index[1]]).sum(-1)
        losses.append(mean(F.binary_cross_entropy_with_logits(score, label, reduction="none")))
        losses[-1].backward()
    assert torch.allclose(losses[0], losses[1], atol=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_labels_are_raised_for_binary_negatives() -> None:
    label = torch.tensor([0, 1, 0])
    assert next(iter(_loader(edge_label=label))).edge_label.tolist() == [0, 1, 0]
    assert next(iter(_loader(edge_label=label, neg_sampling="binary"))).edge_label.tolist() == [1, 2, 1, 0, 0, 0]
    narrow = torch.tensor([0, 127, 1], dtype=torch.int8)
    assert next(iter(_loader(edge_label=narrow, neg_sampling="binary"))).edge_label.tolist() == [1, 128, 2, 0, 0, 0]
    learnt = torch.ones(3, requires_grad=True)
    assert next(iter(_loader(edge_label=learnt))).edge_label.tolist() == [1, 1, 1]
    label = torch.tensor([3, 1, 2])
    assert next(iter(_loader(edge_label=label, neg_sampling="binary"))).edge_label.tolist() == [3, 1, 2, 0, 0, 0]


def test_stored_pairs_are_named() -> None:
    store = memory_store(_data(), None)
    arrays = store.arrays | {"pairs/val": PAIRS.T.numpy(), "pair_labels/val": np.array([2, 5, 7])}
    named = MemoryStore(store.graph, store.part_boundaries, arrays, store.dtypes)
    loader = gsplit.LinkNeighborLoader(named, [2], "val", batch_size=2, shuffle=False, mesh=solo_mesh())
    assert [batch.edge_label.tolist() for batch in loader] == [[2, 5], [7]]
    assert loader.num_targets == 3 and "graph pairs/val" in loader.description
    with pytest.raises(InputError, match="pairs it has, pairs/val .got pairs/test"):
        gsplit.LinkNeighborLoader(named, [2], "test", mesh=solo_mesh())


def test_every_edge_is_a_pair_by_default() -> None:
    loader = _loader(None, batch_size=7)
    batch = next(iter(loader))
    found = batch.endpoint_ids[batch.edge_label_index].T.tolist()
    assert sorted(found) == sorted(EDGES.T.tolist())
    for given in ("edge_label", "edge_label_time"):  # in the order of the user's edges, which is another
        with pytest.raises(InputError, match="edge_label_index=None, whose edges are in the order of the store"):
            _loader(None, **{given: torch.arange(EDGES.shape[1])})
    with pytest.raises(InputError, match="a whole store in its original order"):
        _loader(None, partition=torch.tensor([1, 0, 0, 1, 0, 1]))


def test_any_step_can_be_made_and_an_epoch_is_resumed() -> None:
    loader = _loader(EDGES, batch_size=2, shuffle=True, neg_sampling="triplet")
    assert len(loader) == 4
    loader.load_state_dict({"epoch": 3, "step": 2})
    rest = [batch.input_id.tolist() for batch in loader]
    assert rest == [loader.make_batch(3, step).input_id.tolist() for step in (2, 3)]
    again = _loader(EDGES, batch_size=2, neg_sampling="triplet", prefetch=2, shuffle=True)
    again.set_epoch(3)
    steps = [batch.input_id.tolist() for batch in again]
    assert steps[2:] == rest and sorted(position for step in steps for position in step) == list(range(7))
    assert "2 of 2 pairs" in repr(again.make_batch(0, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "auto"},
            "strategy='auto': expected stored pairs, which the planner can count .got 3 pairs",
        ),
        ({"exclude_seed_edges": "both"}, "exclude_seed_edges: expected 'reverse', True or False .got 'both'"),
        ({"exclude_seed_edges": torch.ones(3)}, "exclude_seed_edges: expected 'reverse', True or False"),
        ({"edge_label": torch.ones(2)}, r"edge_label: expected a tensor of 3 labels, .*got torch.float32 \[2\]"),
        ({"edge_label": [1, 0, 1]}, "edge_label: expected a tensor of 3 labels, not bfloat16 .got list"),
        ({"edge_label": torch.ones(3, dtype=torch.bfloat16)}, r"not bfloat16 .got torch.bfloat16 \[3\]"),
        ({"edge_label": torch.ones(3), "neg_sampling": "joint"}, "edge_label: expected None for neg_sampling joint"),
        ({"pairs": torch.zeros(3, 2)}, r"edge_label_index: expected a name, or a tensor \[2, n\] .*got torch.float32"),
        ({"pairs": [[0, 1], [1, 2]]}, r"edge_label_index: expected a name, or a tensor \[2, n\] .*got list"),
        ({"pairs": (("a", "to", "a"), PAIRS)}, r"pairs: expected pairs of a graph without types .got .*to"),
        ({"num_workers": 2}, "option num_workers"),
        ({"neg_sampling_ratio": 2}, "use neg_sampling=dict"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _loader(**options)


def test_a_batch_refuses_what_its_mode_does_not_have() -> None:
    batch = next(iter(_loader(neg_sampling="in_batch")))
    assert batch.candidates.numel() == 3 and batch.own_columns.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="batch.edge_label_index: expected neg_sampling binary .got in_batch"):
        _ = batch.edge_label_index
    with pytest.raises(InputError, match="batch.y: expected a batch of vertices .got a batch of pairs"):
        _ = batch.y
    with pytest.raises(InputError, match="pairs with labels .got pairs without labels"):
        _ = next(iter(_loader())).edge_label
    with pytest.raises(InputError, match=r"batch.endpoints: expected \[5, ...\] .got \[2, 1\]"):
        batch.endpoints(torch.zeros(2, 1))
    with pytest.raises(InputError, match=r"values: expected shape \[3\] .got \[5\]"):
        batch.mean(torch.zeros(5))


def test_a_loss_of_one_rank_is_refused() -> None:
    model = gsplit.parallelize(GraphSAGE(3, 4, 1, 4), solo_mesh())
    batch = next(iter(_loader()))
    z = model(batch.x, batch.edge_index)
    with pytest.raises(InputError, match="a loss from batch.mean or batch.sum"):
        z[batch.edge_label_index[0]].sum().backward()


def _steps(store: Any, pairs: torch.Tensor) -> list[Any]:
    """Positions, pairs with negatives, and edges of all layers, of every step, by original id."""
    loader = gsplit.LinkNeighborLoader(
        store, [3, 3], pairs, neg_sampling="triplet", batch_size=8, mesh=solo_mesh(), seed=2
    )
    steps = []
    for batch in loader:
        edges = []
        for layer, block in enumerate(batch.blocks):
            src, dst = block.edge_index()
            src_ids = batch.mixed_ids(layer)[src].tolist()
            edges.append(sorted(zip(src_ids, batch.destinations(layer).n_id[dst].tolist(), strict=True)))
        ends = batch.endpoint_ids[torch.stack([batch.src_index, batch.dst_pos_index, batch.dst_neg_index])]
        steps.append((batch.input_id.tolist(), ends.tolist(), edges))
    return steps


def test_a_partitioned_store_has_the_steps_of_the_whole_one(tmp_path: Path) -> None:
    planted = PlantedGraph(120, 900, num_communities=4, num_features=3, num_classes=2)
    whole = build_store(synthetic_source(planted), tmp_path / "whole.gsplit")
    parted = gsplit.partition(whole, tmp_path / "parted.gsplit", 3, [3, 3], batch_size=30, solver="restream", epochs=1)
    assert "internal_ids" in parted.names and not np.array_equal(parted.original_ids(), np.arange(120))
    pairs = torch.randint(0, 120, (2, 30), generator=torch.Generator().manual_seed(0))
    wanted = _steps(whole, pairs)
    assert len(wanted) == 4 and _steps(parted, pairs) == wanted
