"""Layers by host kernels on real ranks: loss and gradients of PyG's layers on the whole graph in one process."""

from functools import partial

import pytest
import torch
from fused_programs import make_models, train_by_pyg, train_on_ranks
from nn_models import N

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.weekly)])
@pytest.mark.parametrize("ownership", ["in turn", "all on rank 0"])
def test_loss_and_gradients_are_those_of_pyg(ranks: int, ownership: str) -> None:
    owner = [vertex % ranks if ownership == "in turn" else 0 for vertex in range(N)]
    every = [train_on_ranks(solo_mesh(), owner)] if ranks == 1 else run_ranks(train_on_ranks, ranks, owner)
    wanted = train_by_pyg()
    for found in every:
        for name, (loss, gradients, num_fused), (want, wants) in zip(make_models(), found, wanted, strict=True):
            assert num_fused == 2, name
            assert loss == pytest.approx(want, rel=1e-11), name
            largest = max(float(g.abs().max()) for g in wants)
            assert all(map(partial(torch.allclose, rtol=0, atol=1e-11 * largest), gradients, wants)), name
