"""The loader: iterates over the mini-batches of a graph on any number of ranks, with the argument names of PyG.

``batch_size`` is the size of the GLOBAL mini-batch, which all ranks share. The number of steps is known before the
first and equal on all ranks. A position in training is (epoch, step): any step can be made without the steps before it.

A step has three stages: ``Strategy.sample``, ``StepLoader.load`` and ``Batch.to``. With ``prefetch`` the first two run
ahead in a thread (``pipeline``), and the third is launched one step ahead on a second stream of the device.
"""

import logging
import operator
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsplit.device.devices import SideStream, in_thread
from gsplit.distributed.comm.comm import assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh, resolve_mesh
from gsplit.errors import InputError, explain
from gsplit.features.copies import ForeignCopies
from gsplit.features.device import DeviceRows
from gsplit.features.protocol import HostSource
from gsplit.graph.ownership import Ownership
from gsplit.loading.pipeline import Pipeline
from gsplit.loading.plan import resolve_plan
from gsplit.loading.step_loader import StepLoader
from gsplit.loading.strategy import SampledStep, Strategy
from gsplit.loading.tiers import open_device_rows, open_features
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph
from gsplit.sampling.drawn import require_drawn
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import make_sampler
from gsplit.sampling.protocol import LayerSampler, SampledRange, SamplerFactory
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.telemetry import StepTelemetry, Telemetry

__all__ = ["NeighborLoader"]

_LOG = logging.getLogger(__name__)


