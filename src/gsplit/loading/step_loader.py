"""The second stage of a step: from a sampled step to a batch with its rows, labels and edge values.

``load`` reads what the host has to read and may run ahead of training, in the loader's thread. The third stage,
``Batch.to``, is the training thread's and brings the batch to where the model computes.

On the host ``load`` does it all: own input rows are read straight into the mixed tensor of layer 0 and rows of other
ranks received into its tail, so nothing is copied. If the host samples for a device, ``load`` only finds out where the
rows are; everything it found crosses in one copy (``packing``), and the device gathers the rows out of its own and the
host's memory and exchanges them itself. Stored features carry no gradient, so both may run ahead of training.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gsplit.device.packing import PinnedBuffers
from gsplit.distributed.comm.comm import Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.features.device import DeviceRows, StagedRows
from gsplit.features.protocol import RowSource, RowsRead, take_rows
from gsplit.graph.blocks import Block, count_self_loops
from gsplit.kernels.buffers import BufferPool
from gsplit.loading.strategy import SampledStep
from gsplit.minibatch.batch import Batch, BatchContext, BatchLayer, PendingRows, exchange_input_rows
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.telemetry import StepTelemetry

__all__ = ["StepLoader"]

_NO_ROWS = torch.empty(0)


class StepLoader:
    """Reads what the batches of one loader are made of; ``features`` are the input rows of this rank's vertices.

    ``comm``: the ranks that input rows cross between. ``device_rows``: the same rows for a device that the host samples
    for; without, the host reads every row for it. ``num_ahead``: steps that may be loaded and not yet finished.
    """

    def __init__(
        self,
        graph: LocalGraph,
        mesh: Mesh,
        comm: Comm,
        features: RowSource,
        arrays: ArrayNames,
        *,
        strategy: str,
        each_vertex_once: bool,
        deterministic: bool = False,
        device_rows: DeviceRows | None = None,
        labels: bool = True,
        num_ahead: int = 0,
    ) -> None:
        self._graph, self._mesh, self._comm, self._arrays = graph, mesh, comm, arrays
        self._strategy, self._each_vertex_once, self._deterministic = strategy, each_vertex_once, deterministic
        self._number = next(mesh.loader_numbers)
        self._labels = graph.rows("y") if labels and "y" in graph.store.names else None
        self._edge_attr = None if arrays.edge_attr is None else graph.edge_rows(arrays.edge_attr)
        self._edge_weight = None if arrays.edge_weight is None else graph.edge_rows(arrays.edge_weight)
        self._pool = BufferPool(mesh.device)
        self._buffers = PinnedBuffers(num_ahead + 2) if mesh.host_samples else None
        self._features = features
        self._device_rows = (device_rows or StagedRows(features)) if mesh.host_samples else None

    def load(self, sampled: SampledStep) -> Batch:
        """Read the rows of a sampled step. A collective of the loading group."""
        device, telemetry = self._mesh.sample_device, sampled.telemetry
        blocks = sampled.blocks if self._mesh.device.type == "cpu" else count_self_loops(sampled.blocks)
        layers = [
            BatchLayer(
                replace(block, edge_ids=None),
                route,
                self._edge_values(self._edge_attr, block),
                _flat(self._edge_values(self._edge_weight, block)),
            )
            for block, route in zip(blocks, sampled.routes, strict=True)
        ]
        pending = self._locate_inputs(sampled)
        batch = Batch(
            x=_NO_ROWS if pending is not None else self._read_inputs(sampled),
            labels=None if self._labels is None else take_rows(self._labels, sampled.targets, device),
            frontiers=sampled.frontiers,
            layers=tuple(layers),
            num_targets=sampled.targets.numel(),
            global_batch_size=sampled.global_batch_size,
            context=self._context(sampled),
            pending=pending,
        )
        telemetry.count("targets", batch.num_targets)
        telemetry.count("edges", sum(block.num_edges for block in sampled.blocks))
        if self._buffers is not None:
            return batch.pin(self._buffers)
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
            telemetry=sampled.telemetry,
        )

    def _read_inputs(self, sampled: SampledStep) -> Tensor:
        """The mixed input rows, on the host or where it samples. A collective of the loading group."""
        features, route, telemetry = self._features, sampled.input_route, sampled.telemetry
        num_local = sampled.read_ids.numel()
        num_rows = num_local if route is None else route.num_buffer
        rows = self._pool.empty((num_rows, *features.row_shape), features.dtype)
        with telemetry.span("load_features"):
            read = features.read(sampled.read_ids, rows[:num_local])
        _count_read(read, num_local, telemetry)
        return exchange_input_rows(rows, route, self._comm, sampled.key.step, self._pool, telemetry)

    def _locate_inputs(self, sampled: SampledStep) -> PendingRows | None:
        """Where the input rows are, if a device gathers them."""
        if self._device_rows is None:
            return None
        num_local = sampled.read_ids.numel()
        with sampled.telemetry.span("load_features"):
            located, read = self._device_rows.locate(sampled.read_ids)
        _count_read(read, num_local, sampled.telemetry)
        return PendingRows(located, num_local, sampled.input_route, self._device_rows, self._comm)

    def _edge_values(self, source: RowSource | None, block: Block) -> Tensor | None:
        """Stored values of a block's edges, which are all in-edges of vertices held here."""
        if source is None:
            return None
        assert block.edge_ids is not None  # the sampler was made with edge_ids, because values are wanted
        return take_rows(source, block.edge_ids, self._mesh.sample_device)


def _count_read(read: RowsRead, num_local: int, telemetry: StepTelemetry) -> None:
    telemetry.count("input_rows", num_local)
    telemetry.count("rows_loaded", read.rows)
    telemetry.count("bytes_loaded", read.num_bytes)
    telemetry.count("cache_hits", read.hits)


def _flat(weights: Tensor | None) -> Tensor | None:
    """One number per edge, also where they are stored as a column."""
    return None if weights is None else weights.reshape(-1)
