"""Forecast of the memory of every rank of a split-parallel run on the host, before the run (gsplit inspect --memory).

Maps of the store's files are listed apart from a rank's own memory, because the kernel drops and reads them again as
needed. The size of a mini-batch comes from the counts of ``gsplit partition`` if the run has the same batch size and
fanouts, otherwise from the fanouts, as a bound. Memory is counted for two mini-batches, because the loop holds one
while the next is made, and for those that are made ahead.

Presampling does not count received rows. It counts edges from other ranks; their sources are assumed to be random input
rows of the other ranks, which gives the number of different ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gsplit.errors import InputError, StoreError, explain
from gsplit.features.cache import (
    HotOrder,
    cached_order,
    expected_hit_rate,
    hotness_of,
    stored_row_bytes,
    typed_hotness,
    typed_orders,
)
from gsplit.graph.ownership import Ownership, own_parts
from gsplit.loading.batch_loader import whole_graph_bytes
from gsplit.partitioning.forecast import links_into_run
from gsplit.partitioning.weights import work_scale
from gsplit.planner.memory import HELD_BATCHES, batch_bytes, hidden_bytes
from gsplit.planner.placement import GraphSize
from gsplit.store.files import storage_dtype
from gsplit.store.manifest import PartStatistics
from gsplit.store.reader import Store

__all__ = ["MemoryPlan", "RankMemory", "forecast_memory"]

_Cost = Annotated[float, Field(ge=0.0, le=1e30)]


class _PartitionSettings(BaseModel):
    """Of ``gsplit partition``, from a store's provenance: its mini-batches, the costs of vertices and edges."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    num_neighbors: Annotated[list[Annotated[int, Field(ge=-1, le=1 << 16)]], Field(min_length=1, max_length=64)]
    batch_size: Annotated[int, Field(ge=1, le=1 << 40)]
    c_v: _Cost
    c_e: _Cost


class _PartitionCounts(BaseModel):
    """The number of presampled mini-batches."""

    model_config = ConfigDict(frozen=True)

    mini_batches: Annotated[int, Field(ge=1)]


class _RecordedPartition(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)

    settings: _PartitionSettings
    counts: _PartitionCounts


def _recorded_partition(store: Store) -> _RecordedPartition | None:
    """The last ``gsplit partition``; None if the store was never partitioned."""
    steps = [step for step in store.manifest.provenance if step.step == "partition"]
    if not steps:
        return None
    try:
        return _RecordedPartition.model_validate(steps[-1])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["provenance", *(str(part) for part in first["loc"])])
        got = str(first["input"])[:80]
        fix = "partition the store again"
        raise StoreError(explain(f"{store.where}: manifest.json: {key}", first["msg"], got, fix)) from None


@dataclass(frozen=True)
class MemoryPlan:
    """Options of the run. Batch size and fanouts default to those of the partition; without ``hidden``, no model.

    ``compares``: the first step is compared with one process, for which rank 0 opens the whole graph.
    """

    ranks: int = 1
    features: tuple[str, ...] = ("x",)
    targets: str = "train"
    cache_bytes: int = 0
    on_disk: bool = False
    batch_size: int | None = None
    num_neighbors: tuple[int, ...] | None = None
    hidden: int | None = None
    prefetch: int = 0
    sampling_threads: int = 1
    copies_bytes: int = 0
    compares: bool = True


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by purpose. ``program`` is the memory of the imported libraries."""

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
        """The rank's own memory: all that is anonymous."""
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
    """The memory of every rank."""
    if store.manifest.shard is not None:
        first, stop = store.vertex_range
        got = f"a shard of vertices {first}..{stop - 1}"
        raise InputError(explain(store.where, "a whole store", got, "inspect the store it was cut from"))
    ownership = own_parts(store.part_boundaries, plan.ranks, store.part_loads)
    program = _anonymous_now()
    return [_forecast_rank(store, plan, ownership, rank, program) for rank in range(plan.ranks)]


