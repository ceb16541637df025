"""A batch: data and one context; a loss that forgets the other ranks is refused in backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import solo_mesh

FORGOTTEN = r"backward: expected a loss from batch.mean or batch.sum of this batch .*Fix: write loss = batch.mean\("


def _loader() -> NeighborLoader:
    return NeighborLoader(small_store("random", 1)[0], [3, 2], "train", batch_size=10)


def _model() -> Any:
    torch.manual_seed(0)
    return parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), solo_mesh())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_without_the_batch_is_refused(reduction: str) -> None:
    model, batch = _model(), _loader().make_batch(0, 0)
    loss = F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction=reduction)
    with pytest.raises(InputError, match=FORGOTTEN):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_the_mean_of_another_batch_does_not_count() -> None:
    model, loader = _model(), _loader()
    one, other = loader.make_batch(0, 0), loader.make_batch(0, 1)
    out = model(one.x, one.edge_index)
    wrong = other.mean(F.cross_entropy(out, one.y, reduction="none"))
    with pytest.raises(InputError, match=FORGOTTEN):
        wrong.backward()


def test_every_backward_is_looked_at() -> None:
    model, batch = _model(), _loader().make_batch(0, 0)
    out = model(batch.x, batch.edge_index)
    values = F.cross_entropy(out, batch.y, reduction="none")
    batch.mean(values).backward(retain_graph=True)
    batch.sum(values).backward(retain_graph=True)
    with pytest.raises(InputError, match=FORGOTTEN):
        values.mean().backward()


def test_evaluation_and_terms_on_parameters_need_no_batch() -> None:
    model, batch = _model(), _loader().make_batch(0, 0)
    with torch.no_grad():
        model(batch.x, batch.edge_index).sum()
    penalty = sum((p**2).sum() for p in model.parameters())
    assert isinstance(penalty, torch.Tensor)
    penalty.backward()
    model.zero_grad()
    loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
    (loss + 0.1 * sum((p**2).sum() for p in model.parameters())).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_batch_moves_nowhere_else() -> None:
    batch = _loader().make_batch(0, 0)
    assert batch.to("cpu") is batch
    with pytest.raises(InputError, match="batch.to: expected the mesh's device, cpu .got meta"):
        batch.to("meta")


def test_a_weighted_mean_is_over_the_sum_of_the_weights() -> None:
    model, batch = _model(), _loader().make_batch(0, 0)
    values = F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none")
    weight = torch.arange(1.0, 11.0)
    found = batch.mean(values, weight)
    torch.testing.assert_close(found, (weight * values).sum() / weight.sum())
    assert batch.mean(values) == batch.sum(values) / 10
    with pytest.raises(InputError, match=r"weight: expected shape \[10\] .got \[9\]"):
        batch.mean(values, weight[1:])
    found.backward()
    assert all(p.grad is not None for p in model.parameters())
