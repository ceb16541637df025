"""The second and third stage of every strategy: from a sampled step to a batch with its rows, labels and edge values.

``load`` reads what the host has to read and may run ahead of training, in the loader's thread; ``finish`` makes the
batch of it where the model computes, in the thread of training. If the host samples for a device, everything that
``load`` found crosses in one copy (``packing``).
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gsplit.batch import Batch, BatchContext, BatchLayer
from gsplit.blocks import Block, FrontierIds, count_self_loops
from gsplit.distributed.mesh import Mesh
from gsplit.exchange import Exchange
from gsplit.features.device import DeviceRows, StagedRows
from gsplit.features.protocol import RowSource, take_rows
from gsplit.kernels.buffers import BufferPool
from gsplit.local_graph import ArrayNames, LocalGraph
from gsplit.packing import Packed, PinnedBuffers
from gsplit.strategies.inputs import DeviceInputs, HostInputs, Inputs
from gsplit.strategies.protocol import LoadedStep, SampledStep

__all__ = ["StepLoader"]


@dataclass(frozen=True)
class _Parts:
    """The tensors of a batch, and the exchange of its input rows; ``inputs`` is what ``Inputs.fetch`` gave."""

    frontiers: tuple[FrontierIds, ...]
    labels: Tensor | None
    layers: tuple[BatchLayer, ...]
    loading_exchange: Exchange
    inputs: Any


class StepLoader:
    """Reads what the batches of one loader are made of; ``features`` are the input rows of this rank's vertices.

    ``device_rows``: the same for a device that the host samples for; without, the host reads every row for it.
    ``num_ahead``: steps that may be loaded and not yet finished.
    """

    def __init__(
        self,
        graph: LocalGraph,
        mesh: Mesh,
        features: RowSource,
        arrays: ArrayNames,
        *,
        device_rows: DeviceRows | None = None,
        labels: bool = True,
        num_ahead: int = 0,
    ) -> None:
        self._graph, self._mesh, self._arrays = graph, mesh, arrays
        self._number = next(mesh.loader_numbers)
        self._labels = graph.rows("y") if labels and "y" in graph.store.names else None
        self._edge_attr = None if arrays.edge_attr is None else graph.edge_rows(arrays.edge_attr)
        self._edge_weight = None if arrays.edge_weight is None else graph.edge_rows(arrays.edge_weight)
        self.pool = BufferPool(mesh.sample_device)
        self._buffers = PinnedBuffers(num_ahead + 2) if mesh.host_samples else None
        self._inputs: Inputs = HostInputs(features, self.pool)
        if mesh.host_samples:
            self._inputs = DeviceInputs(device_rows or StagedRows(features), mesh.device)

    def load(self, sampled: SampledStep) -> LoadedStep:
        """Read the rows of a sampled step. A collective of the loading group."""
        graph, device = self._graph, self._mesh.sample_device
        blocks = sampled.blocks if self._mesh.device.type == "cpu" else count_self_loops(sampled.blocks)
        layers = [
            BatchLayer(
                replace(block, edge_ids=None),
                exchange,
                self._edge_values(self._edge_attr, block),
                _flat(self._edge_values(self._edge_weight, block)),
            )
            for block, exchange in zip(blocks, sampled.exchanges, strict=True)
        ]
        parts = _Parts(
            frontiers=tuple(
                FrontierIds(found.level, graph.to_original_ids(found.ids), found.ids) for found in sampled.frontiers
            ),
            labels=None if self._labels is None else take_rows(self._labels, sampled.targets, device),
            layers=tuple(layers),
            loading_exchange=sampled.loading_exchange,
            inputs=self._inputs.fetch(sampled),
        )
        sampled.telemetry.count("targets", sampled.targets.numel())
        sampled.telemetry.count("edges", sum(block.num_edges for block in sampled.blocks))
        return LoadedStep(sampled, parts if self._buffers is None else self._buffers.pack(parts))

    def finish(self, loaded: LoadedStep, *, strategy: str, each_vertex_once: bool) -> Batch:
        """The batch of a loaded step. A collective where the model is on a device."""
        sampled, parts = loaded.sampled, loaded.parts
        telemetry, device = sampled.telemetry, self._mesh.device
        if isinstance(parts, Packed):
            with telemetry.span("copy", device):
                parts = parts.unpack(device)
        assert isinstance(parts, _Parts)
        x = self._inputs.place(parts.inputs, parts.loading_exchange, telemetry)
        values = [value for layer in parts.layers for value in (layer.edge_attr, layer.edge_weight)]
        arrays = [x, *(found.ids for found in parts.frontiers), *(layer.block.src_rows for layer in parts.layers)]
        sizes = [array.nbytes for array in arrays] + [value.nbytes for value in values if value is not None]
        telemetry.record_max("batch_bytes", sum(sizes))
        telemetry.record_max("largest_batch_array_bytes", max(sizes))
        context = BatchContext(
            mesh=self._mesh,
            key=sampled.key,
            graph=self._graph,
            arrays=self._arrays,
            strategy=strategy,
            each_vertex_once=each_vertex_once,
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

    def _edge_values(self, source: RowSource | None, block: Block) -> Tensor | None:
        """Stored values of a block's edges, which are all in-edges of vertices held here."""
        if source is None:
            return None
        assert block.edge_ids is not None  # the sampler was made with edge_ids, because values are wanted
        return take_rows(source, block.edge_ids, self._mesh.sample_device)


def _flat(weights: Tensor | None) -> Tensor | None:
    """One number per edge, also where they are stored as a column."""
    return None if weights is None else weights.reshape(-1)
