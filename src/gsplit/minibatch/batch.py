"""A mini-batch as the training loop sees it on one rank: the interface between loader and model.

``x`` is the mixed input tensor of layer 0, exchanged already. A model wrapped by ``gsplit.parallelize`` takes
``(batch.x, batch.edge_index)``. A model written against the batch does, for every layer l,
``h_mixed, h_dst = batch.shuffle(l, h)`` and then its layer on ``batch.blocks[l]``. Rows of the last output are this
rank's targets. ``mean`` and ``sum`` are over the whole mini-batch and are collectives: every rank calls them. Ranks own
different numbers of targets, so a plain mean over a rank's rows is silently wrong on several ranks; backward refuses it
(``LossGuard``).
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.device.packing import PinnedBuffers, PinnedMemory
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.device import DeviceRows
from gsplit.features.protocol import take_rows
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeWeightHandle
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.minibatch.route import Route, count_reduction
from gsplit.minibatch.shuffle import exchange_rows, exchange_stored, keep_prefix
from gsplit.sampling.minibatch import StepKey
from gsplit.telemetry import StepTelemetry

__all__ = ["Batch", "BatchContext", "BatchLayer", "LossGuard", "PendingRows", "divisor", "exchange_input_rows"]


class LossGuard:
    """Checks that a loss went through ``batch.mean`` or ``batch.sum`` before backward reaches the model."""

    def __init__(self) -> None:
        self._backward = -1
        self.model = ""
        """Train/eval mode of the model that was called with the batch; the same on every rank."""

    def reduced(self) -> None:
        """Called when backward passes the global sum of this batch."""
        self._backward = torch._C._current_graph_task_id()

    def check(self, gradient: Tensor) -> None:
        """Called with the gradient of a wrapped model's output."""
        if self._backward != torch._C._current_graph_task_id():
            fix = 'write loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none")), or use batch.sum'
            got = "a loss of this rank's rows alone, whose gradient would be wrong on several ranks"
            raise InputError(explain("backward", "a loss from batch.mean or batch.sum of this batch", got, fix))


class _GlobalSum(torch.autograd.Function):
    """Sum of local rows over all ranks. Backward: times the ranks, on local rows; gradients are averaged later.

    rows [n] to a scalar, rows [n, k] to [k].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, call: Call, guard: LossGuard) -> Tensor:
        ctx.shape, ctx.size, ctx.guard = rows.shape, comm.size, guard
        total = rows.sum() if rows.dim() == 1 else rows.sum(0)
        comm.all_reduce(call, total).wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        ctx.guard.reduced()
        return (g * ctx.size).expand(ctx.shape), None, None, None


def exchange_input_rows(
    rows: Tensor, route: Route | None, comm: Comm, step: int, pool: BufferPool, telemetry: StepTelemetry
) -> Tensor:
    """The mixed input rows from the own ones; None: the rank has read all of them. A collective."""
    with telemetry.span("exchange_features", rows.device):  # all ranks: once per step
        if route is None:
            return rows
        return exchange_stored(rows, route, comm, Call("exchange features", step, 0), pool, telemetry)


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Input rows that a device has still to gather out of ``features``, and to exchange along ``route``.

    ``located``: where the ``num_local`` own rows are, from ``DeviceRows.locate``.
    """

    located: Any
    num_local: int
    route: Route | None
    features: DeviceRows
    comm: Comm

    def gather(self, device: torch.device, step: int, pool: BufferPool, telemetry: StepTelemetry) -> Tensor:
        """The mixed input rows, on the device. A collective."""
        features, route = self.features, self.route
        num_rows = self.num_local if route is None else route.num_buffer
        rows = torch.empty(num_rows, *features.row_shape, dtype=features.dtype, device=device)
        with telemetry.span("gather_features", device):
            features.gather(self.located, rows[: self.num_local])
        return exchange_input_rows(rows, route, self.comm, step, pool, telemetry)


