"""Verifies on the user's own model and graph that W ranks compute what one process computes.

All ranks train a float64 copy of the model for some steps; rank 0 also trains one alone, on the same mini-batches, and
compares the loss and every parameter's gradient at every step, and the buffers (running statistics) at the end.

The steps are gradient descent with a fixed largest change, not Adam: Adam divides every gradient by its own magnitude,
so the rounding error of a gradient close to 0 would become a full step. With unscaled features, such as integers up to
200, a different order of summation led to differences of 1e-4.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, resolve_mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType
from gsplit.loading.batch_loader import BatchLoader
from gsplit.loading.link_loader import LinkNeighborLoader
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.local_graph import ArrayNames, Features, InputNodes
from gsplit.nn.checks.one_process import TrainedSteps, run_steps
from gsplit.nn.parallelize import call_wrapped, check_features, parallelize
from gsplit.nn.runtime import runtime_of
from gsplit.sampling.protocol import SamplerFactory
from gsplit.sampling.relations import RelationFanouts
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.training.losses import LossFunction, PairLossFunction, loss_of_batch, resolve_loss
from gsplit.training.training_step import check_finite

__all__ = ["Verification", "verify", "verify_step"]


@dataclass(frozen=True)
class Verification:
    """The largest differences found, and whether they are within the tolerance."""

    max_loss_error: float
    max_grad_error: float
    max_buffer_error: float
    largest_gradient: float
    tolerance: float
    steps: int
    ranks: int
    strategy: str
    largest_loss: float = 1.0
    largest_buffer: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether the ranks computed what one process does: differences relative to the largest gradient, loss, buffer.

        Losses and buffers below 1 are compared absolutely.
        """
        errors = (
            self.max_loss_error / max(1.0, self.largest_loss),
            self.max_buffer_error / max(1.0, self.largest_buffer),
            self.max_grad_error / (self.largest_gradient or 1.0),
        )
        return all(error <= self.tolerance for error in errors)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def _train(
    model: Module,
    loader: BatchLoader[Any],
    mesh: Mesh,
    steps: int,
    lr: float,
    loss: LossFunction | PairLossFunction,
    graph: GraphStore | None,
) -> TrainedSteps:
    """Train a copy of the model."""
    widths = None if graph is None else _widths(graph, loader.arrays)
    copied = copy.deepcopy(model).double().train()
    model = parallelize(
        copied,
        mesh,
        graph=graph,
        num_features=widths,
        pair_type=loader.plan.pair_type,
        edge_attr=loader.arrays.edge_attr,
        edge_weight=loader.arrays.edge_weight,
        verify_every=0,
    )

    def loss_of(model: Module, batch: Batch) -> Tensor:
        value = batch.mean(*loss_of_batch(loss, call_wrapped(model, batch), batch))
        check_finite(float(value.detach()), batch)
        return value

    batches = (loader.make_batch(*divmod(number, len(loader))).cast(torch.float64) for number in range(steps))
    return run_steps(model, batches, loss_of, lr)


def _widths(graph: GraphStore, arrays: ArrayNames) -> dict[str, int] | None:
    """The widths of the rows of every vertex type; None for the features ``x``, which ``parallelize`` reads."""
    if all(names == [f"{of}/x"] for of, names in arrays.of_types.items()):
        return None
    shapes = {of: [graph.shape(f"features/{name}") for name in names] for of, names in arrays.of_types.items()}
    return {of: sum(shape[1] for shape in found) for of, found in shapes.items()}


