"""One rank's view of a graph: a range of vertices, with their in-edges, ids, rows and targets.

All arrays are as long as the range, and memory-mapped if those of the store are (law 6). Strategies that need the whole
graph use a view of all vertices. Rows are numbered by internal ids, those of the store. Users and random keys use
original ids (law 1).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, StoreError, explain
from gsplit.features.copies import ForeignCopies, choose_prefixes, fetch_copies
from gsplit.features.protocol import RowSource
from gsplit.features.sources import DeviceTensorRows, MappedRows, describe_rows, torch_dtype
from gsplit.graph.degrees import gcn_degrees
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership, original_ids_of, own_parts
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import Draw, open_draw
from gsplit.sampling.targets import LocalTargets, SeedTimes, StoredTargets, all_local_vertices, local_listed_targets
from gsplit.store.protocol import GraphStore, missing_array

__all__ = [
    "ArrayNames",
    "Features",
    "GcnRows",
    "InputNodes",
    "LocalGraph",
    "find_edge_array",
    "make_ownership",
    "type_of_targets",
]

Features = str | RowSource | Sequence[str | RowSource] | Mapping[str, str | Sequence[str]] | None
"""The name of stored features or a user-defined source of rows, or several of them, whose rows are concatenated.

None: no features, for a model that takes rows of an embedding.

