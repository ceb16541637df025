"""Split parallelism: the ranks share one mini-batch, each sampling, loading and computing the vertices it owns."""

import torch
from torch import Tensor

from gsplit.batch import Batch
from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.kernels.buffers import BufferPool
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import LayerSampler
from gsplit.sampling.targets import LocalTargets
from gsplit.split import Split, split_minibatch
from gsplit.strategies.vertex_data import VertexData
from gsplit.telemetry import Telemetry

__all__ = ["SplitMaker", "SplitStrategy"]


class SplitMaker:
    """Turns this rank's targets of a step into its batch; the ranks of a replica do so together."""

    def __init__(
        self,
        *,
        sampler: LayerSampler,
        ownership: Ownership,
        data: VertexData,
        mesh: Mesh,
        telemetry: Telemetry,
        num_neighbors: list[int],
        deterministic: bool,
    ) -> None:
        self._sampler, self._ownership, self._data = sampler, ownership, data
        self._mesh, self._telemetry = mesh, telemetry
        self._num_neighbors, self._deterministic = num_neighbors, deterministic
        self._pool = BufferPool(mesh.device)

    def make(self, targets: Tensor, key: StepKey, global_batch_size: int) -> Batch:
        """Sample, exchange and load. A collective: every rank of the replica makes every step."""
        mesh, data = self._mesh, self._data
        split = split_minibatch(
            self._sampler,
            targets.to(mesh.device),
            self._num_neighbors,
            key,
            self._ownership,
            mesh.loading,
            self._telemetry,
        )
        x = self._load(split, key)
        self._count(split, x)
        return Batch(
            x=x,
            labels=data.take_labels(targets, mesh.device),
            n_id=data.name(split.input_ids, mesh.device),
            blocks=tuple(layer.block for layer in split.layers),
            indices=tuple(layer.index for layer in split.layers),
            batch_size=split.num_targets,
            global_batch_size=global_batch_size,
            key=key,
            comm=mesh.shuffles,
            world=mesh.world,
            strategy="split",
            telemetry=self._telemetry,
            pool=self._pool,
            deterministic=self._deterministic,
            scales=self._scales(split, key, x.dtype),
        )

    def _load(self, split: Split, key: StepKey) -> Tensor:
        """Own input rows read straight into the mixed tensor, foreign ones received into its tail."""
        features, index = self._data.features, split.layers[0].index
        x = self._pool.empty((index.num_mixed, *features.row_shape), features.dtype)
        with self._telemetry.span("load_features"):
            self._data.read_features(split.input_ids, x[: index.num_local])
        with self._telemetry.span("exchange_features"):  # all ranks: once per step
            self._fill_tail(x, index, Call("exchange features", key.step, 0))
        return x

    def _fill_tail(self, mixed: Tensor, index: ShuffleIndex, call: Call) -> None:
        """Receive the rows of other ranks behind the own ones."""
        rows = self._mesh.loading.send_buffer((index.num_sent, *mixed.shape[1:]), mixed.dtype)
        torch.index_select(mixed[: index.num_local], 0, index.send_rows, out=rows)
        tail = mixed[index.num_local :]
        self._mesh.loading.all_to_all(call, tail, rows, index.recv_counts, index.send_counts).wait()

    def _scales(self, split: Split, key: StepKey, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """GCN's factor of every mixed row of every layer; local frontiers are prefixes of the lowest one."""
        if self._data.factors is None:
            return None
        own = self._data.factors.take(split.input_ids).to(self._mesh.device, dtype)
        scales = []
        for layer, part in enumerate(split.layers):  # all ranks: one exchange per layer, if the loader was made so
            mixed = own.new_empty(part.index.num_mixed)
            mixed[: part.index.num_local] = own[: part.index.num_local]
            self._fill_tail(mixed, part.index, Call("exchange factors", key.step, layer))
            scales.append(mixed)
        return tuple(scales)

    def _count(self, split: Split, x: Tensor) -> None:
        telemetry = self._telemetry
        index = split.layers[0].index
        telemetry.count("targets", split.num_targets)
        telemetry.count("input_rows", index.num_local)
        telemetry.count("rows_loaded", index.num_local)
        telemetry.count("bytes_sent", index.num_sent * x[:1].nbytes)
        telemetry.count("bytes_received", index.num_received * x[:1].nbytes)
        telemetry.count("collectives", 2 * len(split.layers) + 1)  # counts and ids of every layer, then features
        for layer in split.layers:  # of the whole step: hidden layers send the same rows in forward
            telemetry.count("rows_sent", layer.index.num_sent)
            telemetry.count("rows_received", layer.index.num_received)
        arrays = [x, split.input_ids, *(layer.block.src_rows for layer in split.layers)]
        telemetry.peak("batch_bytes", sum(array.nbytes for array in arrays))
        telemetry.peak("largest_batch_array_bytes", max(array.nbytes for array in arrays))
        telemetry.peak("sampler_bytes", self._sampler.num_bytes)


class SplitStrategy:
    """See ``protocol.Strategy``. Everything it holds is of the size of the rank's range or of a batch (law 6)."""

    def __init__(
        self,
        *,
        sampler: LayerSampler,
        ownership: Ownership,
        targets: LocalTargets,
        data: VertexData,
        mesh: Mesh,
        telemetry: Telemetry,
        num_neighbors: list[int],
        batch_size: int,
        shuffle: bool,
        deterministic: bool,
    ) -> None:
        self._maker = SplitMaker(
            sampler=sampler,
            ownership=ownership,
            data=data,
            mesh=mesh,
            telemetry=telemetry,
            num_neighbors=num_neighbors,
            deterministic=deterministic,
        )
        self._sampler, self._targets, self._telemetry = sampler, targets, telemetry
        self._cut = (mesh.replica, mesh.num_replicas)
        self._batch_size, self._shuffle = batch_size, shuffle

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""
        return self._targets.num_targets

    def make_batch(self, key: StepKey) -> Batch:
        """Sample, exchange and load one step. A collective: every rank makes every step.

        With several replicas each takes a strided cut of the mini-batch's targets, and splits that.
        """
        targets, size = self._targets, self._batch_size
        own = targets.for_step(key.seed, key.epoch, key.step, size, shuffle=self._shuffle, cut=self._cut)
        self._telemetry.peak("targets_bytes", targets.num_bytes)
        range_bytes = max(self._sampler.num_range_bytes, targets.largest_bytes)
        self._telemetry.peak("largest_range_array_bytes", range_bytes)
        return self._maker.make(own, key, targets.size_of_step(key.step, size))
