"""The second stage of every strategy: from a sampled step to a batch with its rows, labels and edge values.

Input rows are read straight into the mixed tensor of layer 0 and rows of other ranks received into its tail, so nothing
is copied. Stored features carry no gradient: their exchange belongs to the loader, which may run ahead of training.
"""

from torch import Tensor

from gsplit.batch import Batch, BatchContext, BatchLayer
from gsplit.blocks import Block, count_self_loops
from gsplit.distributed.mesh import Mesh
from gsplit.features.protocol import RowSource, take_rows
from gsplit.kernels.buffers import BufferPool
from gsplit.local_graph import ArrayNames, LocalGraph
from gsplit.strategies.protocol import SampledStep

__all__ = ["StepLoader"]


class StepLoader:
    """Reads what the batches of one loader are made of; ``features`` are the input rows of this rank's vertices."""

    def __init__(
        self,
        graph: LocalGraph,
        mesh: Mesh,
        features: RowSource,
        arrays: ArrayNames,
        *,
        labels: bool = True,
    ) -> None:
        self._graph, self._mesh, self._features, self._arrays = graph, mesh, features, arrays
        self._labels = graph.rows("y") if labels and "y" in graph.store.names else None
        self._edge_attr = None if arrays.edge_attr is None else graph.edge_rows(arrays.edge_attr)
        self._edge_weight = None if arrays.edge_weight is None else graph.edge_rows(arrays.edge_weight)
        self.pool = BufferPool(mesh.sample_device)

    def load(self, sampled: SampledStep, *, strategy: str, each_vertex_once: bool) -> Batch:
        """The batch of a sampled step. A collective of the loading group."""
        mesh, graph, device = self._mesh, self._graph, self._mesh.device
        x = self._load_features(sampled)
        blocks = sampled.blocks if device.type == "cpu" else count_self_loops(sampled.blocks)
        input_ids = sampled.input_ids.to(device)
        layers = [
            BatchLayer(
                block.to(device),
                exchange,
                self._edge_values(self._edge_attr, block),
                _flat(self._edge_values(self._edge_weight, block)),
            )
            for block, exchange in zip(blocks, sampled.exchanges, strict=True)
        ]
        telemetry = sampled.telemetry
        values = [value for layer in layers for value in (layer.edge_attr, layer.edge_weight) if value is not None]
        arrays = [x, sampled.input_ids, *(block.src_rows for block in sampled.blocks), *values]
        telemetry.count("targets", sampled.targets.numel())
        telemetry.count("edges", sum(block.num_edges for block in sampled.blocks))
        telemetry.peak("batch_bytes", sum(array.nbytes for array in arrays))
        telemetry.peak("largest_batch_array_bytes", max(array.nbytes for array in arrays))
        context = BatchContext(
            mesh=mesh,
            key=sampled.key,
            graph=graph,
            arrays=self._arrays,
            strategy=strategy,
            each_vertex_once=each_vertex_once,
            telemetry=telemetry,
        )
        return Batch(
            x=x.to(device),
            labels=None if self._labels is None else take_rows(self._labels, sampled.targets, device),
            n_id=graph.to_original_ids(sampled.input_ids).to(device) if graph.original_ids.size else input_ids,
            input_ids=input_ids,
            layers=tuple(layers),
            num_targets=sampled.targets.numel(),
            global_batch_size=sampled.global_batch_size,
            context=context,
        )

    def _load_features(self, sampled: SampledStep) -> Tensor:
        """The mixed input rows of layer 0."""
        features, exchange, telemetry = self._features, sampled.loading_exchange, sampled.telemetry
        x = self.pool.empty((exchange.num_mixed, *features.row_shape), features.dtype)
        with telemetry.span("load_features"):
            read = features.read(sampled.input_ids, x[: exchange.num_local])
        with telemetry.span("exchange_features"):  # all ranks: once per step
            exchange.fill_received(x, "exchange features")
        telemetry.count("input_rows", exchange.num_local)
        telemetry.count("rows_loaded", read.rows)
        telemetry.count("bytes_loaded", read.num_bytes)
        telemetry.count("cache_hits", read.hits)
        telemetry.count("bytes_sent", exchange.num_sent * x[:1].nbytes)
        telemetry.count("bytes_received", exchange.num_received * x[:1].nbytes)
        telemetry.count("collectives", exchange.num_collectives)
        return x

    def _edge_values(self, source: RowSource | None, block: Block) -> Tensor | None:
        """Stored values of a block's edges, which are all in-edges of vertices held here."""
        if source is None:
            return None
        assert block.edge_ids is not None  # the sampler was made with edge_ids, because values are wanted
        return take_rows(source, block.edge_ids, self._mesh.device)


def _flat(weights: Tensor | None) -> Tensor | None:
    """One number per edge, also where they are stored as a column."""
    return None if weights is None else weights.reshape(-1)
