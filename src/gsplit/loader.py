"""The loader: mini-batches of one graph for any number of ranks, with PyG's argument names.

``batch_size`` is the size of the GLOBAL mini-batch, shared by all ranks. The number of steps is known before the
first and the same on every rank. A position in training is (epoch, step) and nothing else: any step can be made
without the ones before.
"""

import hashlib
import logging
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsplit.batch import Batch
from gsplit.distributed.comm import assert_same_on_all_ranks
from gsplit.distributed.mesh import Mesh, resolve_mesh
from gsplit.errors import InputError, explain
from gsplit.feature_tiers import open_features
from gsplit.features.budget import parse_bytes
from gsplit.features.protocol import RowSource
from gsplit.local_graph import ArrayNames, FeatureNames, LocalGraph, make_ownership
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import check_fanouts, make_sampler
from gsplit.sampling.targets import LocalTargets
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.strategies.loading import StepLoader
from gsplit.strategies.protocol import Strategy
from gsplit.strategies.registry import strategy_class
from gsplit.telemetry import StepTelemetry, Telemetry

__all__ = ["NeighborLoader"]

_LOG = logging.getLogger(__name__)
_PLANNED_SAMPLERS = ("weighted", "labor", "replace")
_REFUSED = {
    "replace": "neighbours are drawn without replacement",
    "weight_attr": "weighted sampling is not built yet",
    "disjoint": "a mini-batch is one graph, shared by all targets",
    "time_attr": "temporal sampling is not built",
    "input_time": "temporal sampling is not built",
    "temporal_strategy": "temporal sampling is not built",
    "subgraph_type": "blocks hold the sampled edges, in their direction",
    "directed": "blocks hold the sampled edges, in their direction",
    "transform": "change the batch in the training loop",
    "transform_sampler_output": "change the batch in the training loop",
    "neighbor_sampler": "sampling is built in; leave it out",
    "num_workers": "sampling runs compiled in this process; leave it out",
    "persistent_workers": "there are no workers; leave it out",
    "prefetch_factor": "there are no workers; leave it out",
    "pin_memory": "batches are made on the mesh's device; leave it out",
    "filter_per_worker": "there are no workers; leave it out",
    "is_sorted": "the store is sorted; leave it out",
}


