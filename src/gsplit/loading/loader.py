"""The loader of vertices: iterates over the mini-batches of a graph, with the argument names of PyG.

``batch_size`` is the size of the GLOBAL mini-batch, which all ranks share.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.device.devices import copy_to_device
from gsplit.distributed.comm.mesh import Mesh, resolve_mesh
from gsplit.graph.blocks import TimedSeeds
from gsplit.graph.ownership import Ownership
from gsplit.loading.batch_loader import BatchLoader
from gsplit.loading.plan import resolve_plan
from gsplit.loading.strategy import SampledStep, Strategy
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.local_graph import Features, InputNodes
from gsplit.sampling.minibatch import StepKey, positions_of_step
from gsplit.sampling.protocol import SamplerFactory
from gsplit.sampling.relations import RelationFanouts
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.telemetry import StepTelemetry

__all__ = ["NeighborLoader"]


class NeighborLoader(BatchLoader[Batch]):
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

    ``time_attr``: the name of stored times of the edges, as integers; a target then draws in-edges that are not later
    than its own time, in every layer. ``input_time``: the times of the targets, in the order of ``input_nodes``, whose
    ids may then be given several times, with different times. ``temporal_strategy``: "uniform", or "last" for the
    latest in-edges. ``batch.seed_time`` and ``batch.input_id`` belong to the targets.

    ``features``, ``edge_attr`` and ``edge_weight`` name stored arrays. Edge values are loaded if the graph has an array
    of that name. ``features`` may also be a user-defined source of rows, which is called with original ids, or several
    names and sources, whose rows are concatenated (docs/loading.md; the protocols are in ``gsplit.extending``).
    ``features=None``: no features, ``x`` has no columns. ``features_on_disk``: read features from files instead of
    mapping them. ``cache``: memory of each rank for its hottest rows, such as "2GB", from a partitioned store;
    ``device_cache``: the same in the memory of a device; "auto": as many rows as fit beside 8 GB.
    ``copies``: memory of each rank for copies of the hottest rows of other ranks, which are then not exchanged.

    ``prefetch``: the number of batches that threads make ahead; by default 2 if the host samples for a device, else 0.
    ``sampling_threads``: the number of these threads, at most ``prefetch``, each with a sampler and a process group of
    its own. Batches depend on neither. ``telemetry``: a file for one JSON line per step.

    Heterogeneous graphs: ``num_neighbors`` is a list, whose numbers count for every edge type, or {edge type: list}; 0
    leaves an edge type out. ``input_nodes`` is (vertex type, name, ids in the type, mask or None), and ``features`` one
    name, for all types that have it, or {vertex type: names}. Batches are ``TypedBatch``.
    """

    def __init__(
        self,
        graph: "GraphStore | Any",
        num_neighbors: RelationFanouts,
        input_nodes: InputNodes = None,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        strategy: str = "split",
        sampler: str | SamplerFactory = "uniform",
        weight_attr: str | None = None,
        replace: bool = False,
        layer_dependency: bool = False,
        time_attr: str | None = None,
        input_time: Tensor | None = None,
        temporal_strategy: str = "uniform",
        seed: int = 0,
        mesh: Mesh | None = None,
        ownership: Ownership | None = None,
        partition: Tensor | Mapping[str, Tensor] | None = None,
        features: Features = "x",
        features_on_disk: bool = False,
        cache: int | str = 0,
        device_cache: int | str = "auto",
        copies: int | str = 0,
        edge_attr: str | None = "edge_attr",
        edge_weight: str | None = "edge_weight",
        deterministic: bool = False,
        prefetch: int | None = None,
        sampling_threads: int = 1,
        telemetry: str | Path | None = None,
        **options: object,
    ) -> None:
        ranks = resolve_mesh(mesh, "NeighborLoader")
        store = as_graph_store(graph, partition)
        plan, view = resolve_plan(
            store,
            ranks,
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
            time_attr=time_attr,
            input_time=input_time,
            temporal_strategy=temporal_strategy,
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
            sampling_threads=sampling_threads,
            options=options,
        )
        super().__init__(
            ranks,
            plan,
            view,
            sampler,
            telemetry,
            equal_ranges=ownership is None and len(store.part_boundaries) == 2,
        )

    def _sample(self, strategy: Strategy, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """Sample this rank's part of a step. A collective of the replica."""
        plan = self.plan
        mesh = self.mesh
        targets = self._graph.targets
        assert targets is not None
        stride = (mesh.replica, mesh.num_replicas)  # each replica takes a strided share of the mini-batch
        if plan.strategy.targets == "strided":
            stride = (mesh.replica + mesh.num_replicas * mesh.split_rank, mesh.size)  # and so does each of its ranks
        places, own = targets.places_in_step(
            key.seed, key.epoch, key.step, plan.batch_size, shuffle=plan.shuffle, stride=stride
        )
        telemetry.record_max("targets_bytes", targets.num_bytes)
        if not plan.strategy.needs_whole_graph:
            largest_bytes = max(strategy.num_range_bytes, targets.largest_bytes)
            telemetry.record_max("largest_range_array_bytes", largest_bytes)
        size = targets.size_of_step(key.step, plan.batch_size)
        ids = torch.from_numpy(own)
        if targets.seed_times is None:
            return strategy.sample(ids, key, size, telemetry)
        device = mesh.sample_device
        listed = positions_of_step(key, targets.num_targets, plan.batch_size, shuffle=plan.shuffle)
        times = targets.seed_times.time[listed]  # of the targets of all ranks
        seeds = TimedSeeds(
            time=copy_to_device(torch.from_numpy(times[places]), device),
            input_id=copy_to_device(torch.from_numpy(targets.seed_times.input_id[listed[places]]), device),
        )
        distinct = copy_to_device(torch.from_numpy(np.unique(times)), device)
        return strategy.sample(copy_to_device(ids, device), key, size, telemetry, seeds=seeds, times=distinct)
