"""Opening a store takes milliseconds and reads a few pages, whatever its size.

Opening checks the manifest for consistency, every file against the manifest (header byte for byte, length)
and the contents at a bounded sample of places. It does not read whole arrays; ``store.verify`` does. Damage that
opening does not detect must still be harmless, so code that indexes by stored values checks them first
(``kernels.jit``).

Of a store on object storage, opening reads the manifest. Arrays are fetched, checked and mapped when they are first
used (``remote``).
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from gsplit.array_types import Array
from gsplit.errors import InputError, StoreError, explain
from gsplit.files.objects import as_url
from gsplit.graph.graph import Graph
from gsplit.graph.types import GraphTypes
from gsplit.store.files import ArrayFile, read_inside
from gsplit.store.manifest import MAX_MANIFEST_BYTES, Manifest, file_of, graph_fingerprint, parse_manifest, role_of
from gsplit.store.protocol import ArrayStore, missing_array
from gsplit.store.remote import Mirror, RowBlocks, open_mirror

__all__ = ["Store", "open_store"]

_DAMAGED = "the file is damaged: restore it from a copy, or import the graph again"


class Store(ArrayStore):
    """An opened store: the manifest, and its arrays as read-only memory maps. Made by ``gsplit.open``.

    ``array``, ``rows`` and ``vertex_names`` use original ids, like ``n_id`` of a mini-batch and the rows of
    ``gsplit.infer``. Members called ``stored_...`` use the internal order of the files, which partitioning changes.
    """

    def __init__(
        self, path: Path, manifest: Manifest, arrays: Mapping[str, Array], mirror: Mirror | None = None
    ) -> None:
        """``mirror``: the files that this host has fetched, for a store on object storage."""
        self.path = path
        self.manifest = manifest
        self.arrays = arrays
        self.mirror = mirror

    @property
    def where(self) -> str:
        return str(self.path) if self.mirror is None else self.mirror.objects.url

    @cached_property
    def types(self) -> GraphTypes | None:  # type: ignore[override]
        """The types of a heterogeneous graph; None for a homogeneous one."""
        return self.manifest.types

    @property
    def num_vertices(self) -> int:
        return self.manifest.num_vertices

    @property
    def num_edges(self) -> int:
        """Number of edges in this store: the in-edges of its vertex range."""
        return self.manifest.num_edges

    @property
    def vertex_range(self) -> tuple[int, int]:
        return self.manifest.vertex_range

    @property
    def num_classes(self) -> int:
        """Largest label plus one; 0 without integer labels."""
        return self.manifest.num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes if labels were strings; else empty."""
        return tuple(self.manifest.class_names)

    @property
    def unused(self) -> tuple[str, ...]:
        """Empty: mini-batches can carry every stored array."""
        return ()

    @property
    def fingerprint(self) -> str:
        """A checksum of the graph, equal for stores with the same edges in the same numbering."""
        if self.manifest.shard is not None:
            return self.manifest.shard.whole_fingerprint
        return graph_fingerprint({name: entry.sha256 for name, entry in self.manifest.arrays.items()})

    @property
    def graph(self) -> Graph:
        """The edges."""
        return Graph(self.arrays["indptr"], self.arrays["indices"], self.num_vertices, self.vertex_range[0])

    def open_file(self, name: str) -> ArrayFile:
        """Open the file of an array once more, to read instead of map it. The caller closes it."""
        self.stored_array(name)
        root = _open_directory(self.path if self.mirror is None else self.mirror.folder)
        try:
            entry = _read_manifest(root).arrays.get(name)
            opened = self.manifest.arrays[name]
            if entry != opened:
                expected = f"{opened.describe()}, as when the store was opened"
                got = "no such array" if entry is None else entry.describe()
                raise StoreError(explain(file_of(name), expected, got, "open the store again"))
            return ArrayFile(root, file_of(name), opened.dtype, opened.shape)
        except StoreError as error:
            raise StoreError(f"{self.where}: {error}") from None
        finally:
            os.close(root)

    def open_blocks(self, name: str) -> RowBlocks | None:
        """The rows of a feature array that stays on object storage; None if ``stored_array`` is to be used."""
        self.shape(name)
        return None if self.mirror is None else self.mirror.open_blocks(name)

    @property
    def part_boundaries(self) -> list[int]:
        """First vertex of every part, then the number of vertices. One part unless the store was partitioned."""
        return self.manifest.part_boundaries

    @property
    def part_loads(self) -> list[int] | None:
        """Work of every part as counted on held-out mini-batches; None unless the store was partitioned."""
        found = self.manifest.part_statistics
        return None if found is None else found.loads

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, which is not read for it."""
        if name not in self.arrays:
            raise missing_array(self.where, name, self.names)
        return self.manifest.arrays[name].shape

    def dtype(self, name: str) -> str:
        """Element type of an array. bfloat16 is stored as uint16."""
        self.shape(name)
        return self.manifest.arrays[name].dtype

    def stored_targets(self, name: str) -> tuple[Array, Array | None, int]:
        """The targets held here, their positions in the whole list (None if whole), and its length."""
        targets = self.stored_array(f"targets/{name}")
        if self.manifest.shard is None:
            return targets, None, targets.size
        return targets, self.stored_array(f"target_positions/{name}"), self.manifest.shard.num_targets[name]

    def __repr__(self) -> str:
        return f"Store({self.where!r}, {self.num_vertices} vertices, {self.num_edges} edges)"


class FetchedArrays(Mapping[str, Array]):
    """The arrays of a store on object storage; each is fetched when it is first used."""

    def __init__(self, mirror: Mirror, manifest: Manifest) -> None:
        self._mirror = mirror
        self._manifest = manifest
        self._mapped: dict[str, Array] = {}
        self._fetching = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._manifest.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.arrays)

    def __len__(self) -> int:
        return len(self._manifest.arrays)

    def __getitem__(self, name: str) -> Array:
        with self._fetching:
            if name not in self._mapped:
                self._mapped[name] = self._open(name)
            return self._mapped[name]

    def _open(self, name: str) -> Array:
        self._manifest.arrays[name]  # a KeyError, as of any mapping
        names = [name, *(["indices"] if name == "edge_type" else [])]  # what a sample of it is compared with
        if name.startswith("name_offsets"):
            names.append(name.replace("name_offsets", "name_bytes"))
        for each in names:
            self._mirror.fetch(each)
        folder = self._mirror.folder
        root = _open_directory(folder)
        try:
            return _map_files(root, folder, self._manifest, names)[name]
        except StoreError as error:
            raise StoreError(f"{folder}: {error}") from None
        finally:
            os.close(root)


def open_store(path: str | Path, *, cache_dir: str | Path | None = None, cache_bytes: int | str | None = None) -> Store:
    """Open a store and check it as far as that takes milliseconds.

    ``path`` is a folder, or the URL of a store on object storage such as ``s3://BUCKET/NAME.gsplit``. Its arrays are
    fetched into ``cache_dir`` when they are first used (default: GSPLIT_CACHE_DIR, or a folder of the user's cache).
    With ``cache_bytes``, such as "20GB", features are not fetched: each rank keeps its hottest rows on disk, in so many
    bytes, and reads others by ranges (default: GSPLIT_CACHE_BYTES; without it, features are fetched whole).
    """
    url = as_url(path)
    if url is not None:
        mirror, manifest = open_mirror(url, cache_dir, cache_bytes)
        return Store(Path(path), manifest, FetchedArrays(mirror, manifest), mirror)
    if cache_dir is not None or cache_bytes is not None:
        got = f"{path}, on this host"
        fix = "leave cache_dir and cache_bytes out"
        raise InputError(explain("cache_dir, cache_bytes", "the URL of a store on object storage", got, fix))
    path = Path(path)
    root = _open_directory(path)
    try:
        manifest = _read_manifest(root)
        return Store(path, manifest, _map_files(root, path, manifest, manifest.arrays))
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from None
    finally:
        os.close(root)


def _map_files(root: int, path: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, Array]:
    """Check and map the files of some arrays in the directory ``path``, whose descriptor is ``root``."""
    files: dict[str, ArrayFile] = {}
    try:
        for name in names:
            entry = manifest.arrays[name]
            files[name] = ArrayFile(root, file_of(name), entry.dtype, entry.shape)
        _check_samples(manifest, files)
        return {name: file.map(path) for name, file in files.items()}
    finally:
        for file in files.values():
            file.close()


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        fix = "check the path; gsplit import makes a store"
        if (whole := path.with_name(f"{path.name}.gsplit")).is_dir():
            fix = f"give the whole name, {whole}"
        raise StoreError(explain(path, "the directory of a store", got, fix)) from None


def _read_manifest(root: int) -> Manifest:
    try:
        os.stat("manifest.json", dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        fix = "check the path; gsplit import makes a store"
        raise StoreError(explain("manifest.json", "the manifest of a store", "no such file", fix)) from None
    return parse_manifest(read_inside(root, "manifest.json", MAX_MANIFEST_BYTES))


def _check_samples(manifest: Manifest, files: dict[str, ArrayFile]) -> None:
    """Check that ids are in range and offsets rise, at a bounded number of places of every index array."""
    first, stop = manifest.vertex_range
    for name, file in files.items():
        if name.startswith("targets/"):
            _check_ids(name, file, first, stop)
            _check_target_types(manifest, name, file)
        elif name.startswith("target_positions/") and manifest.shard is not None:
            _check_ids(name, file, 0, manifest.shard.num_targets[name.partition("/")[2]])
        elif name in ("indices", "original_ids", "internal_ids") or name.startswith(("pairs/", "pair_negatives/")):
            _check_ids(name, file, 0, manifest.num_vertices)
        elif name == "indptr":
            _check_offsets(name, file, manifest.num_edges)
        elif name.startswith("name_offsets"):
            _check_offsets(name, file, files[name.replace("name_offsets", "name_bytes")].size)
        elif name == "edge_type":
            _check_relations(manifest, file, files["indices"])


def _check_target_types(manifest: Manifest, name: str, file: ArrayFile) -> None:
    """Refuse targets of another vertex type than that of their list in a sample."""
    types = manifest.types
    vertex_type = role_of(name).vertex_type
    if types is None or vertex_type is None:
        return
    for start, part in _windows(file):
        others = np.flatnonzero(types.of_host(part) != types.number(vertex_type))
        if others.size:
            got = f"{part[others[0]]} as element {start + others[0]}, of another type"
            raise StoreError(explain(file_of(name), f"vertices of type {vertex_type}", got, _DAMAGED))


def _check_relations(manifest: Manifest, kinds: ArrayFile, indices: ArrayFile) -> None:
    """Refuse edges of an unknown type, or from a vertex of another type than theirs, in a sample."""
    types = manifest.types
    assert types is not None
    src_types, _ = types.ends()
    for start, part in _windows(kinds):
        if part.size and not 0 <= int(part.min()) <= int(part.max()) < types.num_relations:
            got = f"{part.min()}..{part.max()} near element {start}"
            expected = f"edge types in 0..{types.num_relations - 1}"
            raise StoreError(explain(file_of("edge_type"), expected, got, _DAMAGED))
        sources = types.of_host(indices.read(start, start + part.size))
        wrong = np.flatnonzero(sources != src_types[part])
        if wrong.size:
            at = int(wrong[0])
            expected = f"a source of type {types.edge_types[part[at]][0]} for {types.edge_types[part[at]]}"
            got = f"type {types.vertex_types[sources[at]]} at edge {start + at}"
            raise StoreError(explain(file_of("edge_type"), expected, got, _DAMAGED))


def _windows(file: ArrayFile, count: int = 64, width: int = 64) -> Iterator[tuple[int, Array]]:
    """Evenly spaced pieces of an array with their positions, including the first and last elements."""
    if file.size <= count * width:
        yield 0, file.read(0, file.size)
        return
    for start in np.linspace(0, file.size - width, count).astype(np.int64):
        yield int(start), file.read(int(start), int(start) + width)


def _check_ids(name: str, file: ArrayFile, first: int, stop: int) -> None:
    """Refuse ids outside [first, stop) in a sample."""
    for start, part in _windows(file):
        if part.size and not first <= int(part.min()) <= int(part.max()) < stop:
            got = f"{part.min()}..{part.max()} near element {start}"
            raise StoreError(explain(file_of(name), f"ids in {first}..{stop - 1}", got, _DAMAGED))


def _check_offsets(name: str, file: ArrayFile, end: int) -> None:
    """Refuse offsets that do not rise from 0 to ``end`` in a sample."""
    low = int(file.read(0, 1)[0])
    high = int(file.read(file.size - 1, file.size)[0])
    if low != 0 or high != end:
        raise StoreError(explain(file_of(name), f"offsets from 0 to {end}", f"{low}..{high}", _DAMAGED))
    for start, part in _windows(file):
        if (part[1:] < part[:-1]).any() or int(part[0]) < 0 or int(part[-1]) > end:
            got = f"a fall near element {start}"
            raise StoreError(explain(file_of(name), f"offsets rising from 0 to {end}", got, _DAMAGED))
