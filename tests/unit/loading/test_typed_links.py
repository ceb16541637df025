"""Pairs of an edge type in one process: negatives of the types, stored pairs, Trainer and verify, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE, HeteroConv, SAGEConv
from typed_link_programs import (
    COUNTS,
    RATED_BY,
    RATES,
    PairModel,
    link_loader,
    link_store,
    make_encoder,
    make_pair_model,
    rated,
    with_stored_negatives,
)

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.minibatch.typed_batch import TypedLinkBatch
from gsplit.nn.parallelize import forward_plan_of, parallelize


def _batch(mode: str, num_parts: int, **options: Any) -> TypedLinkBatch:
    batch = link_loader(solo_mesh(), mode, "split", num_parts, **options).make_batch(0, 0)
    assert isinstance(batch, TypedLinkBatch)
    return batch


def test_negatives_are_vertices_of_the_types_and_do_not_depend_on_the_partition() -> None:
    drawn = []
    for num_parts in (1, 4):
        batch = _batch("binary", num_parts)
        ids = batch.endpoint_id_dict
        src, dst = ids["user"][batch.edge_label_index[0]], ids["item"][batch.edge_label_index[1]]
        assert batch.edge_label.sum() == 16 and batch.edge_label.numel() == batch.num_values == 48
        assert int(src.max()) < COUNTS["user"] and int(dst.max()) < COUNTS["item"]
        assert src[16:].unique().numel() > 15 and dst[16:].unique().numel() > 15
        drawn.append((src.tolist(), dst.tolist()))
    assert drawn[0] == drawn[1]
    assert "TypedLinkBatch(epoch 0, step 0: 16 of 16 pairs" in repr(batch)


def test_trainer_and_verify_take_pairs_of_types() -> None:
    store = link_store(3)
    pairs = (RATES, torch.from_numpy(rated()[:, ::4]))
    found = gsplit.verify(
        make_encoder(), store, [3, 2], edge_label_index=pairs, neg_sampling="triplet", loss_fn="bpr", batch_size=16
    )
    assert found.ok and found.largest_gradient > 0
    model = parallelize(make_encoder(), solo_mesh(), graph=store)
    loader = link_loader(solo_mesh(), "in_batch", "split", 3)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), lr=0.05), loader)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert len(trainer.train_epoch()) == len(loader) > 2
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    named = with_stored_negatives(store)
    scores = trainer.evaluate(named, ["test"], metrics=("mrr", "hits@5"))
    assert scores["test"] == gsplit.evaluate_links(model, named, (RATES, "test"))["mrr"]
    assert set(scores) == {"test", "test hits@5"}


@pytest.mark.parametrize("mode", ["binary", "triplet", "joint", "in_batch"])
def test_losses_take_the_rows_of_both_types(mode: str) -> None:
    """In loops of your own, and inside of a loss function of your own."""
    batch = _batch(mode, 2)
    rows = {name: torch.randn(ids.numel(), 5) for name, ids in batch.endpoint_id_dict.items()}
    fused, of_rows = batch.fuse_pairs(rows)
    losses = [gsplit.losses.link_cross_entropy] + [gsplit.losses.bpr] * (mode in ("triplet", "joint"))
    for loss in losses:
        assert torch.equal(loss(rows, batch).values, loss(fused, of_rows).values)


def test_bf16_losses_get_float32_rows_of_every_type() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(out: Any, batch: Any) -> Any:
        seen.extend(rows.dtype for rows in out.values())
        return gsplit.losses.link_cross_entropy(out, batch)

    model = parallelize(make_encoder().float(), solo_mesh(), graph=link_store(2))
    loader = link_loader(solo_mesh(), "binary", "split", 3)
    optimizer = torch.optim.Adam(model.parameters())
    gsplit.Trainer(model, optimizer, loader, precision="bf16", loss_fn=loss_fn).train_epoch(1)
    assert set(seen) == {torch.float32}


def test_stored_pairs_have_ids_in_the_types(tmp_path: Path) -> None:
    data = HeteroData()
    for name, count in COUNTS.items():
        data[name].num_nodes = count
    ends = torch.from_numpy(rated())
    data[RATES].edge_index = ends
    data[RATED_BY].edge_index = ends.flip(0)
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit", pairs={"test": ends[:, :9]})
    loader = gsplit.LinkNeighborLoader(store, [2], (RATES, "test"), batch_size=9, neg_sampling="binary")
    batch = loader.make_batch(0, 0)
    assert isinstance(batch, TypedLinkBatch)
    ids = batch.endpoint_id_dict
    index = batch.edge_label_index[:, :9]
    found = torch.stack([ids["user"][index[0]], ids["item"][index[1]]])
    assert torch.equal(found[:, batch.input_id.argsort()], ends[:, :9])


class _Triplets(Module):
    """Lazy sizes; scores of pairs with several negatives, by a decoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = HeteroConv({of: SAGEConv((-1, -1), 4) for of in (RATES, RATED_BY)})
        self.lin = Linear(4, 4)

    def forward(self, batch: TypedLinkBatch) -> tuple[Tensor, Tensor]:
        z_dict = batch.endpoints(self.conv(batch.x_dict, batch.edge_index_dict))
        src = self.lin(z_dict[batch.pair_type[0]])[batch.src_index]
        items = z_dict["item"]
        others = (src.unsqueeze(1) * items[batch.dst_neg_index]).sum(-1)
        return (src * items[batch.dst_pos_index]).sum(-1), others


