"""Surfaces that become a store: ``.npz`` archives, CSV and Parquet tables, OGB's folders, SNAP's edge lists."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from fuzz_guard import Surface
from fuzz_mutations import mutate_array, mutate_bytes

from gsplit.store.build import build_store
from gsplit.store.importers.arrow import TableColumns
from gsplit.store.importers.npz import npz_source
from gsplit.store.importers.ogb import ogb_source
from gsplit.store.importers.snap import RandomVertices, snap_source
from gsplit.store.importers.tables import tables_source
from gsplit.store.importers.typed_tables import typed_tables_source
from gsplit.store.source import GraphSource
from gsplit.store.verify import verify_store

__all__ = ["IMPORTS"]

N, E = 12, 40
_WRITTEN = 0.1  # of the inputs become a store, with all its flushing to disk; the others are read to the end
_RNG = np.random.default_rng(0)
_EDGES = _RNG.integers(0, N, (2, E))
_X = _RNG.random((N, 3)).astype(np.float32)
_Y = np.arange(N) % 3
_WEIGHT = _RNG.random(E).astype(np.float32)
_SPLITS = {"train_idx": np.arange(0, N, 2), "val_idx": np.arange(1, N, 4)}


def _consume(random: Random, source: GraphSource, folder: Path) -> None:
    """Read a graph to the end; of some, make a store, which must then be sound."""
    if random.random() < _WRITTEN:
        try:
            verify_store(build_store(source, folder / "out.gsplit"))
        finally:
            shutil.rmtree(folder / "out.gsplit", ignore_errors=True)
        return
    for chunk in source.edges():
        assert chunk.src.shape == chunk.dst.shape
    for vertices in source.vertices.values():
        _consume_rows(vertices)
    _consume_rows(source)


def _consume_rows(source: GraphSource) -> None:
    for stream in (*source.features.values(), *(() if source.y is None else (source.y,))):
        for piece in stream.chunks():
            assert piece.rows.shape[1:] == stream.type.row_shape or piece.rows.ndim <= 2


class _Files:
    """Files in a folder, one of which is damaged for each input."""

    def __init__(self, folder: Path, read: Callable[[], GraphSource]) -> None:
        self._folder, self._read = folder, read
        self._sound = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        _consume(Random(0), read(), folder)
        verify_store(build_store(read(), folder / "out.gsplit"))
        shutil.rmtree(folder / "out.gsplit")

    def damage(self, random: Random, path: Path, data: bytes) -> bytes:
        """Another content for a file."""
        if path.suffix == ".gz" and random.random() < 0.9:
            return gzip.compress(mutate_bytes(random, gzip.decompress(data)), 1)
        return mutate_bytes(random, data)

    def attempt(self, random: Random) -> None:
        path = random.choice(list(self._sound))
        path.write_bytes(self.damage(random, path, self._sound[path]))
        try:
            _consume(random, self._read(), self._folder)
        finally:
            path.write_bytes(self._sound[path])


def _arrays(random: Random) -> dict[str, Any]:
    """A graph as arrays, some of them damaged, missing or of another type."""
    arrays: dict[str, Any] = {"edge_index": _EDGES, "x": _X, "y": _Y, "edge_weight": _WEIGHT, "num_nodes": np.array(N)}
    arrays |= _SPLITS
    for name in random.sample(list(arrays), random.choice((0, 1, 1, 2))):
        kind = random.randrange(6)
        if kind == 0:
            del arrays[name]
        elif kind == 1:
            arrays[name] = arrays[name].astype(random.choice(("u1", "i8", "u8", "f8", "f2", "?", "c16", "S3", "i2")))
        elif kind == 2:
            arrays[name] = arrays[name].reshape(-1)[: random.randrange(E)]
        elif kind == 3:
            width = random.choice([width for width in (1, 2, 4) if arrays[name].size % width == 0])
            arrays[name] = np.asfortranarray(arrays[name].reshape(-1, width))
        else:
            arrays[name] = mutate_array(random, np.atleast_1d(arrays[name]))
    return arrays


class Npz:
    """``gsplit import npz``: values, types and shapes that do not fit, and damaged archives."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "g.npz"
        np.savez_compressed(self._path, **_arrays(Random(5)))
        self._data = self._path.read_bytes()
        _consume(Random(0), npz_source(self._path), folder)

    def attempt(self, random: Random) -> None:
        if random.random() < 0.5:
            self._path.write_bytes(mutate_bytes(random, self._data))
        else:
            with np.errstate(all="ignore"):
                np.savez(self._path, **_arrays(random))
        _consume(random, npz_source(self._path), self._folder)


_COLUMNS = TableColumns(edge_values=("w",), features=("f0", "f1"))


def _tables() -> dict[str, Any]:
    edges = pa.table({"src": _EDGES[0], "dst": _EDGES[1], "w": _WEIGHT})
    words = [("train", "val", "test", None)[i % 4] for i in range(N)]
    columns = {"id": np.arange(N), "y": _Y, "split": words, "f0": _X[:, 0], "f1": _X[:, 1]}
    pairs = {"src": _EDGES[0, :9], "dst": _EDGES[1, :9], "label": _Y[:9]}
    return {"edges": edges, "vertices": pa.table(columns), "pairs": pa.table(pairs)}


