"""``manifest.json``: sizes of the graph, the arrays of the store, and how it was made.

The manifest has no paths: an array's name is its path, made of a fixed role and, in folders, one word (``role_of``). In
a heterogeneous graph, arrays of vertices belong to a vertex type, whose name is a word before it: ``features/paper/x``.
Every shape follows from the counts, so a manifest that parses is consistent. ``reader`` compares it with the files.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version as installed_version
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gsplit.errors import InputError, StoreError, explain
from gsplit.files.untrusted import describe_fault
from gsplit.graph.types import GraphTypes
from gsplit.store.statistics import Statistics

__all__ = [
    "MAX_EDGES",
    "MAX_EDGE_TYPES",
    "MAX_MANIFEST_BYTES",
    "MAX_CLASS_NAME",
    "MAX_NAMED_CLASSES",
    "MAX_VERTICES",
    "MAX_WORD",
    "VERSION",
    "ArrayEntry",
    "ClassNames",
    "ColumnNames",
    "EdgeTypeEntry",
    "INPUT_POSITION",
    "LabelMetadata",
    "Manifest",
    "PartStatistics",
    "ProvenanceStep",
    "Role",
    "Shard",
    "VertexTypeEntry",
    "check_vertex_type",
    "edge_type_dtype",
    "file_of",
    "index_type",
    "graph_fingerprint",
    "new_step",
    "parse_manifest",
    "part_group_size",
    "role_of",
]

VERSION = 3
"""The newest version of the format. A store is written in the oldest version that has all its arrays."""
_OLDEST_VERSION = 2
MAX_VERTICES = 1 << 35
MAX_EDGES = 1 << 40
MAX_COLUMNS = 1 << 24
MAX_NAMED_CLASSES = 1 << 14
MAX_CLASS_NAME = 200
MAX_WORD = 1000
MAX_MANIFEST_BYTES = 64 << 20
MAX_VERTEX_TYPES = 1 << 12
_MAX_GROUPS = 1 << 10
MAX_EDGE_TYPES = (1 << 15) - 1

_INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_ANY = ("bool", *_INTEGERS, *_FLOATS)


@dataclass(frozen=True)
class Role:
    """Requirements of an array: its types, what one row belongs to, and the number of dimensions.

    ``vertex_type``: the type whose vertices have the rows, or that the targets are of; None in a homogeneous graph.
    """

    dtypes: tuple[str, ...]
    rows: Literal["vertex", "vertex + 1", "edge", "any", "vertex of the graph", "pair"]
    dimensions: tuple[int, ...] = (1,)
    vertex_type: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a shard has the whole array: its rows do not belong to the vertices or edges held."""
        return self.rows in ("vertex of the graph", "pair")


