"""One rank's view of a graph: a range of vertices, with their in-edges, ids, rows and targets.

All arrays are as long as the range, and memory-mapped if those of the store are (law 6). Strategies that need the whole
graph use a view of all vertices. Rows are numbered by internal ids, those of the store. Users and random keys use
original ids (law 1).
"""

import functools
from collections.abc import Sequence
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
from gsplit.sampling.draws import Draw, DrawOptions, open_draw
from gsplit.sampling.targets import LocalTargets, StoredTargets, all_local_vertices, local_listed_targets
from gsplit.store.protocol import GraphStore

__all__ = ["ArrayNames", "Features", "GcnRows", "LocalGraph", "make_ownership"]

Features = str | RowSource | Sequence[str | RowSource]
"""The name of stored features or a user-defined source of rows, or several of them, whose rows are concatenated."""


class ArrayNames:
    """The arrays that are loaded.

    An edge array with the default name is loaded if it is stored. Any other name must be stored.
    """

    def __init__(self, store: GraphStore, features: Features, edge_attr: str | None, edge_weight: str | None) -> None:
        self.features = _list_features(features)
        self.edge_attr = _find_edge_array(store, edge_attr, "edge_attr")
        self.edge_weight = _find_edge_array(store, edge_weight, "edge_weight")
        if self.edge_weight is not None:
            shape = store.stored_array(f"edges/{self.edge_weight}").shape
            if len(shape) > 1 and shape[1] != 1:
                got = f"{list(shape)}"
                fix = "load them as features: edge_attr=NAME, edge_weight=None"
                raise InputError(explain(f"edges/{self.edge_weight}", "one weight per edge", got, fix))

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
        return f"features {', '.join(features)}, edge_attr {self.edge_attr}, edge_weight {self.edge_weight}"


def _list_features(features: Features) -> list[str | RowSource]:
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


def _find_edge_array(store: GraphStore, name: str | None, default: str) -> str | None:
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
        self._device = mesh.device
        self.first, self.stop = (0, store.num_vertices) if whole else ownership.range_of(mesh.split_rank)
        low, high = store.vertex_range
        if not low <= self.first <= self.stop <= high:
            fix = "open the whole store" if whole else "give this rank the store that holds its vertices"
            expected = f"vertices {self.first}..{self.stop}"
            raise InputError(explain(f"rank {mesh.rank}", expected, f"a shard {low}..{high}", fix))
        self.graph: Graph = store.graph.restrict(self.first, self.stop)
        self._gcn: dict[tuple[bool, float, str | None], GcnRows] = {}

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

    def rows(self, name: str) -> RowSource:
        """A per-vertex array by name; its rows are numbered by vertex."""
        array = self.store.stored_array(name)
        return MappedRows(name, array, torch_dtype(self.store.dtype(name)), self.store.vertex_range[0])

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
        return original_ids_of(ids, self.original_ids, self.first)

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
        if self._device.type == "cpu":
            return MappedRows(name, values, torch.float64, self.first)
        return DeviceTensorRows(torch.from_numpy(values).to(self._device), self.first)

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

    def targets(self, input_nodes: str | Tensor | None) -> LocalTargets:
        """The targets in the view: from a stored list, from a tensor of original ids or a mask, or every vertex."""
        store = self.store
        if isinstance(input_nodes, str):
            ids, positions, num_targets = store.stored_targets(input_nodes)
            listed = StoredTargets(input_nodes, ids, positions, num_targets, held=store.vertex_range)
            return listed.local(self.first, self.stop, self.original_ids)
        original = self.original_ids if self.original_ids.size else np.arange(self.first, self.stop)
        if input_nodes is None:
            return all_local_vertices(original, self.first, store.num_vertices)
        wanted = _as_ids(input_nodes, store.num_vertices)
        if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < store.num_vertices:
            got = f"{wanted.min()}..{wanted.max()}"
            fix = "give original ids, or a mask over all vertices"
            raise InputError(explain("input_nodes", f"ids in 0..{store.num_vertices - 1}", got, fix))
        return local_listed_targets(wanted, original, self.first)


def _as_ids(nodes: Tensor, num_vertices: int) -> Ids:
    whole = isinstance(nodes, Tensor) and nodes.dim() == 1 and not nodes.is_floating_point() and not nodes.is_complex()
    if whole and nodes.dtype == torch.bool and nodes.numel() == num_vertices:
        return np.flatnonzero(nodes.cpu().numpy())
    if not whole or nodes.dtype == torch.bool or nodes.dtype == torch.uint8:
        got = f"{nodes.dtype} {list(nodes.shape)}" if isinstance(nodes, Tensor) else type(nodes).__name__
        expected = f"a 1-d tensor of integer ids, or a bool mask of {num_vertices}"
        raise InputError(explain("input_nodes", expected, got, "give ids, or a mask over all vertices"))
    return nodes.cpu().numpy().astype(np.int64)
