"""Losses by name: ``Trainer(loss_fn="bce")``, ``gsplit train --loss bce``, or in your own loop

    loss = batch.mean(*gsplit.losses.bce(out, batch.y))

Each is PyTorch's function with ``reduction="none"``, reduced to one value and one weight per target; ``batch.mean`` of
them equals PyTorch's ``reduction="mean"`` for the whole mini-batch in one process. With several columns of labels,
every entry counts equally. Entries without a label (NaN, or integers below 0) are left out of the mean, which is 0 if
there is no label.

A loss of pairs takes the output and the batch, ``loss = batch.mean(*gsplit.losses.link_cross_entropy(z, batch))``, and
scores a pair by the dot product of the rows of its endpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.typed_batch import TypedLinkBatch

__all__ = [
    "LINK_LOSSES",
    "LOSSES",
    "LossFunction",
    "PairLossFunction",
    "TargetLoss",
    "as_target_loss",
    "bce",
    "bpr",
    "cross_entropy",
    "huber",
    "l1",
    "link_cross_entropy",
    "loss_of_batch",
    "mse",
    "named_loss",
    "resolve_loss",
    "weighted_cross_entropy",
]


class TargetLoss(NamedTuple):
    """One value per target, and its weight in the mean; None: equal weights."""

    values: Tensor
    weight: Tensor | None = None


LossFunction = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor | None]]
"""From outputs and labels of this rank's targets to one value per target, with weights or without."""


PairLossFunction = Callable[[Any, LinkBatch], Tensor | tuple[Tensor, Tensor | None]]
"""From outputs and a batch of pairs to one value per column of ``edge_label_index``, or per pair."""


def loss_of_batch(loss_fn: LossFunction | PairLossFunction, out: Any, batch: Batch) -> TargetLoss:
    """The values of a loss function: of outputs and labels, or of outputs and a batch of pairs."""
    given: Any = batch if isinstance(batch, LinkBatch) else batch.y
    return as_target_loss(loss_fn(out, given))


def as_target_loss(found: Tensor | tuple[Tensor, Tensor | None]) -> TargetLoss:
    """The result of a loss function, with its weights if it has any."""
    return TargetLoss(*found) if isinstance(found, tuple) else TargetLoss(found)


def cross_entropy(out: Tensor, y: Tensor) -> TargetLoss:
    """``F.cross_entropy`` of one class per target; classes below 0 mean "no label"."""
    if y.dim() != 1 or y.is_floating_point():
        got = f"{_short(y)} {list(y.shape)}"
        raise InputError(explain("y", "one class per target for cross_entropy", got, "choose another loss"))
    labelled = y >= 0  # PyTorch itself ignores only -100
    values = F.cross_entropy(out, y.long().clamp(min=0), reduction="none")
    return TargetLoss(torch.where(labelled, values, torch.zeros_like(values)), labelled.to(values.dtype))


def weighted_cross_entropy(class_weights: Sequence[float] | Tensor) -> LossFunction:
    """``F.cross_entropy(weight=class_weights)``: the mean of a mini-batch is over the sum of its targets' weights."""
    weights = torch.as_tensor(class_weights, dtype=torch.float64)
    if weights.dim() != 1 or not bool(((weights > 0) & weights.isfinite()).all()):
        fix = "remove targets of a class that should not count from the list of targets"
        raise InputError(explain("class_weights", "a positive number for every class", weights.tolist(), fix))

    held: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # copied once: a copy waits for the device

    def weighted(out: Tensor, y: Tensor) -> TargetLoss:
        if out.size(1) != weights.size(0):
            fix = "give as many weights as the model has outputs"
            raise InputError(explain("class_weights", f"{out.size(1)} numbers", weights.size(0), fix))
        values, labelled = cross_entropy(out, y)
        assert labelled is not None
        kind = (out.device, values.dtype)
        if kind not in held:
            held[kind] = weights.to(*kind)
        return TargetLoss(values, held[kind][y.long().clamp(min=0)] * labelled)

    return weighted


def bce(out: Tensor, y: Tensor) -> TargetLoss:
    """``F.binary_cross_entropy_with_logits`` of labels 0 and 1 in one or several columns."""
    labels = y.to(torch.uint8) if y.dtype == torch.bool else y
    labelled = ~labels.isnan() if labels.is_floating_point() else labels >= 0
    return _by_entry(F.binary_cross_entropy_with_logits, out, labels, labelled)


def mse(out: Tensor, y: Tensor) -> TargetLoss:
    """``F.mse_loss`` of float labels in one or several columns."""
    return _regression(F.mse_loss, out, y)


def l1(out: Tensor, y: Tensor) -> TargetLoss:
    """``F.l1_loss`` of float labels in one or several columns."""
    return _regression(F.l1_loss, out, y)


def huber(out: Tensor, y: Tensor) -> TargetLoss:
    """``F.huber_loss``, with its delta of 1, of float labels in one or several columns."""
    return _regression(F.huber_loss, out, y)


def _regression(function: Callable[..., Tensor], out: Tensor, y: Tensor) -> TargetLoss:
    if not y.is_floating_point():
        fix = "import the labels as floats, or choose a loss of classes"
        raise InputError(explain("y", "float labels for a loss of regression", _short(y), fix))
    return _by_entry(function, out, y, ~y.isnan())