@dataclass(frozen=True, slots=True)
class BatchLayer:
    """One layer of a batch: its edges, the route of its source rows, and the edges' stored values, if there are any.

    ``route``: None where this rank has all source rows itself.
    """

    block: Block
    route: Route | None = None
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None

    @property
    def num_local(self) -> int:
        """Rows of the local frontier: this rank's own source rows."""
        return self.block.num_src if self.route is None else self.route.num_local

    @property
    def destinations_are_local(self) -> bool:
        """Whether the destinations are the first rows of the local frontier; not at a boundary."""
        return self.route is None or self.route.destinations_are_local


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What a batch is part of: the ranks, the step, the graph, and the strategy that made it.

    ``each_vertex_once``: no vertex of the mini-batch is computed on two ranks, which is what BatchNorm needs.
    ``arrays`` are the names of the stored arrays in the batch. ``loader`` is the number of its loader on the mesh.
    ``pool``: memory for the rows of its layers. ``deterministic``: gradients of rows are added in one order.
    """

    mesh: Mesh
    key: StepKey
    graph: LocalGraph
    arrays: ArrayNames
    strategy: str
    each_vertex_once: bool
    pool: BufferPool
    deterministic: bool = False
    loader: int = 0
    telemetry: StepTelemetry = field(default_factory=StepTelemetry)
    guard: LossGuard = field(default_factory=LossGuard)


@dataclass(frozen=True, repr=False)
class Batch:
    """One rank's part of a mini-batch.

    ``x``: mixed input rows. ``frontiers``: which vertices the rows of every level are: two for hybrid(k), with the
    vertices below and above the boundary, one otherwise. ``num_targets``: this rank's; ``global_batch_size``: those of
    all ranks.

    A batch that the host has loaded for a device lies in pinned memory (``pin``) and has no input rows yet, only where
    they are (``pending``). The training thread moves it with ``to``.
    """

    x: Tensor
    labels: Tensor | None
    frontiers: tuple[FrontierIds, ...]
    layers: tuple[BatchLayer, ...]
    num_targets: int
    global_batch_size: int
    context: BatchContext
    pending: PendingRows | None = None
    pinned: PinnedMemory | None = None

    def __repr__(self) -> str:
        mesh, key = self.context.mesh, self.context.key
        return (
            f"Batch(epoch {key.epoch}, step {key.step}: {self.num_targets} of {self.global_batch_size} targets, "
            f"{self.num_layers} layers, x {list(self.x.shape)}, "
            f"{self.context.strategy} on rank {mesh.rank} of {mesh.size})"
        )

    @property
    def batch_size(self) -> int:
        """This rank's targets, under PyG's name."""
        return self.num_targets

    @property
    def n_id(self) -> Tensor:
        """Original ids of this rank's own input rows, the first rows of ``x``: targets before all."""
        return self.frontiers[0].n_id

    @property
    def input_ids(self) -> Tensor:
        """``n_id`` in the store's numbering."""
        return self.frontiers[0].ids

    @property
    def num_layers(self) -> int:
        """Layers of the sample, which must be the model's."""
        return len(self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The edges of every layer, from the input up."""
        return tuple(layer.block for layer in self.layers)

    @property
    def key(self) -> StepKey:
        """The name of the step: seed, epoch and step."""
        return self.context.key

    @property
    def telemetry(self) -> StepTelemetry:
        """Where the numbers of this step are collected."""
        return self.context.telemetry

    @property
    def y(self) -> Tensor:
        """Labels of this rank's targets."""
        if self.labels is None:
            raise InputError(explain("batch.y", "a graph with labels", "none", "import the labels with the graph"))
        return self.labels

    @property
    def edge_index(self) -> "EdgeHandle[Batch]":
        """What a wrapped PyG model takes in place of an edge tensor."""
        return EdgeHandle(self)

    @property
    def has_edge_attr(self) -> bool:
        """Whether the batch carries stored edge features."""
        return self.context.arrays.edge_attr is not None

    @property
    def has_edge_weight(self) -> bool:
        """Whether the batch carries stored edge weights."""
        return self.context.arrays.edge_weight is not None

    @property
    def edge_attr(self) -> "EdgeAttrHandle[Batch]":
        """What a wrapped PyG model takes in place of edge features."""
        if not self.has_edge_attr:
            raise InputError(_no_edge_values("edge_attr", self.context.graph))
        return EdgeAttrHandle(self)

    @property
    def edge_weight(self) -> "EdgeWeightHandle[Batch]":
        """What a wrapped PyG model takes in place of edge weights."""
        if not self.has_edge_weight:
            raise InputError(_no_edge_values("edge_weight", self.context.graph))
        return EdgeWeightHandle(self)

    def frontier(self, level: int) -> FrontierIds:
        """The vertices of the local frontier of a level, which are the first ones of these."""
        return next(found for found in reversed(self.frontiers) if found.level <= level)

    def destinations(self, layer: int) -> FrontierIds:
        """The vertices whose in-edges a layer's block has, which are the first ones of these."""
        return self.frontier(layer if self.layers[layer].destinations_are_local else layer + 1)

    def mixed_ids(self, layer: int) -> Tensor:
        """Original ids of the rows of a layer's mixed frontier. A collective."""
        return self._exchange_stored(layer, self.frontier(layer).n_id, "exchange mixed ids")

    def _exchange_stored(self, layer: int, rows: Tensor, purpose: str) -> Tensor:
        """Values of a layer's mixed rows from those of the own ones, without gradient. A collective."""
        route = self.layers[layer].route
        own = rows[: self.layers[layer].num_local]
        if route is None:
            return own
        buffer = rows.new_empty(route.num_buffer, *rows.shape[1:])
        buffer[: route.num_local] = own
        call = Call(purpose, self.key.step, layer)
        return exchange_stored(buffer, route, self.context.mesh.shuffles, call, self.context.pool, self.telemetry)

    def gcn_norm(
        self, layer: int, *, add_self_loops: bool, fill_value: float, weighted: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Of GCN's normalisation: 1 / sqrt(degree) of a layer's mixed rows, and the destinations' self-loop weights.

        Degrees are those of the whole graph, with the stored edge weights if ``weighted``; without them all self-loops
        weigh 1, and their weights are None. A collective.
        """
        context = self.context
        name = context.arrays.edge_weight if weighted else None
        found = context.graph.gcn_rows(add_self_loops=add_self_loops, fill_value=fill_value, edge_weight=name)
        device = self.x.device
        own = take_rows(found.deg_inv_sqrt, self.frontier(layer).ids[: self.layers[layer].num_local], device).to(dtype)
        mixed = self._exchange_stored(layer, own, "exchange degrees")
        if found.loop_weight is None:
            return mixed, None
        dst = self.destinations(layer).ids[: self.blocks[layer].num_dst]
        return mixed, take_rows(found.loop_weight, dst, device).to(dtype)

    def shuffle(self, layer: int, h: Tensor, *, of_wrapped_model: bool = False) -> tuple[Tensor, Tensor]:
        """Hidden rows of this rank to ``(h_mixed, h_dst)`` of a layer; differentiable. ``x`` is exchanged already.

        ``of_wrapped_model``: the model was checked not to join rows across a boundary.
        """
        if not 0 <= layer < self.num_layers:
            fix = "count layers from the input up"
            raise InputError(explain("layer", f"0 to {self.num_layers - 1}", layer, fix))
        self._refuse_input_gradients()
        found, context = self.layers[layer], self.context
        if not (found.destinations_are_local or of_wrapped_model):
            got = f"{context.strategy}, layer {layer}"
            fix = "wrap a PyG model with gsplit.parallelize, or use split"
            raise InputError(explain("batch.shuffle", "a strategy whose levels are prefixes of each other", got, fix))
        route = found.route if layer else None  # layer 0's rows were exchanged by the loader
        num_input = found.block.num_src if route is None else route.num_local
        if h.dim() < 2 or h.size(0) != num_input:
            below = "batch.x, or what a row-wise encoder made of it"
            above = "the output of the layer below, one row per destination"
            expected, fix = f"[{num_input}, ...]", f"pass {above if layer else below}"
            raise InputError(explain(f"h at layer {layer}", expected, list(h.shape), fix))
        with self.telemetry.span("shuffle"):
            if route is None:
                return keep_prefix(h, found.block.num_dst)
            call = Call("shuffle" if route.appends else "boundary", context.key.step, layer)
            return exchange_rows(
                h,
                route,
                context.mesh.shuffles,
                call,
                context.pool,
                self.telemetry,
                deterministic=context.deterministic,
            )

    def _refuse_input_gradients(self) -> None:
        if self.x.requires_grad:
            fix = "train an embedding of your own instead; stored features carry no gradient"
            raise InputError(explain("batch.x", "no gradient asked for", "requires_grad", fix))

    def _check_per_target(self, values: Tensor, name: str) -> None:
        if values.dim() != 1 or values.size(0) != self.num_targets:
            fix = 'give one value per target of this rank, for example cross_entropy(..., reduction="none")'
            raise InputError(explain(name, f"shape [{self.num_targets}]", list(values.shape), fix))

    def _global_sum(self, rows: Tensor, name: str) -> Tensor:
        self._refuse_input_gradients()
        context = self.context
        detail = f"epoch {context.key.epoch} of loader {context.loader}"
        if context.guard.model:
            detail += f", model: {context.guard.model}"
        call = Call(name, context.key.step, detail=detail)
        count_reduction(prod(rows.shape[1:]) * rows.element_size(), context.mesh.size, self.telemetry)
        total: Tensor = _GlobalSum.apply(rows, context.mesh.world, call, context.guard)  # type: ignore[no-untyped-call]
        return total

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the whole mini-batch of one value per target, the same on every rank. A collective."""
        self._check_per_target(values, "values")
        return self._global_sum(values, "sum")

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean over the whole mini-batch of one value per target, the same on every rank. A collective.

        ``weight``, one per target: sum(weight * values) / sum(weight), both sums over all ranks and in float32 at
        least; 0 where all weights are 0. The gradient is right when parameter gradients are then AVERAGED over ranks.
        """
        total, weights = self.weighted_sum(values, weight)
        return total / divisor(weights)

    def weighted_sum(self, values: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
        """Both halves of ``mean``: sum(weight * values) and sum(weight), for means over several mini-batches.

        Without weights every target weighs 1. A collective.
        """
        self._check_per_target(values, "values")
        values = values.to(torch.promote_types(values.dtype, torch.float32))  # 2048 + 1 is 2048 in half precision
        if weight is None:
            return self._global_sum(values, "mean"), self.global_batch_size
        self._check_per_target(weight, "weight")
        weight = weight.detach().to(values.dtype)
        total, weights = self._global_sum(torch.stack([weight * values, weight], dim=1), "weighted mean").unbind()
        return total, weights.detach()

    def cast(self, dtype: torch.dtype) -> "Batch":
        """The batch with its input rows in another type: features may be stored in half precision."""
        return self if self.x.dtype == dtype else replace(self, x=self.x.to(dtype))

    def pin(self, buffers: PinnedBuffers) -> "Batch":
        """The batch with its tensors in pinned memory, from which they cross to a device in one copy."""
        data, pinned = buffers.pin((self.labels, self.frontiers, self.layers, self.pending))
        labels, frontiers, layers, pending = data
        return replace(self, labels=labels, frontiers=frontiers, layers=layers, pending=pending, pinned=pinned)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on the mesh's device; another one is refused. A collective for a pinned batch, which is moved."""
        device, own = torch.device(device), self.context.mesh.device
        if device.type != own.type or device.index not in (None, own.index):
            fix = "make the mesh for that device: gsplit.init(device=...)"
            raise InputError(explain("batch.to", f"the mesh's device, {own}", device, fix))
        if self.pinned is None:
            return self
        with self.telemetry.span("copy", own):
            data = self.pinned.to(own, (self.labels, self.frontiers, self.layers, self.pending))
        labels, frontiers, layers, pending = data
        assert pending is not None  # rows are located before a batch is pinned
        x = pending.gather(own, self.key.step, self.context.pool, self.telemetry)
        moved = replace(self, x=x, labels=labels, frontiers=frontiers, layers=layers, pending=None, pinned=None)
        moved.record_bytes()
        return moved

    def record_bytes(self) -> None:
        """Note in telemetry what the batch holds (law 7)."""
        values = [value for layer in self.layers for value in (layer.edge_attr, layer.edge_weight)]
        arrays = [self.x, *(found.ids for found in self.frontiers), *(block.src_rows for block in self.blocks)]
        sizes = [array.nbytes for array in arrays] + [value.nbytes for value in values if value is not None]
        self.telemetry.record_max("batch_bytes", sum(sizes))
        self.telemetry.record_max("largest_batch_array_bytes", max(sizes))


def divisor(weight: Tensor | float) -> Tensor | float:
    """What sums are divided by for a mean: their weight, or 1 where nothing weighs, so that 0 stays 0."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.ones_like(weight), weight)
    return weight or 1


def _no_edge_values(name: str, graph: LocalGraph) -> str:
    stored = ", ".join(graph.store.edge_names) or "no per-edge arrays"
    fix = f"name a stored per-edge array: NeighborLoader(..., {name}=NAME)"
    return explain(f"batch.{name}", f"a graph with stored values for {name}", f"a store that has {stored}", fix)
