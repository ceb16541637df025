"""The plan of a loader: the checked arguments of ``NeighborLoader``, with names, sizes and the strategy resolved.

It is made once, before features are opened or samplers are made. ``LoaderPlan.description`` contains everything that
the mini-batches depend on, for checkpoints. ``LoaderPlan.compared`` contains everything that must be equal on all
ranks; they compare it before the first exchange that depends on it. Options of PyG's loader that this loader does not
have are refused with the reason.
"""

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, SupportsIndex

from torch import Tensor

from gsplit.array_types import Array
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.files.byte_sizes import parse_bytes
from gsplit.graph.ownership import Ownership
from gsplit.graph.types import EdgeType
from gsplit.minibatch.local_graph import (
    ArrayNames,
    Features,
    InputNodes,
    LocalGraph,
    make_ownership,
    type_of_targets,
)
from gsplit.minibatch.strategy_names import AUTO, StrategySpec, parse_strategy
from gsplit.planner.auto import PlannedSteps, resolve_strategy
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.neighbor import check_fanouts
from gsplit.sampling.pairs import StoredPairs
from gsplit.sampling.protocol import Fanout, SamplerFactory
from gsplit.sampling.relations import RelationFanouts, resolve_relation_fanouts
from gsplit.sampling.targets import LocalTargets
from gsplit.store.files import raw_bytes
from gsplit.store.in_memory import MemoryStore
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store

__all__ = ["LoaderPlan", "PairSeeds", "RankGraph", "fingerprint_of", "resolve_plan", "stored_checksums"]

