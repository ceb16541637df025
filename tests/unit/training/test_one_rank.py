"""One rank of the whole path equals PyG layers run straight on the blocks of the one-process mini-batch."""

import numpy as np
import pytest
import torch
from rank_programs import ByHand, Case, loader_of, store_of

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_outputs_loss_and_gradients(kind: str) -> None:
    rng = np.random.default_rng(1)
    case = Case(5, 60, rng.integers(0, 60, 400), rng.integers(0, 60, 400), (0, 60), [3, -1, 2], np.arange(0, 60, 3))
    store = store_of(case)
    batch = loader_of(solo_mesh(), case).make_batch(2, 1)
    torch.manual_seed(0)
    model = ByHand(kind).double()
    loss = batch.mean(torch.nn.functional.cross_entropy(model(batch), batch.y, reduction="none"))
    ours = torch.autograd.grad(loss, list(model.parameters()))

    place = torch.from_numpy(np.argsort(store.original_ids()))
    targets = place[batch.n_id[: batch.batch_size]]
    sampler = HostNeighborSampler(store.graph, store.original_ids())
    whole = sample_minibatch(sampler, targets, case.fanouts, StepKey(case.seed, 2, 1))
    h = torch.from_numpy(store.stored_array("features/x"))[whole.input_ids]
    for layer, (conv, block) in enumerate(zip(model.convs, whole.blocks, strict=True)):
        h = conv((h, h[: block.num_dst]), block.edge_index())
        h = torch.nn.functional.elu(h) if layer < 2 else h
    plain = torch.nn.functional.cross_entropy(h, torch.from_numpy(store.stored_array("y"))[targets])
    assert torch.allclose(loss, plain, rtol=0, atol=1e-12)
    for got, want in zip(ours, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)
