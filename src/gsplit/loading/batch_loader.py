"""What all loaders share: from a plan to an iterator over mini-batches, on any number of ranks.

The number of steps is known before the first and equal on all ranks. A position in training is (epoch, step): any step
can be made without the steps before it.

A step has three stages: ``Strategy.sample``, ``StepLoader.load`` and ``Batch.to``. With ``prefetch`` the first two run
ahead in threads (``pipeline``). On a device, a second stream is used: if the host samples, the third stage is launched
on it one step ahead; if the device samples, the thread launches the first two on it, and waits for their sizes.
"""

import logging
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast
from weakref import WeakMethod

import torch

from gsplit.device.devices import SideStream, in_thread
from gsplit.distributed.comm.comm import Call, Comm, assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.features.copies import ForeignCopies
from gsplit.features.device import DeviceRows
from gsplit.features.protocol import HostSource
from gsplit.files.host_limits import free_bytes
from gsplit.loading.pipeline import Pipeline
from gsplit.loading.plan import LoaderPlan, RankGraph
from gsplit.loading.step_loader import StepLoader
from gsplit.loading.strategy import SampledStep, Strategy
from gsplit.loading.tiers import (
    can_read_foreign_rows,
    open_device_rows,
    open_features,
    open_typed_features,
    stays_remote,
)
from gsplit.loading.typed_step_loader import TypedStepLoader
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.local_graph import ArrayNames, LocalGraph
from gsplit.minibatch.strategy_names import StrategySpec, parse_strategy
from gsplit.sampling.drawn import require_drawn
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import make_sampler
from gsplit.sampling.protocol import LayerSampler, SampledRange, SamplerFactory
from gsplit.sampling.relations import relation_sampler
from gsplit.sampling.temporal import open_edge_times, temporal_sampler
from gsplit.telemetry import StepTelemetry, Telemetry

__all__ = ["BatchLoader", "whole_graph_bytes"]

_LOG = logging.getLogger(__name__)
_SMALL = 8  # targets per rank of a mini-batch on which ranks are compared with one process
_MOST_VERTICES = 1 << 27  # of a graph that one process opens: it reads the ids of all
_MOST_MEMORY = 8  # divides the free memory
B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class _StepMaker:
    """What one sampling thread makes its steps with: samplers and a process group of its own."""

    strategy: Strategy
    step_loader: StepLoader