_HASHED_BYTES = 64 << 20  # of an array in memory; larger ones are sampled
_REFUSED = {
    "disjoint": "a mini-batch is one graph, shared by all targets",
    "input_time": "pairs have times by edge_label_time",
    "subgraph_type": "blocks have the sampled edges, in their direction",
    "directed": "blocks have the sampled edges, in their direction",
    "transform": "change the batch in the training loop",
    "transform_sampler_output": "change the batch in the training loop",
    "neighbor_sampler": "sampling is built in, or sampler=FUNCTION; see gsplit.extending",
    "num_workers": "sampling runs compiled in this process; leave it out",
    "persistent_workers": "there are no workers; leave it out",
    "prefetch_factor": "there are no workers; use prefetch=N to make N batches ahead",
    "pin_memory": "batches for a device are pinned already; leave it out",
    "filter_per_worker": "there are no workers; leave it out",
    "is_sorted": "the store is sorted; leave it out",
    "edge_label_time": "vertices have times by input_time",
    "neg_sampling_ratio": "use neg_sampling=dict(mode='binary', amount=RATIO)",
}


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """See the module; the fields have the names of the arguments of ``NeighborLoader``. Sizes are in bytes.

    ``graph`` and ``input_nodes`` are fingerprints. ``target_type``: the vertex type of the targets of a heterogeneous
    graph, whose ``num_neighbors`` has a number per layer and relation. ``pair_type``: the edge type of its pairs.
    ``draw``: the options of the built-in sampler. ``sampler``: those of them that differ from the default, or the name
    of a user-defined sampler. ``boundaries``: those of ``Ownership``. ``checksums``: of the stored arrays that are
    read. ``negatives``: how a loader of pairs draws negatives and excludes edges, or empty.

    ``NeighborLoader(graph, [15, 10], "train", batch_size=1024, cache="2GB")`` on two ranks has ``num_neighbors``
    (15, 10), ``cache`` 2000000000, ``strategy.name`` "split" and ``boundaries`` such as (0, 1220000, 2449029).
    """

    graph: str
    num_vertices: int
    input_nodes: str
    num_targets: int
    num_neighbors: tuple[Fanout, ...]
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    arrays: ArrayNames
    draw: DrawOptions
    sampler: str
    negatives: str
    checksums: Mapping[str, str]
    strategy: StrategySpec
    boundaries: tuple[int, ...]
    prefetch: int
    sampling_threads: int
    copies: int
    cache: int
    device_cache: int | None
    features_on_disk: bool
    deterministic: bool
    target_type: str = ""
    pair_type: EdgeType | None = None

    @property
    def description(self) -> dict[str, str]:
        """Everything that the mini-batches depend on; equal on all ranks, for any number of ranks."""
        found = {name: str(getattr(self, name)) for name in _DESCRIBED}
        found["num_neighbors"] = str(list(self.num_neighbors))
        if self.sampler:
            found["sampler"] = self.sampler
        if self.negatives:
            found["negatives"] = self.negatives
        return found | dict(self.checksums)

    @property
    def compared(self) -> dict[str, object]:
        """Everything that must be equal on all ranks."""
        return {
            **self.description,
            "strategy": self.strategy.name,
            "prefetch": self.prefetch,
            "sampling_threads": self.sampling_threads,
            "copies": self.copies,
            "boundaries": self.boundaries,
        }

    @property
    def num_steps(self) -> int:
        """The number of steps of an epoch, equal on all ranks."""
        whole, rest = divmod(self.num_targets, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown |= {"strategy": self.strategy.name, "checksums": ", ".join(self.checksums)}
        return "\n".join(f"{name}: {value}" for name, value in shown.items())


_DESCRIBED = (
    "graph",
    "num_vertices",
    "input_nodes",
    "num_targets",
    "num_neighbors",
    "batch_size",
    "shuffle",
    "drop_last",
    "seed",
    "arrays",
)


@dataclass(frozen=True)
class RankGraph:
    """One rank's part of the graph.

    ``sampled``: the vertices that it samples, its own or all. ``owned``: the vertices that it owns; often the same
    object. ``targets``: those it owns, or all targets, of which it takes a strided share in every step; None for pairs.
    ``listed``: the targets as they were given, and their times.
    """

    sampled: LocalGraph
    owned: LocalGraph
    targets: LocalTargets | None = None
    listed: tuple[InputNodes, Tensor | None] = (None, None)

    @property
    def store(self) -> GraphStore:
        return self.owned.store

    @property
    def num_targets(self) -> int:
        return 0 if self.targets is None else self.targets.num_targets

    def with_targets(self, spec: StrategySpec, input_nodes: InputNodes, input_time: Tensor | None) -> "RankGraph":
        """The same with the targets that this rank needs under a strategy, and their times if given."""
        holder = self.owned if spec.targets == "owner" else self.sampled
        if input_time is None:
            targets = holder.targets(input_nodes)
        else:
            targets = holder.timed_targets(input_nodes, input_time)
        return replace(self, targets=targets, listed=(input_nodes, input_time))

    def on_one_process(self, mesh: Mesh, spec: StrategySpec) -> "RankGraph":
        """The whole graph and all targets, for a mesh of one process. Refused where the store is a shard."""
        whole = LocalGraph(self.store, mesh, Ownership((0, self.store.num_vertices)), whole=True)
        alone = RankGraph(sampled=whole, owned=whole)
        return alone if self.targets is None else alone.with_targets(spec, *self.listed)


@dataclass(frozen=True)
class PairSeeds:
    """What a plan has of pairs, in place of targets: the name or checksum of the list and its length.

    ``negatives``: how negatives are drawn and edges are excluded. ``arrays``: the stored arrays of the list.
    ``edge_type``: of the pairs of a heterogeneous graph.
    ``stored``: the list by its name, for the planner; None for a tensor, or for all edges. ``has_times``: every pair
    has a time.
    """

    name: str
    num_pairs: int
    negatives: str
    arrays: tuple[str, ...]
    stored: StoredPairs | None
    edge_type: EdgeType | None = None
    has_times: bool = False


def resolve_plan(
    store: GraphStore,
    mesh: Mesh,
    *,
    num_neighbors: RelationFanouts,
    input_nodes: InputNodes,
    batch_size: int,
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
    ownership: Ownership | None = None,
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
    options: Mapping[str, object],
    pairs: PairSeeds | None = None,
) -> tuple[LoaderPlan, RankGraph]:
    """Resolve the arguments of a loader. Also returns this rank's part of the graph. A collective for "auto"."""
    _check_sampling(seed, options)
    fanouts = _resolve_fanouts(num_neighbors, store)
    draw = _resolve_draw(
        sampler,
        weight_attr=weight_attr,
        replace=replace,
        layer_dependency=layer_dependency,
        time_attr=time_attr,
        temporal_strategy=temporal_strategy,
    )
    times, has_times = ("input_time", input_time is not None) if pairs is None else ("edge_label_time", pairs.has_times)
    _check_times(store, draw, times, strategy, copies, has_times=has_times)
    size = _whole_number("batch_size", batch_size, 1, "a positive number", "give the size of the global mini-batch")
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    depth = _resolve_prefetch(prefetch, mesh, sampler, arrays, is_typed=store.types is not None)
    device_bytes = _resolve_device_cache(device_cache, store, mesh)
    threads = _check_sampling_threads(sampling_threads, depth, mesh, sampler, arrays)
    drawn = _describe_sampler(sampler) if callable(sampler) else str(draw)
    if store.types is not None:
        planned_pairs = strategy == AUTO and pairs is not None
        _check_typed(drawn, {"device_cache": device_bytes or 0, "copies": copies}, mesh, planned_pairs=planned_pairs)
    if strategy == AUTO:
        _check_auto(sampler, arrays, pairs)
        tiers = {"on_disk": features_on_disk, "cache": cache, "copies": copies}
        steps = _planned_steps(store, input_nodes, fanouts, size, arrays, draw, pairs, **tiers)
        strategy = resolve_strategy(strategy, store, mesh, steps).strategy  # all ranks: rank 0 sends its choice
    spec = parse_strategy(strategy, len(fanouts))
    target_type, nodes = (None, None) if pairs is not None else type_of_targets(store, input_nodes)
    view = _view_graph(store, mesh, make_ownership(store, mesh, ownership), spec)
    if pairs is None:
        view = view.with_targets(spec, input_nodes, input_time)
    plan = LoaderPlan(
        graph=store.fingerprint,
        num_vertices=store.num_vertices,
        input_nodes=_describe_nodes(target_type, nodes, input_time) if pairs is None else pairs.name,
        num_targets=view.num_targets if pairs is None else pairs.num_pairs,
        num_neighbors=tuple(fanouts),
        batch_size=size,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=operator.index(seed),
        arrays=arrays,
        draw=draw,
        sampler=drawn,
        negatives="" if pairs is None else pairs.negatives,
        checksums=_checksums_of(store, arrays, draw, target_type, nodes, pairs),
        strategy=spec,
        boundaries=view.owned.ownership.boundaries,
        prefetch=depth,
        sampling_threads=threads,
        copies=_check_copies(copies, spec),
        cache=parse_bytes(cache),
        device_cache=device_bytes,
        features_on_disk=features_on_disk,
        deterministic=deterministic,
        target_type=target_type or "",
        pair_type=None if pairs is None else pairs.edge_type,
    )
    return plan, view


def _planned_steps(
    store: GraphStore,
    input_nodes: InputNodes,
    fanouts: list[Fanout],
    batch_size: int,
    arrays: ArrayNames,
    draw: DrawOptions,
    pairs: PairSeeds | None,
    **tiers: Any,
) -> PlannedSteps:
    """What the planner counts. ``tiers``: where rows come from."""
    stored = None if pairs is None else pairs.stored
    vertex_type, nodes = (None, None) if pairs is not None else type_of_targets(store, input_nodes)
    if vertex_type is not None and not isinstance(nodes, Tensor):
        nodes = vertex_type if nodes is None else f"{vertex_type}/{nodes}"
    return PlannedSteps(nodes, fanouts, batch_size, arrays.stored_features, draw=draw, pairs=stored, **tiers)


def _view_graph(store: GraphStore, mesh: Mesh, ownership: Ownership, spec: StrategySpec) -> RankGraph:
    """The part of the graph that a rank uses under a strategy."""
    if not spec.needs_whole_graph:
        owned = LocalGraph(store, mesh, ownership)
        sampled = owned
    else:
        sampled = LocalGraph(store, mesh, ownership, whole=True)
        owned = sampled if mesh.num_splits == 1 else LocalGraph(store, mesh, ownership)
    return RankGraph(sampled=sampled, owned=owned)


def _whole_number(name: str, value: SupportsIndex, least: int, expected: str, fix: str) -> int:
    """Check and convert an integer of any type, such as one of numpy's."""
    if not hasattr(value, "__index__") or operator.index(value) < least:
        raise InputError(explain(name, expected, value, fix))
    return operator.index(value)


def _resolve_fanouts(num_neighbors: RelationFanouts, store: GraphStore) -> list[Fanout]:
    """A number per layer, or a number per layer and relation."""
    if store.types is not None:
        return [*resolve_relation_fanouts(num_neighbors, store.types)]
    if isinstance(num_neighbors, Mapping):
        fix = "give a list: one number per layer"
        raise InputError(explain("num_neighbors", "one number per layer of a graph without types", "a dict", fix))
    check_fanouts(num_neighbors)
    return [operator.index(fanout) for fanout in num_neighbors]


def _check_typed(sampler: str, sizes: Mapping[str, int | str], mesh: Mesh, *, planned_pairs: bool) -> None:
    """Refuse options that are not built for heterogeneous graphs. ``sampler``: what differs from the uniform one.

    ``planned_pairs``: the strategy for pairs is to be chosen by the planner.
    """
    refused: dict[str, tuple[object, str]] = {}
    if planned_pairs:
        refused["strategy"] = (f"{AUTO} for pairs", "name a strategy: split, data, data_cached or hybrid(k)")
    if sampler:
        refused["sampler"] = (sampler, "use sampler='uniform' without options, which draws every relation")
    for name, size in sizes.items():
        if parse_bytes(size, name):
            refused[name] = (size, "leave it out; stored features are memory-mapped")
    if mesh.host_samples:
        refused["mesh"] = (mesh, "use gsplit.init(sample_device=...), so that the device samples, or the CPU")
    for name, (got, fix) in refused.items():
        raise InputError(explain(name, "an option that is built for heterogeneous graphs", f"{name}={got}", fix))


def _check_sampling(seed: int, options: Mapping[str, object]) -> None:
    """Refuse sampling options that are not supported."""
    if not hasattr(seed, "__index__") or not 0 <= seed < 1 << 63:
        raise InputError(explain("seed", "0 to 2**63 - 1", seed, "choose another seed"))
    for name, value in options.items():
        fix = _REFUSED.get(name, "see the signature of NeighborLoader")
        raise InputError(explain(f"option {name}", "an option of this loader", f"{name}={value!r}", fix))


def _resolve_draw(sampler: str | SamplerFactory, **options: Any) -> DrawOptions:
    """The options of the built-in sampler. They are refused with a user-defined one, which draws as it does."""
    if not callable(sampler):
        return DrawOptions(sampler=sampler, **options)
    given = DrawOptions(**options)
    if str(given):
        fix = "leave them out, or use sampler='uniform' or sampler='labor'"
        raise InputError(explain("sampler", "a built-in sampler for these options", f"a function and {given}", fix))
    return given


def _check_times(
    store: GraphStore, draw: DrawOptions, name: str, strategy: str, copies: int | str, *, has_times: bool
) -> None:
    """Refuse options that are not built for temporal sampling. ``name``: the argument with the times of the seeds."""
    if draw.time_attr is None and not has_times:
        return
    if draw.time_attr is None or not has_times:
        got = f"time_attr={draw.time_attr!r}, {'with' if has_times else 'without'} {name}"
        fix = "name the stored times of the edges, and give the times of the targets or pairs"
        raise InputError(explain("temporal sampling", f"time_attr and {name}", got, fix))
    refused = []
    if store.types is not None:
        kinds = ", ".join(store.types.vertex_types)
        refused.append((f"a graph with the vertex types {kinds}", "leave time_attr out, or use a graph without types"))
    if strategy == AUTO:
        refused.append((f"strategy={AUTO!r}", "name a strategy: split, data, data_cached or hybrid(k)"))
    if parse_bytes(copies, "copies"):
        refused.append((f"copies={copies!r}", "leave copies out"))
    for got, fix in refused:
        raise InputError(explain("time_attr", "options that temporal sampling is built for", got, fix))


def _check_auto(sampler: str | SamplerFactory, arrays: ArrayNames, pairs: PairSeeds | None) -> None:
    """Refuse samplers, feature sources and targets that the planner cannot run."""
    if pairs is not None and pairs.stored is None:
        fix = "store them with gsplit.add_pairs, or name a strategy, such as strategy='split'"
        got = f"{pairs.num_pairs} pairs"
        raise InputError(explain("strategy='auto'", "stored pairs, which the planner can count", got, fix))
    own = ["sampler"] if callable(sampler) else []
    own += ["features"] if len(arrays.stored_features) < len(arrays.features) else []
    if own or not arrays.features:
        expected = "the built-in sampler and stored features, which the planner can count"
        fix = "name a strategy, such as strategy='split'"
        got = f"user-defined {' and '.join(own)}" if own else "features=None"
        raise InputError(explain("strategy='auto'", expected, got, fix))


def _resolve_prefetch(
    prefetch: int | None, mesh: Mesh, sampler: str | SamplerFactory, arrays: ArrayNames, *, is_typed: bool
) -> int:
    """The number of steps to make ahead. Refused if types of vertices would be exchanged on the device meanwhile.

    By default 2 for a device, which would wait otherwise. On CPUs sampling and training share the cores. User-defined
    samplers and sources are called in another thread only if that is asked for.
    """
    exchanges_on_device = is_typed and mesh.device.type != "cpu"
    if prefetch is None:
        is_built_in = not callable(sampler) and len(arrays.stored_features) == len(arrays.features)
        return 2 if mesh.device.type != "cpu" and is_built_in and not exchanges_on_device else 0
    fix = "choose 2, or leave it out"
    depth = _whole_number("prefetch", prefetch, 0, "a number of batches, 0 for none", fix)
    if depth and exchanges_on_device:
        got = f"prefetch={depth} with {mesh}"
        raise InputError(explain("prefetch", "a graph without vertex types, or ranks on CPUs", got, "leave it out"))
    return depth


def _check_sampling_threads(
    sampling_threads: int, prefetch: int, mesh: Mesh, sampler: str | SamplerFactory, arrays: ArrayNames
) -> int:
    """The number of threads that make steps ahead. Refused if a device samples, or if they would call user code."""
    expected = "a number of threads, from 1"
    count = _whole_number("sampling_threads", sampling_threads, 1, expected, "leave it out, or give a number of cores")
    refused = {}
    if mesh.sample_device.type != "cpu":
        refused[f"sample_device={mesh.sample_device}"] = ("mini-batches that are sampled on the CPU", "leave it out")
    if callable(sampler):
        refused["a user-defined sampler"] = ("a built-in sampler", "leave it out: one thread calls your sampler")
    if len(arrays.stored_features) < len(arrays.features):
        refused["a user-defined source of rows"] = ("stored features", "leave it out: one thread calls your source")
    if prefetch < count:
        expected = "at least as many batches made ahead as threads"
        refused[f"prefetch={prefetch}"] = (expected, f"use prefetch={2 * count}, or fewer threads")
    if count > 1:
        for got, (needed, fix) in refused.items():
            raise InputError(explain("sampling_threads", needed, f"sampling_threads={count} with {got}", fix))
    return count


def _resolve_device_cache(device_cache: int | str, store: GraphStore, mesh: Mesh) -> int | None:
    """The size of the cache in bytes; None for as much memory as the device has left. Refused without a device.

    "auto" makes a cache only for a device and from a partitioned store, which has the hotness of its rows.
    """
    if device_cache == "auto":
        return None if mesh.device.type != "cpu" and "hotness" in store.names else 0
    num_bytes = parse_bytes(device_cache, "device_cache")
    if num_bytes and mesh.device.type == "cpu":
        got = f"{device_cache} with {mesh}"
        fix = "use cache= for the host's memory, or leave it out"
        raise InputError(explain("device_cache", "a model on a device", got, fix))
    return num_bytes


def _check_copies(copies: int | str, spec: StrategySpec) -> int:
    """The size of the copies in bytes. Refused for strategies that do not shuffle input rows."""
    num_bytes = parse_bytes(copies, "copies")
    if num_bytes and not spec.shuffles_input:
        expected = "a strategy that shuffles input rows: split or hybrid(k)"
        fix = "leave it out, or change the strategy"
        raise InputError(explain("copies", expected, f"strategy={spec.name!r}", fix))
    return num_bytes


def _describe_nodes(target_type: str | None, nodes: str | Tensor | None, input_time: Tensor | None) -> str:
    name = fingerprint_of(nodes) if target_type is None else f"{target_type}/{fingerprint_of(nodes)}"
    return name if input_time is None else f"{name}, times {fingerprint_of(input_time)}"


def _describe_sampler(sampler: SamplerFactory) -> str:
    """The name and the fingerprint, if any, of a user-defined sampler."""
    fingerprint = getattr(sampler, "fingerprint", None)
    made_by: object = sampler
    while isinstance(made_by, partial):
        made_by = made_by.func
    name = getattr(made_by, "__qualname__", type(made_by).__qualname__)
    return name if fingerprint is None else f"{name} {fingerprint}"


def fingerprint_of(nodes: str | Tensor | None) -> str:
    """A short text that identifies a list of targets or pairs."""
    if nodes is None or isinstance(nodes, str):
        return str(nodes)
    return hashlib.sha256(nodes.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _checksums_of(
    store: GraphStore,
    arrays: ArrayNames,
    draw: DrawOptions,
    target_type: str | None,
    input_nodes: str | Tensor | None,
    pairs: PairSeeds | None,
) -> dict[str, str]:
    """Checksums of the labels, of the loaded arrays and of the stored targets or pairs."""
    of_type = "" if target_type is None else f"/{target_type}"
    names = [f"y{of_type}"]
    names += [f"features/{name}" for name in arrays.stored_features]
    names += [f"edges/{name}" for name in (arrays.edge_attr, arrays.edge_weight, draw.weight_attr, draw.time_attr)]
    names += (f"targets{of_type}/{input_nodes}",) if pairs is None else pairs.arrays
    return stored_checksums(store, names)


def stored_checksums(store: GraphStore, names: Iterable[str]) -> dict[str, str]:
    """Checksums of the named arrays that a store has, and of the scales of those of int8.

    None of shards, because shards differ between hosts.
    """
    wanted: dict[str, None] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        wanted |= dict.fromkeys([name, f"scales/{rest}"] if kind == "features" else [name])
    if isinstance(store, MemoryStore):
        return {f"graph {name}": _checksum(store.arrays[name]) for name in wanted if name in store.arrays}
    if not isinstance(store, Store) or store.manifest.shard is not None:
        return {}
    arrays = store.manifest.arrays
    return {f"store {name}": arrays[name].sha256[:16] for name in wanted if name in arrays}


def _checksum(array: Array) -> str:
    """The checksum of an array, or of evenly spaced rows of a large one, because every new loader computes it."""
    rows = array[:: max(1, -(-array.nbytes // _HASHED_BYTES))]
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(raw_bytes(rows))
    return digest.hexdigest()[:16]