ROLES = {
    "indptr": Role(("int64",), "vertex + 1"),
    "indices": Role(("int32", "int64"), "edge"),
    "edge_type": Role(("uint8", "int16"), "edge"),
    "y": Role(_ANY, "vertex", (1, 2)),
    "original_ids": Role(("int64",), "vertex"),
    "internal_ids": Role(("int32", "int64"), "vertex of the graph"),
    "hotness": Role(("int64",), "vertex"),
    "vertex_ids": Role(("int64",), "vertex"),
    "name_offsets": Role(("int64",), "vertex + 1"),
    "name_bytes": Role(("uint8",), "any"),
}
FOLDERS = {
    "features": Role(("int8", *_FLOATS), "vertex", (2,)),
    "scales": Role(("float32",), "vertex"),
    "edges": Role(_ANY, "edge", (1, 2)),
    "time_order": Role(("int32",), "edge"),
    "targets": Role(("int64",), "any"),
    "target_positions": Role(("int64",), "any"),
    "pairs": Role(("int64",), "pair", (2,)),
    "pair_labels": Role(("bool", *_INTEGERS, "float32", "float64"), "pair"),
    "pair_negatives": Role(("int64",), "pair", (2,)),
}
BY_TYPE = ("y", "vertex_ids", "name_offsets", "name_bytes", "features", "scales", "targets")
"""The arrays of ROLES and FOLDERS that a heterogeneous graph has for each vertex type, and only so."""
INPUT_POSITION = "input_position"
"""The per-edge array of positions in the input. It is not a value of the edges."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,63}")


def role_of(name: str) -> Role:
    """The role of an array by its name, such as ``indptr``, ``features/x`` or, for a vertex type, ``features/paper/x``.

    >>> role_of("y").vertex_type, role_of("y/paper").vertex_type, role_of("targets/paper/train").vertex_type
    (None, 'paper', 'paper')
    """
    folder, *words = name.split("/")
    plain = all(_WORD.fullmatch(word) for word in words)
    found = {0: ROLES, 1: FOLDERS}.get(len(words), {}).get(folder)
    if found and plain:
        return found
    found = {1: ROLES, 2: FOLDERS}.get(len(words), {}).get(folder)
    if found and plain and folder in BY_TYPE:
        return replace(found, vertex_type=words[0])
    known = ", ".join([*ROLES, *(f"{folder}/NAME" for folder in FOLDERS)])
    by_type = f"for a vertex type, {', '.join(BY_TYPE)} have it as first word"
    raise ValueError(f"array name {name[:80]!r} is not one of {known} (NAME: letters, digits, _ and -; {by_type})")


def check_vertex_type(name: str) -> None:
    """Refuse a name of a vertex type that cannot be a word in names of arrays."""
    if not _WORD.fullmatch(name):
        expected = "a word: letters, digits, _ and -, not a digit first, at most 64"
        raise InputError(explain("vertex type", expected, repr(name), "rename the type"))


def index_type(num_vertices: int) -> str:
    """The type of ids of vertices in ``indices`` and ``internal_ids``."""
    return "int32" if num_vertices <= 1 << 31 else "int64"


def edge_type_dtype(num_relations: int) -> str:
    """The type of the elements of ``edge_type``."""
    return "uint8" if num_relations < 256 else "int16"


def file_of(name: str) -> str:
    """The path of an array inside the store. Names without a role are refused."""
    role_of(name)
    return f"{name}.npy"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Extent = Annotated[int, Field(ge=0, le=1 << 62)]


class ArrayEntry(_Strict):
    """One array file: element type, shape and the SHA-256 of its elements."""

    dtype: str
    shape: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=2)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    def describe(self) -> str:
        return f"{self.dtype} {list(self.shape)} with SHA-256 {self.sha256[:16]}..."


Word = Annotated[str, Field(max_length=MAX_WORD)]


ClassNames = Annotated[list[Annotated[str, Field(max_length=MAX_CLASS_NAME)]], Field(max_length=MAX_NAMED_CLASSES)]
ColumnNames = Annotated[list[Word], Field(max_length=MAX_COLUMNS)]


class ProvenanceStep(_Strict):
    """One step that made the store: the command, its time, its settings and its counts."""

    step: Word
    time: Word
    gsplit_version: Word
    settings: dict[str, Any] = {}
    counts: dict[str, Annotated[int, Field(ge=0, le=1 << 62)]] = {}

    @field_validator("settings")
    @classmethod
    def _are_values(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if fault := describe_fault(settings):
            raise ValueError(f"settings hold {fault}")
        return settings


def new_step(step: str, settings: dict[str, Any], counts: dict[str, int]) -> ProvenanceStep:
    """A step made now by this version of gsplit."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return ProvenanceStep(
        step=step, time=now, gsplit_version=installed_version("gsplit"), settings=settings, counts=counts
    )


