"""A small training in float64 that a selftest repeats on ranks of a device and on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gsplit.distributed.mesh import Mesh
from gsplit.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.ownership import Ownership
from gsplit.run.models import make_model
from gsplit.store.in_memory import MemoryStore, renumbered_store

__all__ = ["TOLERANCE", "SmallTraining", "largest_difference", "train_model", "train_models"]

TOLERANCE = 1e-9
_VERTICES = 90
_WIDTH = 6
_CLASSES = 5


@dataclass(frozen=True)
class SmallTraining:
    """Losses of every step, and the weights at the end, as arrays of numpy."""

    losses: list[float]
    weights: dict[str, Any]


def _small_store(num_splits: int) -> tuple[MemoryStore, Ownership]:
    """A random graph with hubs, owned by ranges of different lengths."""
    rng = np.random.default_rng(7)
    num_edges = 6 * _VERTICES
    src = (_VERTICES * rng.random(num_edges) ** 2).astype(np.int64)
    dst = (_VERTICES * rng.random(num_edges) ** 1.5).astype(np.int64)
    arrays = {
        "features/x": (rng.normal(size=(_VERTICES, _WIDTH)), "float64"),
        "y": (rng.integers(0, _CLASSES, _VERTICES), "int64"),
    }
    store = renumbered_store(src, dst, rng.permutation(_VERTICES), arrays, {"train": rng.permutation(_VERTICES)[:60]})
    cuts = sorted(rng.integers(1, _VERTICES, num_splits - 1).tolist())
    whole = MemoryStore(store.graph, [0, _VERTICES], store.arrays, store.dtypes)
    return whole, Ownership((0, *cuts, _VERTICES))


def train_model(
    mesh: Mesh, name: str, num_splits: int, steps: int = 5, before_last: Callable[[], None] = lambda: None
) -> SmallTraining:
    """Train a model with dropout; ``before_last`` is called when the batch of the last step has been made."""
    store, ownership = _small_store(num_splits)
    torch.manual_seed(0)
    plain = make_model(
        name,
        in_channels=_WIDTH,
        hidden_channels=8,
        num_layers=3,
        out_channels=_CLASSES,
        dropout=0.5,
        heads=2,
        degrees=torch.arange(1, 6),
    )
    model = parallelize(plain.double(), mesh)
    optimizer = torch.optim.Adam(model.parameters())
    loader = NeighborLoader(
        store,
        [4, 3, -1],
        "train",
        batch_size=12,
        mesh=mesh,
        seed=3,
        ownership=ownership if mesh.size > 1 else None,
    )
    losses = []
    for step in range(steps):
        batch = loader.make_batch(0, step)
        if step == steps - 1:
            before_last()
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    weights = {key: value.numpy(force=True).copy() for key, value in model.state_dict().items()}
    return SmallTraining([float(loss) for loss in losses], weights)


def train_models(mesh: Mesh, names: list[str], num_splits: int) -> list[SmallTraining]:
    """Train every model."""
    return [train_model(mesh, name, num_splits) for name in names]


def largest_difference(one: SmallTraining, other: SmallTraining) -> float:
    """The largest difference of two trainings in a loss or a weight."""
    pairs: list[tuple[Any, Any]] = [(np.array(one.losses), np.array(other.losses))]
    pairs += [(value, other.weights[name]) for name, value in one.weights.items()]
    return max(float(np.nan_to_num(np.abs(a - b), nan=np.inf).max(initial=0.0)) for a, b in pairs)
