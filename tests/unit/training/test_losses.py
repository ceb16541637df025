"""Losses by name: PyTorch's own mean over a mini-batch, entries without a label left out, what does not fit refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from link_programs import link_store, pairs_of
from small_graph import WIDTH, small_store
from torch import Tensor
from torch_geometric.nn import GraphSAGE

from gsplit import (
    InputError,
    LinkNeighborLoader,
    NeighborLoader,
    Trainer,
    evaluate,
    evaluate_links,
    losses,
    parallelize,
)
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.in_memory import MemoryStore

COLUMNS = {
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


def _mean(found: losses.TargetLoss) -> Tensor:
    """What ``batch.mean`` makes of it in one process."""
    weight = torch.ones_like(found.values) if found.weight is None else found.weight
    return (weight * found.values).sum() / weight.sum()


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_a_loss_of_columns_is_pytorchs_mean_over_all_entries(name: str, columns: int) -> None:
    torch.manual_seed(0)
    out = torch.randn(7, max(columns, 1), dtype=torch.float64, requires_grad=True)
    y = (torch.rand(7, columns) if columns else torch.rand(7)).round().double()
    want: Tensor = COLUMNS[name](out, y.view(out.shape))  # type: ignore[operator]
    found = _mean(losses.LOSSES[name](out, y))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-15)
    for ours, theirs in zip(torch.autograd.grad(found, out), torch.autograd.grad(want, out), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", COLUMNS)
def test_entries_without_a_label_are_left_out_of_the_mean(name: str) -> None:
    torch.manual_seed(0)
    out = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y = torch.rand(6, 3).round().double()
    y[0, 1] = y[2, :2] = y[5] = torch.nan  # the last target has no label at all
    found = losses.LOSSES[name](out, y)
    assert found.weight is not None and found.weight.tolist() == [2, 3, 1, 3, 3, 0] and found.values[5] == 0
    labelled = ~y.isnan()
    want: Tensor = COLUMNS[name](out[labelled], y[labelled])  # type: ignore[operator]
    torch.testing.assert_close(_mean(found), want, rtol=0, atol=1e-15)
    (gradient,) = torch.autograd.grad(_mean(found), out)
    assert gradient.isfinite().all() and (gradient[~labelled] == 0).all() and (gradient[labelled] != 0).all()


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64])
def test_labels_of_bce_may_be_integers_and_minus_one_is_none(kind: torch.dtype) -> None:
    out = torch.tensor([[0.3, -2.0], [1.0, 4.0]])
    y = torch.tensor([[1, 0], [0, 1]])
    want = F.binary_cross_entropy_with_logits(out, y.float())
    torch.testing.assert_close(_mean(losses.bce(out, y.to(kind))), want)
    if kind == torch.int64:
        y[0, 0] = -1
        torch.testing.assert_close(
            _mean(losses.bce(out, y)), F.binary_cross_entropy_with_logits(out, y.float(), y + 1 > 0) * 4 / 3
        )


def test_what_does_not_fit_is_refused() -> None:
    out, classes, floats = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2)
    with pytest.raises(InputError, match=r"y: expected one class per target for cross_entropy .got float32 \[4, 2\]"):
        losses.cross_entropy(out, floats)
    with pytest.raises(InputError, match=r"y: expected float labels for a loss of regression .got int64"):
        losses.mse(out, classes)
    with pytest.raises(InputError, match=r"output: expected shape \[4, 2\], as y has .got \[4, 3\]"):
        losses.huber(out, floats)
    with pytest.raises(InputError, match=r"loss_fn: expected one of cross_entropy, bce, mse, l1, huber .got nll"):
        losses.named_loss("nll")


def _store(y: Any) -> MemoryStore:
    store, _ = small_store("random", 1)
    return MemoryStore(store.graph, store.part_boundaries, store.arrays | {"y": y}, store.dtypes | {"y": y.dtype.name})


@pytest.mark.parametrize("by_name", [True, False])
def test_a_trainer_takes_a_loss_by_its_name_or_as_a_function(by_name: bool) -> None:
    y = np.random.default_rng(0).normal(size=(90, 2))
    loader = NeighborLoader(_store(y), [-1, -1], "train", batch_size=12)
    torch.manual_seed(0)
    model = parallelize(GraphSAGE(WIDTH, 8, 2, 2).double(), solo_mesh())
    loss_fn: str | Callable[[Tensor, Tensor], Tensor] = "mse"
    if not by_name:
        loss_fn = lambda out, wanted: F.mse_loss(out, wanted, reduction="none").mean(1)  # noqa: E731
    batch = loader.make_batch(0, 0)
    with torch.no_grad():
        want = float(F.mse_loss(model(batch.x, batch.edge_index), batch.y))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss_fn=loss_fn)
    assert trainer.train_step(batch) == pytest.approx(want, abs=1e-14)
    assert trainer.evaluate(_store(y), "train") == evaluate(model, _store(y), "train", metrics=["rmse"])


def _links(negatives: Any, **options: Any) -> LinkNeighborLoader:
    store, _ = link_store("mixed")
    pairs = pairs_of()[:, :12]
    return LinkNeighborLoader(store, [3, 3], pairs, neg_sampling=negatives, batch_size=12, mesh=solo_mesh(), **options)


@pytest.mark.parametrize("amount", [1, 3])
def test_losses_of_pairs_are_those_of_a_loop(amount: int) -> None:
    modes: list[Any] = [{"mode": "triplet", "amount": amount}, {"mode": "joint", "amount": amount}, "in_batch"]
    for negatives in modes:
        batch = next(iter(_links(negatives)))
        z = torch.randn(batch.endpoint_ids.numel(), 4, dtype=torch.float64)
        cross, ranked = [], []
        for i in range(12):
            src = z[batch.src_index[i]]
            positive = src @ z[batch.dst_pos_index[i]]
            if negatives == "in_batch":
                others = [src @ z[row] for n, row in enumerate(batch.candidates.tolist()) if n != batch.own_columns[i]]
            else:
                rows = batch.dst_neg_index.reshape(-1) if negatives["mode"] == "joint" else batch.dst_neg_index[i]
                others = [src @ z[row] for row in rows.reshape(-1).tolist()]
            scores = torch.stack([positive, *others])
            cross.append(-scores.log_softmax(0)[0])
            ranked.append(torch.stack([-F.logsigmoid(positive - other) for other in others]).mean())
        torch.testing.assert_close(losses.link_cross_entropy(z, batch).values, torch.stack(cross))
        if negatives != "in_batch":
            torch.testing.assert_close(losses.bpr(z, batch).values, torch.stack(ranked))


def test_binary_losses_of_pairs_take_rows_or_scores() -> None:
    batch = next(iter(_links("binary")))
    z = torch.randn(batch.endpoint_ids.numel(), 4)
    scores = (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1)
    want = F.binary_cross_entropy_with_logits(scores, batch.edge_label, reduction="none")
    assert torch.equal(losses.link_cross_entropy(z, batch).values, want)
    assert torch.equal(losses.link_cross_entropy(scores, batch).values, want)
    with pytest.raises(
        InputError, match=r"the model's output: expected \[\d+, ...\], one row per endpoint .got \[24, 1\]"
    ):
        losses.link_cross_entropy(scores.unsqueeze(1), batch)
    with pytest.raises(InputError, match=r"the scores of pairs: expected \[24\], as the labels have .got \[12\]"):
        losses.link_cross_entropy(scores[:12], batch)


def test_a_trainer_of_pairs_learns_and_refuses_what_does_not_fit() -> None:
    torch.manual_seed(0)
    model = parallelize(GraphSAGE(5, 16, 2, 16), solo_mesh())
    loader = _links("in_batch", features="x")
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=0.02), loader)
    found = [trainer.train_epoch()[0] for _ in range(25)]
    assert found[-1] < 0.7 * found[0]
    store, _ = link_store("mixed")
    with pytest.raises(InputError, match="expected pairs .got no pairs/val among "):
        trainer.evaluate(store, ["val"])
    arrays = {**store.arrays, "pairs/val": pairs_of()[:, :12].T.numpy()}
    named = MemoryStore(store.graph, store.part_boundaries, arrays, store.dtypes)
    scores = trainer.evaluate(named, "val", keep_best="val", metrics=["mrr", "hits@5"], num_negatives=9)
    wanted = evaluate_links(model, named, "val", metrics=["mrr", "hits@5"], num_negatives=9)
    assert scores == {"val": wanted["mrr"], "val hits@5": wanted["hits@5"]}
    assert trainer.state.best is not None and trainer.state.evaluation_edges > 0
    with pytest.raises(InputError, match="loss_fn: expected one of cross_entropy, bpr for pairs .got mse"):
        Trainer(model, torch.optim.Adam(model.parameters()), loader, loss_fn="mse")
