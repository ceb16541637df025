"""The loss function of a run: its loss, with the weights of classes that ``--class-weights`` asks for."""

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.losses import LossFunction, named_loss, weighted_cross_entropy
from gsplit.run.config import TrainSettings
from gsplit.run.loss_choice import own_labels
from gsplit.store.reader import Store

__all__ = ["balanced_weights", "make_loss"]

_BALANCED = "balanced"


def make_loss(settings: TrainSettings, store: Store, mesh: Mesh) -> LossFunction:
    """The loss that settings describe, whose loss was chosen. A collective for balanced weights."""
    assert settings.loss is not None
    if settings.class_weights is None:
        return named_loss(settings.loss)
    if settings.loss != "cross_entropy":
        fix = "leave one of them out"
        raise InputError(explain("class_weights", "--loss cross_entropy", settings.loss, fix))
    if settings.class_weights == _BALANCED:
        return weighted_cross_entropy(balanced_weights(_count_classes(store, settings.targets, mesh)))
    return weighted_cross_entropy(_parse(settings.class_weights, store.num_classes))


def _parse(text: str, num_classes: int) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != num_classes:
        expected = f"balanced, or {num_classes} numbers, one per class"
        raise InputError(explain("class_weights", expected, text, "write them as 1,2.5,1"))
    return weights


def balanced_weights(counts: Tensor) -> Tensor:
    """Targets / (classes that occur * targets of a class): every class weighs the same in all; 1 for those without.

    >>> balanced_weights(torch.tensor([30, 10, 0])).tolist()
    [0.6666666666666666, 2.0, 1.0]
    """
    occurs = counts > 0
    each = counts.sum().double() / occurs.sum()
    return torch.where(occurs, each / counts.clamp(min=1), torch.ones_like(each))


def _count_classes(store: Store, targets: str, mesh: Mesh) -> Tensor:
    """Targets of every class; each is counted by the one rank that owns it. A collective."""
    labels = own_labels(store, targets, mesh)
    counts = torch.from_numpy(np.bincount(labels[labels >= 0], minlength=store.num_classes)).to(mesh.device)
    mesh.world.all_reduce(Call("count classes"), counts).wait()
    return counts
