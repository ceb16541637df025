"""Opening a store: milliseconds and a few pages, whatever its size.

Opening checks the manifest against itself, every file against the manifest (header byte for byte, length)
and the contents at a bounded sample of places. It does not read whole arrays; ``store.verify`` does. What
opening cannot see must still be harmless, so whoever indexes by what a file says checks it first (``kernels.jit``).
"""

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.errors import StoreError, explain
from gsplit.graph import Graph
from gsplit.store.array_roles import file_of
from gsplit.store.files import Array, ArrayFile, read_inside
from gsplit.store.manifest import MAX_MANIFEST_BYTES, Manifest, graph_fingerprint, parse_manifest
from gsplit.store.original_order import OriginalOrder
from gsplit.store.protocol import edge_value_names, missing_array

__all__ = ["Store", "open_store"]

_DAMAGED = "the file is damaged: restore it from a copy, or import the graph again"


class Store:
    """An opened store: the manifest, and its arrays as read-only memory maps. Made by ``gsplit.open``.

    ``array``, ``rows`` and ``vertex_names`` go by original ids, like ``n_id`` of a mini-batch and the rows of
    ``gsplit.infer``. What is called ``stored_...`` is in the internal order of the files, which partitioning changes.
    """

    def __init__(self, path: Path, manifest: Manifest, arrays: dict[str, Array]) -> None:
        self.path = path
        self.manifest = manifest
        self._arrays = arrays

    @property
    def num_vertices(self) -> int:
        """Vertices of the whole graph."""
        return self.manifest.num_vertices

    @property
    def num_edges(self) -> int:
        """Edges in this store: the in-edges of its vertex range."""
        return self.manifest.num_edges

    @property
    def vertex_range(self) -> tuple[int, int]:
        """First vertex held and one past the last: all of them unless the store is a host's shard."""
        return self.manifest.vertex_range

    @property
    def num_features(self) -> int:
        """Columns of the feature array ``x``; 0 without one."""
        return int(self._arrays["features/x"].shape[1]) if "features/x" in self._arrays else 0

    @property
    def num_classes(self) -> int:
        """Largest label plus one; 0 without integer labels."""
        return self.manifest.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes were called, where labels were strings."""
        return tuple(self.manifest.class_names)

    @property
    def names(self) -> list[str]:
        """Names of all arrays, as ``array`` takes them."""
        return sorted(self._arrays)

    @property
    def edge_names(self) -> list[str]:
        """Names of the per-edge values."""
        return edge_value_names(self._arrays)

    @property
    def unused(self) -> tuple[str, ...]:
        """Nothing: whatever is stored, mini-batches can carry."""
        return ()

    @property
    def is_renumbered(self) -> bool:
        """Whether internal ids may differ from original ids, as after partitioning."""
        return "original_ids" in self._arrays

    @property
    def fingerprint(self) -> str:
        """The graph in short: equal for stores with the same edges in the same numbering; to compare between ranks."""
        if self.manifest.shard is not None:
            return self.manifest.shard.whole_fingerprint
        return graph_fingerprint({name: entry.sha256 for name, entry in self.manifest.arrays.items()})

    @property
    def graph(self) -> Graph:
        """The edges."""
        return Graph(self._arrays["indptr"], self._arrays["indices"], self.num_vertices, self.vertex_range[0])

    @cached_property
    def _by_original_id(self) -> OriginalOrder:
        return OriginalOrder(self, self.path)

    def array(self, name: str) -> Array:
        """One array by name in original order: row v for original vertex v, targets as ascending original ids.

        The memory map itself unless the store was partitioned, then a copy. The edges of a partitioned store, and
        shards, are refused. bfloat16 comes as uint16, its bits.
        """
        return self._by_original_id.array(name)

    def rows(self, name: str, ids: npt.ArrayLike) -> Array:
        """The rows of some vertices by original id, such as ``store.rows("y", batch.n_id)``; only these are read."""
        return self._by_original_id.rows(name, ids)

    def vertex_names(self, ids: npt.ArrayLike | None = None) -> list[str]:
        """String ids by original id, of all vertices or of some, for stores imported from tables with string ids."""
        return self._by_original_id.vertex_names(ids)

    def stored_array(self, name: str) -> Array:
        """One array by name, such as ``y``, ``features/x`` or ``targets/train``, in internal order; read-only."""
        if name not in self._arrays:
            raise missing_array(self.path, name, self.names)
        return self._arrays[name]

    def open_file(self, name: str) -> ArrayFile:
        """The file of an array, opened once more to be read and not mapped; close it after use."""
        self.stored_array(name)
        root = _open_directory(self.path)
        try:
            entry = _read_manifest(root).arrays.get(name)
            if entry != self.manifest.arrays[name]:
                fix = "open the store again"
                raise StoreError(explain(file_of(name), "the array of when the store was opened", "another", fix))
            return ArrayFile(root, file_of(name), entry.dtype, entry.shape)
        except StoreError as error:
            raise StoreError(f"{self.path}: {error}") from None
        finally:
            os.close(root)

    @property
    def part_boundaries(self) -> list[int]:
        """Where the parts of the graph begin and end: one part unless the store was partitioned."""
        return self.manifest.part_boundaries

    @property
    def part_loads(self) -> list[int] | None:
        """The work of every part that presampling counted; None unless the store was partitioned."""
        found = self.manifest.part_statistics
        return None if found is None else found.loads

    def dtype(self, name: str) -> str:
        """The element type of an array, by its logical name (bfloat16 lies as uint16)."""
        self.stored_array(name)
        return self.manifest.arrays[name].dtype

    def original_ids(self, first: int | None = None, stop: int | None = None) -> Array:
        """The ids that held vertices (all, or a range of them) had when imported: their own unless renumbered."""
        low, high = self.vertex_range
        first, stop = low if first is None else first, high if stop is None else stop
        if not self.is_renumbered:
            return np.arange(first, stop)
        return self._arrays["original_ids"][first - low : stop - low]

    def stored_targets(self, name: str) -> tuple[Array, Array | None, int]:
        """A target list as far as it is held here, its positions in the whole list (None if whole), and its length."""
        targets = self.stored_array(f"targets/{name}")
        if self.manifest.shard is None:
            return targets, None, targets.size
        return targets, self.stored_array(f"target_positions/{name}"), self.manifest.shard.num_targets[name]

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, {self.num_vertices} vertices, {self.num_edges} edges)"


def open_store(path: str | Path) -> Store:
    """Open a store and check what can be checked in milliseconds."""
    path = Path(path)
    root = _open_directory(path)
    files: dict[str, ArrayFile] = {}
    try:
        manifest = _read_manifest(root)
        for name, entry in manifest.arrays.items():
            files[name] = ArrayFile(root, file_of(name), entry.dtype, entry.shape)
        _check_samples(manifest, files)
        return Store(path, manifest, {name: file.map(path) for name, file in files.items()})
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from None
    finally:
        os.close(root)
        for file in files.values():
            file.close()


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        fix = "check the path; gsplit import makes a store"
        raise StoreError(explain(path, "the directory of a store", got, fix)) from None


def _read_manifest(root: int) -> Manifest:
    try:
        os.stat("manifest.json", dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        fix = "check the path; gsplit import makes a store"
        raise StoreError(explain("manifest.json", "one, as in the directory of every store", "none", fix)) from None
    return parse_manifest(read_inside(root, "manifest.json", MAX_MANIFEST_BYTES))


def _check_samples(manifest: Manifest, files: dict[str, ArrayFile]) -> None:
    """Ids in range and offsets rising, at a bounded number of places of every index array."""
    first, stop = manifest.vertex_range
    for name, file in files.items():
        if name.startswith("targets/"):
            _check_ids(name, file, first, stop)
        elif name.startswith("target_positions/") and manifest.shard is not None:
            _check_ids(name, file, 0, manifest.shard.num_targets[name.partition("/")[2]])
        elif name in ("indices", "original_ids"):
            _check_ids(name, file, 0, manifest.num_vertices)
        elif name == "indptr":
            _check_offsets(name, file, manifest.num_edges)
        elif name == "name_offsets":
            _check_offsets(name, file, files["name_bytes"].size)


def _windows(file: ArrayFile, count: int = 64, width: int = 64) -> Iterator[tuple[int, Array]]:
    """Evenly spaced pieces of an array and where they start, the first and last elements among them."""
    if file.size <= count * width:
        yield 0, file.read(0, file.size)
        return
    for start in np.linspace(0, file.size - width, count).astype(np.int64):
        yield int(start), file.read(int(start), int(start) + width)


def _check_ids(name: str, file: ArrayFile, first: int, stop: int) -> None:
    """Refuse ids outside [first, stop), as far as a sample shows."""
    for start, part in _windows(file):
        if part.size and not first <= int(part.min()) <= int(part.max()) < stop:
            got = f"{part.min()}..{part.max()} near element {start}"
            raise StoreError(explain(file_of(name), f"ids in {first}..{stop - 1}", got, _DAMAGED))


def _check_offsets(name: str, file: ArrayFile, end: int) -> None:
    """Refuse offsets that do not rise from 0 to ``end``, as far as a sample shows."""
    ends = int(file.read(0, 1)[0]), int(file.read(file.size - 1, file.size)[0])
    if ends != (0, end):
        raise StoreError(explain(file_of(name), f"offsets from 0 to {end}", f"{ends[0]}..{ends[1]}", _DAMAGED))
    for start, part in _windows(file):
        if (part[1:] < part[:-1]).any() or int(part[0]) < 0 or int(part[-1]) > end:
            got = f"a fall near element {start}"
            raise StoreError(explain(file_of(name), f"offsets rising from 0 to {end}", got, _DAMAGED))