class Csv(_Files):
    """``gsplit import tables`` from CSV."""

    def __init__(self, folder: Path) -> None:
        for name, table in _tables().items():
            pyarrow.csv.write_csv(table, folder / f"{name}.csv")
        edges, vertices, pairs = (folder / f"{name}.csv" for name in ("edges", "vertices", "pairs"))
        super().__init__(folder, lambda: tables_source(edges, vertices, columns=_COLUMNS, pairs={"train": pairs}))


class Parquet(_Files):
    """``gsplit import tables`` from Parquet."""

    def __init__(self, folder: Path) -> None:
        tables = _tables()
        tables["pairs"] = tables["pairs"].append_column("negatives", [_EDGES[:, :9].T.tolist()])
        for name, table in tables.items():
            pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
        edges, vertices, pairs = (folder / f"{name}.parquet" for name in tables)
        super().__init__(folder, lambda: tables_source(edges, vertices, columns=_COLUMNS, pairs={"train": pairs}))


_TOML = """
ids = "auto"
unknown_ids = "drop"

[vertices.paper]
file = "vertices.csv"
label = "y"
features = ["f*"]

[vertices.venue]
num_vertices = 12

[edges."paper cites paper"]
file = "edges.csv"
src = "src"
dst = "dst"

[edges."venue holds paper"]
file = "edges.csv"
reverse = "held_by"
"""


class TypedTables(_Files):
    """``gsplit import typed``: damaged tables, and a TOML file whose other lines than names of files are damaged."""

    def __init__(self, folder: Path) -> None:
        for name in ("edges", "vertices"):
            pyarrow.csv.write_csv(_tables()[name], folder / f"{name}.csv")
        (folder / "graph.toml").write_text(_TOML)
        super().__init__(folder, lambda: typed_tables_source(folder / "graph.toml"))

    def damage(self, random: Random, path: Path, data: bytes) -> bytes:
        """A line of the TOML file, or any byte of a table."""
        if path.suffix != ".toml":
            return super().damage(random, path, data)
        lines = data.split(b"\n")
        place = random.choice([i for i, line in enumerate(lines) if line and not line.startswith(b"file")])
        lines[place] = mutate_bytes(random, lines[place])
        return b"\n".join(lines)


def _write_csv(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(str(value) for value in np.atleast_1d(row)) for row in rows]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 1))


class OgbText(_Files):
    """``gsplit import ogb`` from the layout in CSV."""

    def __init__(self, folder: Path) -> None:
        raw = folder / "raw"
        contents = {"edge": _EDGES.T, "node-feat": _X, "node-label": _Y, "num-node-list": [N], "num-edge-list": [E]}
        for name, rows in contents.items():
            _write_csv(raw / f"{name}.csv.gz", rows)
        _write_ogb_splits(folder)
        super().__init__(folder, lambda: ogb_source(folder))


class OgbTyped(_Files):
    """``gsplit import ogb`` from the folders of a heterogeneous set."""

    def __init__(self, folder: Path) -> None:
        raw = folder / "raw"
        _write_csv(raw / "num-node-dict.csv.gz", [["a", "b"], [N, N]])
        _write_csv(raw / "triplet-type-list.csv.gz", [["a", "to", "b"], ["b", "to", "b"]])
        for name in ("a___to___b", "b___to___b"):
            _write_csv(raw / "relations" / name / "edge.csv.gz", _EDGES.T)
            _write_csv(raw / "relations" / name / "num-edge-list.csv.gz", [E])
        _write_csv(raw / "node-feat" / "b" / "node-feat.csv.gz", _X)
        _write_csv(raw / "node-label" / "b" / "node-label.csv.gz", _Y)
        _write_ogb_splits(folder, "time/b")
        super().__init__(folder, lambda: ogb_source(folder, reverse=True))


class OgbBinary(_Files):
    """``gsplit import ogb`` from the layout in arrays."""

    def __init__(self, folder: Path) -> None:
        (folder / "raw").mkdir()
        counts: dict[str, Any] = {"num_nodes_list": np.array([N]), "num_edges_list": np.array([E])}
        np.savez_compressed(folder / "raw" / "data.npz", edge_index=_EDGES, node_feat=_X, **counts)
        np.savez_compressed(folder / "raw" / "node-label.npz", node_label=_Y.reshape(-1, 1).astype(np.float32))
        _write_ogb_splits(folder)
        super().__init__(folder, lambda: ogb_source(folder))


class Snap(_Files):
    """``gsplit import snap`` from an edge list with comments."""

    def __init__(self, folder: Path) -> None:
        path = folder / "edges.txt"
        path.write_text("# Nodes: 12\n" + "".join(f"{7 * src}\t{7 * dst}\n" for src, dst in _EDGES.T))
        super().__init__(folder, lambda: snap_source(path, RandomVertices(num_features=2)))


def _write_ogb_splits(folder: Path, split: str = "time") -> None:
    for name, start in (("train", 0), ("valid", 1), ("test", 2)):
        _write_csv(folder / "split" / split / f"{name}.csv.gz", np.arange(start, N, 3))


IMPORTS: dict[str, Callable[[Path], Surface]] = {
    "npz": Npz,
    "csv": Csv,
    "parquet": Parquet,
    "typed tables": TypedTables,
    "ogb csv": OgbText,
    "ogb typed": OgbTyped,
    "ogb npz": OgbBinary,
    "snap": Snap,
}