class _AcrossPairs(PairModel):
    def score(self, src: Tensor, dst: Tensor) -> Tensor:
        return super().score(src, dst).softmax(0)


class _WithoutEndpoints(PairModel):
    def forward(self, batch: TypedLinkBatch) -> Tensor:
        rows = self.encoder(batch.x_dict, batch.edge_index_dict)
        return self.score(rows["user"][batch.edge_label_index[0]], rows["item"][batch.edge_label_index[1]])


def test_a_model_that_decodes_pairs_of_types_is_wrapped() -> None:
    store = link_store(2)
    model = parallelize(_Triplets().double(), solo_mesh(), graph=store, pair_type=RATES)
    assert forward_plan_of(model).pairs == "triplets" and forward_plan_of(model).pair_type == RATES
    batch = _batch("triplet", 2, num_neighbors=[3])
    one, others = model(batch)
    assert one.shape == (16,) and others.shape == (16, 3)
    found = gsplit.verify(
        PairModel().double(),
        store,
        [3, 2],
        edge_label_index=(RATES, torch.from_numpy(rated())),
        neg_sampling="binary",
        batch_size=16,
    )
    assert found.ok and found.largest_gradient > 0


def test_models_that_decode_pairs_of_types_wrongly_are_refused() -> None:
    store = link_store(2)
    for model, options, reason in (
        (PairModel(), {}, r"pair_type: expected the edge type of the pairs .got None, and the model decodes pairs"),
        (PairModel(), {"pair_type": ("user", "knows", "user")}, "pair_type: expected an edge type of the graph"),
        (_AcrossPairs(), {"pair_type": RATES}, "every target's output to depend on its neighbourhood only"),
        (_WithoutEndpoints(), {"pair_type": RATES}, r"rows of pairs are those of batch.endpoints\(h\)"),
    ):
        with pytest.raises(InputError, match=reason):
            parallelize(model.double(), solo_mesh(), graph=store, **options)  # type: ignore[arg-type]
    model = parallelize(make_pair_model(), solo_mesh(), graph=store, pair_type=RATES)
    back = link_loader(
        solo_mesh(), "binary", "split", 2, edge_label_index=(RATED_BY, torch.from_numpy(rated()[[1, 0]]))
    )
    with pytest.raises(InputError, match="the model: expected pairs from user to item, which it decodes .got pairs of"):
        model(back.make_batch(0, 0))


