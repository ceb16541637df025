"""The loader: mini-batches of one graph for any number of ranks, with PyG's argument names.

``batch_size`` is the size of the GLOBAL mini-batch, shared by all ranks. The number of steps is known before the
first and the same on every rank. A position in training is (epoch, step) and nothing else: any step can be made
without the ones before.
"""

import logging
import operator
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsplit.batch import Batch
from gsplit.batch_stream import BatchStream
from gsplit.devices import SideStream, in_thread
from gsplit.distributed.comm import assert_same_on_all_ranks
from gsplit.distributed.mesh import Mesh, resolve_mesh
from gsplit.errors import InputError, explain
from gsplit.loader_options import (
    check_auto,
    check_options,
    check_prefetch,
    describe_sampler,
    fingerprint,
    row_options,
    sampler_factory,
    stored_checksums,
)
from gsplit.local_graph import ArrayNames, Features, LocalGraph, make_ownership
from gsplit.ownership import Ownership
from gsplit.pipeline import Pipeline
from gsplit.planner.auto import PlannedSteps, resolve_strategy
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import SamplerFactory
from gsplit.sampling.targets import LocalTargets
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.strategies.assembly import MiniBatchOptions, make_strategy
from gsplit.strategies.protocol import LoadedStep
from gsplit.strategies.registry import strategy_class
from gsplit.strategies.setup import view_graph
from gsplit.strategies.spec import parse_strategy
from gsplit.telemetry import StepTelemetry, Telemetry

__all__ = ["NeighborLoader"]

_LOG = logging.getLogger(__name__)