class NeighborLoader:
    """Iterates over the mini-batches of an epoch; each ``iter`` is the next epoch.

    ``graph``: an opened store, or a PyG ``Data`` with a ``partition`` tensor (a rank or part for every vertex).
    ``num_neighbors``: the fanout of every layer, that of the targets first; -1 takes all neighbours. ``input_nodes``:
    the name of stored targets, a tensor of original ids or a mask, or None for every vertex. ``batch_size``: the number
    of targets of the GLOBAL mini-batch. ``mesh``: the ranks, from ``gsplit.init()``; optional for one process.

    ``strategy``: how the ranks share a mini-batch: "split", "data", "data_cached", "hybrid(k)", or "auto" for the
    fastest according to the planner. The result is the same (docs/strategies.md). ``ownership``: the ranges of vertices
    that the ranks own, in place of those of the store. ``deterministic``: on devices, the shuffle
    adds gradients in a fixed order.

    ``sampler``: "uniform", "labor" for fewer distinct vertices, or a function that makes a user-defined sampler.
    ``weight_attr``: the name of stored weights; edges are drawn by weight. ``replace``: draw with replacement.
    ``layer_dependency``: a vertex draws by the same random numbers at every layer (docs/samplers.md).

    ``features``, ``edge_attr`` and ``edge_weight`` name stored arrays. Edge values are loaded if the graph has an array
    of that name. ``features`` may also be a user-defined source of rows, which is called with original ids, or several
    names and sources, whose rows are concatenated (docs/loading.md; the protocols are in ``gsplit.extending``).
    ``features_on_disk``: read features from files instead of mapping them. ``cache``: memory of each rank for its
    hottest rows, such as "2GB", from a partitioned store; ``device_cache``: the same in the memory of a device.
    ``copies``: memory of each rank for copies of the hottest rows of other ranks, which are then not exchanged.

    ``prefetch``: the number of batches that a thread makes ahead; batches do not depend on it. ``telemetry``: a file
    for one JSON line per step.
    """

    _position = (-1, 0)  # of the newest iterator: its epoch and its next step
    _start: tuple[int, int] | None = None  # the position at which the next iterator starts, if it was set
    _num_iterators = 0
    _pipeline: Pipeline[Batch] | None = None  # of the newest iterator
    _side: SideStream | None = None

    def __init__(
        self,
        graph: "GraphStore | Any",
        num_neighbors: list[int],
        input_nodes: str | Tensor | None = None,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        strategy: str = "split",
        sampler: str | SamplerFactory = "uniform",
        weight_attr: str | None = None,
        replace: bool = False,
        layer_dependency: bool = False,
        seed: int = 0,
        mesh: Mesh | None = None,
        ownership: Ownership | None = None,
        partition: Tensor | None = None,
        features: Features = "x",
        features_on_disk: bool = False,
        cache: int | str = 0,
        device_cache: int | str = 0,
        copies: int | str = 0,
        edge_attr: str | None = "edge_attr",
        edge_weight: str | None = "edge_weight",
        deterministic: bool = False,
        prefetch: int = 0,
        telemetry: str | Path | None = None,
        **options: object,
    ) -> None:
        self.mesh = resolve_mesh(mesh, "NeighborLoader")
        store = as_graph_store(graph, partition)
        self.plan, self._graph = resolve_plan(
            store,
            self.mesh,
            num_neighbors=num_neighbors,
            input_nodes=input_nodes,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            strategy=strategy,
            sampler=sampler,
            weight_attr=weight_attr,
            replace=replace,
            layer_dependency=layer_dependency,
            seed=seed,
            ownership=ownership,
            features=features,
            features_on_disk=features_on_disk,
            cache=cache,
            device_cache=device_cache,
            copies=copies,
            edge_attr=edge_attr,
            edge_weight=edge_weight,
            deterministic=deterministic,
            prefetch=prefetch,
            options=options,
        )
        # all ranks: refuses ranks with other options before the first collective that depends on them
        assert_same_on_all_ranks(self.mesh.world, "NeighborLoader", self.plan.compared)
        self._open(require_drawn(sampler) if callable(sampler) else None)
        self.telemetry = Telemetry(self.mesh.rank, telemetry)
        self._log_start(store, equal_ranges=ownership is None and len(store.part_boundaries) == 2)

    def _open(self, user_sampler: SamplerFactory | None) -> None:
        """Open row sources and make samplers and process groups. A collective."""
        plan = self.plan
        graph = self._graph
        mesh = self.mesh
        spec = plan.strategy
        read = graph.owned if spec.reads_own_rows else graph.sampled
        rows = open_features(read, plan.arrays.features, cache=plan.cache, on_disk=plan.features_on_disk)
        groups = mesh.borrow_loading_groups(owner=self) if plan.prefetch else mesh.loading_groups
        copies: ForeignCopies | None = None
        if plan.copies:
            copies = graph.owned.copy_foreign_rows(rows, plan.copies, mesh.loading).move_rows(mesh.device)

        def sampler_of(view: LocalGraph) -> LayerSampler:
            with_ids = plan.arrays.has_edge_values
            if user_sampler is not None:
                return user_sampler(SampledRange(view.graph, view.original_ids, mesh.sample_device, with_ids))
            draw = view.open_draw(plan.draw)
            return make_sampler(view.graph, view.original_ids, mesh.sample_device, edge_ids=with_ids, draw=draw)

        self._strategy = Strategy(
            spec,
            list(plan.num_neighbors),
            graph.sampled,
            groups.ids,
            whole=sampler_of(graph.sampled) if spec.needs_whole_graph else None,
            own=sampler_of(graph.owned) if spec.reads_own_rows else None,
            copies=copies,
        )
        self._step_loader = StepLoader(
            graph.sampled,
            mesh,
            groups.inputs,
            rows,
            plan.arrays,
            strategy=spec.name,
            each_vertex_once=spec.computes_each_vertex_once(mesh.size, mesh.num_replicas),
            deterministic=plan.deterministic,
            device_rows=self._open_device_rows(read, rows),
            num_ahead=plan.prefetch,
        )

    def _open_device_rows(self, read: LocalGraph, rows: HostSource) -> DeviceRows | None:
        """The input rows for a device, if the host samples for it.

        Own rows in the store may be copied to host memory that the device can read; each row is owned by one rank.
        Rows of user-defined sources are not copied ahead, because these may be slow or large.
        """
        plan = self.plan
        if not self.mesh.host_samples:
            return None
        in_store = len(plan.arrays.stored_features) == len(plan.arrays.features)
        held = in_store and plan.strategy.reads_own_rows and not plan.features_on_disk and not plan.cache
        return open_device_rows(read, rows, self.mesh.device, cache=plan.device_cache, held=held)

    def _log_start(self, store: GraphStore, *, equal_ranges: bool) -> None:
        """Log the size of a mini-batch. (In a DDP script the batch size is that of one rank.)"""
        if self.mesh.rank != 0:
            return
        ranks = self.mesh.size
        size = self.plan.batch_size
        _LOG.info(
            "global mini-batch of %d targets over %d rank(s), %.1f per rank on average; %d steps per epoch",
            size,
            ranks,
            size / ranks,
            len(self),
        )
        if store.unused:
            _LOG.warning("not in the mini-batches: %s", ", ".join(store.unused))
        if equal_ranges and self.mesh.num_splits > 1 and self.plan.strategy.reads_own_rows:
            _LOG.warning(
                "the graph is not partitioned: ranks own equal ranges and exchange most rows (gsplit partition)"
            )

    @property
    def description(self) -> dict[str, str]:
        """Everything that the mini-batches depend on; equal on all ranks, for any number of ranks."""
        return self.plan.description

    @property
    def arrays(self) -> ArrayNames:
        """The stored arrays that are loaded."""
        return self.plan.arrays

    @property
    def strategy(self) -> str:
        """The name of the strategy; for "auto", of the one that was chosen."""
        return self.plan.strategy.name

    @property
    def prefetch(self) -> int:
        """The number of batches that are made ahead."""
        return self.plan.prefetch

    @property
    def num_targets(self) -> int:
        """The number of targets of an epoch, over all ranks."""
        return self.plan.num_targets

    def __len__(self) -> int:
        return self.plan.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Start the next ``iter`` at the first step of this epoch."""
        self.load_state_dict({"epoch": epoch, "step": 0})

    def state_dict(self) -> dict[str, int]:
        """The position in training: the epoch and its next step."""
        epoch, step = self._start or self._position
        return {"epoch": max(epoch, 0), "step": step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next ``iter`` at this position; the end of an epoch is the start of the next one."""
        if set(state) != {"epoch", "step"}:
            raise InputError(explain("state", "epoch and step", sorted(state), "pass what state_dict returned"))
        epoch = operator.index(state["epoch"])
        step = operator.index(state["step"])
        if epoch < 0 or not 0 <= step <= len(self):
            fix = "pass what state_dict returned for the same targets and batch size"
            raise InputError(explain("state", f"an epoch from 0 and a step in 0..{len(self)}", (epoch, step), fix))
        self._start = (epoch + 1, 0) if step == len(self) > 0 else (epoch, step)

    def __iter__(self) -> Iterator[Batch]:
        epoch, step = self._start or (self._position[0] + 1, 0)
        self._position = (epoch, step)
        self._start = None
        self._num_iterators += 1
        return self._batches(epoch, step, self._num_iterators)

    def _batches(self, epoch: int, first: int, number: int) -> Iterator[Batch]:
        """The steps of one epoch. Only the newest iterator changes the position of the loader."""
        self._check_newest(number)
        self.telemetry.start_clock()
        with closing(self._open_pipeline(epoch, range(first, len(self)))) as pipeline:
            try:
                yield from self._take(pipeline, epoch, first, number)
            finally:
                if self._pipeline is pipeline:
                    self._pipeline = None  # it refers to the loader

    def _check_newest(self, number: int) -> None:
        if number != self._num_iterators:
            got = f"iterator {number} of {self._num_iterators}"
            fix = "iterate over one epoch at a time, or use make_batch"
            raise InputError(explain("this iterator", "to be the loader's newest", got, fix))

    def _open_pipeline(self, epoch: int, steps: range) -> Pipeline[Batch]:
        """A pipeline for the steps of an epoch. Only one is open at a time, because all steps share the sampler."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = Pipeline(lambda step: self._load(epoch, step), steps, self.plan.prefetch)
        return self._pipeline

    def _take(self, pipeline: Pipeline[Batch], epoch: int, first: int, number: int) -> Iterator[Batch]:
        """Take finished batches, and record position and telemetry of each step."""
        if self.plan.prefetch and self.mesh.host_samples and self._side is None:
            self._side = SideStream(
                self.mesh.device
            )  # one for all epochs, because torch caches device memory per stream
        batches = _finish_batches(pipeline, len(self) - first, self.mesh.device, self._side)
        for step in range(first, len(self)):
            self._check_newest(number)
            waited = time.perf_counter_ns()
            with torch.inference_mode(False):
                batch = next(batches)
            if self.plan.prefetch:
                batch.telemetry.add_span("wait_for_batch", waited)
            self._position = (epoch, step + 1)
            try:
                yield batch
            finally:  # also if the loop ends early or fails, so that no step is counted in the next
                self.telemetry.end_step(batch.telemetry)

    @torch.inference_mode(False)
    def make_batch(self, epoch: int, step: int) -> Batch:
        """Make any step of any epoch. A collective."""
        epoch = operator.index(epoch)
        step = operator.index(step)
        if epoch < 0 or not 0 <= step < len(self):
            got = f"epoch {epoch}, step {step}"
            fix = "choose a step below len(loader)"
            raise InputError(explain("make_batch", f"an epoch from 0 and a step in 0..{len(self) - 1}", got, fix))
        if self._pipeline is not None:
            self._pipeline.drain()  # it uses the same sampler; all ranks have permitted the same steps
        return self._load(epoch, step).to(self.mesh.device)

    @torch.inference_mode(False)
    def _load(self, epoch: int, step: int) -> Batch:
        """The first two stages of a step, in the thread of the pipeline if it has one. A collective."""
        mesh = self.mesh
        on_stage = mesh.record_stage if mesh.size > 1 else None
        telemetry = StepTelemetry(epoch, step, mesh.device, mesh.sample_device, on_stage)
        with in_thread(mesh.device):
            return self._step_loader.load(self._sample(self._key(epoch, step), telemetry))

    def _key(self, epoch: int, step: int) -> StepKey:
        return StepKey(self.plan.seed, epoch, step, self.plan.draw.layer_dependency)

    def _sample(self, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """Sample this rank's part of a step. A collective of the replica."""
        plan = self.plan
        mesh = self.mesh
        targets = self._graph.targets
        stride = (mesh.replica, mesh.num_replicas)  # each replica takes a strided share of the mini-batch
        if plan.strategy.targets == "strided":
            stride = (mesh.replica + mesh.num_replicas * mesh.split_rank, mesh.size)  # and so does each of its ranks
        own = targets.for_step(key.seed, key.epoch, key.step, plan.batch_size, shuffle=plan.shuffle, stride=stride)
        telemetry.record_max("targets_bytes", targets.num_bytes)
        if not plan.strategy.needs_whole_graph:
            largest_bytes = max(self._strategy.num_range_bytes, targets.largest_bytes)
            telemetry.record_max("largest_range_array_bytes", largest_bytes)
        size = targets.size_of_step(key.step, plan.batch_size)
        return self._strategy.sample(own.to(mesh.sample_device), key, size, telemetry)


def _finish_batches(
    pipeline: Pipeline[Batch], num_steps: int, device: torch.device, side: SideStream | None
) -> Iterator[Batch]:
    """The third stage of all steps, in the training thread. With ``side``, each batch is launched there one step ahead.

    The copy, gather and exchange of step t + 1 then run on the device while step t trains. All ranks launch them at the
    same point of every step, so the collectives of a device are issued by one thread in one order. An error during a
    launch is raised when its step is taken, after the step before it.
    """
    if side is None:
        for _ in range(num_steps):
            yield pipeline.take().to(device)
        return

    def launch() -> tuple[Batch, Any] | Exception:
        try:
            loaded = pipeline.take()
            with side.launching():
                batch = loaded.to(device)
            return batch, side.mark()
        except Exception as error:
            return error

    ahead = launch() if num_steps else None
    for step in range(num_steps):
        assert ahead is not None
        if isinstance(ahead, Exception):
            raise ahead
        batch, mark = ahead
        ahead = launch() if step + 1 < num_steps else None
        # The next launch waits for the current stream before it allocates memory. This also protects a batch that is
        # dropped earlier.
        side.join(mark, [batch.x, batch.blocks[0].indptr])
        yield batch