def _by_entry(function: Callable[..., Tensor], out: Tensor, y: Tensor, labelled: Tensor) -> TargetLoss:
    """The mean over a target's labelled entries, weighted by their number: all entries have equal weight."""
    if y.dim() == 1:
        y, labelled = y.unsqueeze(1), labelled.unsqueeze(1)
    if out.shape != y.shape:  # torch would broadcast silently
        fix = "give the model as many outputs as there are columns of labels"
        raise InputError(explain("the model's output", f"shape {list(y.shape)}, as y has", list(out.shape), fix))
    wanted = torch.where(labelled, y, torch.zeros_like(y)).to(out.dtype)  # no NaN reaches a gradient
    entries = torch.where(labelled, function(out, wanted, reduction="none"), torch.zeros_like(out))
    count = labelled.sum(1).to(out.dtype)
    return TargetLoss(entries.sum(1) / count.clamp(min=1), count)


LOSSES: dict[str, Callable[[Tensor, Tensor], TargetLoss]] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": mse,
    "l1": l1,
    "huber": huber,
}
"""All losses by name."""


def link_cross_entropy(out: Tensor | Mapping[str, Tensor], batch: LinkBatch) -> TargetLoss:
    """The cross entropy of pairs. ``out``: the rows of the endpoints, by vertex type in a heterogeneous graph.

    With binary negatives, or labels 0 and 1: ``F.binary_cross_entropy_with_logits`` of the scores, where ``out`` may
    also be one score per column of ``edge_label_index``. Otherwise ``F.cross_entropy`` of the pair among its negatives.
    """
    out, batch = _of_one_type(out, batch)
    mode = batch.pair_rows.mode
    if mode == "binary":
        score = out if out.dim() == 1 else _dot(_rows(out, batch), batch.edge_label_index)
        if score.shape != batch.edge_label.shape:
            fix = "return one score for each, and give one label per pair"
            expected = f"{list(batch.edge_label.shape)}, as the labels have"
            raise InputError(explain("the scores of pairs", expected, list(score.shape), fix))
        return TargetLoss(F.binary_cross_entropy_with_logits(score, batch.edge_label.to(score.dtype), reduction="none"))
    if mode == "in_batch":
        out = _rows(out, batch)
        scores = out[batch.src_index] @ out[batch.candidates].T
        return TargetLoss(F.cross_entropy(scores, batch.own_columns, reduction="none"))
    positive, negative = _scores(out, batch)
    scores = torch.cat([positive.unsqueeze(1), negative], dim=1)
    first = torch.zeros_like(batch.src_index)
    return TargetLoss(F.cross_entropy(scores, first, reduction="none"))


def bpr(out: Tensor | Mapping[str, Tensor], batch: LinkBatch) -> TargetLoss:
    """Bayesian personalised ranking (Rendle et al. 2009): -log sigmoid(positive - negative), for triplet and joint."""
    positive, negative = _scores(*_of_one_type(out, batch))
    return TargetLoss(F.softplus(negative - positive.unsqueeze(1)).mean(1))


def _of_one_type(out: Tensor | Mapping[str, Tensor], batch: LinkBatch) -> tuple[Tensor, LinkBatch]:
    """The rows of both types of the endpoints as one tensor, and a batch whose pairs are rows of it."""
    if isinstance(out, Tensor):
        return out, batch
    if not isinstance(batch, TypedLinkBatch):
        fix = "return the rows of batch.endpoints as one tensor"
        raise InputError(explain("the model's output", "a tensor", type(out).__name__, fix))
    return batch.fuse_pairs(out)


def _rows(out: Tensor, batch: LinkBatch) -> Tensor:
    """The rows of the endpoints. Other outputs, such as scores of shape [n, 1], must not be indexed by endpoints."""
    num_rows = batch.endpoint_ids.numel()
    if out.dim() != 2 or out.size(0) != num_rows:
        fix = "return the rows of batch.endpoints, or one score per column of edge_label_index as a vector"
        raise InputError(
            explain("the model's output", f"[{num_rows}, ...], one row per endpoint", list(out.shape), fix)
        )
    return out


def _dot(out: Tensor, index: Tensor) -> Tensor:
    return (out[index[0]] * out[index[1]]).sum(-1)


def _scores(out: Tensor, batch: LinkBatch) -> tuple[Tensor, Tensor]:
    """The scores of pairs [n] and of their negatives [n, K]."""
    out = _rows(out, batch)
    src = out[batch.src_index]
    positive = (src * out[batch.dst_pos_index]).sum(-1)
    rows = batch.dst_neg_index
    if batch.pair_rows.mode == "joint":
        return positive, src @ out[rows].T
    others = out[rows.unsqueeze(1) if rows.dim() == 1 else rows]
    return positive, (src.unsqueeze(1) * others).sum(-1)


LINK_LOSSES: dict[str, PairLossFunction] = {"cross_entropy": link_cross_entropy, "bpr": bpr}
"""All losses of pairs by name."""


def named_loss(name: str) -> LossFunction:
    """Look up a loss in ``LOSSES``."""
    if name not in LOSSES:
        fix = "choose one, or pass a function of (out, y)"
        raise InputError(explain("loss_fn", f"one of {', '.join(LOSSES)}", name, fix))
    return LOSSES[name]


def resolve_loss(loss_fn: str | LossFunction | PairLossFunction, *, of_pairs: bool) -> LossFunction | PairLossFunction:
    """A loss by name, of vertices or of pairs; a function is returned as it is."""
    if not isinstance(loss_fn, str):
        return loss_fn
    if not of_pairs:
        return named_loss(loss_fn)
    if loss_fn not in LINK_LOSSES:
        fix = "choose one, or pass a function of (out, batch)"
        raise InputError(explain("loss_fn", f"one of {', '.join(LINK_LOSSES)} for pairs", loss_fn, fix))
    return LINK_LOSSES[loss_fn]


def _short(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")
