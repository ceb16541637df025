"""The second stage of a step: from a sampled step to a batch with input rows, labels and edge values.

``load`` may run ahead of training, in the thread of the loader. The third stage, ``Batch.to``, runs in the training
thread.

On CPUs ``load`` does all the work. If the ranks are on one host and map the stored features, nothing is read or
exchanged here: ``batch.x`` refers to the mixed rows in the map (``features.in_place``); a loader that works ahead
reads them all from the map. Otherwise it reads the local input rows directly into the mixed tensor of layer 0, and
receives rows of other ranks into the rest of it, without further copies (law 4: local rows come first).

For a device, ``load`` locates the rows, and reads those that the device cannot reach (``features.device``). If the host
has sampled, one copy moves everything to the device (``device.packing``), which gathers the rows; this may be launched
one step ahead, on a second stream, because stored features have no gradient. If the device has sampled, it gathers them
here. The exchange of the rows is left to the thread of training, which issues all collectives of the device.
"""

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self
from weakref import WeakMethod

import torch
from torch import Tensor

from gsplit.device.devices import copy_to_device
from gsplit.device.packing import PinnedBuffers, map_tensors
from gsplit.distributed.comm.comm import Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.features.device import DeviceRows, RowsLocated, StagedRows
from gsplit.features.in_place import InPlaceRows
from gsplit.features.protocol import RowSource, RowsRead, take_rows
from gsplit.graph.blocks import Block, count_self_loops
from gsplit.kernels.buffers import BufferPool
from gsplit.loading.strategy import SampledStep
from gsplit.minibatch.batch import (
    Batch,
    BatchContext,
    BatchLayer,
    PendingRows,
    SmallBatches,
    exchange_input_rows,
)
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.minibatch.route import Route
from gsplit.telemetry import StepTelemetry

__all__ = ["StepLoader"]

_HOST = torch.device("cpu")
_NO_ROWS = torch.empty(0)


