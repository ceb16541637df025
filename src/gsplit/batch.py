"""A mini-batch as the training loop sees it on one rank: input rows, labels, and the collectives of one step.

``x`` is the mixed input tensor of layer 0, exchanged already. A model wrapped by ``gsplit.parallelize`` takes
``(batch.x, batch.edge_index)``. A model written against the batch does, for every layer l,
``h_mixed, h_dst = batch.shuffle(l, h)`` and then its layer on ``batch.blocks[l]``. Rows of the last output are this
rank's targets. ``mean`` and ``sum`` are over the whole mini-batch and are collectives: every rank calls them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gsplit.blocks import Block, ShuffleIndex
from gsplit.distributed.comm import Call, Comm
from gsplit.errors import InputError, explain
from gsplit.kernels.buffers import BufferPool
from gsplit.sampling.minibatch import StepKey
from gsplit.shuffle import keep_prefix, shuffle
from gsplit.telemetry import Telemetry

__all__ = ["Batch", "EdgeHandle", "Handle", "WeightHandle"]


class _GlobalSum(torch.autograd.Function):
    """Sum of local rows over all ranks. Backward: times the ranks, on local rows; gradients are averaged later."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Comm, call: Call) -> Tensor:
        ctx.shape, ctx.size = values.shape, comm.size
        total = values.sum()
        comm.all_reduce(call, total).wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (g * ctx.size).expand(ctx.shape), None, None


def _global_sum(values: Tensor, comm: Comm, call: Call) -> Tensor:
    total: Tensor = _GlobalSum.apply(values, comm, call)  # type: ignore[no-untyped-call]
    return total


_FIX = (
    "hand it to a model wrapped by gsplit.parallelize, or use batch.blocks[l].edge_index() with batch.shuffle(l, h), "
    "one block per layer"
)


class Handle:
    """Refuses to be a tensor."""

    name = "batch.edge_index"

    def __init__(self, batch: "Batch") -> None:
        self.batch = batch

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        operation = getattr(function, "__name__", str(function))
        got = f"{cls.name}, which stands for one block per layer"
        raise InputError(explain(f"torch.{operation}", "a tensor of edges", got, _FIX))

    def _refuse(self, *args: object) -> NoReturn:
        raise InputError(explain(self.name, "no tensor operation", "one", _FIX))

    __iter__ = __getitem__ = __len__ = __add__ = __radd__ = __sub__ = __mul__ = __lt__ = __gt__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(explain(f"{self.name}.{name}", "no tensor operation", "one", _FIX))


class EdgeHandle(Handle):
    """Stands where PyG models expect ``edge_index``."""


class WeightHandle(Handle):
    """Stands where PyG models expect ``edge_weight``: GCN's normalisation by the degrees of the whole graph."""

    name = "batch.edge_weight"


