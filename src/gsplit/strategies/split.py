"""Split parallelism: the ranks share one mini-batch, each sampling, loading and computing the vertices it owns."""

import torch
from torch import Tensor

from gsplit.buffers import BufferPool
from gsplit.comm import Call
from gsplit.features.mapped import MappedRows
from gsplit.mesh import Mesh
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import LayerSampler
from gsplit.split import Split, split_minibatch
from gsplit.strategies.batch import Batch
from gsplit.strategies.targets import OwnTargets
from gsplit.telemetry import Telemetry

__all__ = ["SplitStrategy"]


class SplitStrategy:
    """See ``protocol.Strategy``. Everything it holds is of the size of the rank's range or of a batch (law 6)."""

    def __init__(
        self,
        *,
        sampler: LayerSampler,
        ownership: Ownership,
        targets: OwnTargets,
        features: MappedRows,
        labels: MappedRows | None,
        original_ids: MappedRows | None,
        mesh: Mesh,
        telemetry: Telemetry,
        num_neighbors: list[int],
        batch_size: int,
        shuffle: bool,
        deterministic: bool,
    ) -> None:
        self._sampler, self._ownership, self._targets = sampler, ownership, targets
        self._features, self._labels, self._original_ids = features, labels, original_ids
        self._mesh, self._telemetry = mesh, telemetry
        self._num_neighbors, self._batch_size = num_neighbors, batch_size
        self._shuffle, self._deterministic = shuffle, deterministic
        self._pool = BufferPool(mesh.device)

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""
        return self._targets.num_targets

    def make_batch(self, key: StepKey) -> Batch:
        """Sample, exchange and load one step. A collective: every rank makes every step."""
        telemetry = self._telemetry
        targets = self._targets.of_step(key.seed, key.epoch, key.step, self._batch_size, shuffle=self._shuffle)
        split = split_minibatch(
            self._sampler,
            targets.to(self._mesh.device),
            self._num_neighbors,
            key,
            self._ownership,
            self._mesh.loading,
            telemetry,
        )
        x = self._load(split, key)
        self._count(split, x)
        first = key.step * self._batch_size
        return Batch(
            x=x,
            labels=None if self._labels is None else self._labels.take(targets).to(self._mesh.device),
            n_id=split.input_ids
            if self._original_ids is None
            else self._original_ids.take(split.input_ids).to(self._mesh.device),
            blocks=tuple(layer.block for layer in split.layers),
            indices=tuple(layer.index for layer in split.layers),
            batch_size=split.num_targets,
            global_batch_size=min(first + self._batch_size, self.num_targets) - first,
            key=key,
            comm=self._mesh.shuffles,
            telemetry=telemetry,
            pool=self._pool,
            deterministic=self._deterministic,
        )

    def _load(self, split: Split, key: StepKey) -> Tensor:
        """Own input rows read straight into the mixed tensor, foreign ones received into its tail."""
        index = split.layers[0].index
        x = self._pool.lend((index.num_mixed, *self._features.row_shape), self._features.dtype)
        own = x[: index.num_local]
        with self._telemetry.span("load_features"):
            if x.device.type == "cpu":
                self._features.read(split.input_ids, own)
            else:
                own.copy_(self._features.take(split.input_ids))
        with self._telemetry.span("exchange_features"):  # all ranks: once per step
            rows = self._mesh.loading.outgoing((index.num_sent, *self._features.row_shape), x.dtype)
            torch.index_select(own, 0, index.send_rows, out=rows)
            call = Call("exchange features", key.step, 0)
            tail = x[index.num_local :]
            self._mesh.loading.exchange(call, tail, rows, index.recv_counts, index.send_counts).wait()
        return x

    def _count(self, split: Split, x: Tensor) -> None:
        telemetry = self._telemetry
        telemetry.count("targets", split.num_targets)
        telemetry.count("input_rows", split.layers[0].index.num_local)
        index = split.layers[0].index
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
        telemetry.peak("targets_bytes", self._targets.num_bytes)
        telemetry.peak("largest_range_array_bytes", max(self._sampler.num_range_bytes, self._targets.largest_bytes))