class BatchLoader(ABC, Generic[B]):
    """See the module. Subclasses resolve their arguments to a plan, and sample a step."""

    _counted = "targets"  # what a mini-batch has ``batch_size`` of
    _holds_rows = True  # on a device: whether all own rows may be copied to memory that it reads
    _position = (-1, 0)  # of the newest iterator: its epoch and its next step
    _start: tuple[int, int] | None = None  # the position at which the next iterator starts, if it was set
    _num_iterators = 0
    _pipeline: "Pipeline[tuple[B, Any]] | None" = None  # of the newest iterator
    _side: SideStream | None = None  # one for all epochs, because torch caches device memory per stream

    def __init__(
        self,
        mesh: Mesh,
        plan: LoaderPlan,
        graph: RankGraph,
        sampler: str | SamplerFactory,
        telemetry: str | Path | None,
        *,
        equal_ranges: bool,
    ) -> None:
        """``equal_ranges``: the graph is not partitioned, and ranks own equal ranges. A collective."""
        self.mesh = mesh
        self.plan = plan
        self._graph = graph
        # all ranks: refuses ranks with other options before the first collective that depends on them
        assert_same_on_all_ranks(self.mesh.control, type(self).__name__, self.plan.compared)
        self.device_note = ""
        """Where the rows of a device are, and how batches are made for it; empty on the CPU."""
        self._user_sampler = require_drawn(sampler) if callable(sampler) else None
        self._open()
        self.mesh.control.gather_text(Call("open the loader", long_wait=True), "")  # a cold disk may be slow
        self.telemetry = Telemetry(self.mesh.rank, telemetry)
        self._log_start(equal_ranges=equal_ranges)

    def _open(self) -> None:
        """Open row sources and make samplers and process groups. A collective."""
        plan = self.plan
        graph = self._graph
        mesh = self.mesh
        spec = plan.strategy
        read = graph.owned if spec.reads_own_rows else graph.sampled
        groups = [mesh.loading_groups]
        if plan.prefetch:  # all ranks: as many, because they have compared the plan
            groups = [mesh.borrow_loading_groups(owner=self) for _ in range(plan.sampling_threads)]
        make_whole = self._sampler_factory(graph.sampled) if spec.needs_whole_graph else None
        make_own = self._sampler_factory(graph.owned) if spec.reads_own_rows else None
        samplers = [  # before rows: the edges of a device that samples come first in its memory
            (None if make_whole is None else make_whole(), None if make_own is None else make_own()) for _ in groups
        ]
        step_loader, copies, reads_foreign_rows = self._open_rows(read, groups[0].inputs)
        self._makers = [
            _StepMaker(
                Strategy(
                    spec,
                    list(plan.num_neighbors),
                    graph.sampled,
                    group.ids,
                    whole=whole,
                    own=own,
                    copies=copies,
                    reads_foreign_rows=reads_foreign_rows,
                ),
                step_loader.over(group.inputs),
            )
            for group, (whole, own) in zip(groups, samplers, strict=True)
        ]
        if plan.prefetch and mesh.device.type != "cpu":
            self._side = SideStream(mesh.device)

    def _sampler_factory(self, view: LocalGraph) -> Callable[[], LayerSampler]:
        """Makes samplers of a view. They share the arrays of the graph."""
        plan = self.plan
        store = self._graph.store
        device = self.mesh.sample_device
        with_ids = plan.arrays.has_edge_values
        if self._user_sampler is not None:
            return partial(self._user_sampler, SampledRange(view.graph, view.original_ids, device, with_ids))
        if store.types is not None:
            return partial(relation_sampler, view.graph, view.original_ids, device, store.stored_array("edge_type"))
        if plan.draw.time_attr is not None:
            times = open_edge_times(store, view.graph, plan.draw.time_attr)
            last = plan.draw.temporal_strategy == "last"
            return partial(temporal_sampler, view.graph, view.original_ids, device, times, last=last, edge_ids=with_ids)
        draw = view.open_draw(plan.draw)
        return partial(make_sampler, view.graph, view.original_ids, device, edge_ids=with_ids, draw=draw)

    def _open_rows(self, read: LocalGraph, comm: Comm) -> tuple[StepLoader, ForeignCopies | None, bool]:
        """Open the row sources. Also returns the copies of other ranks' rows, if wanted, and whether a rank reads the
        rows of all ranks itself. A collective.
        """
        plan = self.plan
        mesh = self.mesh
        spec = plan.strategy
        sampled = self._graph.sampled
        each_once = spec.computes_each_vertex_once(mesh.size, mesh.num_replicas)
        types = self._graph.store.types
        if types is not None:
            typed = TypedStepLoader(
                sampled,
                types,
                plan.target_type,
                open_typed_features(read, plan.arrays.of_types, cache=plan.cache, on_disk=plan.features_on_disk),
                pair_type=plan.pair_type,
                mesh=mesh,
                comm=comm,
                arrays=plan.arrays,
                strategy=spec.name,
                each_vertex_once=each_once,
                deterministic=plan.deterministic,
                small_batches=WeakMethod(self.small_batches),
            )
            return typed, None, False
        rows = open_features(read, plan.arrays.features, cache=plan.cache, on_disk=plan.features_on_disk)
        device_rows = self._open_device_rows(read, rows)
        is_near = mesh.replica_shares_host or not spec.reads_own_rows
        reads_foreign_rows = can_read_foreign_rows(rows, read.store, mesh, wanted=is_near and not plan.copies)
        step_loader = StepLoader(
            sampled,
            mesh,
            comm,
            rows,
            plan.arrays,
            strategy=spec.name,
            each_vertex_once=each_once,
            deterministic=plan.deterministic,
            device_rows=device_rows,
            in_place=reads_foreign_rows and not plan.prefetch,
            labels=self._graph.targets is not None,
            num_ahead=plan.prefetch,
            small_batches=WeakMethod(self.small_batches),
        )
        if not plan.copies:
            return step_loader, None, reads_foreign_rows
        copies = self._graph.owned.copy_foreign_rows(rows, plan.copies, mesh.loading)
        return step_loader, copies.move_rows(mesh.device), reads_foreign_rows

    def _open_device_rows(self, read: LocalGraph, rows: HostSource) -> DeviceRows | None:
        """The input rows for a device.

        Own rows in the store may be copied to host memory that the device can read; each row is owned by one rank.
        Rows of user-defined sources are not copied ahead, because these may be slow or large, nor are rows that stay on
        object storage, or those of a loader that makes a few small batches only.
        """
        plan = self.plan
        if self.mesh.device.type == "cpu":
            return None
        in_store = len(plan.arrays.stored_features) == len(plan.arrays.features)
        held = self._holds_rows and in_store and plan.strategy.reads_own_rows
        held = held and not plan.features_on_disk and not plan.cache and not stays_remote(read.store)
        cache = 0 if plan.device_cache is None and not in_store else plan.device_cache
        found = open_device_rows(read, rows, self.mesh.device, plan.arrays.stored_features, cache=cache, held=held)
        size = "as much as fits" if plan.device_cache is None else f"{plan.device_cache} bytes"
        where = "the device" if self.mesh.sample_device == self.mesh.device else "the host"
        self.device_note = (
            f"{self.mesh.device}: {found.describe()} (device_cache: {size}); "
            f"{where} samples, {plan.prefetch} batches ahead"
        )
        _LOG.info("%s", self.device_note)
        return found

    def _log_start(self, *, equal_ranges: bool) -> None:
        """Log the size of a mini-batch. (In a DDP script the batch size is that of one rank.)"""
        if self.mesh.rank != 0:
            return
        ranks = self.mesh.size
        size = self.plan.batch_size
        _LOG.info(
            "global mini-batch of %d %s over %d rank(s), %.1f per rank on average; %d steps per epoch",
            size,
            self._counted,
            ranks,
            size / ranks,
            len(self),
        )
        if self._graph.store.unused:
            _note_unused(self._graph.store.unused)
        if equal_ranges and self._graph.store.types is not None and self.mesh.num_splits > 1:
            _LOG.warning(
                "the graph is not partitioned: ranks own equal ranges of ids, which are ordered by type, so that ranks "
                "have different work (gsplit partition)"
            )
        elif equal_ranges and self.mesh.num_splits > 1 and self.plan.strategy.reads_own_rows:
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
    def sampling_threads(self) -> int:
        """The number of threads that make batches ahead."""
        return self.plan.sampling_threads

    @property
    def has_float_labels(self) -> bool:
        """Whether the stored labels of the targets are floats."""
        store = self._graph.store
        name = f"y/{self.plan.target_type}" if self.plan.target_type else "y"
        return name in store.names and "float" in store.dtype(name)

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

    def __iter__(self) -> Iterator[B]:
        epoch, step = self._start or (self._position[0] + 1, 0)
        self._position = (epoch, step)
        self._start = None
        self._num_iterators += 1
        return self._batches(epoch, step, self._num_iterators)

    def _batches(self, epoch: int, first: int, number: int) -> Iterator[B]:
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

    def _open_pipeline(self, epoch: int, steps: range) -> "Pipeline[tuple[B, Any]]":
        """A pipeline for the steps of an epoch. Only one is open at a time, because epochs share the samplers."""
        if self._pipeline is not None:
            self._pipeline.close()
        plan = self.plan
        self._pipeline = Pipeline(
            lambda step: self._load_ahead(epoch, step), steps, plan.prefetch, plan.sampling_threads
        )
        return self._pipeline

    def _take(self, pipeline: "Pipeline[tuple[B, Any]]", epoch: int, first: int, number: int) -> Iterator[B]:
        """Take finished batches, and record position and telemetry of each step."""
        if self._side is not None and self.mesh.host_samples:
            batches = _launch_ahead(pipeline, len(self) - first, self._side)
        else:
            batches = (self._finish(*pipeline.take()) for _ in range(first, len(self)))
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
    def make_batch(self, epoch: int, step: int) -> B:
        """Make any step of any epoch. A collective."""
        epoch = operator.index(epoch)
        step = operator.index(step)
        if epoch < 0 or not 0 <= step < len(self):
            got = f"epoch {epoch}, step {step}"
            fix = "choose a step below len(loader)"
            raise InputError(explain("make_batch", f"an epoch from 0 and a step in 0..{len(self) - 1}", got, fix))
        if self._pipeline is not None:
            self._pipeline.drain()  # it uses the same samplers; all ranks have permitted the same steps
        if self._side is None:
            return self._load(epoch, step).to(self.mesh.device)
        with self._side.launching():
            loaded = self._load_ahead(epoch, step)
        return self._finish(*loaded)

    def small_batches(self, *, alone: bool) -> Iterator[B]:
        """Two mini-batches of few targets, the second of twice as many and of others; see ``SmallBatches``.

        One process reads the whole graph, which a shard does not have, and which takes too long if it is very large.
        """
        if alone:
            loader = self._on_one_process()
        elif self.plan.prefetch:  # its samplers and groups are in use by threads, one of which may have failed
            loader = self._reopen(self.mesh, self.plan.strategy, self._graph)
        else:
            loader = copy(self)
        epoch = max(self._position[0], 0)  # whose order of targets training needs, too
        for step in (0, 1):
            size = min(self.plan.batch_size, (step + 1) * _SMALL * self.mesh.size)
            loader.plan = replace(loader.plan, batch_size=size, drop_last=False)
            yield loader.make_batch(epoch, min(step, len(loader) - 1))

    def _on_one_process(self) -> Self:
        """The same loader for one process, which has all targets of every mini-batch."""
        num_vertices = self._graph.store.num_vertices
        most = free_bytes() // _MOST_MEMORY
        if num_vertices > _MOST_VERTICES or whole_graph_bytes(num_vertices, self.plan.num_targets) > most:
            fix = "train on a part of the graph, or compare by gsplit.verify"
            expected = f"at most {_MOST_VERTICES:,} vertices, and at most {most:,} bytes to open them on one process"
            raise InputError(explain("verify", expected, f"{num_vertices:,}", fix))
        mesh = solo_mesh(self.mesh.device, "cpu")  # whose memory has no room for the edges of all ranks
        spec = parse_strategy("data", len(self.plan.num_neighbors))
        return self._reopen(mesh, spec, self._graph.on_one_process(mesh, spec))

    def _reopen(self, mesh: Mesh, spec: StrategySpec, graph: RankGraph) -> Self:
        """The same loader without threads and caches. A collective."""
        loader = copy(self)
        loader.mesh = mesh
        loader.plan = replace(
            self.plan, strategy=spec, prefetch=0, sampling_threads=1, copies=0, cache=0, device_cache=0
        )
        loader._graph = graph
        loader._pipeline = None
        loader._side = None
        loader._holds_rows = False
        loader._open()
        return loader

    def _load_ahead(self, epoch: int, step: int) -> tuple[B, Any]:
        """``_load``, on the second stream if the device samples. Also returns an event after the work that it launched.

        Nothing that training launches is waited for. A collective.
        """
        if self._side is None or self.mesh.host_samples:
            return self._load(epoch, step), None
        with in_thread(self.mesh.device), self._side.running():  # or torch returns to the first device at the end
            return self._load(epoch, step), self._side.mark()

    def _finish(self, batch: B, mark: Any) -> B:
        """The third stage of a step, in the training thread. ``mark``: from ``_load_ahead``. A collective."""
        if mark is not None:
            assert self._side is not None
            self._side.join(mark, batch.device_tensors())
        return batch.to(self.mesh.device)

    @torch.inference_mode(False)
    def _load(self, epoch: int, step: int) -> B:
        """The first two stages of a step, in its thread of the pipeline if there is one. A collective."""
        mesh = self.mesh
        on_stage = mesh.record_stage if mesh.size > 1 else None
        telemetry = StepTelemetry(
            epoch, step, mesh.device, mesh.sample_device, on_stage, times_devices=self.telemetry.times_devices
        )
        maker = self._makers[step % len(self._makers)]  # that of one thread of the pipeline
        with in_thread(mesh.device):
            sampled = self._sample(maker.strategy, self._key(epoch, step), telemetry)
            telemetry.record_max("sampler_bytes", sum(each.strategy.num_sampler_bytes for each in self._makers))
            return cast(B, maker.step_loader.load(sampled))

    def _key(self, epoch: int, step: int) -> StepKey:
        return StepKey(self.plan.seed, epoch, step, self.plan.draw.layer_dependency)

    @abstractmethod
    def _sample(self, strategy: Strategy, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """Sample this rank's part of a step. A collective of the replica."""


def whole_graph_bytes(num_vertices: int, num_targets: int) -> int:
    """Memory in which rank 0 opens the whole graph, to take small mini-batches alone; 0 if there are too many vertices.

    For every vertex the sampler's table and the degrees of GCN, and the targets. Ids and rows are read from the store.
    """
    return 0 if num_vertices > _MOST_VERTICES else (4 + 16) * num_vertices + 32 * num_targets


def _launch_ahead(pipeline: "Pipeline[tuple[B, Any]]", num_steps: int, side: SideStream) -> Iterator[B]:
    """The third stage of all steps that the host has sampled, in the training thread; launched one step ahead.

    The copy and gather of step t + 1 then run on the device while step t trains. The exchange of its rows comes after
    step t, on the stream of training, which orders all collectives. An error during a launch is raised when its step is
    taken, after the step before it.
    """

    def launch() -> tuple[B, Any] | Exception:
        try:
            loaded, _ = pipeline.take()
            with side.launching():
                batch = loaded.copy_to_device()
            return batch, side.mark()
        except Exception as error:
            return error

    ahead = launch() if num_steps else None
    for step in range(num_steps):
        assert ahead is not None
        if isinstance(ahead, Exception):
            raise ahead
        batch, mark = ahead
        # The next launch waits for the current stream before it allocates memory. This also protects a batch that is
        # dropped earlier.
        side.join(mark, batch.allocated)
        batch = batch.exchange_rows()
        ahead = launch() if step + 1 < num_steps else None
        yield batch


@cache  # once: a program makes several loaders of the same data
def _note_unused(names: tuple[str, ...]) -> None:
    _LOG.warning("not in the mini-batches: %s", ", ".join(names))