def _forecast_rank(store: Store, plan: MemoryPlan, ownership: Ownership, rank: int, program: int) -> RankMemory:
    first, stop = ownership.range_of(rank)
    owned = stop - first
    features = _features_by_type(store, plan.features)
    offsets = store.stored_array("indptr")[first - store.vertex_range[0] :]
    owned_of = {of: _owned_rows(store, of, first, stop) for of in features}
    own = GraphSize(
        num_vertices=owned,
        num_edges=int(offsets[owned] - offsets[0]),
        edge_bytes=store.stored_array("indices").itemsize,
        feature_bytes=sum(owned_of[of] * stored_row_bytes(store, names) for of, names in features.items()),
    )
    mapped = {
        "graph": own.graph_bytes,
        "ids": 8 * owned if store.is_renumbered else 0,
        "features": 0 if plan.on_disk else own.feature_bytes,
    }
    orders = _cached_orders(store, first, stop, features, plan.cache_bytes) if plan.cache_bytes else {}
    size = _batch_size(store, plan, ownership, rank)
    scales = {of: sum(_is_scaled(store, name) for name in names) for of, names in features.items()}
    input_rows = size.local + size.received
    received_row_bytes = _mean_row_bytes(store, features, 0, store.num_vertices)
    input_bytes = size.local * _mean_row_bytes(store, features, first, stop) + size.received * received_row_bytes
    batch = batch_bytes(
        input_bytes=input_bytes,
        rows_loaded=size.local,
        edges=size.edges,
        computed=size.computed,
    )
    anonymous = {
        "program": program,
        "sampler tables": plan.sampling_threads * (4 * owned + int(16 * size.local)),
        "targets": 32 * _own_targets(store, plan.targets, first, stop),
        "scales": sum(4 * owned_of[of] * scales[of] for of in features) if plan.on_disk else 0,
        "cache": sum(order.num_cached * stored_row_bytes(store, features[of]) for of, order in orders.items()),
        "copies": min(plan.copies_bytes, int((store.num_vertices - owned) * received_row_bytes)),
        "mini-batches": int((HELD_BATCHES + plan.prefetch) * batch),
        "hidden rows": int(hidden_bytes(size.computed, plan.hidden or 0)),
        "comparison of the first step": _comparison_bytes(store, plan) if rank == 0 else 0,
    }
    return RankMemory(
        rank=rank,
        num_vertices=owned,
        mapped=mapped,
        anonymous=anonymous,
        input_rows=input_rows,
        edges=size.edges,
        expected_hit_rate=_hit_rate(store, first, stop, orders) if orders else None,
        basis=size.basis,
    )


def _comparison_bytes(store: Store, plan: MemoryPlan) -> int:
    """Of rank 0 before the first step."""
    if plan.ranks == 1 or not plan.compares:
        return 0
    return whole_graph_bytes(store.num_vertices, store.stored_array(f"targets/{plan.targets}").size)


def _features_by_type(store: Store, features: Sequence[str]) -> dict[str | None, list[str]]:
    """The stored features that are loaded, by vertex type; of None in a graph without types."""
    if store.types is None:
        return {None: list(features)}
    found: dict[str | None, list[str]] = {
        of: [f"{of}/{name}" for name in features if f"features/{of}/{name}" in store.names]
        for of in store.types.vertex_types
    }
    return {of: names for of, names in found.items() if names}


def _owned_rows(store: Store, of: str | None, first: int, stop: int) -> int:
    if store.types is None or of is None:
        return stop - first
    low, high = store.types.row_range(of, first, stop)
    return high - low


def _is_scaled(store: Store, name: str) -> bool:
    return store.dtype(f"features/{name}") == "int8"


def _loaded_row_bytes(store: Store, names: Sequence[str]) -> int:
    """The bytes of the features of one vertex in a mini-batch: in the largest type, and decoded if they have scales."""
    width = sum(prod(store.shape(f"features/{name}")[1:]) for name in names)
    sizes = [
        4 if _is_scaled(store, name) else storage_dtype(store.dtype(f"features/{name}")).itemsize for name in names
    ]
    return width * max(sizes)


def _mean_row_bytes(store: Store, features: Mapping[str | None, list[str]], first: int, stop: int) -> float:
    """The bytes of an input row in a mini-batch: types have as many as presampling loaded, or as there are vertices."""
    if store.types is None:
        return _loaded_row_bytes(store, features[None])
    loaded = {}
    for of in store.types.vertex_types:
        counts = typed_hotness(store, first, stop, of) if "hotness" in store.names else []
        loaded[of] = sum(int(part.sum()) for part in counts)
    if not sum(loaded.values()):
        loaded = {of: _owned_rows(store, of, first, stop) for of in store.types.vertex_types}
    num_bytes = sum(loaded[of] * _loaded_row_bytes(store, names) for of, names in features.items() if of is not None)
    return num_bytes / max(1, sum(loaded.values()))


