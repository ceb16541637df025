"""What training and inference need of a graph, wherever it lies: on disk, in memory, in a shard.

Everything here is in INTERNAL order: the vertices of a part are contiguous, and ``original_ids`` maps back. What users
read is in original order and goes through ``original_order``.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from gsplit.errors import InputError, explain
from gsplit.graph import Graph
from gsplit.store.array_roles import INPUT_POSITION
from gsplit.store.files import Array

__all__ = ["GraphStore", "edge_value_names", "missing_array"]


@runtime_checkable
class GraphStore(Protocol):
    """A graph with its arrays. ``reader.Store`` and ``memory.MemoryStore`` are such."""

    @property
    def num_vertices(self) -> int:
        """Vertices of the whole graph."""

    @property
    def num_edges(self) -> int:
        """Edges held here: the in-edges of ``vertex_range``."""

    @property
    def vertex_range(self) -> tuple[int, int]:
        """First vertex held and one past the last."""

    @property
    def part_boundaries(self) -> list[int]:
        """Where the parts of the graph begin and end."""

    @property
    def part_loads(self) -> list[int] | None:
        """The work of every part that presampling counted; None where it did not."""

    @property
    def names(self) -> list[str]:
        """Names of all arrays, as ``stored_array`` takes them."""

    @property
    def edge_names(self) -> list[str]:
        """Names of the per-edge values: ``stored_array(f"edges/{name}")`` has a row for every entry of ``indices``."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Attributes of the source that mini-batches do not carry."""

    @property
    def is_renumbered(self) -> bool:
        """Whether internal ids may differ from original ids."""

    @property
    def fingerprint(self) -> str:
        """The graph in short, to compare between ranks."""

    @property
    def num_features(self) -> int:
        """Columns of the feature array ``x``; 0 without one."""

    @property
    def num_classes(self) -> int:
        """Largest label plus one; 0 without integer labels."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes were called, where labels were strings; else empty."""

    @property
    def graph(self) -> Graph:
        """The edges."""

    def stored_array(self, name: str) -> Array:
        """One array by name, rows in internal order."""

    def dtype(self, name: str) -> str:
        """The element type of an array, by its logical name (bfloat16 lies as uint16)."""

    def original_ids(self, first: int | None = None, stop: int | None = None) -> Array:
        """The original ids of the vertices held, or of a range of them."""

    def stored_targets(self, name: str) -> tuple[Array, Array | None, int]:
        """Targets held here (internal ids), their positions in the whole list (None if whole), and its length."""


def edge_value_names(names: Iterable[str]) -> list[str]:
    """The per-edge values among the names of arrays, without our own record of the input's order.

    >>> edge_value_names(["edges/edge_attr", "edges/input_position", "y"])
    ['edge_attr']
    """
    return sorted(n[6:] for n in names if n.startswith("edges/") and n != f"edges/{INPUT_POSITION}")


_FOLDERS = {
    "features": ("features", "import the graph with features"),
    "scales": ("scales of int8 features", "use gsplit convert --features int8"),
    "targets": ("targets", "import the graph with a train, val or test split, or pass a tensor of ids"),
    "edges": ("per-edge values", "import the graph with per-edge values"),
    "target_positions": ("target positions", "cut a shard: a whole store needs none"),
}
_SINGLE = {
    "y": ("labels", "import the graph with labels"),
    "name_offsets": ("string ids", "use original ids, or vertex_ids if the store has them: its ids are numbers"),
    "name_bytes": ("string ids", "use original ids, or vertex_ids if the store has them: its ids are numbers"),
    "vertex_ids": ("mapped integer ids", "use original ids (0 .. n-1), or vertex_names if ids were strings"),
    "original_ids": ("a renumbered graph", "use original_ids(), which works for every store"),
    "hotness": ("a partitioned store", "run gsplit partition first"),
}


def missing_array(where: object, name: str, names: list[str]) -> InputError:
    """The error for an array that is not there: what there is of its kind.

    >>> print(missing_array("g.gsplit", "features/z", ["features/x", "indptr", "y"]))
    g.gsplit: expected one of the features it has, features/x (got features/z). Fix: use one of these names.
    """
    folder, slash, _ = name.partition("/")
    if slash and folder in _FOLDERS:
        kind, fix = _FOLDERS[folder]
        alike = [other for other in names if other.startswith(f"{folder}/")]
        if not alike:
            return InputError(explain(where, kind, f"none; {name} was asked for", fix))
        expected = f"one of the {kind} it has, {', '.join(alike)}"
        return InputError(explain(where, expected, name, "use one of these names"))
    if name in _SINGLE:
        kind, fix = _SINGLE[name]
        return InputError(explain(where, kind, f"none; {name} was asked for", fix))
    return InputError(explain(where, f"one of {', '.join(names)}", name, "use one of these names"))
