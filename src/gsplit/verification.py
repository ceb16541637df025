"""The promise, checked on the user's own model and graph: W ranks compute what one process computes.

All ranks train a float64 copy of the model for some steps; rank 0 also trains one alone, on the same mini-batches, and
compares the loss and every parameter's gradient at every step.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gsplit.comm import Call
from gsplit.loader import NeighborLoader
from gsplit.mesh import Mesh, solo_mesh
from gsplit.nn.calls import call_model, needs_weights
from gsplit.nn.parallelize import parallelize
from gsplit.store.memory import MemoryStore
from gsplit.store.reader import Store
from gsplit.trainer import per_target_cross_entropy

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """The largest differences found, and whether they are within the tolerance."""

    max_loss_error: float
    max_grad_error: float
    tolerance: float
    steps: int
    ranks: int
    strategy: str

    @property
    def ok(self) -> bool:
        """Whether the ranks computed what one process does."""
        return max(self.max_loss_error, self.max_grad_error) <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def _train(
    model: Module,
    loader: NeighborLoader,
    mesh: Mesh,
    steps: int,
    lr: float,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> tuple[list[float], list[list[Tensor]]]:
    """Losses, and gradients of all parameters, of the first steps."""
    model = parallelize(copy.deepcopy(model).double().train(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses: list[float] = []
    gradients: list[list[Tensor]] = []
    for number in range(steps):
        batch = loader.make_batch(*divmod(number, len(loader))).double()
        value = batch.mean(loss(call_model(model, batch), batch.y))
        value.backward()
        losses.append(float(value.detach()))
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def verify(
    model: Module,
    graph: Store | MemoryStore,
    num_neighbors: list[int],
    input_nodes: str | Tensor | None = None,
    batch_size: int = 1024,
    *,
    mesh: Mesh,
    strategy: str = "split",
    features: str = "x",
    seed: int = 0,
    steps: int = 3,
    lr: float = 1e-3,
    tolerance: float = 1e-9,
    loss: Callable[[Tensor, Tensor], Tensor] = per_target_cross_entropy,
) -> Verification:
    """Train a copy of ``model`` on the ranks of ``mesh`` and on one process, and compare. A collective.

    Rank 0 needs the whole graph. The model itself is left as it is.
    """

    def run(on: Mesh, how: str) -> tuple[list[float], list[list[Tensor]]]:
        loader = NeighborLoader(
            graph,
            num_neighbors,
            input_nodes,
            batch_size,
            strategy=how,
            features=features,
            seed=seed,
            mesh=on,
            gcn_norm=needs_weights(model),
            quiet=True,
        )
        return _train(model, loader, on, steps, lr, loss)

    losses, gradients = run(mesh, strategy)
    errors = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if mesh.rank == 0:
        wanted_losses, wanted = run(solo_mesh(mesh.device), "split")
        errors[0] = max(abs(a - b) for a, b in zip(losses, wanted_losses, strict=True))
        pairs = [pair for got, want in zip(gradients, wanted, strict=True) for pair in zip(got, want, strict=True)]
        errors[1] = max(float((got - want).abs().max()) if got.numel() else 0.0 for got, want in pairs)
    mesh.world.broadcast(Call("broadcast errors"), errors)  # all ranks wait here for rank 0
    return Verification(float(errors[0]), float(errors[1]), tolerance, steps, mesh.size, strategy)
