"""The batch of a heterogeneous graph in one process: its rows, ids, labels and edges against the graph."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from typed_models import CITES, COUNTS, FANOUTS, RELATIONS, TRAINED, WIDTHS, WRITES, make_data, make_store

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.typed_batch import RelationItems, TypedBatch, VertexItems
from gsplit.store.in_memory import typed_store


def _batch(strategy: str = "split", num_parts: int = 4) -> TypedBatch:
    loader = NeighborLoader(
        make_store(num_parts), FANOUTS, ("paper", "train"), batch_size=20, strategy=strategy, seed=1
    )
    batch = loader.make_batch(0, 1)
    assert isinstance(batch, TypedBatch)
    return batch


@pytest.mark.parametrize("strategy", ["split", "data", "data_cached", "hybrid(1)"])
def test_rows_labels_and_edges_are_those_of_the_graph(strategy: str) -> None:
    data = make_data()
    batch = _batch(strategy)
    for name in COUNTS:
        items = batch[name]
        assert isinstance(items, VertexItems)
        assert torch.equal(batch.x_dict[name], data[name].x[batch.n_id_dict[name]])
        assert items.x is batch.x_dict[name] and items.n_id is batch.n_id_dict[name]
        assert items.n_id.unique().numel() == items.n_id.numel()
    targets = batch.n_id_dict["paper"][: batch.batch_size]
    assert batch["paper"].batch_size == batch.num_targets == 20 and batch["author"].batch_size == 0  # type: ignore[union-attr]
    assert set(targets.tolist()) <= set(TRAINED.tolist())
    assert torch.equal(batch.y, data["paper"].y[targets]) and batch["paper"].y is batch.y  # type: ignore[union-attr]
    assert batch["author"].y is None  # type: ignore[union-attr]
    for relation in RELATIONS:
        src, dst = batch.part(relation).blocks[0].edge_index()
        edges = set(zip(*data[relation].edge_index.tolist(), strict=True))
        n_id = batch.n_id_dict
        found = list(zip(n_id[relation[0]][src].tolist(), n_id[relation[2]][dst].tolist(), strict=True))
        assert set(found) <= edges and len(set(found)) == len(found)
        for layer, fanout in enumerate(reversed(FANOUTS[relation])):
            degrees = batch.part(relation).blocks[layer].indptr.diff()
            assert fanout < 0 or int(degrees.max() if degrees.numel() else 0) <= fanout
    assert sum(batch.part(relation).blocks[0].num_edges for relation in RELATIONS) == batch.blocks[0].num_edges > 0


def test_fused_rows_have_the_order_of_the_fused_edges() -> None:
    batch = _batch()
    ids = {name: n_id[:, None] for name, n_id in batch.n_id_dict.items()}
    fused = batch.to_homogeneous(ids).view(-1)
    src, dst = batch.blocks[0].edge_index()
    for number, relation in enumerate(RELATIONS):
        mine = batch.kinds[0] == number
        own_src, own_dst = batch.part(relation).blocks[0].edge_index()
        assert torch.equal(fused[src[mine]], batch.n_id_dict[relation[0]][own_src])
        assert torch.equal(fused[dst[mine]], batch.n_id_dict[relation[2]][own_dst])
        assert bool((batch.node_type[src[mine]] == list(COUNTS).index(relation[0])).all())


def test_the_mini_batch_does_not_depend_on_the_partition() -> None:
    one, other = _batch(num_parts=1), _batch(num_parts=5)
    for name in COUNTS:
        assert set(one.n_id_dict[name].tolist()) == set(other.n_id_dict[name].tolist())
    assert one.n_id_dict["paper"][:20].tolist() == other.n_id_dict["paper"][:20].tolist()


def test_what_a_batch_shows() -> None:
    batch = _batch()
    shown = repr(batch)
    assert shown.startswith("TypedBatch(epoch 0, step 1: 20 of 20 targets, 2 layers, x {paper [")
    assert batch.telemetry.counts["input_rows"] == sum(x.size(0) for x in batch.x_dict.values())
    assert isinstance(batch[CITES], RelationItems)
    assert batch.cast(torch.float32).x_dict["author"].dtype == torch.float32
    with pytest.raises(InputError, match="a type of the graph"):
        batch["venue"]
    batch.x_dict["author"].requires_grad_()
    with pytest.raises(InputError, match="requires_grad=False"):
        batch.mean(torch.zeros(20))


def test_rows_of_other_widths_are_not_fused() -> None:
    batch = _batch()
    with pytest.raises(InputError, match="of one width"):
        _ = batch.fused_x
    with pytest.raises(InputError, match="no rows of author, field"):
        batch.to_homogeneous({"paper": batch.x_dict["paper"]})


def test_types_without_features_have_ids_only() -> None:
    loader = NeighborLoader(make_store(3), [3, 2], ("paper", None), batch_size=9, features={"paper": ["x", "x"]})
    batch = loader.make_batch(0, 0)
    assert isinstance(batch, TypedBatch) and loader.num_targets == COUNTS["paper"]
    assert list(batch.x_dict) == ["paper"] and batch.x_dict["paper"].size(1) == 2 * WIDTHS["paper"]
    assert batch["author"].x is None and batch.n_id_dict["author"].numel() > 0  # type: ignore[union-attr]


def test_targets_by_ids_masks_and_type() -> None:
    store = make_store(3)
    mask = torch.zeros(COUNTS["author"], dtype=torch.bool)
    mask[[4, 80, 7]] = True
    for nodes, wanted in (
        (("author", torch.tensor([80, 4, 7])), {4, 7, 80}),
        (("author", mask), {4, 7, 80}),
        ("field", set(range(12))),
    ):
        batch = NeighborLoader(store, [2], nodes, batch_size=100).make_batch(0, 0)
        assert isinstance(batch, TypedBatch)
        name = nodes if isinstance(nodes, str) else nodes[0]
        assert set(batch.n_id_dict[name][: batch.num_targets].tolist()) == wanted
        with pytest.raises(InputError, match="a graph with labels"):
            _ = batch.y


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"input_nodes": "train"}, "vertex type, targets"),
        ({"input_nodes": ("venue", None)}, "one of paper, author, field"),
        ({"input_nodes": ("paper", "test")}, "targets/paper/test"),
        ({"input_nodes": ("field", torch.tensor([12]))}, "ids in 0..11"),
        ({"num_neighbors": {CITES: [1]}}, "a list for each of"),
        ({"features": {"venue": "x"}}, "one of paper"),
        ({"features": {"paper": "emb"}}, "features/paper/emb"),
        ({"features": ["x"]}, "by vertex type"),
        ({"sampler": lambda part: None}, "draws every relation"),
        ({"copies": 100}, "built for heterogeneous graphs"),
        ({"prefetch": 2, "mesh": solo_mesh("meta")}, "prefetch: expected a graph without vertex types, or ranks on"),
        ({"cache": "1MB"}, "expected a partitioned store"),
        ({"features_on_disk": True}, "features_on_disk: expected a store on disk"),
    ],
)
def test_what_typed_graphs_do_not_have_is_refused(options: dict[str, object], expected: str) -> None:
    given = {"num_neighbors": [2], "input_nodes": ("paper", "train"), **options}
    with pytest.raises(Exception, match=expected):
        NeighborLoader(make_store(2), **given)  # type: ignore[arg-type]


def test_types_are_refused_on_graphs_without_them() -> None:
    plain = Data(x=torch.zeros(4, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(InputError, match="a graph without types"):
        NeighborLoader(plain, {WRITES: [2]}, None)
    with pytest.raises(InputError, match="a graph without types"):
        NeighborLoader(plain, [2], ("paper", "train"))


def test_layers_by_hand() -> None:
    """A model written against the batch: one type of one relation."""
    batch = _batch()
    h_mixed, h_dst = batch.part("paper").shuffle(0, batch.x_dict["paper"])
    block = batch.part(CITES).blocks[0]
    assert h_mixed.size(0) == block.num_src and h_dst.size(0) == block.num_dst
    assert np.isfinite(h_mixed.numpy()).all()


def test_wrong_features_fanouts_and_ids_are_refused() -> None:
    store = make_store(3)
    for options, reason in (
        ({"num_neighbors": 5}, "a list with a number for every layer .got 5"),
        ({"num_neighbors": dict.fromkeys(RELATIONS, 2)}, "a list with a number for every layer .got 2"),
        ({"num_neighbors": "ab"}, "a list with a number for every layer .got 'ab'"),
        ({"features": "emb"}, "one of the features it has.*got features/emb"),
        ({"features": {"paper": None}}, "names of stored features by vertex type.*'paper': None"),
        ({"features": {"paper": object()}}, "features of paper: expected names of stored features .got <object"),
        ({"features": {"paper": ["x", object()]}}, "sources of rows and OwnedEmbedding are for graphs without types"),
        ({"input_nodes": ("author", torch.tensor([7, 3, 7]))}, "1 of them more than once, such as 7"),
    ):
        given = {"num_neighbors": [2], "input_nodes": ("paper", "train"), **options}
        with pytest.raises(InputError, match=reason):
            NeighborLoader(store, **given)  # type: ignore[arg-type]
    no_edges = typed_store({"a": 3}, {}, {"a": np.zeros(3, np.int64)}, {}, {})
    with pytest.raises(InputError, match="a graph with edge types"):
        NeighborLoader(no_edges, [2], ("a", None))