def _cached_orders(
    store: Store, first: int, stop: int, features: Mapping[str | None, list[str]], cache_bytes: int
) -> Mapping[str | None, HotOrder]:
    if store.types is None:
        return {None: cached_order(store, first, stop, features[None], cache_bytes)}
    by_type = {of: names for of, names in features.items() if of is not None}
    return dict(typed_orders(store, first, stop, by_type, cache_bytes).items())


def _hit_rate(store: Store, first: int, stop: int, orders: Mapping[str | None, HotOrder]) -> float:
    """The expected share of input rows with features that are in the cache."""
    hits = 0.0
    total = 0
    for of, order in orders.items():
        parts = [hotness_of(store, first, stop)] if of is None else typed_hotness(store, first, stop, of)
        hotness = np.concatenate(parts) if parts else np.empty(0, np.int64)
        hits += expected_hit_rate(hotness, order) * int(hotness.sum())
        total += int(hotness.sum())
    return hits / total if total else 0.0


def _own_targets(store: Store, name: str, first: int, stop: int) -> int:
    targets = store.stored_array(f"targets/{name}")
    return int(np.count_nonzero((targets >= first) & (targets < stop)))


def _batch_size(store: Store, plan: MemoryPlan, ownership: Ownership, rank: int) -> _BatchSize:
    statistics = store.manifest.part_statistics
    found = _recorded_partition(store)
    usual = ([15, 15, 15], 1024) if found is None else (found.settings.num_neighbors, found.settings.batch_size)
    fanouts = usual[0] if plan.num_neighbors is None else list(plan.num_neighbors)
    batch_size = usual[1] if plan.batch_size is None else plan.batch_size
    whole_parts = set(ownership.boundaries) <= set(store.part_boundaries)
    if statistics is not None and found is not None and whole_parts and (fanouts, batch_size) == usual:
        return _counted(store, statistics, found, ownership, rank)
    return _bounded(store, fanouts, batch_size, ownership, rank)


def _counted(
    store: Store, statistics: PartStatistics, found: _RecordedPartition, ownership: Ownership, rank: int
) -> _BatchSize:
    """The mean of the mini-batches that ``gsplit partition`` counted: held-out ones by part, presampled by vertex."""
    first, stop = ownership.range_of(rank)
    num_batches = statistics.num_batches
    parts = list(pairwise(store.part_boundaries))
    own = [part for part, (start, end) in enumerate(parts) if first <= start and end <= stop]
    starts = np.searchsorted(store.part_boundaries, ownership.boundaries[:-1]).tolist()
    into = links_into_run(statistics, starts, rank) / num_batches
    edges = float(into.sum())
    foreign = edges - float(into[rank])
    presampled = found.counts.mini_batches
    local = float(hotness_of(store, first, stop).sum()) / presampled
    elsewhere = float(hotness_of(store, 0, store.num_vertices).sum()) / presampled - local
    received = elsewhere * -math.expm1(-foreign / elsewhere) if elsewhere > 0 else 0.0
    c_v, c_e = found.settings.c_v, found.settings.c_e
    work = sum(statistics.loads[part] for part in own) / num_batches / work_scale(c_v, c_e)
    computed = (work - c_e * edges) / c_v if c_v else local
    basis = f"counted over {num_batches} mini-batches by gsplit partition"
    return _BatchSize(local=local, received=received, edges=edges, computed=computed, basis=basis)


def _bounded(store: Store, fanouts: list[int], batch_size: int, ownership: Ownership, rank: int) -> _BatchSize:
    """A bound from the fanouts: every drawn vertex is a new one while there are any, and ranks have equal shares."""
    first, stop = ownership.range_of(rank)
    num_vertices = store.num_vertices
    share = (stop - first) / max(1, num_vertices)
    mean_degree = store.num_edges / max(1, num_vertices)
    rows = float(min(batch_size, num_vertices))
    edges = 0.0
    computed = 0.0
    for fanout in fanouts:
        drawn = rows * (mean_degree if fanout < 0 else min(fanout, mean_degree))
        computed += rows
        edges += drawn
        rows = min(float(num_vertices), rows + drawn)
    local = min(rows * share, float(stop - first))
    shown = ",".join(map(str, fanouts))
    return _BatchSize(
        local=local,
        received=min(edges * share, rows - local),
        edges=edges * share,
        computed=computed * share,
        basis=f"bounded by fanouts {shown} and batch size {batch_size}: no counts of such mini-batches",
    )


def _anonymous_now() -> int:
    """Anonymous memory of this process after the imports of a rank."""
    import gsplit.nn.parallelize
    import gsplit.training.trainer  # noqa: F401

    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