@dataclass(frozen=True)
class Batch:
    """One rank's part of a mini-batch.

    ``n_id`` names this rank's own input rows, which are the first rows of ``x``; rows received from others follow
    them in ``x``. ``comm`` are the ranks that exchange rows of this batch, ``world`` all that share the mini-batch.
    ``scales`` are the factors of GCN's normalisation, one for every mixed row of every layer, if they were asked for.
    """

    x: Tensor
    labels: Tensor | None
    n_id: Tensor
    blocks: tuple[Block, ...]
    indices: tuple[ShuffleIndex, ...]
    batch_size: int
    global_batch_size: int
    key: StepKey
    comm: Comm
    world: Comm
    strategy: str
    telemetry: Telemetry
    pool: BufferPool
    deterministic: bool = False
    scales: tuple[Tensor, ...] | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the sample, which must be the model's."""
        return len(self.blocks)

    @property
    def y(self) -> Tensor:
        """Labels of this rank's targets."""
        if self.labels is None:
            raise InputError(explain("batch.y", "a graph with labels", "none", "import the labels with the graph"))
        return self.labels

    @property
    def edge_index(self) -> EdgeHandle:
        """What a wrapped PyG model takes in place of an edge tensor."""
        return EdgeHandle(self)

    @property
    def edge_weight(self) -> WeightHandle:
        """What a wrapped GCN takes in place of edge weights: its normalisation by the whole graph's degrees."""
        if self.scales is None:
            fix = "make the loader with NeighborLoader(..., gcn_norm=True)"
            raise InputError(explain("batch.edge_weight", "GCN's normalisation", "none", fix))
        return WeightHandle(self)

    @property
    def each_vertex_once(self) -> bool:
        """Whether no vertex of the mini-batch is computed on two ranks: what BatchNorm needs."""
        return self.comm.size == self.world.size

    def mixed_ids(self, layer: int) -> Tensor:
        """Original ids of the rows of a layer's mixed frontier. A collective."""
        index = self.indices[layer]
        own = self.n_id[: index.num_local]
        ids = torch.cat([own, own.new_empty(index.num_received)])
        call = Call("exchange mixed ids", self.key.step, layer)
        leaving, arriving = own[index.send_rows], ids[index.num_local :]
        self.comm.all_to_all(call, arriving, leaving, index.recv_counts, index.send_counts).wait()
        return ids

    def shuffle(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden rows of this rank to ``(h_mixed, h_dst)`` of a layer; differentiable. ``x`` is mixed already."""
        if not 0 <= layer < self.num_layers:
            fix = "count layers from the input up"
            raise InputError(explain("layer", f"0 to {self.num_layers - 1}", layer, fix))
        index = self.indices[layer]
        self._refuse_input_gradients()
        if layer == 0:
            if h.dim() < 2 or h.size(0) != index.num_mixed:
                fix = "pass batch.x, or what a row-wise encoder made of it"
                raise InputError(explain("h at layer 0", f"[{index.num_mixed}, ...]", list(h.shape), fix))
            return keep_prefix(h, index.num_dst)
        if h.dim() < 2 or h.size(0) != index.num_local:
            fix = "pass the output of the layer below, one row per destination"
            raise InputError(explain(f"h at layer {layer}", f"[{index.num_local}, ...]", list(h.shape), fix))
        call = Call("shuffle", self.key.step, layer)
        self.telemetry.count("bytes_sent", index.num_sent * h[:1].nbytes)
        self.telemetry.count("bytes_received", index.num_received * h[:1].nbytes)
        self.telemetry.count("collectives", 1)
        with self.telemetry.span("shuffle"):
            return shuffle(h, index, self.comm, call, self.pool, deterministic=self.deterministic)

    def _refuse_input_gradients(self) -> None:
        if self.x.requires_grad:
            fix = "train an embedding of your own instead; stored features carry no gradient"
            raise InputError(explain("batch.x", "no gradient asked for", "requires_grad", fix))

    def _check_rows(self, values: Tensor) -> None:
        self._refuse_input_gradients()
        if values.dim() != 1 or values.size(0) != self.batch_size:
            fix = 'give one value per target of this rank, for example cross_entropy(..., reduction="none")'
            raise InputError(explain("values", f"shape [{self.batch_size}]", list(values.shape), fix))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the whole mini-batch of one value per target, the same on every rank. A collective."""
        self._check_rows(values)
        return _global_sum(values, self.world, Call("sum", self.key.step))

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the whole mini-batch of one value per target, the same on every rank. A collective.

        Its gradient is right when parameter gradients are then AVERAGED over the ranks.
        """
        self._check_rows(values)
        return _global_sum(values, self.world, Call("mean", self.key.step)) / self.global_batch_size

    def cast(self, dtype: torch.dtype) -> "Batch":
        """The batch with its input rows in another type: features may be stored in half precision."""
        return self if self.x.dtype == dtype else replace(self, x=self.x.to(dtype))

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device."""
        device = torch.device(device)
        if device != self.x.device:
            fix = "make the mesh for that device: gsplit.init(device=...)"
            raise InputError(explain("batch.to", f"the mesh's device, {self.x.device}", device, fix))
        move: Callable[[Any], Any] = lambda item: item.to(device)  # noqa: E731
        return replace(
            self,
            x=move(self.x),
            labels=None if self.labels is None else move(self.labels),
            n_id=move(self.n_id),
            blocks=tuple(move(block) for block in self.blocks),
            indices=tuple(move(index) for index in self.indices),
            scales=None if self.scales is None else tuple(move(scale) for scale in self.scales),
        )
