"""The mini-batch on one rank: the interface between loader and model.

``x`` is the mixed input tensor of layer 0: the loader has exchanged its rows, or refers to them in the mapped store
(``features.in_place``). A model wrapped by ``gsplit.parallelize`` takes ``(batch.x, batch.edge_index)``. A model
written against the batch calls, for every layer l, ``h_mixed, h_dst = batch.shuffle(l, h)`` and then its layer on
``batch.blocks[l]``. The rows of the last output are this rank's targets.

``mean`` and ``sum`` are over the whole mini-batch, and ``gather`` returns the rows of all its targets. They are
collectives: every rank calls them. A loss that goes through none of them is refused in backward (``minibatch.loss``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Protocol, Self, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from gsplit.device.packing import PinnedBuffers, PinnedMemory, map_tensors
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.device import DeviceRows
from gsplit.features.in_place import InPlaceRows
from gsplit.features.protocol import take_rows
from gsplit.graph.blocks import Block, FrontierIds, TimedSeeds
from gsplit.graph.types import EdgeType
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeWeightHandle
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.minibatch.loss import GatherRows, GlobalSum, LossGuard, positions_of
from gsplit.minibatch.pair_rows import PairRows
from gsplit.minibatch.route import Route, count_reduction
from gsplit.minibatch.shuffle import RowExchange, exchange_rows, exchange_stored, keep_prefix
from gsplit.sampling.minibatch import StepKey
from gsplit.telemetry import StepTelemetry

__all__ = [
    "Batch",
    "BatchContext",
    "BatchLayer",
    "PendingRows",
    "SmallBatches",
    "divisor",
    "exchange_input_rows",
]


B = TypeVar("B", bound="Batch")


def exchange_input_rows(
    rows: Tensor, route: Route | None, comm: Comm, step: int, pool: BufferPool, telemetry: StepTelemetry, of: str = ""
) -> Tensor:
    """The mixed input rows from the local ones. Without a route, the rank has read all of them. A collective otherwise.

    ``of``: the vertex type, in a heterogeneous graph.
    """
    with telemetry.span("exchange_features", rows.device):  # all ranks: once per step
        if route is None:
            return rows
        return exchange_stored(rows, route, comm, Call("exchange features", step, 0, of), pool, telemetry)


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Input rows that a device has not gathered from ``features``, or not exchanged along ``route`` yet.

    ``located``: where the ``num_local`` local rows are, from ``DeviceRows.locate``.
    """

    located: Any
    num_local: int
    route: Route | None
    features: DeviceRows
    comm: Comm

    def gather(self, device: torch.device, telemetry: StepTelemetry) -> Tensor:
        """The local input rows, on the device, with room behind them for those of other ranks."""
        features = self.features
        num_rows = self.num_local if self.route is None else self.route.num_buffer
        rows = torch.empty(num_rows, *features.row_shape, dtype=features.dtype, device=device)
        with telemetry.span("gather_features", device):
            features.gather(self.located, rows[: self.num_local])
        return rows


@dataclass(frozen=True, slots=True)
class BatchLayer:
    """One layer of a batch: its edges, the route of its source rows, and the stored values of its edges.

    ``route`` is None if nothing is exchanged at this layer in the forward pass: this rank computed or read all source
    rows, or the loader has received them already (layer 0 of ``data_cached``).
    """

    block: Block
    route: Route | None = None
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None

    @property
    def num_local(self) -> int:
        """Rows of the local frontier: all source rows where nothing is exchanged."""
        return self.block.num_src if self.route is None else self.route.num_local

    @property
    def destinations_are_local(self) -> bool:
        """Whether the destinations are the first rows of the local frontier (law 4); not at a boundary."""
        return self.route is None or self.route.destinations_are_local


class SmallBatches(Protocol):
    """Makes the small mini-batches on which ranks are compared with one process (``nn.checks.one_process``)."""

    def __call__(self, *, alone: bool) -> "Iterator[Batch]":
        """The mini-batches of all ranks, a collective, or ``alone``, the same ones as one process makes them."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class BatchContext:
    """The ranks, the step, the graph and the strategy of a batch.

    ``arrays``: the names of the stored arrays in the batch. ``each_vertex_once``: no vertex of the mini-batch is
    computed on two ranks, which BatchNorm requires. ``pool``: memory for the rows of its layers. ``deterministic``:
    gradients of rows are added in a fixed order. ``loader``: the number of the batch's loader on the mesh.
    ``transposed``: the layers whose blocks the model has needed by source, on a device; all batches of a loader share
    it, and later ones are made with such blocks. ``small_batches``: those of its loader.
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
    transposed: set[int] = field(default_factory=set)
    telemetry: StepTelemetry = field(default_factory=StepTelemetry)
    guard: LossGuard = field(default_factory=LossGuard)
    small_batches: "WeakMethod[SmallBatches] | None" = None