class NeighborLoader:
    """Iterates over the mini-batches of an epoch; each ``iter`` is the next epoch.

    ``graph`` is an opened store, or a PyG ``Data`` with a ``partition`` tensor (a rank or part for every vertex).
    ``num_neighbors[0]`` is the targets' own hop; -1 takes all neighbours. ``input_nodes``: the name of stored targets,
    a tensor of original ids or a mask, or None for every vertex. ``batch_size``: targets of the GLOBAL mini-batch.
    ``mesh``: the ranks, from ``gsplit.init()``; a program of one process may leave it out.

    ``strategy``: how the ranks share a mini-batch, "split", "data", "data_cached", "push_pull", "hybrid(k)", or "auto",
    the fastest by the planner; the result is the same (docs/strategies.md). ``ownership`` overrides who owns which
    range of vertices. ``sampler``: "uniform", or a function that makes a sampler of your own (docs/minibatch.md).
    ``features``, ``edge_attr``, ``edge_weight`` name stored arrays; edge values are loaded where the graph has an array
    of that name. ``features`` may also be a source of rows of your own, which is asked for original ids, or several of
    both, side by side (docs/loading.md; ``gsplit.extending`` has the protocols). ``cache``: memory of each rank for its
    hottest rows, such as "2GB", from a partitioned store; ``device_cache``: the same in a device's memory. ``copies``:
    memory of each rank for copies of the hottest rows of other ranks, which then need not travel.
    ``features_on_disk``: read features from files instead of mapping them (docs/loading.md).
    ``deterministic``: on devices, sums of the shuffle in one order. ``telemetry``: a file for one JSON line per step.
    ``prefetch``: batches that a thread makes ahead of training; what they contain does not depend on it.
    """

    _position = (-1, 0)  # of the newest iterator: epoch, and the step that comes next
    _start: tuple[int, int] | None = None  # where the next iterator is told to begin
    _iterators = 0
    _pipeline: Pipeline[LoadedStep] | None = None  # of the newest iterator
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
        check_options(num_neighbors, batch_size, sampler, seed, options)
        self.mesh, store = resolve_mesh(mesh, "NeighborLoader"), as_graph_store(graph, partition)
        self.arrays = ArrayNames(store, features, edge_attr, edge_weight)
        check_auto(strategy, sampler, self.arrays)
        names = self.arrays.stored_features
        steps = PlannedSteps(input_nodes, list(num_neighbors), batch_size, names, features_on_disk, cache)
        steps = replace(steps, strategies=("split",)) if copies else steps  # only there input rows are shuffled
        chosen = resolve_strategy(strategy, store, self.mesh, steps)
        self._spec = parse_strategy(chosen.strategy, len(num_neighbors))
        self._kind = strategy_class(self._spec)
        self._seed, self._batch_size, self._drop_last = int(seed), int(batch_size), drop_last
        self._prefetch = check_prefetch(prefetch, self.mesh)
        rows = row_options(self._spec, self.mesh, cache, device_cache, copies, features_on_disk, self._prefetch)
        views = view_graph(store, self.mesh, make_ownership(store, self.mesh, ownership), self._kind)
        targets = views.targets(self._spec, input_nodes)
        self._describe(views.owned, targets, num_neighbors, input_nodes, shuffle, sampler)
        self._compare_ranks(views.owned, rows.copies)
        drawn = sampler_factory(sampler)
        how = MiniBatchOptions(list(num_neighbors), self._batch_size, shuffle, deterministic, drawn)
        self._strategy = make_strategy(self._spec, views, self.arrays, self.mesh, targets, rows, how)
        self.telemetry = Telemetry(self.mesh.rank, telemetry)
        self._log_start(store, equal_ranges=ownership is None and len(store.part_boundaries) == 2)

    def _describe(
        self,
        local: LocalGraph,
        targets: LocalTargets,
        num_neighbors: list[int],
        input_nodes: str | Tensor | None,
        shuffle: bool,
        sampler: str | SamplerFactory,
    ) -> None:
        names = [f"features/{name}" for name in self.arrays.stored_features]
        names += [f"edges/{name}" for name in (self.arrays.edge_attr, self.arrays.edge_weight)]
        self.description = {
            "graph": local.store.fingerprint,
            "num_vertices": str(local.store.num_vertices),
            "input_nodes": fingerprint(input_nodes),
            "num_targets": str(targets.num_targets),
            "num_neighbors": str(num_neighbors),
            "batch_size": str(self._batch_size),
            "shuffle": str(shuffle),
            "drop_last": str(self._drop_last),
            "seed": str(self._seed),
            "arrays": str(self.arrays),
            **describe_sampler(sampler),
            **stored_checksums(local.store, ["y", *names, f"targets/{input_nodes}"]),
        }
        """All that decides what the mini-batches are; the same on every rank, for any number of ranks."""

    def _compare_ranks(self, local: LocalGraph, copies: int) -> None:
        """Refuse ranks that would not make the same mini-batches, before anything else is a collective."""
        settings = {
            **self.description,
            "prefetch": self._prefetch,
            "strategy": self.strategy,
            "copies": copies,
            "boundaries": local.ownership.boundaries,
        }
        assert_same_on_all_ranks(self.mesh.world, "NeighborLoader", settings)

    def _log_start(self, store: GraphStore, *, equal_ranges: bool) -> None:
        """Say what a mini-batch is here: a DDP script's batch size is that of one rank."""
        ranks, size = self.mesh.size, self._batch_size
        if self.mesh.rank != 0:
            return
        _LOG.info(
            "global mini-batch of %d targets over %d rank(s), %.1f per rank on average; %d steps per epoch",
            *(size, ranks, size / ranks, len(self)),
        )
        if store.unused:
            _LOG.warning("not in the mini-batches: %s", ", ".join(store.unused))
        if equal_ranges and self.mesh.num_splits > 1 and self._kind.reads == "own rows":
            _LOG.warning(
                "the graph is not partitioned: ranks own equal ranges and exchange most rows (gsplit partition)"
            )

    @property
    def strategy(self) -> str:
        """How the ranks share a mini-batch."""
        return self._spec.name

    @property
    def prefetch(self) -> int:
        """Batches that are made ahead."""
        return self._prefetch

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""
        return self._strategy.num_targets

    def __len__(self) -> int:
        whole, rest = divmod(self.num_targets, self._batch_size)
        return whole + (1 if rest and not self._drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter`` run this epoch, from its first step."""
        self.load_state_dict({"epoch": epoch, "step": 0})

    def state_dict(self) -> dict[str, int]:
        """Where training stands: the epoch, and the step that comes next in it."""
        epoch, step = self._start or self._position
        return {"epoch": max(epoch, 0), "step": step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next ``iter`` go on from there; the end of an epoch is the beginning of the next."""
        if set(state) != {"epoch", "step"}:
            raise InputError(explain("state", "epoch and step", sorted(state), "pass what state_dict returned"))
        epoch, step = operator.index(state["epoch"]), operator.index(state["step"])
        if epoch < 0 or not 0 <= step <= len(self):
            fix = "pass what state_dict returned for the same targets and batch size"
            raise InputError(explain("state", f"an epoch from 0 and a step in 0..{len(self)}", (epoch, step), fix))
        self._start = (epoch + 1, 0) if step == len(self) > 0 else (epoch, step)

    def __iter__(self) -> Iterator[Batch]:
        epoch, step = self._start or (self._position[0] + 1, 0)
        self._position, self._start = (epoch, step), None
        self._iterators += 1
        return self._batches(epoch, step, self._iterators)

    def _batches(self, epoch: int, first: int, number: int) -> Iterator[Batch]:
        """The steps of one epoch. Only the newest iterator moves the loader's position."""
        self._check_newest(number)
        self.telemetry.start_clock()
        with closing(self._open_pipeline(epoch, range(first, len(self)))) as pipeline:
            try:
                yield from self._take(pipeline, epoch, first, number)
            finally:
                if self._pipeline is pipeline:
                    self._pipeline = None  # it knows the loader

    def _check_newest(self, number: int) -> None:
        if number != self._iterators:
            got, fix = f"iterator {number} of {self._iterators}", "iterate over one epoch at a time, or use make_batch"
            raise InputError(explain("this iterator", "to be the loader's newest", got, fix))

    def _open_pipeline(self, epoch: int, steps: range) -> Pipeline[LoadedStep]:
        """What makes the steps of an epoch; one at a time, because they share the sampler."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = Pipeline(lambda step: self._load(epoch, step), steps, self._prefetch)
        return self._pipeline

    def _take(self, pipeline: Pipeline[LoadedStep], epoch: int, first: int, number: int) -> Iterator[Batch]:
        if self._prefetch and self.mesh.host_samples and self._side is None:
            self._side = SideStream(self.mesh.device)  # one for all epochs: device memory is kept by stream
        stream = BatchStream(pipeline, len(self) - first, self._strategy.finish, self._side)
        for step in range(first, len(self)):
            self._check_newest(number)
            waited = time.perf_counter_ns()
            with torch.inference_mode(False):
                batch = stream.take()
            if self._prefetch:
                batch.telemetry.add_span("wait_for_batch", waited)
            self._position = (epoch, step + 1)
            try:
                yield batch
            finally:  # also when the loop is left or fails: no step's numbers run into the next
                self.telemetry.end_step(batch.telemetry)

    @torch.inference_mode(False)
    def make_batch(self, epoch: int, step: int) -> Batch:
        """Any step of any epoch, by its name alone. A collective: every rank makes it."""
        epoch, step = operator.index(epoch), operator.index(step)
        if epoch < 0 or not 0 <= step < len(self):
            got, fix = f"epoch {epoch}, step {step}", "len(loader) says how many steps there are"
            raise InputError(explain("make_batch", f"an epoch from 0 and a step in 0..{len(self) - 1}", got, fix))
        if self._pipeline is not None:
            self._pipeline.drain()  # it shares the sampler; all ranks have permitted the same steps
        return self._strategy.finish(self._load(epoch, step))

    @torch.inference_mode(False)
    def _load(self, epoch: int, step: int) -> LoadedStep:
        """The first two stages of a step; in the pipeline's thread if there is one."""
        devices = (self.mesh.device, self.mesh.sample_device)
        telemetry = StepTelemetry(epoch, step, *devices, self.mesh.record_stage if self.mesh.size > 1 else None)
        with in_thread(self.mesh.device):
            sampled = self._strategy.sample(StepKey(self._seed, epoch, step), telemetry)
            return self._strategy.load(sampled)