class NeighborLoader:
    """Iterates over the mini-batches of an epoch; each ``iter`` is the next epoch.

    ``graph`` is an opened store, or a PyG ``Data`` with a ``partition`` tensor (a rank or part for every vertex).
    ``num_neighbors[0]`` is the targets' own hop; -1 takes all neighbours. ``input_nodes``: the name of stored targets,
    a tensor of original ids or a mask, or None for every vertex. ``batch_size``: targets of the GLOBAL mini-batch.
    ``mesh``: the ranks, from ``gsplit.init()``; a program of one process may leave it out.

    ``strategy``: "split" (the ranks share the mini-batch) or "data" (each rank takes some targets and their whole
    neighbourhood); the result is the same. ``ownership`` overrides who owns which range of vertices. ``features``,
    ``edge_attr``, ``edge_weight`` name stored arrays; edge values are loaded where the graph has an array of that name.
    Several ``features`` are put side by side. ``cache``: memory of each rank for its hottest rows, such as "2GB", from
    a partitioned store. ``copies``: memory of each rank for copies of the hottest rows of other ranks, which then need
    not travel. ``features_on_disk``: read features from files instead of mapping them (docs/loading.md).
    ``deterministic``: on devices, sums of the shuffle in one order. ``telemetry``: a file for one JSON line per step.
    """

    _position = (-1, 0)  # of the newest iterator: epoch, and the step that comes next
    _start: tuple[int, int] | None = None  # where the next iterator is told to begin
    _iterators = 0

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
        sampler: str = "uniform",
        seed: int = 0,
        mesh: Mesh | None = None,
        ownership: Ownership | None = None,
        partition: Tensor | None = None,
        features: FeatureNames = "x",
        features_on_disk: bool = False,
        cache: int | str = 0,
        copies: int | str = 0,
        edge_attr: str | None = "edge_attr",
        edge_weight: str | None = "edge_weight",
        deterministic: bool = False,
        telemetry: str | Path | None = None,
        **options: object,
    ) -> None:
        _check_options(num_neighbors, batch_size, sampler, seed, options)
        self.mesh, self._kind = resolve_mesh(mesh, "NeighborLoader"), strategy_class(strategy)
        store, self._copies = as_graph_store(graph, partition), _check_copies(copies, self._kind)
        self.arrays = ArrayNames(store, features, edge_attr, edge_weight)
        self._seed, self._batch_size, self._drop_last = int(seed), int(batch_size), drop_last
        ranges = make_ownership(store, self.mesh, ownership)
        local = LocalGraph(store, self.mesh, ranges, whole=self._kind.needs_whole_graph)
        targets = local.targets(input_nodes)
        self._compare_ranks(local, targets, num_neighbors, input_nodes, shuffle)
        rows = open_features(local, self.arrays.features, cache=cache, on_disk=features_on_disk)
        self._strategy = self._make_strategy(local, rows, targets, list(num_neighbors), shuffle, deterministic)
        self.telemetry = Telemetry(self.mesh.rank, telemetry)
        self._log_start(store, equal_ranges=ownership is None and len(store.part_boundaries) == 2)

    def _make_strategy(
        self,
        local: LocalGraph,
        rows: RowSource,
        targets: LocalTargets,
        num_neighbors: list[int],
        shuffle: bool,
        deterministic: bool,
    ) -> Strategy:
        arrays, device = self.arrays, self.mesh.sample_device
        return self._kind(
            sampler=make_sampler(local.graph, local.original_ids, device, edge_ids=arrays.has_edge_values),
            ownership=local.ownership,
            targets=targets,
            loader=StepLoader(local, self.mesh, rows, arrays),
            mesh=self.mesh,
            num_neighbors=num_neighbors,
            batch_size=self._batch_size,
            shuffle=shuffle,
            deterministic=deterministic,
            copies=local.copy_foreign_rows(rows, self._copies, self.mesh.loading) if self._copies else None,
        )

    def _compare_ranks(
        self,
        local: LocalGraph,
        targets: LocalTargets,
        num_neighbors: list[int],
        input_nodes: str | Tensor | None,
        shuffle: bool,
    ) -> None:
        """Refuse ranks that would not make the same mini-batches. A collective."""
        settings = {
            "num_neighbors": num_neighbors,
            "batch_size": self._batch_size,
            "shuffle": shuffle,
            "drop_last": self._drop_last,
            "strategy": self._kind.name,
            "seed": self._seed,
            "arrays": str(self.arrays),
            "copies": self._copies,
            "boundaries": local.ownership.boundaries,
            "num_vertices": local.store.num_vertices,
            "num_targets": targets.num_targets,
            "graph": local.store.fingerprint,
            "input_nodes": _fingerprint(input_nodes),
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
        if equal_ranges and self.mesh.num_splits > 1 and not self._kind.needs_whole_graph:
            _LOG.warning(
                "the graph is not partitioned: ranks own equal ranges and exchange most rows (gsplit partition)"
            )

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
        self.telemetry.start_clock()
        for step in range(first, len(self)):
            if number != self._iterators:
                fix = "iterate over one epoch at a time, or use make_batch(epoch, step)"
                raise InputError(
                    explain(
                        "this iterator", "to be the loader's newest", f"iterator {number} of {self._iterators}", fix
                    )
                )
            batch = self.make_batch(epoch, step)
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
        telemetry = StepTelemetry(epoch, step, self.mesh.device, self.mesh.sample_device)
        sampled = self._strategy.sample(StepKey(self._seed, epoch, step), telemetry)
        return self._strategy.load(sampled)


def _check_options(
    num_neighbors: list[int], batch_size: int, sampler: str, seed: int, options: dict[str, object]
) -> None:
    check_fanouts(num_neighbors)
    if not isinstance(batch_size, int) or batch_size < 1:
        fix = "give the size of the global mini-batch"
        raise InputError(explain("batch_size", "a positive number", batch_size, fix))
    if not hasattr(seed, "__index__") or not 0 <= seed < 1 << 63:
        raise InputError(explain("seed", "0 to 2**63 - 1", seed, "choose another seed"))
    if sampler != "uniform":
        fix = "use sampler='uniform'" + ("; this one is planned" if sampler in _PLANNED_SAMPLERS else "")
        raise InputError(explain("sampler", "'uniform', the only one built so far", repr(sampler), fix))
    for name, value in options.items():
        fix = _REFUSED.get(name, "see the signature of NeighborLoader")
        raise InputError(explain(f"option {name}", "an option of this loader", f"{name}={value!r}", fix))


def _check_copies(size: int | str, kind: type[Strategy]) -> int:
    num_bytes = parse_bytes(size, "copies")
    if num_bytes and kind.needs_whole_graph:
        fix = "leave it out: nothing crosses between ranks"
        raise InputError(explain("copies", "a strategy that exchanges input rows", f"strategy={kind.name!r}", fix))
    return num_bytes


def _fingerprint(nodes: str | Tensor | None) -> str:
    """The targets' list in short, to compare between ranks."""
    if nodes is None or isinstance(nodes, str):
        return str(nodes)
    return hashlib.sha256(nodes.cpu().contiguous().numpy().tobytes()).hexdigest()
