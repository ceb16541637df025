"""What a rank will hold in memory, said before a run: what is only mapped, and what is its own.

Maps of the store's files are counted apart: the kernel drops and reads them again as it likes. What a mini-batch takes
comes from what ``gsplit partition`` counted, if the run is of that batch size and those fanouts; otherwise from the
fanouts, as a bound. Two mini-batches are counted, because the loop holds one while the next is made, and those that are
made ahead.

Rows received are not counted by presampling. Edges from other ranks are, and are taken to point at the others' input
rows at random; that gives the number of different ones.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from gsplit.errors import InputError, explain
from gsplit.feature_tiers import cached_order, hotness_of, stored_row_bytes
from gsplit.features.cache import expected_hit_rate
from gsplit.kernels.buffers import SLACK
from gsplit.ownership import Ownership, own_parts
from gsplit.partitioning.weights import work_scale
from gsplit.run.recorded_partition import RecordedPartition, recorded_partition
from gsplit.store.manifest import PartStatistics
from gsplit.store.reader import Store

__all__ = ["MemoryPlan", "RankMemory", "forecast_memory"]

_HELD_BATCHES = 2
_HIDDEN_COPIES = 6  # of every hidden row while a GraphSAGE layer runs forward and backward


@dataclass(frozen=True)
class MemoryPlan:
    """What is to be run. Without batch size and fanouts, those of the partition; without ``hidden``, no model."""

    ranks: int = 1
    features: tuple[str, ...] = ("x",)
    targets: str = "train"
    cache_bytes: int = 0
    on_disk: bool = False
    batch_size: int | None = None
    num_neighbors: tuple[int, ...] | None = None
    hidden: int | None = None
    prefetch: int = 0
    copies_bytes: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by what they are for. ``program`` is what the libraries take before anything is loaded."""

    rank: int
    num_vertices: int
    mapped: dict[str, int]
    anonymous: dict[str, int]
    input_rows: float
    edges: float
    expected_hit_rate: float | None
    basis: str

    @property
    def num_bytes(self) -> int:
        """All that is the rank's own: its anonymous memory."""
        return sum(self.anonymous.values())


@dataclass(frozen=True)
class _BatchSize:
    """A rank's part of a mini-batch: own input rows, received ones, edges, and vertices computed over all layers."""

    local: float
    received: float
    edges: float
    computed: float
    basis: str


def forecast_memory(store: Store, plan: MemoryPlan) -> list[RankMemory]:
    """For every rank of a split-parallel run on the host."""
    if store.manifest.shard is not None:
        raise InputError(explain(store.path, "a whole store", "a shard", "inspect the store it was cut from"))
    ownership = own_parts(store.part_boundaries, plan.ranks, store.part_loads)
    program = _anonymous_now()
    return [_forecast_rank(store, plan, ownership, rank, program) for rank in range(plan.ranks)]


def _forecast_rank(store: Store, plan: MemoryPlan, ownership: Ownership, rank: int, program: int) -> RankMemory:
    first, stop = ownership.range_of(rank)
    offsets = store.stored_array("indptr")
    low, owned = store.vertex_range[0], stop - first
    num_edges = int(offsets[stop - low] - offsets[first - low])
    row_bytes, names = stored_row_bytes(store, plan.features), [f"features/{name}" for name in plan.features]
    mapped = {
        "graph": 8 * (owned + 1) + num_edges * store.stored_array("indices").itemsize,
        "ids": 8 * owned if store.is_renumbered else 0,
        "features": 0 if plan.on_disk else owned * row_bytes,
    }
    order = cached_order(store, first, stop, plan.features, plan.cache_bytes) if plan.cache_bytes else None
    size = _batch_size(store, plan, ownership, rank)
    scaled = [name for name in names if store.dtype(name) == "int8"]
    width = sum(prod(store.stored_array(name).shape[1:]) for name in names)
    item = max(4 if name in scaled else store.stored_array(name).itemsize for name in names)
    rows = size.local + size.received
    # x, rows to send, ids of the frontier; per edge its row and where it was drawn from, per destination an offset
    features = rows * width * item * SLACK + size.local * 8 + (size.edges + size.computed) * 8
    anonymous = {
        "program": program,
        "sampler tables": 4 * owned + int(16 * size.local),
        "targets": 32 * _own_targets(store, plan.targets, first, stop),
        "scales": 4 * owned * len(scaled) if plan.on_disk else 0,
        "cache": order.num_cached * row_bytes if order else 0,
        "copies": min(plan.copies_bytes, (store.num_vertices - owned) * width * item),
        "mini-batches": int((_HELD_BATCHES + plan.prefetch) * features),
        "hidden rows": int(_HIDDEN_COPIES * size.computed * 4 * (plan.hidden or 0)),
    }
    rate = expected_hit_rate(hotness_of(store, first, stop), order) if order else None
    return RankMemory(rank, owned, mapped, anonymous, rows, size.edges, rate, size.basis)