For a heterogeneous graph: one name, for all types that have it, or names by vertex type."""
InputNodes = str | Tensor | None | tuple[str, str | Tensor | None]
"""Targets: the name of a stored list, ids, a mask, or None for all. With types: (vertex type, one of these), or
the name of a list with its type, such as "paper/train"."""


class ArrayNames:
    """The arrays that are loaded.

    An edge array with the default name is loaded if it is stored. Any other name must be stored. ``of_types``: the
    features of every vertex type of a heterogeneous graph, such as {"paper": ["paper/x"]}; types without features are
    left out.
    """

    def __init__(self, store: GraphStore, features: Features, edge_attr: str | None, edge_weight: str | None) -> None:
        self.of_types: dict[str, list[str]] = {}
        if store.types is None:
            self.features = _list_features(features)
        else:
            self.of_types = _list_typed_features(store, features)
            self.features = [name for names in self.of_types.values() for name in names]
        self.edge_attr = find_edge_array(store, edge_attr, "edge_attr")
        self.edge_weight = find_edge_array(store, edge_weight, "edge_weight")
        if self.edge_weight is not None:
            shape = store.stored_array(f"edges/{self.edge_weight}").shape
            if len(shape) > 1 and shape[1] != 1:
                got = f"{list(shape)}"
                fix = "load them as features: edge_attr=NAME, edge_weight=None"
                raise InputError(explain(f"edges/{self.edge_weight}", "one weight per edge", got, fix))

    @property
    def given(self) -> Any:
        """The features as an argument: a list, or names by vertex type."""
        if not self.of_types and self.features:
            return self.features
        return {of: [name.removeprefix(f"{of}/") for name in names] for of, names in self.of_types.items()}

    @property
    def stored_features(self) -> list[str]:
        """The names of stored features; the others are user-defined sources."""
        return [name for name in self.features if isinstance(name, str)]

    @property
    def has_edge_values(self) -> bool:
        """Whether the sampler must return the ids of the edges that it draws."""
        return self.edge_attr is not None or self.edge_weight is not None

    def __str__(self) -> str:
        features = [found if isinstance(found, str) else describe_rows(found) for found in self.features]
        return f"features {', '.join(features) or None}, edge_attr {self.edge_attr}, edge_weight {self.edge_weight}"


def _list_features(features: Features) -> list[str | RowSource]:
    if features is None:
        return []
    found: list[Any] = [features]
    if isinstance(features, Sequence) and not isinstance(features, str | RowSource):
        found = list(features)
    if not found:
        raise InputError(explain("features", "at least one name", found, 'name stored features, such as "x"'))
    for each in found:
        if not isinstance(each, str | RowSource):
            expected = "names of stored features, or sources of rows: row_shape, dtype and read(ids, out)"
            fix = "import arrays into the store, or see gsplit.extending.RowSource"
            raise InputError(explain("features", expected, type(each).__name__, fix))
    return found


def _list_typed_features(store: GraphStore, features: Features) -> dict[str, list[str]]:
    assert store.types is not None
    found: dict[str, list[str]] = {}
    if features is None:
        return found
    if isinstance(features, str):
        for vertex_type in store.types.vertex_types:
            if f"features/{vertex_type}/{features}" in store.names:
                found[vertex_type] = [f"{vertex_type}/{features}"]
        if not found and features != "x":  # the default, which no type needs to have
            raise missing_array("graph", f"features/{features}", store.names)
        return found
    if not isinstance(features, Mapping) or None in features.values():
        fix = 'write features={"paper": "x", "author": ["x", "emb"]}'
        got = features if isinstance(features, Mapping) else type(features).__name__
        raise InputError(explain("features", "names of stored features by vertex type", got, fix))
    for vertex_type, names in features.items():
        store.types.number(vertex_type)  # refuses unknown types
        given = names if isinstance(names, (list, tuple)) else [names]
        if not all(isinstance(name, str) for name in given):
            fix = "store the rows; sources of rows and OwnedEmbedding are for graphs without types"
            raise InputError(explain(f"features of {vertex_type}", "names of stored features", repr(names)[:80], fix))
        found[vertex_type] = [f"{vertex_type}/{name}" for name in ([names] if isinstance(names, str) else names)]
        for name in found[vertex_type]:
            store.shape(f"features/{name}")  # refuses names that are not stored
    return {vertex_type: found[vertex_type] for vertex_type in store.types.vertex_types if found.get(vertex_type)}


def type_of_targets(store: GraphStore, input_nodes: InputNodes) -> tuple[str | None, str | Tensor | None]:
    """The vertex type of the targets, None without types, and which of its vertices they are."""
    if store.types is None:
        if isinstance(input_nodes, tuple):
            fix = "name the targets alone, such as 'train'"
            raise InputError(explain("input_nodes", "targets of a graph without types", str(input_nodes), fix))
        return None, input_nodes
    if isinstance(input_nodes, str):
        vertex_type, slash, name = input_nodes.partition("/")
        if vertex_type in store.types.vertex_types:
            return vertex_type, name if slash else None
    if not isinstance(input_nodes, tuple) or len(input_nodes) != 2:
        expected = f"(vertex type, targets), where the type is one of {', '.join(store.types.vertex_types)}"
        got = type(input_nodes).__name__ if isinstance(input_nodes, Tensor) else input_nodes
        raise InputError(explain("input_nodes", expected, got, 'write "paper/train", or ("paper", ids in the type)'))
    store.types.number(input_nodes[0])  # refuses unknown types
    return input_nodes


def find_edge_array(store: GraphStore, name: str | None, default: str) -> str | None:
    """The name of stored values of edges; None for none, and if the default ones are not stored."""
    if name is None or name in store.edge_names:
        return name
    if name == default:
        return None
    got = f"{name!r}; stored are {', '.join(store.edge_names) or 'none'}"
    raise InputError(explain(default, "the name of a stored per-edge array", got, "use a stored one, or None"))


@dataclass(frozen=True)
class GcnRows:
    """1 / sqrt(degree) and the weight of the self-loop of every vertex of a view, for the normalisation of GCN.

    ``loop_weight`` is None if edges have no stored weights; then all self-loops have weight 1.
    """

    deg_inv_sqrt: RowSource
    loop_weight: RowSource | None


def make_ownership(store: GraphStore, mesh: Mesh, ownership: Ownership | None) -> Ownership:
    """The given ownership, checked, or one that gives each rank consecutive parts of the store."""
    if ownership is None:
        return own_parts(store.part_boundaries, mesh.num_splits, store.part_loads)
    if ownership.num_ranks != mesh.num_splits or ownership.num_vertices != store.num_vertices:
        expected = f"{mesh.num_splits} ranges over {store.num_vertices} vertices"
        got = f"{ownership.num_ranks} over {ownership.num_vertices}"
        raise InputError(explain("ownership", expected, got, "make it for this graph and mesh"))
    return ownership


class LocalGraph:
    """The vertices ``first .. stop - 1`` of a store, on one rank.

    In a store of 10 vertices with ``Ownership((0, 5, 10))``, the view of rank 1 has ``first`` 5 and ``stop`` 10. Its
    view with ``whole=True`` has ``first`` 0 and ``stop`` 10.
    """

    def __init__(self, store: GraphStore, mesh: Mesh, ownership: Ownership, *, whole: bool = False) -> None:
        """``whole``: a view of all vertices, instead of those that the rank owns."""
        self.store = store
        self.ownership = ownership
        self.device = mesh.device
        self.first, self.stop = (0, store.num_vertices) if whole else ownership.range_of(mesh.split_rank)
        low, high = store.vertex_range
        if not low <= self.first <= self.stop <= high:
            fix = "open the whole store" if whole else "give this rank the store that holds its vertices"
            expected = f"vertices {self.first}..{self.stop}"
            raise InputError(explain(f"rank {mesh.rank}", expected, f"a shard {low}..{high}", fix))
        self.graph: Graph = store.graph.restrict(self.first, self.stop)
        self._gcn: dict[tuple[bool, float, str | None], GcnRows] = {}
        self._device_original_ids: Tensor | None = None

    @functools.cached_property
    def original_ids(self) -> Ids:
        """The original ids of the vertices; empty if the ids of the store are original."""
        if not self.store.is_renumbered:
            return np.empty(0, np.int64)
        ids = np.asarray(self.store.original_ids(self.first, self.stop))
        count = self.store.num_vertices
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            got = f"{ids.min()}..{ids.max()}"
            fix = "run gsplit inspect --verify, then restore the store"
            raise StoreError(explain("original_ids", f"ids in 0..{count - 1}", got, fix))
        return ids

    def rows(self, name: str, vertex_type: str | None = None) -> RowSource:
        """A per-vertex array by name; its rows are numbered by vertex, or by ``GraphTypes.rows`` for a type's array."""
        array = self.store.stored_array(name)
        return MappedRows(name, array, torch_dtype(self.store.dtype(name)), self.first_row(vertex_type))

    def first_row(self, vertex_type: str | None) -> int:
        """The number of the first row that the store holds of the vertices, or of the vertices of a type."""
        if vertex_type is None:
            return self.store.vertex_range[0]
        assert self.store.types is not None
        return self.store.types.row_range(vertex_type, *self.store.vertex_range)[0]

    def edge_types(self) -> RowSource:
        """The relation of every edge of a heterogeneous graph, by edge id."""
        dtype = torch_dtype(self.store.dtype("edge_type"))
        return MappedRows("edge_type", self.store.stored_array("edge_type"), dtype, 0)

    def copy_foreign_rows(self, rows: RowSource, num_bytes: int, comm: Comm) -> ForeignCopies:
        """Copy the hottest rows of other ranks, as many as fit into ``num_bytes``. A collective."""
        store = self.store
        low = store.vertex_range[0]
        hotness = store.stored_array("hotness")[self.first - low : self.stop - low]
        capacity = num_bytes // max(1, prod(rows.row_shape) * rows.dtype.itemsize)
        prefixes = choose_prefixes(hotness, self.first, store.part_boundaries, self.ownership, capacity, comm)
        return fetch_copies(prefixes, self.ownership, rows, comm)

    def edge_rows(self, name: str) -> RowSource:
        """A per-edge array by name; its rows are numbered by edge id, the position in ``graph.indices``."""
        full = f"edges/{name}"
        return MappedRows(full, self.store.stored_array(full), torch_dtype(self.store.dtype(full)), 0)

    def to_original_ids(self, ids: Tensor) -> Tensor:
        """The original ids of some vertices of the view."""
        if ids.device.type == "cpu" or not self.original_ids.size:
            return original_ids_of(ids, self.original_ids, self.first)
        if self._device_original_ids is None:
            self._device_original_ids = torch.from_numpy(np.array(self.original_ids)).to(ids.device)
        return self._device_original_ids[ids - self.first]

    def open_draw(self, options: DrawOptions) -> Draw:
        """The draw of a built-in sampler for the vertices of the view."""
        return open_draw(options, self.store, self.graph)

    def gcn_rows(self, *, add_self_loops: bool, fill_value: float, edge_weight: str | None) -> GcnRows:
        """The normalisation of GCN by the degrees of the whole graph. Computed once, in one pass over the edges."""
        key = (add_self_loops, fill_value, edge_weight)
        if key not in self._gcn:
            weights = None if edge_weight is None else self._weights(edge_weight)
            found = gcn_degrees(self.graph, weights, add_self_loops=add_self_loops, fill_value=fill_value)
            loops = None if found.loop_weight is None else self._small_rows("loop_weight", found.loop_weight)
            self._gcn[key] = GcnRows(self._small_rows("deg_inv_sqrt", found.deg_inv_sqrt), loops)
        return self._gcn[key]

    def _small_rows(self, name: str, values: npt.NDArray[np.float64]) -> RowSource:
        """One number for every vertex, on the device of the model."""
        if self.device.type == "cpu":
            return MappedRows(name, values, torch.float64, self.first)
        return DeviceTensorRows(torch.from_numpy(values).to(self.device), self.first)

    def _weights(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """Stored weights in a type that numba can sum; types other than float32 and float64 are converted."""
        array = self.store.stored_array(f"edges/{name}").reshape(-1)
        dtype = self.store.dtype(f"edges/{name}")
        if dtype in ("float32", "float64"):
            return array
        stored = torch.from_numpy(np.array(array))
        typed = stored.view(torch.bfloat16) if dtype == "bfloat16" else stored
        weights: npt.NDArray[np.float64] = typed.to(torch.float64).numpy()
        return weights

    def targets(self, input_nodes: InputNodes) -> LocalTargets:
        """The targets in the view: from a stored list, from a tensor of original ids or a mask, or every vertex."""
        store = self.store
        vertex_type, input_nodes = type_of_targets(store, input_nodes)
        if vertex_type is not None:
            return self._targets_of_type(vertex_type, input_nodes)
        if isinstance(input_nodes, str):
            ids, positions, num_targets = store.stored_targets(input_nodes)
            listed = StoredTargets(input_nodes, ids, positions, num_targets, held=store.vertex_range)
            return listed.local(self.first, self.stop, self.original_ids)
        original = self.original_ids if self.original_ids.size else np.arange(self.first, self.stop)
        if input_nodes is None:
            return all_local_vertices(original, self.first, store.num_vertices)
        return local_listed_targets(_as_ids(input_nodes, store.num_vertices), original, self.first)

    def timed_targets(self, input_nodes: InputNodes, input_time: Tensor) -> LocalTargets:
        """``targets`` with a time for each, in the order of ``input_nodes``: of ids, of a mask, or by original id.

        Of ids, a vertex may be given several times, at different times.
        """
        if isinstance(input_nodes, Tensor):
            ids = _as_ids(input_nodes, self.store.num_vertices)
            original = self.original_ids if self.original_ids.size else np.arange(self.first, self.stop)
            return local_listed_targets(
                ids, original, self.first, SeedTimes.sorted(_as_times(input_time, ids.size), ids)
            )
        found = self.targets(input_nodes)
        found.seed_times = SeedTimes.listed(_as_times(input_time, found.num_targets))
        return found

    def _targets_of_type(self, vertex_type: str, input_nodes: str | Tensor | None) -> LocalTargets:
        """Targets of one vertex type; ids and masks are those of the type."""
        store = self.store
        assert store.types is not None
        if isinstance(input_nodes, str):
            name = f"{vertex_type}/{input_nodes}"
            ids, positions, num_targets = store.stored_targets(name)
            return StoredTargets(name, ids, positions, num_targets, held=store.vertex_range).local(
                self.first, self.stop, self.original_ids
            )
        count = store.types.count(vertex_type)
        chosen = np.arange(count) if input_nodes is None else _as_ids(input_nodes, count)
        original = self.original_ids if self.original_ids.size else np.arange(self.first, self.stop)
        in_type = original - store.types.offsets[store.types.number(vertex_type)]
        return local_listed_targets(chosen, in_type, self.first)


def _as_times(input_time: Tensor, num_targets: int) -> Ids:
    whole = isinstance(input_time, Tensor) and input_time.dtype in (torch.int64, torch.int32)
    if not whole or input_time.shape != (num_targets,):
        is_tensor = isinstance(input_time, Tensor)
        got = f"{input_time.dtype} {list(input_time.shape)}" if is_tensor else type(input_time).__name__
        fix = "give one time per target, in the order of input_nodes"
        raise InputError(explain("input_time", f"a tensor of {num_targets} integers", got, fix))
    times: Ids = input_time.cpu().numpy().astype(np.int64)
    return times


def _as_ids(nodes: Tensor, num_vertices: int) -> Ids:
    whole = isinstance(nodes, Tensor) and nodes.dim() == 1 and not nodes.is_floating_point() and not nodes.is_complex()
    if whole and nodes.dtype == torch.bool and nodes.numel() == num_vertices:
        return np.flatnonzero(nodes.cpu().numpy())
    if not whole or nodes.dtype == torch.bool or nodes.dtype == torch.uint8:
        got = f"{nodes.dtype} {list(nodes.shape)}" if isinstance(nodes, Tensor) else type(nodes).__name__
        expected = f"a 1-d tensor of integer ids, or a bool mask of {num_vertices}"
        raise InputError(explain("input_nodes", expected, got, "give ids, or a mask over all vertices"))
    ids: Ids = nodes.cpu().numpy().astype(np.int64)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_vertices:
        got = f"{ids.min()}..{ids.max()}"
        fix = "give original ids, or a mask over all vertices"
        raise InputError(explain("input_nodes", f"ids in 0..{num_vertices - 1}", got, fix))
    return ids
