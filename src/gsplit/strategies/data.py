"""Data parallelism: each rank takes every W-th target of the mini-batch and computes its whole neighbourhood.

The sample is the same keyed one that ``split`` takes (law 1), so loss and gradients are the same; vertices that
several ranks need are sampled, loaded and computed by each of them. Nothing crosses between ranks but gradients. Needs
the whole graph and all features on every rank, memory-mapped or not.
"""

from torch import Tensor

from gsplit.batch import Batch
from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import SoloComm
from gsplit.distributed.mesh import Mesh
from gsplit.kernels.buffers import BufferPool
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.protocol import LayerSampler
from gsplit.sampling.targets import LocalTargets
from gsplit.strategies.vertex_data import VertexData
from gsplit.telemetry import Telemetry

__all__ = ["DataStrategy"]


class DataStrategy:
    """See ``protocol.Strategy``. ``targets`` and ``data`` are those of the whole graph."""

    def __init__(
        self,
        *,
        sampler: LayerSampler,
        targets: LocalTargets,
        data: VertexData,
        mesh: Mesh,
        telemetry: Telemetry,
        num_neighbors: list[int],
        batch_size: int,
        shuffle: bool,
    ) -> None:
        self._sampler, self._targets, self._data = sampler, targets, data
        self._mesh, self._telemetry = mesh, telemetry
        self._num_neighbors, self._batch_size, self._shuffle = num_neighbors, batch_size, shuffle
        self._pool, self._alone = BufferPool(mesh.device), SoloComm()
        self._cut = (mesh.replica + mesh.num_replicas * mesh.split_rank, mesh.size)

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""
        return self._targets.num_targets

    def make_batch(self, key: StepKey) -> Batch:
        """Sample and load one step; no other rank is asked for anything."""
        mesh, data, telemetry, size = self._mesh, self._data, self._telemetry, self._batch_size
        targets = self._targets.for_step(key.seed, key.epoch, key.step, size, shuffle=self._shuffle, cut=self._cut)
        with telemetry.span("sample"):
            sample = sample_minibatch(self._sampler, targets.to(mesh.device), self._num_neighbors, key)
        x = self._pool.empty((sample.input_ids.numel(), *data.features.row_shape), data.features.dtype)
        with telemetry.span("load_features"):
            data.read_features(sample.input_ids, x)
        self._count(sample, x)
        return Batch(
            x=x,
            labels=data.take_labels(targets, mesh.device),
            n_id=data.name(sample.input_ids, mesh.device),
            blocks=sample.blocks,
            indices=tuple(
                ShuffleIndex(sample.input_ids[:0], (0,), (0,), block.num_src, block.num_dst) for block in sample.blocks
            ),
            batch_size=sample.num_targets,
            global_batch_size=self._targets.size_of_step(key.step, size),
            key=key,
            comm=self._alone,
            world=mesh.world,
            strategy="data",
            telemetry=telemetry,
            pool=self._pool,
            scales=self._scales(sample, x),
        )

    def _scales(self, sample: MiniBatch, x: Tensor) -> tuple[Tensor, ...] | None:
        if self._data.factors is None:
            return None
        scales = self._data.factors.take(sample.input_ids).to(x.device, x.dtype)
        return tuple(scales[: block.num_src] for block in sample.blocks)

    def _count(self, sample: MiniBatch, x: Tensor) -> None:
        telemetry = self._telemetry
        telemetry.count("targets", sample.num_targets)
        telemetry.count("edges", sum(block.num_edges for block in sample.blocks))
        telemetry.count("input_rows", x.size(0))
        telemetry.count("rows_loaded", x.size(0))
        arrays = [x, sample.input_ids, *(block.src_rows for block in sample.blocks)]
        telemetry.peak("batch_bytes", sum(array.nbytes for array in arrays))
        telemetry.peak("largest_batch_array_bytes", max(array.nbytes for array in arrays))
        telemetry.peak("sampler_bytes", self._sampler.num_bytes)
        telemetry.peak("targets_bytes", self._targets.num_bytes)
