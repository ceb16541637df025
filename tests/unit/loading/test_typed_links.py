"""Pairs of an edge type in one process: negatives of the types, stored pairs, Trainer and verify, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch_geometric.data import HeteroData
from typed_link_programs import (
    COUNTS,
    RATED_BY,
    RATES,
    Encoder,
    link_loader,
    link_store,
    make_encoder,
    rated,
    with_stored_negatives,
)

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.minibatch.typed_batch import TypedLinkBatch
from gsplit.nn.parallelize import parallelize


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


class _Decoder(Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.lin = Linear(6, 1)

    def forward(self, batch: TypedLinkBatch) -> Tensor:
        z_dict = batch.endpoints(self.encoder(batch.x_dict, batch.edge_index_dict))
        return self.lin(z_dict["user"])  # type: ignore[no-any-return]


def test_what_is_not_built_or_wrong_is_refused() -> None:
    pairs = torch.from_numpy(rated()[:, :8])
    other = ("item", "back", "user")
    for options, reason in (
        ({"edge_label_index": pairs}, r"\(edge type, pairs\) for a heterogeneous graph .got Tensor"),
        ({"edge_label_index": (RATES, None)}, "without pairs"),
        ({"edge_label_index": (other, pairs)}, "where the type is one of.*got .'item', 'back', 'user'"),
        ({"reverse_edge_types": {RATES: RATES}}, "an edge type from item to user"),
        ({"sampler": "labor"}, "sampler: expected an option that is built for heterogeneous graphs"),
    ):
        given = {"edge_label_index": (RATES, pairs), "mesh": solo_mesh(), **options}
        with pytest.raises(InputError, match=reason):
            gsplit.LinkNeighborLoader(link_store(2), [2], **given)  # type: ignore[arg-type]
    far = gsplit.LinkNeighborLoader(link_store(2), [2], (RATES, pairs + 45), batch_size=8, mesh=solo_mesh())
    with pytest.raises(InputError, match="ids in 0..39 of user"):
        far.make_batch(0, 0)
    with pytest.raises(InputError, match="decodes pairs by batch.endpoints"):
        parallelize(_Decoder().double(), solo_mesh(), graph=link_store(2))


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
