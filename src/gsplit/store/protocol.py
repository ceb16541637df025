"""The interface of a graph store, and the part of it that the stores on disk and in memory share.

``GraphStore`` is what training and inference need from a graph. Its arrays are in INTERNAL order: the vertices of a
part are contiguous, and ``original_ids`` maps back. Users read arrays by original id, as in ``n_id`` of a mini-batch
and in the rows of ``gsplit.infer``; ``OriginalOrder`` does that.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, StoreError, explain
from gsplit.graph.graph import Graph
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.store.manifest import INPUT_POSITION, role_of

__all__ = ["ArrayStore", "GraphStore", "OriginalOrder", "edge_value_names", "missing_array"]


@runtime_checkable
class GraphStore(Protocol):
    """A graph with its arrays. Implemented by ``reader.Store`` and ``in_memory.MemoryStore``."""

    @property
    def num_vertices(self) -> int:
        """Number of vertices of the whole graph."""

    @property
    def num_edges(self) -> int:
        """Number of edges held here: the in-edges of ``vertex_range``."""

    @property
    def vertex_range(self) -> tuple[int, int]:
        """First vertex held and one past the last."""

    @property
    def part_boundaries(self) -> list[int]:
        """First vertex of every part, then the number of vertices."""

    @property
    def part_loads(self) -> list[int] | None:
        """Work of every part as counted by presampling; None without presampling."""

    @property
    def names(self) -> list[str]:
        """Names of all arrays, as ``stored_array`` takes them."""

    @property
    def edge_names(self) -> list[str]:
        """Names of the per-edge values. ``stored_array(f"edges/{name}")`` has one row per entry of ``indices``."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Attributes of the source that mini-batches do not carry."""

    @property
    def is_renumbered(self) -> bool:
        """Whether internal ids may differ from original ids."""

    @property
    def fingerprint(self) -> str:
        """A checksum of the graph, to compare between ranks."""

    @property
    def num_features(self) -> int:
        """Number of columns of the feature array ``x``; 0 without one."""

    @property
    def num_classes(self) -> int:
        """Largest label plus one; 0 without integer labels."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes if labels were strings; else empty."""

    @property
    def graph(self) -> Graph:
        """The edges."""

    @property
    def types(self) -> GraphTypes | None:
        """The vertex and edge types of a heterogeneous graph; ``stored_array("edge_type")`` has those of the edges."""

    def stored_array(self, name: str) -> Array:
        """One array by name, rows in internal order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, which is not read for it."""

    def dtype(self, name: str) -> str:
        """Element type of an array. bfloat16 is stored as uint16."""

    def original_ids(self, first: int | None = None, stop: int | None = None) -> Array:
        """Original ids of the vertices held, or of a range of them."""

    def stored_targets(self, name: str) -> tuple[Array, Array | None, int]:
        """Targets held here (internal ids), their positions in the whole list (None if whole), and its length."""

    @property
    def internal_ids(self) -> Array:
        """The internal id of every vertex of the graph, by original id."""

    @property
    def pair_names(self) -> tuple[str, ...]:
        """Names of the stored lists of pairs, sorted."""

    def pairs(self, name: str) -> Array:
        """A list of vertex pairs [n, 2], source and destination, by original id. Whole also in a shard."""

    def pair_labels(self, name: str) -> Array | None:
        """The label of each pair of a list [n]; None without labels."""

    def pair_negatives(self, name: str) -> Array | None:
        """Negative destinations of each pair of a list [n, K], by original id; None if the list has none."""


