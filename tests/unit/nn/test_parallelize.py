"""Wrapping changes nothing that a user would notice: weights, modes, generators, copies, files, two batches at once."""

import copy
import io

import pytest
import torch
from nn_models import (
    CLASSES,
    WIDTH,
    make_batch,
    make_data,
    make_loader,
    sage,
)
from small_graph import Case, make_model
from torch import Tensor
from torch_geometric.nn import GAT, PNA, GraphSAGE

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import solo_mesh


def test_called_with_tensors_it_is_the_model_it_was() -> None:
    data, case = make_data(), Case("sage", "split", "random", 0.5, None, "batch_norm")
    plain, ours = make_model(case), parallelize(make_model(case), solo_mesh())
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True))
    outs = []
    for model in (plain, ours):
        torch.manual_seed(1)
        outs.append(model(data.x, data.edge_index))
    assert torch.equal(*outs)


def test_wrapping_leaves_the_generator_and_the_modes_alone() -> None:
    model = make_model(Case("gat", "split", "random", 0.5, None, "batch_norm")).eval()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    parallelize(model, solo_mesh())
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())


def test_dropout_is_a_function_of_the_step() -> None:
    model = parallelize(GAT(WIDTH, 8, 3, CLASSES, dropout=0.5).double(), solo_mesh())
    loader = make_loader(fanout=3)
    one, again, other = (
        model(b.x, b.edge_index) for b in (loader.make_batch(2, 0), loader.make_batch(2, 0), loader.make_batch(3, 0))
    )
    assert torch.equal(one, again)
    assert one.shape != other.shape or not torch.equal(one, other)
    model.eval()
    batch = loader.make_batch(2, 0)
    assert not torch.equal(model(batch.x, batch.edge_index), one)


def test_two_batches_live_at_once() -> None:
    model = parallelize(GraphSAGE(WIDTH, 8, 3, CLASSES, dropout=0.5).double(), solo_mesh())
    loader = make_loader(fanout=2)
    batches = [loader.make_batch(epoch, 0) for epoch in (0, 1)]

    def gradient(number: int) -> Tensor:
        out = model(batches[number].x, batches[number].edge_index)
        (g,) = torch.autograd.grad(batches[number].sum(out.square().sum(1)), [model.convs[0].lin_l.weight])
        assert isinstance(g, Tensor)
        return g

    alone = [gradient(0), gradient(1)]
    outs = [b.sum(model(b.x, b.edge_index).square().sum(1)) for b in batches]
    for out, want in zip(reversed(outs), reversed(alone), strict=True):
        assert torch.allclose(torch.autograd.grad(out, [model.convs[0].lin_l.weight])[0], want)


def test_a_copy_works_and_a_saved_model_asks_for_its_ranks() -> None:
    model = parallelize(
        PNA(WIDTH, 8, 3, CLASSES, aggregators=["mean"], scalers=["identity"], deg=torch.ones(3)).double(), solo_mesh()
    )
    batch = make_batch()
    want = model(batch.x, batch.edge_index)
    assert torch.equal(copy.deepcopy(model)(batch.x, batch.edge_index), want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    data = make_data()
    assert torch.equal(loaded(data.x, data.edge_index), model(data.x, data.edge_index))
    with pytest.raises(
        InputError, match=r"expected a model wrapped in this process .*parallelize\(model, mesh\) again"
    ):
        loaded(batch.x, batch.edge_index)
    assert torch.equal(parallelize(loaded, solo_mesh())(batch.x, batch.edge_index), want)
    assert torch.equal(
        parallelize(model, solo_mesh())(batch.x, batch.edge_index), want
    )  # once more: hooks do not pile up
    assert len(model._forward_pre_hooks) == 1


def test_inference_mode_does_not_spoil_training() -> None:
    model, loader = parallelize(sage(dropout=0.5).double(), solo_mesh()), make_loader(3)
    with torch.inference_mode():
        batch = loader.make_batch(0, 0)
        model(batch.x, batch.edge_index)
    batch.sum(model(batch.x, batch.edge_index).sum(1)).backward()
    assert all(p.grad is not None for p in model.parameters())