def part_group_size(num_parts: int) -> int:
    """Number of consecutive parts whose links are counted together, so that the table has at most a million entries.

    >>> part_group_size(1024), part_group_size(1025)
    (1, 2)
    """
    return -(-num_parts // _MAX_GROUPS)


class PartStatistics(_Strict):
    """Counts per part over ``num_batches`` mini-batches, from which any number of ranks is predicted.

    The mini-batches are of the epochs after the presampled ones, so that the parts were not fitted to them. Stores that
    GSplit partitioned before it did so have those of the presampled ones.
    ``loads[p]`` is the work of part p, ``links[g][h]`` how often an edge from group h into group g was drawn. A group
    is ``part_group_size`` consecutive parts: one, up to 1,024 parts.
    """

    num_batches: Annotated[int, Field(ge=1, le=1 << 40)]
    loads: list[Extent]
    links: list[list[Extent]]


class Shard(_Strict):
    """The store that a shard was cut from: its fingerprint and the lengths of its target lists."""

    whole_fingerprint: str
    num_targets: dict[str, Extent]


class VertexTypeEntry(_Strict):
    """One vertex type. Its name is a folder: letters, digits, _ and -."""

    name: Annotated[str, Field(pattern=f"^{_WORD.pattern}$")]
    count: Annotated[int, Field(ge=0, le=MAX_VERTICES)]
    num_classes: Annotated[int, Field(ge=0, le=1 << 63)] = 0
    class_names: ClassNames = []
    feature_columns: ColumnNames = []


class EdgeTypeEntry(_Strict):
    """One edge type: source type, name, destination type, the number of its edges, and which values they have.

    The array ``edges/NAME`` has a row for every edge of the graph; rows of edge types without these values are 0.
    """

    src: Word
    name: Word
    dst: Word
    num_edges: Annotated[int, Field(ge=0, le=MAX_EDGES)]
    values: Annotated[list[Word], Field(max_length=MAX_COLUMNS)] = []


class LabelMetadata(TypedDict):
    """Names of classes, feature columns and types. Copied to derived stores."""

    num_classes: int
    class_names: list[str]
    feature_columns: list[str]
    vertex_types: list[VertexTypeEntry]
    edge_types: list[EdgeTypeEntry]


class Manifest(_Strict):
    """The content of ``manifest.json``. ``num_vertices`` is that of the graph; arrays hold its ``vertex_range``."""

    format: Literal["gsplit-store"] = "gsplit-store"
    version: int = VERSION
    num_vertices: Annotated[int, Field(ge=0, le=MAX_VERTICES)]
    num_edges: Annotated[int, Field(ge=0, le=MAX_EDGES)]
    vertex_range: tuple[Extent, Extent]
    part_boundaries: Annotated[list[Extent], Field(min_length=2, max_length=1 << 20)]
    num_classes: Annotated[int, Field(ge=0, le=1 << 63)] = 0
    class_names: ClassNames = []
    """Names of the classes if labels were strings; the k-th is that of class k."""
    feature_columns: ColumnNames = []
    """Names of the columns of ``features/x`` if they came from a table."""
    vertex_types: Annotated[list[VertexTypeEntry], Field(max_length=MAX_VERTEX_TYPES)] = []
    """The vertex types of a heterogeneous graph, in the order of their ids; empty for a homogeneous one."""
    edge_types: Annotated[list[EdgeTypeEntry], Field(max_length=MAX_EDGE_TYPES)] = []
    type_boundaries: Annotated[list[Extent], Field(max_length=1 << 22)] = []
    """First vertex of every (part, type), then the number of vertices."""
    arrays: dict[str, ArrayEntry]
    statistics: Statistics
    part_statistics: PartStatistics | None = None
    shard: Shard | None = None
    provenance: list[ProvenanceStep]

    @field_validator("version")
    @classmethod
    def _known_version(cls, version: int) -> int:
        if not _OLDEST_VERSION <= version <= VERSION:
            known = f"{_OLDEST_VERSION} to {VERSION}"
            raise ValueError(f"this gsplit reads stores of versions {known}, this one has version {version}")
        return version

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        first, stop = self.vertex_range
        if not first <= stop <= self.num_vertices:
            raise ValueError(f"vertex_range {first}..{stop} does not lie in 0..{self.num_vertices}")
        cuts = self.part_boundaries
        if cuts[0] != 0 or cuts[-1] != self.num_vertices or any(a > b for a, b in pairwise(cuts)):
            raise ValueError(f"part_boundaries must rise from 0 to {self.num_vertices}")
        self._check_types()
        for name in ("indptr", "indices"):
            if name not in self.arrays:
                raise ValueError(f"array {name} is missing")
        for name in self.arrays:
            if name.startswith(("name_offsets", "name_bytes")):
                of_type = name.removeprefix("name_offsets").removeprefix("name_bytes")
                if not {f"name_offsets{of_type}", f"name_bytes{of_type}"} <= self.arrays.keys():
                    raise ValueError("name_offsets and name_bytes go together")
        for name, entry in self.arrays.items():
            self._check_entry(name, entry)
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(f"class_names: {len(self.class_names)} for {self.num_classes} classes")
        if self.version < self.needed_version:
            what = "orders by time, internal_ids, pairs and vertex types"
            raise ValueError(f"version {self.version} does not have {what}, version {VERSION} does")
        self._check_columns()
        self._check_scales()
        self._check_part_statistics()
        self._check_shard()
        self._check_pairs()
        self._check_times()
        return self

    def _check_types(self) -> None:
        """Ranges of the types fit those of the parts, and every edge has a type."""
        if not self.vertex_types:
            if self.edge_types or self.type_boundaries or "edge_type" in self.arrays:
                raise ValueError("edge_types, type_boundaries and the array edge_type go with vertex_types")
            return
        try:
            types = self.types
        except InputError as error:
            raise ValueError(str(error)) from None
        assert types is not None
        if list(types.boundaries[:: types.num_types]) != self.part_boundaries:
            raise ValueError("type_boundaries do not fit part_boundaries")
        if self.shard is not None:
            raise ValueError("a store with vertex types is whole, not a shard")
        if sum(entry.num_edges for entry in self.edge_types) != self.num_edges:
            raise ValueError(f"edge_types: num_edges do not add up to {self.num_edges}")
        expected = edge_type_dtype(types.num_relations)
        if "edge_type" not in self.arrays or self.arrays["edge_type"].dtype != expected:
            raise ValueError(f"array edge_type of {expected} is missing")
        for edge_type in self.edge_types:
            missing = [name for name in edge_type.values if f"edges/{name}" not in self.arrays]
            if missing:
                raise ValueError(f"edge type {edge_type.name}: array edges/{missing[0]} is missing")
        for entry in self.vertex_types:
            if entry.class_names and len(entry.class_names) != entry.num_classes:
                raise ValueError(f"class_names of {entry.name}: {len(entry.class_names)} for {entry.num_classes}")

    @property
    def types(self) -> GraphTypes | None:
        """The types of a heterogeneous graph; None for a homogeneous one."""
        if not self.vertex_types:
            return None
        return GraphTypes(
            vertex_types=tuple(entry.name for entry in self.vertex_types),
            edge_types=tuple((entry.src, entry.name, entry.dst) for entry in self.edge_types),
            edge_values=tuple(tuple(entry.values) for entry in self.edge_types),
            offsets=(0, *accumulate(entry.count for entry in self.vertex_types)),
            boundaries=tuple(self.type_boundaries),
        )

    def _check_columns(self) -> None:
        named = {"features/x": self.feature_columns}
        named |= {f"features/{entry.name}/x": entry.feature_columns for entry in self.vertex_types}
        for array, names in named.items():
            num_columns = self.arrays[array].shape[1] if array in self.arrays else 0
            if names and num_columns != len(names):
                raise ValueError(f"feature_columns: {len(names)} names for the {num_columns} columns of {array}")

    def _check_scales(self) -> None:
        """Features of int8 need the scale of each row."""
        scaled = [name for name in self.names("features") if self.arrays[f"features/{name}"].dtype == "int8"]
        if scaled != self.names("scales"):
            raise ValueError("scales/NAME goes with features/NAME of int8, and with no other")

    def _check_part_statistics(self) -> None:
        found = self.part_statistics
        parts = len(self.part_boundaries) - 1
        groups = -(-parts // part_group_size(parts))
        if found and (len(found.loads) != parts or {len(found.links), *map(len, found.links)} != {groups}):
            raise ValueError(f"part_statistics: loads must be those of {parts} parts, links of {groups} groups")

    def _check_shard(self) -> None:
        """A shard has the positions of its targets in the whole lists; a whole store does not need them."""
        if self.shard is None and self.vertex_range != (0, self.num_vertices):
            raise ValueError("shard is missing, and vertex_range is not the whole")
        positions = self.names("target_positions")
        if positions != (self.names("targets") if self.shard else []):
            raise ValueError("target_positions go with the targets of a shard")
        for name in positions:
            num_targets = self.arrays[f"targets/{name}"].shape[0]
            num_positions = self.arrays[f"target_positions/{name}"].shape[0]
            if num_positions != num_targets:
                raise ValueError(f"target_positions/{name}: {num_positions} for {num_targets} targets")
            whole = self.shard.num_targets.get(name, -1) if self.shard else -1
            if whole < num_targets:
                raise ValueError(f"shard.num_targets.{name}: {num_targets} or more, as many as are here")

    def _check_pairs(self) -> None:
        """Pairs have two columns; their labels and negatives have a row for each."""
        if "internal_ids" in self.arrays and "original_ids" not in self.arrays:
            raise ValueError("internal_ids go with original_ids")
        for name in self.names("pairs"):
            if (columns := self.arrays[f"pairs/{name}"].shape[1]) != 2:
                raise ValueError(f"pairs/{name}: {columns} columns instead of 2, source and destination")
        for folder in ("pair_labels", "pair_negatives"):
            for name in self.names(folder):
                pairs = self.arrays.get(f"pairs/{name}")
                rows = self.arrays[f"{folder}/{name}"].shape[0]
                if pairs is None or pairs.shape[0] != rows:
                    num_pairs = "no" if pairs is None else pairs.shape[0]
                    raise ValueError(f"{folder}/{name}: {rows} rows for {num_pairs} pairs")

    def _check_times(self) -> None:
        """An order by time belongs to one integer per edge."""
        for name in self.names("time_order"):
            times = self.arrays.get(f"edges/{name}")
            if times is None or times.dtype not in _INTEGERS or times.shape[1:] not in ((), (1,)) or self.vertex_types:
                raise ValueError(f"time_order/{name} goes with integers edges/{name} of a graph without vertex types")

    def _check_entry(self, name: str, entry: ArrayEntry) -> None:
        role = role_of(name)
        held = {found.name: found.count for found in self.vertex_types}
        needs_type = bool(held) and name.split("/")[0] in BY_TYPE
        if (role.vertex_type or needs_type) and role.vertex_type not in held:
            expected = f"belongs to one of the vertex types {', '.join(held)}" if held else "has no vertex type"
            raise ValueError(f"{name}: an array of this graph {expected}")
        if entry.dtype not in role.dtypes:
            raise ValueError(f"{name}: dtype {entry.dtype[:20]!r} is not one of {', '.join(role.dtypes)}")
        if len(entry.shape) == 2 and entry.shape[1] > MAX_COLUMNS:
            raise ValueError(f"{name}: {entry.shape[1]} columns, more than {MAX_COLUMNS}")
        if len(entry.shape) not in role.dimensions:
            raise ValueError(f"{name}: {len(entry.shape)} dimensions instead of {role.dimensions}")
        local = held.get(role.vertex_type or "", self.vertex_range[1] - self.vertex_range[0])
        num_rows = {
            "vertex": local,
            "vertex + 1": local + 1,
            "edge": self.num_edges,
            "vertex of the graph": self.num_vertices,
        }
        rows = num_rows.get(role.rows, entry.shape[0])
        if entry.shape[0] != rows:
            raise ValueError(f"{name}: {entry.shape[0]} rows instead of {rows} (one per {role.rows})")

    @property
    def needed_version(self) -> int:
        """The oldest version of the format that has all these arrays."""
        is_new = self.vertex_types or any(
            role_of(name).is_whole or name.startswith("time_order/") for name in self.arrays
        )
        return VERSION if is_new else _OLDEST_VERSION

    def as_json(self) -> str:
        """The text of ``manifest.json``, in the oldest version that has all of it."""
        left_out = set() if self.vertex_types else {"vertex_types", "edge_types", "type_boundaries"}
        written = self.model_copy(update={"version": self.needed_version})
        return written.model_dump_json(indent=1, exclude=left_out)

    @property
    def label_metadata(self) -> LabelMetadata:
        return {
            "num_classes": self.num_classes,
            "class_names": self.class_names,
            "feature_columns": self.feature_columns,
            "vertex_types": self.vertex_types,
            "edge_types": self.edge_types,
        }

    def names(self, folder: str) -> list[str]:
        """The names under a folder such as ``features`` or ``targets``, sorted: ``x``, or ``paper/x``."""
        return sorted(name.removeprefix(f"{folder}/") for name in self.arrays if name.startswith(f"{folder}/"))


def graph_fingerprint(checksums: Mapping[str, str]) -> str:
    """A checksum of the graph, from the SHA-256 of its arrays."""
    names = [name for name in ("indptr", "indices", "original_ids", "edge_type") if name in checksums]
    return " ".join(checksums[name][:16] for name in names)


def parse_manifest(text: bytes) -> Manifest:
    """Parse a manifest. Any fault is a ``StoreError`` that names the key."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part)[:80] for part in first["loc"]) or "the whole"
        found = first["input"]
        got = f"a {type(found).__name__}" if isinstance(found, dict | list | bytes | Manifest) else repr(found)[:80]
        expected = f"a valid manifest; key {key}: {first['msg']}"
        fix = "use the gsplit version that wrote it, restore manifest.json from a copy, or import the graph again"
        raise StoreError(explain("manifest.json", expected, got, fix)) from None