@dataclass(frozen=True, repr=False)
class Batch:
    """One rank's part of a mini-batch.

    ``x``: the mixed input rows. ``frontiers``: the vertices of the rows of every level, as two ``FrontierIds`` for
    hybrid(k), one below and one above the boundary, and as one otherwise. ``num_targets``: the targets of this rank;
    ``global_batch_size``: the targets of all ranks. ``pairs``: those of a ``LinkBatch``.

    A batch that the host samples for a device is first in pinned memory (``pin``), with the locations of its input rows
    (``pending``) in place of ``x``. The training thread moves it to the device with ``to``. If the device samples, the
    local rows of ``x`` are gathered, and ``to`` exchanges them.

    ``of``: the vertex type or relation, for a part of the batch of a heterogeneous graph (``typed_batch``).

    ``requested``: for ``data_cached``, the vertices whose input rows this rank has sent as their owner, and the route
    of these rows. The other strategies find both in layer 0 (``owned_inputs``).
    """

    x: Tensor
    labels: Tensor | None
    frontiers: tuple[FrontierIds, ...]
    layers: tuple[BatchLayer, ...]
    num_targets: int
    global_batch_size: int
    context: BatchContext
    pairs: PairRows | None = None
    seeds: TimedSeeds | None = None
    pending: PendingRows | None = None
    pinned: PinnedMemory | None = None
    of: str = ""
    requested: tuple[Tensor, Route | None] | None = None
    _versions: ClassVar[tuple[int, ...] | None] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._input_versions())

    def _input_versions(self) -> tuple[int, ...]:
        """How often the input rows were written to, as torch counts it, but for those made in inference mode."""
        return tuple(0 if x.is_inference() else x._version for x in self._inputs())

    def _inputs(self) -> tuple[Tensor, ...]:
        return (self.x,)

    @property
    def is_written(self) -> bool:
        """Whether the input rows were written to since the batch was made, such as by ``batch.x.sub_(mean)``."""
        return self._versions != self._input_versions()

    def _keep_written(self, made: B) -> B:
        """A batch made of this one, which counts as written to if this one was."""
        if self.is_written:
            object.__setattr__(made, "_versions", None)
        return made

    def __repr__(self) -> str:
        mesh = self.context.mesh
        key = self.context.key
        return (
            f"Batch(epoch {key.epoch}, step {key.step}: {self.num_targets} of {self.global_batch_size} targets, "
            f"{self.num_layers} layers, x {list(self.x.shape)}, "
            f"{self.context.strategy} on rank {mesh.rank} of {mesh.size})"
        )

    @property
    def batch_size(self) -> int:
        """The targets of this rank; the name is PyG's."""
        return self.num_targets

    @property
    def num_values(self) -> int:
        """The number of values of this rank's loss: one per target."""
        return self.num_targets

    @property
    def global_num_values(self) -> int:
        """``num_values`` over all ranks: the divisor of ``mean``."""
        return self.global_batch_size

    @property
    def n_id(self) -> Tensor:
        """Original ids of the local input rows, which are the first rows of ``x``. The first ids are the targets."""
        return self.frontiers[0].n_id

    @property
    def input_ids(self) -> Tensor:
        """``n_id`` in the numbering of the store."""
        return self.frontiers[0].ids

    @property
    def owned_inputs(self) -> tuple[Tensor, Route | None]:
        """The vertices whose input rows this rank reads, and the route to the mixed rows; None if it reads them all."""
        if self.requested is not None:
            return self.requested
        return self.input_ids[: self.layers[0].num_local], self.layers[0].route

    @property
    def num_layers(self) -> int:
        """The number of sampled layers, which must be that of the model."""
        return len(self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The edges of every layer, from the input up."""
        return tuple(layer.block for layer in self.layers)

    @property
    def key(self) -> StepKey:
        """The key of the step: seed, epoch and step."""
        return self.context.key

    @property
    def telemetry(self) -> StepTelemetry:
        """The counters and times of this step."""
        return self.context.telemetry

    @property
    def y(self) -> Tensor:
        """Labels of this rank's targets."""
        if self.labels is None:
            got = f"a graph with {', '.join(sorted(self.context.graph.store.names))}"
            raise InputError(explain("batch.y", "a graph with labels", got, "import the labels with the graph"))
        return self.labels

    @property
    def seed_time(self) -> Tensor:
        """The times of this rank's targets, in temporal sampling; the name is PyG's."""
        return self._timed_seeds("seed_time").time

    @property
    def input_id(self) -> Tensor:
        """The positions of this rank's targets in ``input_nodes``, in temporal sampling; the name is PyG's."""
        return self._timed_seeds("input_id").input_id

    def _timed_seeds(self, name: str) -> TimedSeeds:
        if self.seeds is None:
            fix = "give NeighborLoader(time_attr=..., input_time=...)"
            raise InputError(explain(f"batch.{name}", "targets with times", "targets without times", fix))
        return self.seeds

    @property
    def edge_index(self) -> "EdgeHandle[Batch]":
        """A placeholder for the edges, for models wrapped by ``gsplit.parallelize``."""
        return EdgeHandle(self)

    @property
    def has_edge_attr(self) -> bool:
        """Whether the batch has stored edge features."""
        return self.context.arrays.edge_attr is not None

    @property
    def has_edge_weight(self) -> bool:
        """Whether the batch has stored edge weights."""
        return self.context.arrays.edge_weight is not None

    @property
    def edge_attr(self) -> "EdgeAttrHandle[Batch]":
        """A placeholder for the edge features, for models wrapped by ``gsplit.parallelize``."""
        if not self.has_edge_attr:
            raise InputError(_no_edge_values("edge_attr", self.context.graph))
        return EdgeAttrHandle(self)

    @property
    def edge_weight(self) -> "EdgeWeightHandle[Batch]":
        """A placeholder for the edge weights, for models wrapped by ``gsplit.parallelize``."""
        if not self.has_edge_weight:
            raise InputError(_no_edge_values("edge_weight", self.context.graph))
        return EdgeWeightHandle(self)

    def part(self, of: str | EdgeType | None) -> "Batch":
        """The rows of a vertex type, or the edges of a relation. Without types there is only the batch itself, None."""
        if of is not None:
            got = f"a graph without types, and a part of {of}"
            raise InputError(explain("batch", "a heterogeneous graph", got, "call the model with batch.edge_index"))
        return self

    def frontier(self, level: int) -> FrontierIds:
        """The ids whose first ones are the local frontier of a level (law 4).

        With local frontiers [7, 8, 6] at level 0 and [7] at level 1, both levels return the ids [7, 8, 6].
        ``layers[1].num_local``, which is 1, is the length of the local frontier of level 1.
        """
        return next(found for found in reversed(self.frontiers) if found.level <= level)

    def destinations(self, layer: int) -> FrontierIds:
        """The ids whose first ``blocks[layer].num_dst`` are the destinations of a layer.

        In the example above, the destination of layer 0 is the first of [7, 8, 6]. Only at a boundary destinations are
        not rows of the layer's local frontier; there the ids are those of the level above.
        """
        return self.frontier(layer if self.layers[layer].destinations_are_local else layer + 1)

    def mixed_ids(self, layer: int) -> Tensor:
        """The original ids of a layer's mixed frontier. A collective."""
        return self._exchange_stored(layer, self.frontier(layer).n_id, "exchange mixed ids")

    def mixed_names(self, layer: int) -> Tensor:
        """``FrontierIds.names`` of a layer's mixed frontier. A collective."""
        return self._exchange_stored(layer, self.frontier(layer).names, "exchange mixed ids")

    def _exchange_stored(self, layer: int, rows: Tensor, purpose: str) -> Tensor:
        """Exchange values of the local rows of a layer for those of its mixed rows. A collective."""
        route = self.layers[layer].route
        local = rows[: self.layers[layer].num_local]
        if route is None:
            return local
        buffer = rows.new_empty(route.num_buffer, *rows.shape[1:])
        buffer[: route.num_local] = local
        call = Call(purpose, self.key.step, layer, self.of)
        return exchange_stored(buffer, route, self.context.mesh.shuffles, call, self.context.pool, self.telemetry)

    def gcn_norm(
        self, layer: int, *, add_self_loops: bool, fill_value: float, weighted: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """1 / sqrt(degree) of a layer's mixed rows, and the self-loop weights of its destinations. A collective.

        For the normalisation of GCN. Degrees are those of the whole graph, with the stored edge weights if
        ``weighted``; without edge weights all self-loops have weight 1, and None is returned for their weights.
        """
        context = self.context
        if self.frontiers[0].timed is not None:
            got = "targets with times, and degrees of the whole graph, which count later edges"
            fix = "use a layer without them, such as SAGEConv or GATConv, or GCNConv(normalize=False)"
            raise InputError(explain("GCN normalisation", "a mini-batch without times", got, fix))
        name = context.arrays.edge_weight if weighted else None
        found = context.graph.gcn_rows(add_self_loops=add_self_loops, fill_value=fill_value, edge_weight=name)
        device = self.x.device
        local_ids = self.frontier(layer).ids[: self.layers[layer].num_local]
        local = take_rows(found.deg_inv_sqrt, local_ids, device).to(dtype)
        mixed = self._exchange_stored(layer, local, "exchange degrees")
        if found.loop_weight is None:
            return mixed, None
        dst = self.destinations(layer).ids[: self.blocks[layer].num_dst]
        return mixed, take_rows(found.loop_weight, dst, device).to(dtype)

    def shuffle(self, layer: int, h: Tensor, *, of_wrapped_model: bool = False) -> tuple[Tensor, Tensor]:
        """Exchange the input rows of a layer. Returns ``(h_mixed, h_dst)``; differentiable. A collective.

        ``h`` are the rows of the local frontier, or ``x`` or rows computed from it for layer 0, which is exchanged
        already. ``of_wrapped_model``: the model was checked not to combine rows across a boundary.
        """
        if not 0 <= layer < self.num_layers:
            fix = "count layers from the input up"
            raise InputError(explain("layer", f"0 to {self.num_layers - 1}", layer, fix))
        self._refuse_input_gradients()
        found = self.layers[layer]
        context = self.context
        if not (found.destinations_are_local or of_wrapped_model):
            got = f"{context.strategy}, layer {layer}"
            fix = "wrap a PyG model with gsplit.parallelize, or use split"
            raise InputError(explain("batch.shuffle", "a strategy whose levels are prefixes of each other", got, fix))
        route = found.route if layer else None  # the loader exchanged the rows of layer 0
        self._check_input_rows(h, layer, found.block.num_src if route is None else route.num_local)
        with self.telemetry.span("shuffle"):
            if route is None:
                return keep_prefix(h, found.block.num_dst)
            return exchange_rows(
                h,
                route,
                context.mesh.shuffles,
                self._shuffle_call(layer, route),
                context.pool,
                self.telemetry,
                deterministic=context.deterministic,
            )

    def _shuffle_call(self, layer: int, route: Route) -> Call:
        return Call("shuffle" if route.appends else "boundary", self.key.step, layer, self.of)

    def row_exchange(self, layer: int, h: Tensor) -> RowExchange | None:
        """The exchange of ``shuffle``, for layers that read the rows of other ranks where they lie; host only.

        None if ``shuffle`` exchanges nothing at this layer, or at a boundary, where rows have other places.
        """
        route = self.layers[layer].route if layer else None
        if route is None or not route.appends or self.context.mesh.shuffles.size == 1:
            return None
        self._refuse_input_gradients()
        self._check_input_rows(h, layer, route.num_local)
        return RowExchange(route, self.context.mesh.shuffles, self._shuffle_call(layer, route), self.telemetry)

    def _check_input_rows(self, h: Tensor, layer: int, num_rows: int) -> None:
        if h.dim() < 2 or h.size(0) != num_rows:
            fix = "pass batch.x, or the output of a row-wise encoder of it"
            if layer:
                fix = "pass the output of the layer below, one row per destination"
            raise InputError(explain(f"h at layer {layer}", f"[{num_rows}, ...]", list(h.shape), fix))

    def _refuse_input_gradients(self) -> None:
        if self.x.requires_grad:
            fix = "train an embedding of your own instead; stored features have no gradient"
            raise InputError(explain("batch.x", "requires_grad=False", f"requires_grad={self.x.requires_grad}", fix))

    def _check_per_target(self, values: Tensor, name: str) -> None:
        if values.dim() != 1 or values.size(0) != self.num_values:
            fix = 'give one value per target of this rank, for example cross_entropy(..., reduction="none")'
            raise InputError(explain(name, f"shape [{self.num_values}]", list(values.shape), fix))

    def _global_sum(self, rows: Tensor, name: str) -> Tensor:
        self._refuse_input_gradients()
        context = self.context
        detail = f"epoch {context.key.epoch} of loader {context.loader}"
        if context.guard.model_mode:
            detail += f", model: {context.guard.model_mode}"
        call = Call(name, context.key.step, detail=detail)
        count_reduction(prod(rows.shape[1:]) * rows.element_size(), context.mesh.size, self.telemetry)
        total: Tensor = GlobalSum.apply(rows, context.mesh, call, context.guard)  # type: ignore[no-untyped-call]
        return total

    def sum(self, values: Tensor) -> Tensor:
        """Sum of one value per target over the whole mini-batch, equal on all ranks. A collective."""
        self._check_per_target(values, "values")
        with self.context.guard.watch(self, values):
            return self._global_sum(values, "sum")

    def mean(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean of one value per target over the whole mini-batch, equal on all ranks. A collective.

        With ``weight``, one per target: sum(weight * values) / sum(weight), both sums over all ranks and at least in
        float32; 0 if all weights are 0. The gradient assumes that parameter gradients are then AVERAGED over the ranks.

        A value may depend on the outputs of its own target, on parameters, and on rows from ``gather``. Every term of
        the loss that reaches the model goes through ``mean``, ``sum`` or ``gather``: ``out.pow(2).mean()`` beside it is
        a mean over this rank's rows, and an error in the first backward.
        """
        total, weights = self.weighted_sum(values, weight)
        return total / divisor(weights)

    def weighted_sum(self, values: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
        """sum(weight * values) and sum(weight), of which ``mean`` is the quotient; for means over several mini-batches.

        Without weights every target has weight 1. A collective.
        """
        self._check_per_target(values, "values")
        if weight is not None:
            self._check_per_target(weight, "weight")
        with self.context.guard.watch(self, values, weight):
            values = values.to(torch.promote_types(values.dtype, torch.float32))  # 2048 + 1 is 2048 in half precision
            if weight is None:
                return self._global_sum(values, "mean"), self.global_num_values
            weight = weight.detach().to(values.dtype)
            total, weights = self._global_sum(torch.stack([weight * values, weight], dim=1), "weighted mean").unbind()
            return total, weights.detach()

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all targets of the mini-batch, from one row per target of this rank; differentiable.

        All ranks get the same rows in the same order, which does not depend on their number: row i of this rank is row
        ``positions[i]``. For losses in which the value of a target depends on other targets:

            Z, Y = batch.gather(z), batch.gather(batch.y)
            loss = batch.mean(contrastive_values(z, batch.y, Z, Y, batch.positions))  # one value per own target

        or, if every rank computes the same loss from all rows, ``loss = barlow_loss(batch.gather(z))``. A collective,
        also in backward: its rows are in the loss on every rank or on none.
        """
        if rows.dim() == 0 or rows.size(0) != self.num_values:
            fix = "give one row per target of this rank, such as the output of the model or batch.y"
            raise InputError(explain("batch.gather", f"[{self.num_values}, ...]", list(rows.shape), fix))
        context = self.context
        with context.guard.watch(self, gathered=rows):
            positions, num_rows = self._positions()
            call = Call("gather rows", context.key.step)
            count_reduction(num_rows * prod(rows.shape[1:]) * rows.element_size(), context.mesh.size, self.telemetry)
            sent = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
            gathered: Tensor = GatherRows.apply(sent, positions, num_rows, context.mesh, call, context.guard)  # type: ignore[no-untyped-call]
            return gathered.to(rows.dtype)

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's targets, or pairs, among the rows of ``gather``. A collective at first."""
        with self.context.guard.watch(self):
            return self._positions()[0]

    def _positions(self) -> tuple[Tensor, int]:
        guard = self.context.guard
        if guard.positions is None:
            guard.positions = positions_of(self.value_keys, self.context.mesh, self.key.step)
        return guard.positions

    @property
    def value_keys(self) -> Tensor:
        """Names of the values of this rank's loss that do not depend on the ranks: of its targets, or of its pairs."""
        if self.pairs is not None:
            return self.pairs.value_keys
        if self.seeds is not None:  # a vertex may be a target at several times
            return self.seeds.input_id
        return self.frontier(self.num_layers).names[: self.num_targets]

    def cast(self, dtype: torch.dtype) -> Self:
        """The batch with its input rows converted to a type. Features may be stored in half precision."""
        return self if self.x.dtype == dtype else self._keep_written(replace(self, x=self.x.to(dtype)))

    def pin(self, buffers: PinnedBuffers) -> Self:
        """The batch with its tensors in pinned memory, from which one copy moves them to a device."""
        data, pinned = buffers.pin(self._packed())
        return self._unpacked(data, pinned)

    def device_tensors(self) -> list[Tensor]:
        """The tensors of the batch that are on the device."""
        found: dict[int, Tensor] = {}
        map_tensors(lambda tensor: found.setdefault(id(tensor), tensor), (self.x, *self._packed()))
        return [tensor for tensor in found.values() if tensor.device == self.context.mesh.device]

    def _packed(self) -> tuple[Any, ...]:
        """What ``pin`` and ``to`` copy."""
        return self.labels, self.frontiers, self.layers, self.pairs, self.seeds, self.pending, self.requested

    def _unpacked(self, data: tuple[Any, ...], pinned: PinnedMemory | None) -> Self:
        labels, frontiers, layers, pairs, seeds, pending, requested = data
        return replace(
            self,
            labels=labels,
            frontiers=frontiers,
            layers=layers,
            pairs=pairs,
            seeds=seeds,
            pending=pending,
            requested=requested,
            pinned=pinned,
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the batch to the device of the mesh. Other devices are refused. A collective if rows are pending."""
        device = torch.device(device)
        own = self.context.mesh.device
        if device.type != own.type or device.index not in (None, own.index):
            fix = "make the mesh for that device: gsplit.init(device=...)"
            raise InputError(explain("batch.to", f"the mesh's device, {own}", device, fix))
        return self.copy_to_device().exchange_rows()

    def copy_to_device(self) -> Self:
        """The first part of ``to``: copy a pinned batch to the device, and gather its local input rows there.

        Also groups the edges of some layers by source: with prefetching, while the step before trains.
        """
        if self.pinned is None:
            return self
        device = self.context.mesh.device
        with self.telemetry.span("copy", device):
            moved = self._unpacked(self.pinned.to(device, self._packed()), None)
        assert moved.pending is not None  # a batch is pinned with its rows located
        layers = [
            replace(layer, block=layer.block.transpose()) if number in self.context.transposed else layer
            for number, layer in enumerate(moved.layers)
        ]
        return replace(moved, x=moved.pending.gather(device, self.telemetry), layers=tuple(layers))

    @property
    def allocated(self) -> list[Tensor]:
        """The tensors that ``copy_to_device`` has allocated: one for all that was copied, and what it has made."""
        made = [block.by_source for block in self.blocks if block.by_source is not None]
        return [
            self.x,
            self.blocks[0].indptr,
            *(t for each in made for t in (each.offsets, each.places, each.dst_rows)),
        ]

    def exchange_rows(self) -> Self:
        """The second part: exchange the input rows. A collective if rows are pending."""
        pending = self.pending
        if pending is None:
            return self
        context = self.context
        x = exchange_input_rows(self.x, pending.route, pending.comm, self.key.step, context.pool, self.telemetry)
        moved = replace(self, x=x, pending=None)
        moved.record_bytes()
        return moved

    def record_bytes(self) -> None:
        """Record the size of the batch in telemetry (law 7)."""
        sizes = [array.nbytes for array in self._arrays()]
        self.telemetry.record_max("batch_bytes", sum(sizes))
        self.telemetry.record_max("largest_batch_array_bytes", max(sizes))

    def _arrays(self) -> list[Tensor]:
        """The large tensors of the batch."""
        values = [value for layer in self.layers for value in (layer.edge_attr, layer.edge_weight)]
        x = self.x.rows if isinstance(self.x, InPlaceRows) else self.x
        arrays = [x, *(found.ids for found in self.frontiers), *(block.src_rows for block in self.blocks)]
        return arrays + [value for value in values if value is not None]


def divisor(weight: Tensor | float) -> Tensor | float:
    """The divisor of a mean: the weight, or 1 if the weight is 0, so that a sum of 0 stays 0."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.ones_like(weight), weight)
    return weight or 1


def _no_edge_values(name: str, graph: LocalGraph) -> str:
    stored = ", ".join(graph.store.edge_names) or "no per-edge arrays"
    fix = f"name a stored per-edge array: NeighborLoader(..., {name}=NAME)"
    return explain(f"batch.{name}", f"a graph with stored values for {name}", f"a store that has {stored}", fix)