class StepLoader:
    """Reads the arrays of the batches of one loader.

    ``features``: the input rows of this rank's vertices; None if a subclass reads them. ``comm``: the ranks that
    exchange input rows. ``device_rows``: the same rows for a device; if None, the host reads all rows for it.
    ``in_place``: layer 0 reads the rows from ``features``, which hold those of all ranks.
    ``num_ahead``: the number of steps that may be loaded before the first of them is finished. ``small_batches``: that
    of the loader, for ``BatchContext``.
    """

    def __init__(
        self,
        graph: LocalGraph,
        mesh: Mesh,
        comm: Comm,
        features: RowSource | None,
        arrays: ArrayNames,
        *,
        strategy: str,
        each_vertex_once: bool,
        deterministic: bool = False,
        device_rows: DeviceRows | None = None,
        in_place: bool = False,
        labels: bool = True,
        num_ahead: int = 0,
        small_batches: "WeakMethod[SmallBatches] | None" = None,
    ) -> None:
        self._graph = graph
        self._mesh = mesh
        self._comm = comm
        self._arrays = arrays
        self._strategy = strategy
        self._each_vertex_once = each_vertex_once
        self._deterministic = deterministic
        self._small_batches = small_batches
        self._number = next(mesh.loader_numbers)
        self._labels = graph.rows("y") if labels and "y" in graph.store.names else None
        self._edge_attr = None if arrays.edge_attr is None else graph.edge_rows(arrays.edge_attr)
        self._edge_weight = None if arrays.edge_weight is None else graph.edge_rows(arrays.edge_weight)
        self._pool = BufferPool(mesh.device)
        self._transposed: set[int] = set()  # layers, as batches of earlier steps were used
        num_buffers = num_ahead + 3 if num_ahead else 2  # no wait if the loss of a step is read one step later
        self._buffers = PinnedBuffers(num_buffers) if mesh.host_samples else None
        self._features = features
        self._in_place = in_place
        self._device_rows: DeviceRows | None = None
        if mesh.device.type != "cpu" and features is not None:
            self._device_rows = device_rows or StagedRows(features)

    def over(self, comm: Comm) -> Self:
        """The same for one more sampling thread, which exchanges over its own group. Sources and buffers are shared."""
        other = copy(self)
        other._comm = comm
        return other

    def load(self, sampled: SampledStep) -> Batch:
        """Read the rows of a sampled step. A collective on CPUs."""
        telemetry = sampled.telemetry
        blocks = sampled.blocks if self._mesh.device.type == "cpu" else count_self_loops(sampled.blocks)
        layers = [
            BatchLayer(
                block=replace(block, edge_ids=None),
                route=route,
                edge_attr=self._edge_values(self._edge_attr, block),
                edge_weight=_flat(self._edge_values(self._edge_weight, block)),
            )
            for block, route in zip(blocks, sampled.routes, strict=True)
        ]
        pending = self._locate_inputs(sampled)
        kind = Batch if sampled.pairs is None else LinkBatch
        batch = kind(
            x=_NO_ROWS if pending is not None else self._read_inputs(sampled),
            labels=None if self._labels is None else self._take_rows(self._labels, self._label_rows(sampled.targets)),
            frontiers=sampled.frontiers,
            layers=tuple(layers),
            num_targets=sampled.targets.numel(),
            global_batch_size=sampled.global_batch_size,
            context=self._context(sampled),
            pairs=sampled.pairs,
            seeds=sampled.seeds,
            pending=pending,
            requested=sampled.requested,
        )
        telemetry.count("targets", batch.num_targets)
        telemetry.count("edges", sum(block.num_edges for block in sampled.blocks))
        if self._buffers is not None:
            return batch.pin(self._buffers)
        if pending is not None:
            return replace(batch, x=pending.gather(self._mesh.device, telemetry))
        batch.record_bytes()
        return batch

    def _context(self, sampled: SampledStep) -> BatchContext:
        return BatchContext(
            mesh=self._mesh,
            key=sampled.key,
            graph=self._graph,
            arrays=self._arrays,
            strategy=self._strategy,
            each_vertex_once=self._each_vertex_once,
            pool=self._pool,
            deterministic=self._deterministic,
            loader=self._number,
            transposed=self._transposed,
            telemetry=sampled.telemetry,
            small_batches=self._small_batches,
        )

    def _label_rows(self, targets: Tensor) -> Tensor:
        """The rows of the targets in the array of labels."""
        return targets

    def _read_inputs(self, sampled: SampledStep) -> Tensor:
        """Read the local input rows and exchange them for the mixed ones. A collective if rows are exchanged."""
        assert self._features is not None
        telemetry = sampled.telemetry
        telemetry.count("input_rows", sampled.num_inputs)
        if not self._in_place:
            return self._read_rows(self._features, sampled.read_ids, sampled.input_route, sampled)
        assert sampled.input_route is None
        with telemetry.span("load_features"):
            rows = InPlaceRows(self._features, sampled.read_ids, self._pool, partial(_count_gathered, telemetry))
        telemetry.count("rows_in_place", rows.size(0))
        _count_read(RowsRead(rows=0, num_bytes=0), telemetry)
        return rows

    def _read_rows(
        self, features: RowSource, ids: Tensor, route: Route | None, sampled: SampledStep, of: str = ""
    ) -> Tensor:
        """Read some rows and exchange them along a route. A collective of the loading group, with a route."""
        telemetry = sampled.telemetry
        num_local = ids.numel()
        num_rows = num_local if route is None else route.num_buffer
        rows = self._pool.empty((num_rows, *features.row_shape), features.dtype)
        with telemetry.span("load_features"):
            read = features.read(ids, rows[:num_local])
        _count_read(read, telemetry)
        return exchange_input_rows(rows, route, self._comm, sampled.key.step, self._pool, telemetry, of)

    def _locate_inputs(self, sampled: SampledStep) -> PendingRows | None:
        """The locations of the input rows, if a device gathers them."""
        if self._device_rows is None:
            return None
        num_local = sampled.read_ids.numel()
        with sampled.telemetry.span("load_features"):
            located, read = self._device_rows.locate(sampled.read_ids)
        sampled.telemetry.count("input_rows", num_local)
        _count_read(read, sampled.telemetry)
        sample_device = self._mesh.sample_device
        return PendingRows(
            located=map_tensors(lambda tensor: copy_to_device(tensor, sample_device), located),
            num_local=num_local,
            route=sampled.input_route,
            features=self._device_rows,
            comm=self._comm,
        )

    def _edge_values(self, source: RowSource | None, block: Block) -> Tensor | None:
        """The stored values of the edges of a block, all of which are in-edges of vertices that this rank samples."""
        if source is None:
            return None
        assert block.edge_ids is not None  # the sampler returns edge ids if edge values are loaded
        return self._take_rows(source, block.edge_ids)

    def _take_rows(self, source: RowSource, ids: Tensor) -> Tensor:
        """Rows that the host reads, where mini-batches are sampled. It waits for ids that are on a device."""
        return copy_to_device(take_rows(source, ids.cpu(), _HOST), self._mesh.sample_device)


def _count_read(read: RowsRead | RowsLocated, telemetry: StepTelemetry) -> None:
    telemetry.count("rows_loaded", read.rows)
    telemetry.count("bytes_loaded", read.num_bytes)
    telemetry.count("cache_hits", read.hits)


def _count_gathered(telemetry: StepTelemetry, read: RowsRead, num_bytes: int) -> None:
    """Count rows in place that a torch function needed as a tensor of so many bytes: they were loaded after all."""
    telemetry.count("rows_in_place", -min(read.rows, telemetry.counts["rows_in_place"]))  # may be of two types
    _count_read(read, telemetry)
    telemetry.record_max("batch_bytes", telemetry.peaks.get("batch_bytes", 0) + num_bytes)
    telemetry.record_max("largest_batch_array_bytes", num_bytes)


def _flat(weights: Tensor | None) -> Tensor | None:
    """One number per edge, also if they are stored as a column."""
    return None if weights is None else weights.reshape(-1)