def test_a_batch_of_another_graph_is_refused() -> None:
    data = HeteroData()
    for name in ("user", "item"):
        data[name].x = torch.rand(6, 3, dtype=torch.float64)
    data[RATES].edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    model = parallelize(make_encoder(), solo_mesh(), graph=link_store(2))
    other = gsplit.NeighborLoader(data, [2, 2], ("user", None), batch_size=6).make_batch(0, 0)
    with pytest.raises(InputError, match="a batch of a graph with the vertex types user, tag, item .* .got the vertex"):
        model(other.x_dict, other.edge_index_dict)  # type: ignore[attr-defined]
    plain = parallelize(GraphSAGE(3, 4, 2, 2).double(), solo_mesh())
    with pytest.raises(InputError, match="a batch of a graph with no types .got the vertex types user, item"):
        plain(other.x_dict["user"], other.edge_index)  # type: ignore[attr-defined]


def test_what_is_not_built_or_wrong_is_refused() -> None:
    pairs = torch.from_numpy(rated()[:, :8])
    other = ("item", "back", "user")
    for options, reason in (
        ({"edge_label_index": pairs}, r"\(edge type, pairs\) for a heterogeneous graph .got Tensor"),
        ({"edge_label_index": (RATES, None)}, "without pairs"),
        ({"edge_label_index": (other, pairs)}, "where the type is one of.*got .'item', 'back', 'user'"),
        ({"reverse_edge_types": {RATES: RATES}}, "an edge type from item to user"),
        ({"reverse_edge_types": {("item", "rev_rates", "user"): RATES}}, "the reverse of .'user', 'rates', 'item'"),
        ({"sampler": "labor"}, "sampler: expected an option that is built for heterogeneous graphs"),
    ):
        given = {"edge_label_index": (RATES, pairs), "mesh": solo_mesh(), **options}
        with pytest.raises(InputError, match=reason):
            gsplit.LinkNeighborLoader(link_store(2), [2], **given)  # type: ignore[arg-type]
    far = gsplit.LinkNeighborLoader(link_store(2), [2], (RATES, pairs + 45), batch_size=8, mesh=solo_mesh())
    with pytest.raises(InputError, match="ids in 0..39 of user"):
        far.make_batch(0, 0)


def test_an_unnamed_reverse_must_be_given() -> None:
    """Otherwise a model sees the edges that it predicts, in the other direction."""
    data = HeteroData()
    data["user"].num_nodes = 4
    data["item"].num_nodes = 4
    ends = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    back = ("item", "bought_by", "user")
    data["user", "buys", "item"].edge_index = ends
    data[back].edge_index = ends.flip(0)
    buys = ("user", "buys", "item")
    with pytest.raises(InputError, match="reverse_edge_types: expected the reverse of"):
        gsplit.LinkNeighborLoader(data, [-1], (buys, ends))
    numbers = []
    for reverse in ({buys: back}, {}):
        loader = gsplit.LinkNeighborLoader(data, [-1], (buys, ends), batch_size=4, reverse_edge_types=reverse)
        batch = loader.make_batch(0, 0)
        assert isinstance(batch, TypedLinkBatch)
        numbers.append([batch.part(relation).blocks[0].num_edges for relation in (buys, back)])
    assert np.array_equal(numbers, [[0, 0], [0, 4]])
    gsplit.LinkNeighborLoader(data, [-1], (buys, ends), batch_size=4, exclude_seed_edges=False)  # needs none
    plain = Data(edge_index=ends, num_nodes=4)
    with pytest.raises(InputError, match="reverse_edge_types: expected a heterogeneous graph"):
        gsplit.LinkNeighborLoader(plain, [-1], ends, reverse_edge_types={buys: back})
    for name in ("user", "item"):
        data[name].x = torch.rand(4, 3, dtype=torch.float64)
    model = HeteroConv({relation: SAGEConv((3, 3), 4) for relation in (buys, back)}).double()
    pairs = {"edge_label_index": (buys, ends), "reverse_edge_types": {buys: back}, "neg_sampling": "binary"}
    assert gsplit.verify(model, data, [2], batch_size=2, steps=2, **pairs).ok  # type: ignore[arg-type]
