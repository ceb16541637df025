"""Which models of pairs are wrapped, how their rows are exchanged, and which are refused with what message."""

from typing import Any

import pytest
import torch
from link_programs import NEGATIVES, PairScores, TripletScores, link_store, pairs_of
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.nn.parallelize import forward_plan_of

WIDTH = 5


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = GraphSAGE(WIDTH, 4, 2, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def encode(self, batch: LinkBatch) -> Tensor:
        return self.encoder(batch.x, batch.edge_index)  # type: ignore[no-any-return]


class _WithoutEndpoints(_Model):
    def forward(self, batch: LinkBatch) -> Tensor:
        z = self.encode(batch)
        return (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1)


class _AcrossPairs(_Model):
    def forward(self, batch: LinkBatch) -> Tensor:
        z = batch.endpoints(self.encode(batch))
        return (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1).softmax(0)


class _NormOfEndpoints(_Model):
    def forward(self, batch: LinkBatch) -> Tensor:
        z: Tensor = self.norm(batch.endpoints(self.encode(batch)))
        return (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1)


class _InBatch(_Model):
    def forward(self, batch: LinkBatch) -> Tensor:
        z = batch.endpoints(self.encode(batch))
        return z[batch.src_index] @ z[batch.candidates].T


class _PairsFirst(_Model):
    def forward(self, batch: LinkBatch) -> Tensor:
        src, dst = batch.edge_label_index
        z = batch.endpoints(self.encode(batch))
        return (z[src] * z[dst]).sum(-1)


class _TwoOutputs(_Model):
    def forward(self, x: Tensor, edge_index: Any) -> tuple[Tensor, Tensor]:
        z = self.encoder(x, edge_index)
        return z, 2 * z


class _OfBatch(_Model):
    def forward(self, batch: LinkBatch) -> Tensor:
        return self.encode(batch)


def _batch(negatives: str = "binary") -> LinkBatch:
    store, _ = link_store("mixed")
    loader = gsplit.LinkNeighborLoader(
        store, [3, 3], pairs_of(), neg_sampling=NEGATIVES[negatives], batch_size=9, mesh=solo_mesh()
    )
    return next(iter(loader)).cast(torch.float32)


@pytest.mark.parametrize(
    ("model", "kind"), [(PairScores(), "binary"), (TripletScores(), "triplets"), (_InBatch(), "in_batch")]
)
def test_a_model_that_decodes_pairs_is_wrapped_and_its_output_is_left_alone(model: Any, kind: str) -> None:
    wrapped = gsplit.parallelize(model, solo_mesh())
    assert forward_plan_of(wrapped).pairs == kind
    batch = _batch({"triplets": "triplet"}.get(kind, kind))
    out = wrapped(batch)
    first = out[0] if isinstance(out, tuple) else out
    assert first.size(0) == batch.num_values != batch.num_targets


def test_the_output_of_an_encoder_are_the_endpoints() -> None:
    torch.manual_seed(0)
    model = _OfBatch()
    plain = gsplit.parallelize(model.encoder, solo_mesh())
    batch = _batch()
    rows = plain(batch.x, batch.edge_index)
    assert forward_plan_of(plain).pairs == ""
    assert rows.size(0) == batch.endpoint_ids.numel()
    again = gsplit.parallelize(_OfBatch(), solo_mesh())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(batch), rows)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_WithoutEndpoints(), r"rows of pairs are those of batch.endpoints\(h\)"),
        (_AcrossPairs(), "every target's output to depend on its neighbourhood only"),
        (_NormOfEndpoints(), "batch norm: expected rows that one rank holds .got rows of endpoints"),
    ],
)
def test_a_model_that_would_be_wrong_on_several_ranks_is_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gsplit.parallelize(model, solo_mesh())


def test_what_does_not_fit_a_batch_is_refused() -> None:
    wrapped = gsplit.parallelize(_TwoOutputs(), solo_mesh())
    batch = _batch()
    with pytest.raises(InputError, match="the model's output: expected a tensor .* .got tuple"):
        wrapped(batch.x, batch.edge_index)
    store, _ = link_store("mixed")
    vertices = next(iter(gsplit.NeighborLoader(store, [3, 3], batch_size=4, mesh=solo_mesh()))).cast(torch.float32)
    decoder = gsplit.parallelize(PairScores(), solo_mesh())
    with pytest.raises(InputError, match="a batch of pairs, which it decodes .got a batch of vertices"):
        decoder(vertices)


def test_inference_of_a_model_that_reads_pairs_before_endpoints_says_so() -> None:
    model = gsplit.parallelize(_PairsFirst(), solo_mesh())
    assert model(_batch()).dim() == 1

    def decoder(src: Tensor, dst: Tensor) -> Tensor:
        return (src * dst).sum(-1)

    with pytest.raises(InputError, match="calls batch.endpoints before it reads pairs"):
        gsplit.evaluate_links(model, link_store("mixed")[0], pairs_of(), num_negatives=5, decoder=decoder)