class ArrayStore(ABC):
    """Base of the implementations: all that follows from named arrays, ``num_vertices`` and ``vertex_range``."""

    arrays: Mapping[str, Array]
    """All arrays by name, in internal order. Without ``indptr`` and ``indices`` for a graph in memory."""

    @property
    @abstractmethod
    def num_vertices(self) -> int:
        """Number of vertices of the whole graph."""

    @property
    @abstractmethod
    def vertex_range(self) -> tuple[int, int]:
        """First vertex held and one past the last: all vertices unless the store is a host's shard."""

    types: GraphTypes | None = None
    """The types of a heterogeneous graph. Its arrays have names such as ``features/paper/x`` and ``y/paper``."""

    def metadata(self) -> tuple[list[str], list[EdgeType]]:
        """PyG's metadata of a heterogeneous graph: its vertex types and edge types, as ``to_hetero`` takes them."""
        if self.types is None:
            fix = "import a graph with vertex types (docs/heterogeneous.md)"
            raise InputError(explain(self.where, "a heterogeneous graph", "one without vertex types", fix))
        return self.types.metadata()

    @property
    def where(self) -> object:
        """Name of the store in messages."""
        return "graph"

    @property
    def num_features(self) -> int:
        """Number of columns of the feature array ``x``; 0 without one."""
        return self.shape("features/x")[1] if "features/x" in self.arrays else 0

    @property
    def names(self) -> list[str]:
        """Names of all arrays, as ``array`` takes them."""
        return sorted(self.arrays)

    @property
    def edge_names(self) -> list[str]:
        """Names of the per-edge values."""
        return edge_value_names(self.arrays)

    @property
    def is_renumbered(self) -> bool:
        """Whether internal ids may differ from original ids, as after partitioning."""
        return "original_ids" in self.arrays

    @cached_property
    def _by_original_id(self) -> "OriginalOrder":
        return OriginalOrder(cast(GraphStore, self), self.where)

    def array(self, name: str) -> Array:
        """One array by name in original order: row v for original vertex v, targets as ascending original ids.

        Arrays of a vertex type, such as ``y/paper`` and ``targets/paper/train``, use the ids in the type. This is the
        stored array itself unless the store was partitioned, then a copy. The edges of a partitioned store, and shards,
        are refused. bfloat16 comes as uint16, its bits.
        """
        return self._by_original_id.array(name)

    def rows(self, name: str, ids: npt.ArrayLike) -> Array:
        """The rows of some vertices by original id, such as ``store.rows("y", batch.n_id)``. Only these are read.

        For an array of a vertex type, such as ``y/paper``, ids are those in the type.
        """
        return self._by_original_id.rows(name, ids)

    def vertex_names(self, ids: npt.ArrayLike | None = None, vertex_type: str | None = None) -> list[str]:
        """String ids of all or some vertices by original id, for stores imported from tables with string ids.

        In a heterogeneous graph, those of a type: ``store.vertex_names([0, 1], "paper")``.
        """
        return self._by_original_id.vertex_names(ids, vertex_type)

    def stored_array(self, name: str) -> Array:
        """One array by name, such as ``y``, ``features/x`` or ``targets/train``, in internal order; read-only."""
        if name not in self.arrays:
            raise missing_array(self.where, name, self.names)
        return self.arrays[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, by the name that ``stored_array`` takes."""
        return self.stored_array(name).shape

    def original_ids(self, first: int | None = None, stop: int | None = None) -> Array:
        """The ids that the vertices held (all, or a range of them) had when imported."""
        low, high = self.vertex_range
        first = low if first is None else first
        stop = high if stop is None else stop
        if not self.is_renumbered:
            return np.arange(first, stop)
        return self.arrays["original_ids"][first - low : stop - low]

    @cached_property
    def internal_ids(self) -> Array:
        """The internal id of every vertex of the graph, by original id: ``internal_ids[original_ids()]`` ascends by 1.

        A memory map if stored, as in every store that this version partitions. Otherwise it is made on first use, 8
        bytes per vertex: 0 .. n-1 for the original numbering, and by sorting ``original_ids`` for graphs in memory and
        stores that an older version partitioned. Such a store's shards do not have what this takes, and are refused.
        """
        if "internal_ids" in self.arrays:
            return self.arrays["internal_ids"]
        if not self.is_renumbered:
            ids: Ids = np.arange(self.num_vertices)
        elif self.vertex_range == (0, self.num_vertices):
            ids = np.argsort(self.original_ids())
        else:
            first, stop = self.vertex_range
            got = f"a shard with vertices {first}..{stop - 1} of {self.num_vertices}, of a store without internal_ids"
            fix = "run gsplit convert --add internal_ids on the whole store, then cut the shards again"
            raise InputError(explain(self.where, "internal_ids, for ids of other shards", got, fix))
        ids.flags.writeable = False
        return ids

    @property
    def pair_names(self) -> tuple[str, ...]:
        """Names of the stored lists of pairs, sorted."""
        return tuple(sorted(name.removeprefix("pairs/") for name in self.arrays if name.startswith("pairs/")))

    def pairs(self, name: str) -> Array:
        """A stored list of vertex pairs [n, 2], source and destination, by ORIGINAL id; read-only.

        >>> store.pairs("train")[:2].tolist()  # doctest: +SKIP
        [[4, 0], [1, 3]]
        """
        return self.stored_array(f"pairs/{name}")

    def pair_labels(self, name: str) -> Array | None:
        """The label of each pair of a list [n]; None without labels."""
        self.pairs(name)
        return self.arrays.get(f"pair_labels/{name}")

    def pair_negatives(self, name: str) -> Array | None:
        """Fixed negative destinations of each pair of a list [n, K], by original id; None if the list has none."""
        self.pairs(name)
        return self.arrays.get(f"pair_negatives/{name}")


class OriginalOrder:
    """Access to the arrays of a store by original id. ``where`` names the store in messages.

    The map from original ids to rows is made on first use: 8 bytes per vertex held.
    """

    def __init__(self, store: GraphStore, where: object) -> None:
        self._store = store
        self._where = where
        self._rows_of_type: dict[str | None, Ids] = {}

    def _held_rows(self, vertex_type: str | None = None) -> Ids:
        """Rows of the vertices held, by ascending original id. For a whole graph: the row of each original id."""
        if vertex_type not in self._rows_of_type:
            self._rows_of_type[vertex_type] = np.argsort(self._ids_held(vertex_type))
        return self._rows_of_type[vertex_type]

    def _ids_held(self, vertex_type: str | None) -> Ids:
        """Original ids of the vertices held, or of those of a type, in the order of the rows."""
        if vertex_type is None:
            return np.asarray(self._store.original_ids())
        ranges = self._types.ranges(vertex_type)
        return np.concatenate([self._store.original_ids(first, stop) for first, stop in ranges])

    @property
    def _types(self) -> GraphTypes:
        assert self._store.types is not None  # arrays of a vertex type exist only with types
        return self._store.types

    @property
    def _is_whole(self) -> bool:
        return self._store.vertex_range == (0, self._store.num_vertices)

    def array(self, name: str) -> Array:
        """A whole array: rows by original id, targets as ascending original ids. A map or a copy, read-only or not."""
        store = self._store
        stored = store.stored_array(name)
        if role_of(name).is_whole:
            return stored
        self._require_whole(f"array({name!r})", f"rows({name!r}, ids), or stored_array({name!r}) in internal order")
        vertex_type = role_of(name).vertex_type
        if not store.is_renumbered and vertex_type is None:
            return stored
        if name.startswith("targets/"):
            if stored.size and not 0 <= int(stored.min()) <= int(stored.max()) < store.num_vertices:
                got = f"{stored.min()}..{stored.max()}"
                fix = "run gsplit inspect --verify, then restore the store"
                raise StoreError(explain(f"{self._where}: {name}", f"ids in 0..{store.num_vertices - 1}", got, fix))
            first = 0 if vertex_type is None else self._types.offsets[self._types.number(vertex_type)]
            return np.asarray(store.original_ids()[stored]) - first
        if not store.is_renumbered:
            return stored
        if role_of(name).rows == "vertex":
            return np.asarray(stored[self._held_rows(vertex_type)])
        got = f"{name}, which is in the internal order of a partitioned graph"
        fix = f"use gsplit.to_pyg(store), in original ids, or stored_array({name!r})"
        raise InputError(explain(self._where, "a per-vertex array or targets", got, fix))

    def rows(self, name: str, ids: npt.ArrayLike) -> Array:
        """The rows of some vertices, in the order of ``ids``."""
        stored = self._store.stored_array(name)
        if role_of(name).rows != "vertex":
            fix = "use y, vertex_ids, hotness or features/NAME"
            raise InputError(explain(self._where, "a per-vertex array", name, fix))
        return np.asarray(stored[self._places(ids, role_of(name).vertex_type)])

    def vertex_names(self, ids: npt.ArrayLike | None = None, vertex_type: str | None = None) -> list[str]:
        """The string ids of some vertices, or of all by ascending original id."""
        of_type = f"/{vertex_type}" if vertex_type else ""
        offsets = self._store.stored_array(f"name_offsets{of_type}")
        text = self._store.stored_array(f"name_bytes{of_type}")
        if ids is None:
            self._require_whole("vertex_names()", "vertex_names(store.original_ids())")
            places = self._held_rows(vertex_type) if self._store.is_renumbered else np.arange(offsets.size - 1)
        else:
            places = self._places(ids, vertex_type)
        starts = np.maximum(offsets[places], 0).tolist()
        stops = np.maximum(offsets[places + 1], 0).tolist()
        view = np.ascontiguousarray(text).data
        return [str(view[start:stop], "utf-8", "replace") for start, stop in zip(starts, stops, strict=True)]

    def imported_ids(self, ids: npt.ArrayLike, vertex_type: str | None = None) -> list[str] | Ids:
        """The ids in the input of some vertices: strings, numbers, or ``ids`` themselves where those were 0 .. n-1."""
        of_type = f"/{vertex_type}" if vertex_type else ""
        if f"name_offsets{of_type}" in self._store.names:
            return self.vertex_names(ids, vertex_type)
        numbers = f"vertex_ids{of_type}"
        return self.rows(numbers, ids) if numbers in self._store.names else np.asarray(ids)

    def _require_whole(self, what: str, instead: str) -> None:
        if not self._is_whole:
            first, stop = self._store.vertex_range
            got = f"a shard with vertices {first}..{stop - 1} of {self._store.num_vertices}"
            fix = f"open the whole store, or use {instead}"
            raise InputError(explain(self._where, f"all vertices for {what}", got, fix))

    def _places(self, ids: npt.ArrayLike, vertex_type: str | None = None) -> Ids:
        """Rows of vertices by original id. An id that is not held is refused."""
        wanted = np.asarray(ids)
        num_vertices = self._store.num_vertices if vertex_type is None else self._types.count(vertex_type)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            got = f"{wanted.dtype} {list(wanted.shape)}"
            raise InputError(explain("ids", "integers in one dimension", got, "give original ids, not a mask"))
        wanted = wanted.astype(np.int64)
        outside = wanted[(wanted < 0) | (wanted >= num_vertices)]
        if outside.size:
            got = f"{outside.size} outside, such as {outside[0]}"
            raise InputError(explain("ids", f"original ids in 0..{num_vertices - 1}", got, "correct the ids"))
        if self._is_whole:
            return self._held_rows(vertex_type)[wanted] if self._store.is_renumbered else wanted
        held = np.asarray(self._store.original_ids())
        ordered = self._held_rows()
        places = np.searchsorted(held[ordered], wanted)
        rows = ordered[np.minimum(places, held.size - 1)] if held.size else places
        missing = wanted[held[rows] != wanted] if held.size else wanted
        if missing.size:
            got = f"{missing.size} that it does not hold, such as {missing[0]}"
            raise InputError(explain(self._where, "ids of this shard", got, "open the whole store"))
        return rows


def edge_value_names(names: Iterable[str]) -> list[str]:
    """The names of the per-edge values among names of arrays, without the recorded input positions.

    >>> edge_value_names(["edges/edge_attr", "edges/input_position", "y"])
    ['edge_attr']
    """
    return sorted(n[6:] for n in names if n.startswith("edges/") and n != f"edges/{INPUT_POSITION}")


_FOLDERS = {
    "features": ("features", "import the graph with features"),
    "scales": ("scales of int8 features", "use gsplit convert --features int8"),
    "targets": ("targets", "import the graph with a train, val or test split, or pass a tensor of ids"),
    "edges": ("per-edge values", "import the graph with per-edge values"),
    "time_order": ("orders by time", "run gsplit convert --add time_order/NAME"),
    "target_positions": ("target positions", "cut a shard: a whole store needs none"),
    "pairs": ("pairs", "add them with gsplit.add_pairs, or pass a tensor of them"),
    "pair_labels": ("labels of pairs", "import the pairs with labels"),
    "pair_negatives": ("negatives of pairs", "import the pairs with negatives"),
}
_SINGLE = {
    "y": ("labels", "import the graph with labels"),
    "name_offsets": ("string ids", "use original ids, or vertex_ids if the store has them: its ids are numbers"),
    "name_bytes": ("string ids", "use original ids, or vertex_ids if the store has them: its ids are numbers"),
    "vertex_ids": ("mapped integer ids", "use original ids (0 .. n-1), or vertex_names if ids were strings"),
    "original_ids": ("a renumbered graph", "use original_ids(), which works for every store"),
    "internal_ids": ("stored internal ids", "use store.internal_ids, which works for every whole store"),
    "edge_type": ("a heterogeneous graph", "import a graph with vertex types (docs/heterogeneous.md)"),
    "hotness": (
        "a partitioned store, which has the hotness of its rows",
        "run gsplit partition, or leave cache and copies out",
    ),
}


def missing_array(where: object, name: str, names: list[str]) -> InputError:
    """The error for an array that does not exist. It lists the arrays of the same kind.

    >>> print(missing_array("g.gsplit", "features/z", ["features/x", "indptr", "y"]))
    g.gsplit: expected one of the features it has, features/x (got features/z). Fix: use one of these names.
    """
    folder, slash, _ = name.partition("/")
    found = _SINGLE.get(folder) or (_FOLDERS.get(folder) if slash else None)
    if found is None:
        return InputError(explain(where, f"one of {', '.join(names)}", name, "use one of these names"))
    kind, fix = found
    alike = [other for other in names if other == folder or other.startswith(f"{folder}/")]
    if not alike:
        return InputError(explain(where, kind, f"no {name} among {', '.join(names)}", fix))
    expected = f"one of the {kind} it has, {', '.join(alike)}"
    return InputError(explain(where, expected, name, "use one of these names"))
