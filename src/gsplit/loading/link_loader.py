"""The loader of pairs, for link prediction, with the argument names of PyG's ``LinkNeighborLoader``.

``batch_size`` is the number of pairs of the GLOBAL mini-batch, without negatives. Every rank reads all pairs of a step
(``sampling.pairs``) and takes some of them: those whose source it owns or, if the strategy takes targets in turn, every
W-th. The endpoints of its pairs are the targets of the strategy.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.device.devices import copy_to_device
from gsplit.device.packing import map_tensors
from gsplit.distributed.comm.mesh import Mesh, resolve_mesh
from gsplit.errors import InputError, explain
from gsplit.graph.ownership import Ownership
from gsplit.graph.types import EdgeType
from gsplit.loading.batch_loader import BatchLoader
from gsplit.loading.plan import PairSeeds, fingerprint_of, resolve_plan
from gsplit.loading.strategy import SampledStep, Strategy
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.local_graph import Features
from gsplit.minibatch.pair_rows import own_pairs
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.pairs import ListedPairs, Negatives, StepPairs, StoredPairs, parse_negatives
from gsplit.sampling.protocol import SamplerFactory
from gsplit.sampling.relations import RelationFanouts
from gsplit.sampling.typed_pairs import PairType, pair_type
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.telemetry import StepTelemetry

__all__ = ["LinkNeighborLoader", "LoaderOptions", "Pairs", "list_pairs", "to_internal", "type_of_pairs"]

Pairs = str | Tensor | tuple[EdgeType, str | Tensor]
"""The name of stored pairs, or a tensor [2, n]; in a heterogeneous graph with the edge type."""


class LoaderOptions(TypedDict, total=False):
    """Options of ``NeighborLoader`` that ``LinkNeighborLoader`` has, too."""

    shuffle: bool
    drop_last: bool
    strategy: str
    sampler: str | SamplerFactory
    weight_attr: str | None
    replace: bool
    layer_dependency: bool
    time_attr: str | None
    temporal_strategy: str
    seed: int
    ownership: Ownership | None
    features: Features
    features_on_disk: bool
    cache: int | str
    device_cache: int | str
    copies: int | str
    edge_attr: str | None
    edge_weight: str | None
    deterministic: bool
    prefetch: int | None
    sampling_threads: int


class LinkNeighborLoader(BatchLoader[LinkBatch]):
    """Iterates over the mini-batches of an epoch of pairs; each ``iter`` is the next epoch.

    ``edge_label_index``: the name of stored pairs, a tensor [2, n] of original ids, or None for every edge of the
    graph. ``edge_label``: a label for every pair of a tensor; stored pairs may have stored labels. ``neg_sampling``:
    a mode ("binary", "triplet", "joint", "in_batch"), ``dict(mode="binary", amount=1)``, PyG's ``NegativeSampling``, or
    None for no negatives. With "binary" and labels from 0, labels are raised by 1, as in PyG: 0 is a negative pair.

    ``exclude_seed_edges``: remove the edges of all pairs of the step from its mini-batch ("reverse": also their reverse
    edges; True: only themselves; False: keep them), because a model would otherwise see the edges that it predicts.
    ``batch_size``: the pairs of the GLOBAL mini-batch. Other options are those of ``NeighborLoader``; the strategy
    "auto" needs stored pairs of a graph without types.

    ``time_attr``: the name of stored times of the edges, as integers. ``edge_label_time``: a time for every pair. The
    endpoints of a pair, and of its negatives, then draw in-edges that are not later, in every layer; an endpoint of
    pairs of different times has a row for each. ``temporal_strategy``: "uniform", or "last" for the latest in-edges.
    ``batch.edge_label_time`` has the times, ``batch.seed_time`` for "triplet". Negatives are binary or triplet ones.

    Heterogeneous graphs: ``edge_label_index`` is (edge type, name of stored pairs or tensor), by ids in the types of
    the ends, and negatives are vertices of these types. Excluded are the edges of the edge type and of its reverse:
    that of ``reverse_edge_types``, {edge type: edge type}, or one named "rev_...", as ``ToUndirected`` does.
    ``num_neighbors`` and ``features`` are those of ``NeighborLoader``. Batches are ``TypedLinkBatch``.
    """

    _counted = "pairs"

    def __init__(
        self,
        graph: "GraphStore | Any",
        num_neighbors: RelationFanouts,
        edge_label_index: Pairs | None = None,
        *,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        neg_sampling: Any = None,
        exclude_seed_edges: Literal["reverse", True, False] = "reverse",
        reverse_edge_types: Mapping[EdgeType, EdgeType] | None = None,
        batch_size: int = 1,
        mesh: Mesh | None = None,
        partition: Tensor | Mapping[str, Tensor] | None = None,
        telemetry: str | Path | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        ranks = resolve_mesh(mesh, "LinkNeighborLoader")
        store = as_graph_store(graph, partition)
        self._negatives = parse_negatives(neg_sampling)
        given: object = exclude_seed_edges
        if not isinstance(given, bool) and not (isinstance(given, str) and given == "reverse"):
            fix = "use one of these"
            raise InputError(explain("exclude_seed_edges", "'reverse', True or False", repr(exclude_seed_edges), fix))
        self._excludes = exclude_seed_edges
        unused = exclude_seed_edges != "reverse" and reverse_edge_types is None
        self._type, listed = type_of_pairs(store, edge_label_index, {} if unused else reverse_edge_types)
        if listed is None and (edge_label is not None or edge_label_time is not None):
            got = "edge_label_index=None, whose edges are in the order of the store"
            fix = "give edge_label_index=data.edge_index"
            raise InputError(explain("edge_label, edge_label_time", "pairs whose order they have", got, fix))
        self._pairs = list_pairs(store, listed, edge_label)
        if self._type is not None:
            self._pairs = self._type.fuse(self._pairs)
        if self._negatives is not None and self._pairs.labels is not None:
            self._pairs = _raise_labels(self._pairs, self._negatives.mode)
        if edge_label_time is not None:
            self._pairs = replace(self._pairs, times=_times_of(edge_label_time, self._pairs.num_pairs, self._negatives))
        known = {name: value for name, value in options.items() if name in LoaderOptions.__annotations__}
        named = listed if isinstance(listed, str) else ""
        label = "" if edge_label is None else f", labels {fingerprint_of(edge_label)}"
        label += "" if edge_label_time is None else f", times {fingerprint_of(edge_label_time)}"
        plan, view = resolve_plan(
            store,
            ranks,
            num_neighbors=num_neighbors,
            input_nodes=None,
            batch_size=batch_size,
            options={name: value for name, value in options.items() if name not in known},
            pairs=PairSeeds(
                name=f"{'' if self._type is None else f'{self._type} '}pairs {fingerprint_of(listed)}{label}",
                num_pairs=self._pairs.num_pairs,
                negatives=f"{self._negatives}, exclude_seed_edges={exclude_seed_edges}",
                arrays=(f"pairs/{named}", f"pair_labels/{named}"),
                edge_type=None if self._type is None else self._type.edge_type,
                stored=StoredPairs(named, self._negatives, exclude_seed_edges) if named else None,
                has_times=edge_label_time is not None,
            ),
            **known,  # type: ignore[arg-type]
        )
        super().__init__(
            ranks,
            plan,
            view,
            options.get("sampler", "uniform"),
            telemetry,
            equal_ranges=options.get("ownership") is None and len(store.part_boundaries) == 2,
        )

    def _sample(self, strategy: Strategy, key: StepKey, telemetry: StepTelemetry) -> SampledStep:
        """Sample this rank's part of a step. A collective of the replica."""
        plan = self.plan
        store = self._graph.store
        device = self.mesh.sample_device
        with telemetry.span("sample"):
            of = self._type
            step = self._pairs.for_step(
                key,
                plan.batch_size,
                self._negatives,
                store.num_vertices,
                shuffle=plan.shuffle,
                ends=None if of is None else (of.sources, of.destinations),
            )
            src = to_internal(store, step.src)
            excluded: ExcludedEdges | None = None
            if self._excludes:
                reverse = self._excludes == "reverse"
                exclude = ExcludedEdges.of if of is None else of.exclude
                edges = exclude(src, to_internal(store, step.dst), reverse=reverse)
                excluded = ExcludedEdges(copy_to_device(edges.src, device), copy_to_device(edges.dst, device))
            times: Tensor | None = None
            mine = self._own(step, src)
            if step.time is not None:
                step, times = step.at_times()
            ids, rows = own_pairs(step, mine, self._pairs.labels)
            endpoints = to_internal(store, ids if times is None else ids // times.numel())
            if times is not None:
                places = ids % times.numel()
                rows = replace(rows, n_id=ids // times.numel(), time=times[places])
                endpoints = endpoints * times.numel() + places
                times = copy_to_device(times, device)
        if not plan.strategy.needs_whole_graph:
            telemetry.record_max("largest_range_array_bytes", strategy.num_range_bytes)
        rows = map_tensors(lambda tensor: copy_to_device(tensor, device), rows)
        return strategy.sample(endpoints, key, step.num_pairs, telemetry, pairs=rows, excluded=excluded, times=times)

    def _own(self, step: StepPairs, src: Tensor) -> Tensor:
        """Which pairs of the step belong to this rank."""
        mesh = self.mesh
        places = torch.arange(step.num_pairs)
        if self.plan.strategy.targets == "strided":
            return places % mesh.size == mesh.replica + mesh.num_replicas * mesh.split_rank
        owners = self._graph.owned.ownership.owners(src)
        return (places % mesh.num_replicas == mesh.replica) & (owners == mesh.split_rank)


def type_of_pairs(
    store: GraphStore, pairs: Pairs | None, reverse: Mapping[EdgeType, EdgeType] | None
) -> tuple[PairType | None, str | Tensor | None]:
    """The edge type of the pairs, None without types, and which pairs they are."""
    if store.types is None:
        if isinstance(pairs, tuple):
            fix = "give a tensor [2, n], or the name of stored pairs"
            raise InputError(explain("pairs", "pairs of a graph without types", str(pairs[0]), fix))
        if reverse:
            fix = "leave it out: exclude_seed_edges='reverse' excludes both directions"
            raise InputError(explain("reverse_edge_types", "a heterogeneous graph", "a graph without types", fix))
        return None, pairs
    given: Any = pairs
    if not isinstance(given, tuple) or len(given) != 2 or given[1] is None:
        got = type(given).__name__ if not isinstance(given, tuple) else f"{given[0]} without pairs"
        fix = "write (edge type, data[edge type].edge_index), or (edge type, name of stored pairs)"
        raise InputError(explain("pairs", "(edge type, pairs) for a heterogeneous graph", got, fix))
    return pair_type(store.types, given[0], reverse), given[1]


def to_internal(store: GraphStore, ids: Tensor) -> Tensor:
    """Internal ids of some vertices by original id."""
    if not store.is_renumbered:
        return ids
    return torch.from_numpy(np.asarray(store.internal_ids[ids.numpy()], np.int64))


def list_pairs(store: GraphStore, edge_label_index: str | Tensor | None, edge_label: Tensor | None) -> ListedPairs:
    """The pairs of a stored list, of a tensor, or all edges, with their labels."""
    if edge_label_index is not None and not isinstance(edge_label_index, str):
        pairs = _pairs_of(edge_label_index)
        return ListedPairs.listed(pairs, _labels_of(edge_label, pairs.shape[0]))
    if edge_label_index is None:
        _require_original_order(store)
        return ListedPairs.edges_of(store.graph)
    listed = store.pairs(edge_label_index)
    if edge_label is not None:
        return ListedPairs.listed(listed, _labels_of(edge_label, listed.shape[0]))
    return ListedPairs.listed(listed, store.pair_labels(edge_label_index))


def _pairs_of(edge_label_index: Tensor) -> Array:
    """The pairs [n, 2] of a tensor [2, n]."""
    is_tensor = isinstance(edge_label_index, Tensor)
    if not is_tensor or edge_label_index.shape[:-1] != (2,) or edge_label_index.dtype not in (torch.int64, torch.int32):
        got = type(edge_label_index).__name__
        if is_tensor:
            got = f"{edge_label_index.dtype} {list(edge_label_index.shape)}"
        fix = "give sources and destinations by original id"
        raise InputError(explain("edge_label_index", "a name, or a tensor [2, n] of int64 or int32", got, fix))
    pairs: Array = edge_label_index.T.cpu().numpy()
    return pairs


def _labels_of(edge_label: Tensor | None, num_pairs: int) -> Array | None:
    if edge_label is None:
        return None
    got = type(edge_label).__name__
    if isinstance(edge_label, Tensor):
        got = f"{edge_label.dtype} {list(edge_label.shape)}"
        if edge_label.shape[:1] == (num_pairs,) and edge_label.dtype != torch.bfloat16:
            labels: Array = edge_label.detach().cpu().numpy()
            return labels
    fix = "give one label per pair, in the order of the pairs"
    raise InputError(explain("edge_label", f"a tensor of {num_pairs} labels, not bfloat16", got, fix))


def _times_of(edge_label_time: Tensor, num_pairs: int, negatives: Negatives | None) -> Ids:
    """The time of every pair. Negatives must belong to a pair, whose time is theirs."""
    got = type(edge_label_time).__name__
    if isinstance(edge_label_time, Tensor):
        got = f"{edge_label_time.dtype} {list(edge_label_time.shape)}"
    if got not in (f"torch.int64 [{num_pairs}]", f"torch.int32 [{num_pairs}]"):
        fix = "give one time per pair, in the order of the pairs, in the unit of the times of the edges"
        raise InputError(explain("edge_label_time", f"a tensor of {num_pairs} integers", got, fix))
    if negatives is not None and negatives.mode not in ("binary", "triplet"):
        fix = "use neg_sampling='binary' or 'triplet', whose negatives have the time of their pair"
        got = f"{negatives.mode}, whose negatives are shared by pairs of different times"
        raise InputError(explain("neg_sampling", "negatives of one pair each, for edge_label_time", got, fix))
    times: Ids = edge_label_time.detach().cpu().numpy().astype(np.int64)
    return times


def _raise_labels(pairs: ListedPairs, mode: str) -> ListedPairs:
    """Labels of pairs that have binary negatives, whose label is 0; other negatives have none. As in PyG."""
    labels = pairs.labels
    assert labels is not None
    if mode != "binary":
        fix = "leave the labels out, or use neg_sampling='binary'"
        raise InputError(explain("edge_label", f"None for neg_sampling {mode}", f"{labels.shape[0]} labels", fix))
    if not labels.size or labels.min() != 0:
        return pairs
    if labels.dtype.kind in "iub":  # the largest label of a narrow type has no next one
        labels = labels.astype(np.int64)
    return replace(pairs, labels=labels + 1)


def _require_original_order(store: GraphStore) -> None:
    """Positions of edges are those of the original numbering, so a renumbered store has other ones."""
    is_whole = store.vertex_range == (0, store.num_vertices)
    if is_whole and store.is_renumbered:
        ids = store.original_ids()
        is_whole = bool((ids[1:] > ids[:-1]).all())
    if not is_whole:
        first, stop = store.vertex_range
        got = f"vertices {first}..{stop - 1} of {store.num_vertices}, renumbered: {store.is_renumbered}"
        fix = "give the edges as a tensor [2, n] of original ids, or store them as pairs"
        raise InputError(explain("edge_label_index=None", "a whole store in its original order", got, fix))
