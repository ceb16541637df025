"""The second and third stage of a step: from a sampled step to a batch with its rows, labels and edge values.

``load`` reads what the host has to read and may run ahead of training, in the loader's thread; ``finish`` makes the
batch of it where the model computes, in the thread of training.

On the host ``load`` does it all: own input rows are read straight into the mixed tensor of layer 0 and rows of other
ranks received into its tail, so nothing is copied. If the host samples for a device, ``load`` only finds out where the
rows are; everything it found crosses in one copy (``packing``), and the device gathers the rows out of its own and the
host's memory and exchanges them itself. Stored features carry no gradient, so both may run ahead of training.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsplit.batch import Batch, BatchContext, BatchLayer
from gsplit.blocks import Block, FrontierIds, count_self_loops
from gsplit.distributed.comm import Call, Comm
from gsplit.distributed.mesh import Mesh
from gsplit.features.device import DeviceRows, StagedRows
from gsplit.features.protocol import RowSource, RowsRead, take_rows
from gsplit.kernels.buffers import BufferPool
from gsplit.local_graph import ArrayNames, LocalGraph
from gsplit.packing import Packed, PinnedBuffers
from gsplit.route import Route
from gsplit.shuffle import exchange_stored
from gsplit.strategies.strategy import SampledStep
from gsplit.telemetry import StepTelemetry

__all__ = ["LoadedStep", "StepLoader"]


@dataclass(frozen=True)
class _Parts:
    """The tensors of a batch; ``inputs`` are the mixed input rows, or where a device finds them."""

    frontiers: tuple[FrontierIds, ...]
    labels: Tensor | None
    layers: tuple[BatchLayer, ...]
    input_route: Route | None
    inputs: Any


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """One rank's part of a step with everything read that the host reads; ``parts``: opaque to all but StepLoader."""

    sampled: SampledStep
    parts: Any


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

    def load(self, sampled: SampledStep) -> LoadedStep:
        """Read the rows of a sampled step. A collective of the loading group."""
        device = self._mesh.sample_device
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
        parts = _Parts(
            frontiers=sampled.frontiers,
            labels=None if self._labels is None else take_rows(self._labels, sampled.targets, device),
            layers=tuple(layers),
            input_route=sampled.input_route,
            inputs=self._read_inputs(sampled) if self._device_rows is None else self._locate_inputs(sampled),
        )
        sampled.telemetry.count("targets", sampled.targets.numel())
        sampled.telemetry.count("edges", sum(block.num_edges for block in sampled.blocks))
        return LoadedStep(sampled, parts if self._buffers is None else self._buffers.pack(parts))

    def finish(self, loaded: LoadedStep) -> Batch:
        """The batch of a loaded step. A collective where the model is on a device."""
        sampled, parts = loaded.sampled, loaded.parts
        telemetry, device = sampled.telemetry, self._mesh.device
        if isinstance(parts, Packed):
            with telemetry.span("copy", device):
                parts = parts.unpack(device)
        assert isinstance(parts, _Parts)
        x = parts.inputs if self._device_rows is None else self._gather_inputs(parts, sampled)
        values = [value for layer in parts.layers for value in (layer.edge_attr, layer.edge_weight)]
        arrays = [x, *(found.ids for found in parts.frontiers), *(layer.block.src_rows for layer in parts.layers)]
        sizes = [array.nbytes for array in arrays] + [value.nbytes for value in values if value is not None]
        telemetry.peak("batch_bytes", sum(sizes))
        telemetry.peak("largest_batch_array_bytes", max(sizes))
        context = BatchContext(
            mesh=self._mesh,
            key=sampled.key,
            graph=self._graph,
            arrays=self._arrays,
            strategy=self._strategy,
            each_vertex_once=self._each_vertex_once,
            pool=self._pool,
            deterministic=self._deterministic,
            loader=self._number,
            telemetry=telemetry,
        )
        return Batch(
            x=x,
            labels=parts.labels,
            frontiers=parts.frontiers,
            layers=parts.layers,
            num_targets=sampled.targets.numel(),
            global_batch_size=sampled.global_batch_size,
            context=context,
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
        return self._exchange_inputs(rows, route, sampled)

    def _locate_inputs(self, sampled: SampledStep) -> Any:
        """Where the input rows are, for a device that gathers them, as a dataclass of tensors."""
        assert self._device_rows is not None
        with sampled.telemetry.span("load_features"):
            located, read = self._device_rows.locate(sampled.read_ids)
        _count_read(read, sampled.read_ids.numel(), sampled.telemetry)
        return located

    def _gather_inputs(self, parts: _Parts, sampled: SampledStep) -> Tensor:
        """The mixed input rows on the device, from what was located. A collective."""
        features, device, route = self._device_rows, self._mesh.device, parts.input_route
        assert features is not None
        num_local = sampled.read_ids.numel()
        num_rows = num_local if route is None else route.num_buffer
        rows = torch.empty(num_rows, *features.row_shape, dtype=features.dtype, device=device)
        with sampled.telemetry.span("gather_features", device):
            features.gather(parts.inputs, rows[:num_local])
        return self._exchange_inputs(rows, route, sampled)

    def _exchange_inputs(self, rows: Tensor, route: Route | None, sampled: SampledStep) -> Tensor:
        with sampled.telemetry.span("exchange_features", rows.device):  # all ranks: once per step
            if route is None:
                return rows
            call = Call("exchange features", sampled.key.step, 0)
            return exchange_stored(rows, route, self._comm, call, self._pool, sampled.telemetry)

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