def _own_targets(store: Store, name: str, first: int, stop: int) -> int:
    targets = store.stored_array(f"targets/{name}")
    return int(np.count_nonzero((targets >= first) & (targets < stop)))


def _batch_size(store: Store, plan: MemoryPlan, ownership: Ownership, rank: int) -> _BatchSize:
    statistics = store.manifest.part_statistics
    found = recorded_partition(store)
    usual = ([15, 15, 15], 1024) if found is None else (found.num_neighbors, found.batch_size)
    fanouts = usual[0] if plan.num_neighbors is None else list(plan.num_neighbors)
    batch = usual[1] if plan.batch_size is None else plan.batch_size
    whole_parts = set(ownership.boundaries) <= set(store.part_boundaries)
    if statistics is not None and found is not None and whole_parts and (fanouts, batch) == usual:
        return _counted(store, statistics, found, ownership, rank)
    return _bounded(store, fanouts, batch, ownership, rank)


def _counted(
    store: Store, statistics: PartStatistics, found: RecordedPartition, ownership: Ownership, rank: int
) -> _BatchSize:
    """From what presampling counted; the mean of its mini-batches."""
    first, stop = ownership.range_of(rank)
    batches, cuts = statistics.num_batches, np.asarray(store.part_boundaries)
    own = [p for p, (start, end) in enumerate(pairwise(cuts.tolist())) if first <= start and end <= stop]
    others = [p for p in range(len(cuts) - 1) if p not in own]
    links = np.asarray(statistics.links, np.float64)
    edges = links[own].sum() / batches
    foreign = links[np.ix_(own, others)].sum() / batches
    local, total = (float(hotness_of(store, a, b).sum()) / batches for a, b in ((first, stop), (0, store.num_vertices)))
    received = (total - local) * -math.expm1(-foreign / (total - local)) if total > local else 0.0
    work = sum(statistics.loads[p] for p in own) / batches / work_scale(found.c_v, found.c_e)
    computed = (work - found.c_e * edges) / found.c_v if found.c_v else local
    basis = f"counted over {batches} mini-batches by gsplit partition"
    return _BatchSize(local, received, float(edges), float(computed), basis)


def _bounded(store: Store, fanouts: list[int], batch: int, ownership: Ownership, rank: int) -> _BatchSize:
    """From the fanouts: every drawn vertex a new one, as far as there are vertices; ranks share evenly."""
    first, stop = ownership.range_of(rank)
    most, share = store.num_vertices, (stop - first) / max(1, store.num_vertices)
    rows, edges, computed = float(min(batch, most)), 0.0, 0.0
    mean = store.num_edges / max(1, most)
    for fanout in fanouts:
        drawn = rows * (mean if fanout < 0 else min(fanout, mean))
        computed, edges, rows = computed + rows, edges + drawn, min(float(most), rows + drawn)
    local = min(rows * share, float(stop - first))
    received = min(edges * share, rows - local)
    basis = f"bounded by fanouts {','.join(map(str, fanouts))} and batch size {batch}: no counts of such mini-batches"
    return _BatchSize(local, received, edges * share, computed * share, basis)


def _anonymous_now() -> int:
    """Anonymous memory of this process, with what a rank imports."""
    import gsplit.nn.parallelize
    import gsplit.trainer  # noqa: F401

    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