def verify(
    model: Module,
    graph: Any,
    num_neighbors: RelationFanouts,
    input_nodes: InputNodes = None,
    *,
    edge_label_index: str | Tensor | tuple[EdgeType, str | Tensor] | None = None,
    edge_label: Tensor | None = None,
    edge_label_time: Tensor | None = None,
    neg_sampling: Any = None,
    exclude_seed_edges: Literal["reverse", True, False] = "reverse",
    reverse_edge_types: Mapping[EdgeType, EdgeType] | None = None,
    batch_size: int = 1024,
    mesh: Mesh | None = None,
    strategy: str = "split",
    sampler: str | SamplerFactory = "uniform",
    weight_attr: str | None = None,
    replace: bool = False,
    layer_dependency: bool = False,
    time_attr: str | None = None,
    input_time: Tensor | None = None,
    temporal_strategy: str = "uniform",
    features: Features = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    partition: Tensor | None = None,
    seed: int = 0,
    steps: int = 3,
    lr: float = 1e-3,
    tolerance: float = 1e-9,
    loss_fn: str | LossFunction | PairLossFunction = "cross_entropy",
    reference_device: str | None = None,
) -> Verification:
    """Train a copy of ``model`` on the ranks of ``mesh`` and on one process, and compare. A collective.

    ``graph``, ``features`` and the arguments of sampling are those of ``NeighborLoader``: a sampler whose draws depend
    on the rank is detected here. With ``edge_label_index``, and the other arguments of ``LinkNeighborLoader``, the
    steps are of link prediction, and ``loss_fn`` is a loss of pairs, as for ``Trainer``. Rank 0 needs the whole graph.
    The model itself is not changed. The one process uses ``reference_device``, by default the device of rank 0.
    """
    check_features(model, features)
    ranks = resolve_mesh(mesh, "gsplit.verify")
    store = as_graph_store(graph, partition)
    has_pairs = edge_label_index is not None
    if not has_pairs and (edge_label is not None or edge_label_time is not None or neg_sampling is not None):
        fix = "give edge_label_index, the name of stored pairs or a tensor [2, n]"
        raise InputError(
            explain("edge_label_index", "pairs, for edge_label, edge_label_time and neg_sampling", None, fix)
        )
    loss = resolve_loss(loss_fn, of_pairs=has_pairs)
    make: Callable[..., Any] = partial(NeighborLoader, store, num_neighbors, input_nodes, input_time=input_time)
    if has_pairs:
        make = partial(
            LinkNeighborLoader,
            store,
            cast(list[int], num_neighbors),
            edge_label_index,
            edge_label=edge_label,
            neg_sampling=neg_sampling,
            edge_label_time=edge_label_time,
            exclude_seed_edges=exclude_seed_edges,
            reverse_edge_types=reverse_edge_types,
        )

    def run(on: Mesh, how: str) -> TrainedSteps:
        loader = make(
            batch_size=batch_size,
            strategy=how,
            sampler=sampler,
            weight_attr=weight_attr,
            replace=replace,
            layer_dependency=layer_dependency,
            time_attr=time_attr,
            temporal_strategy=temporal_strategy,
            features=features,
            edge_attr=edge_attr,
            edge_weight=edge_weight,
            seed=seed,
            mesh=on,
        )
        if len(loader) == 0:
            raise InputError(explain("input_nodes", "at least one target", "0 targets", "name other targets"))
        return _train(model, loader, on, steps, lr, loss, None if store.types is None else store)

    trained = run(ranks, strategy)
    found = torch.zeros(6, dtype=torch.float64)
    if ranks.rank == 0:
        wanted = run(solo_mesh(reference_device or ranks.device), "split")
        found = torch.tensor([*trained.distances(wanted), *wanted.largest], dtype=torch.float64)
    ranks.control.broadcast(Call("broadcast errors", long_wait=True), found)  # all ranks wait here for rank 0
    loss_error, grad_error, buffer_error, largest_loss, gradient, buffer = found.tolist()
    errors = (loss_error, grad_error, buffer_error)
    return Verification(*errors, gradient, tolerance, steps, ranks.size, strategy, largest_loss, buffer)


def verify_step(model: Module, loss_fn: Callable[[Module, Batch], Tensor], batch: Batch) -> None:
    """Compare the loss and the gradients of all ranks with those of one process, or raise. A collective.

    For a training loop of your own, before its first step: ``model`` is the wrapped model in training mode, and
    ``loss_fn(model, batch)`` computes the loss as the loop does, from any mini-batch. It is called with small
    mini-batches of the loader that made ``batch``. Nothing is changed. On one process there is nothing to compare.
    """
    step_check = runtime_of(model).step_check
    assert step_check is not None  # of a model that parallelize has returned
    reason = step_check.compare(model, batch, loss_fn)
    if reason:
        fix = "keep the loader of the mini-batch, and let loss_fn run on any mini-batch of it, on rank 0 alone"
        raise InputError(explain("verify_step", "a step that one process can take", reason, fix))
