"""Parquet and CSV: string or integer ids, in one file or many, joined back by the stored mapping."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from graphs import stored_edges

from gsplit.errors import InputError, MissingDependencyError
from gsplit.store.build import build_store
from gsplit.store.importers import arrow, tables, vertex_ids
from gsplit.store.importers.arrow import TableColumns
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store
from gsplit.store.source import EdgeRules

RNG = np.random.default_rng(0)
N, E = 40, 300
SRC, DST = RNG.integers(0, N, E), RNG.integers(0, N, E)
IDS = np.sort(RNG.choice(10**12, N, replace=False))
NAMES = np.array([f"v{chr(97 + i % 26)}{i}é" for i in range(N)])


def _write(folder: Path, form: str, name: str, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    if form == "parquet":
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=64)
        return folder / f"{name}.parquet"
    if form == "folder":
        (folder / name).mkdir()
        (folder / name / "_SUCCESS").touch()
        for part in range(3):
            pq.write_table(table.slice(part * 100, 100), folder / name / f"part-{part}.parquet")
        return folder / name
    file = folder / f"{name}.{form}"
    with pa.output_stream(file) as stream:  # .gz is compressed by its name
        pyarrow.csv.write_csv(table, stream)
    return file


def _pairs(store: Store, ids: Any) -> list[tuple[Any, Any]]:
    src, dst = stored_edges(store)
    return sorted((ids[s], ids[d]) for s, d in zip(src, dst, strict=True))


@pytest.mark.parametrize("form", ["parquet", "folder", "csv", "csv.gz"])
@pytest.mark.parametrize("kind", ["dense", "sparse", "names"])
@pytest.mark.parametrize("batch", [16, 1 << 20])
def test_edges_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, kind: str, batch: int) -> None:
    monkeypatch.setattr(vertex_ids, "BATCH_IDS", batch)
    monkeypatch.setattr(tables, "BATCH_IDS", batch)
    ids: Any = {"dense": np.arange(N), "sparse": IDS, "names": NAMES}[kind]
    store = build_store(
        tables_source(_write(tmp_path, form, "edges", {"src": ids[SRC], "dst": ids[DST]})), tmp_path / "g.gsplit"
    )
    seen = np.unique(np.concatenate([SRC, DST]))
    if kind == "dense":
        mapped: Any = np.arange(store.num_vertices)
        assert store.num_vertices == seen.max() + 1
    elif kind == "sparse":
        mapped = store.stored_array("vertex_ids")
        assert np.array_equal(mapped, IDS[seen])
    else:
        mapped = store.vertex_names(np.arange(store.num_vertices))
        assert mapped == sorted(NAMES[seen], key=lambda name: name.encode())
    assert _pairs(store, mapped) == sorted(zip(ids[SRC], ids[DST], strict=True))


@pytest.mark.parametrize("form", ["parquet", "csv"])
@pytest.mark.parametrize("kind", ["dense", "sparse", "names"])
def test_vertex_table_in_any_order(tmp_path: Path, form: str, kind: str) -> None:
    ids: Any = {"dense": np.arange(N), "sparse": IDS, "names": np.sort(NAMES)}[kind]
    order = RNG.permutation(N)
    x, y = RNG.random((N, 3)).astype(np.float32), RNG.integers(0, 5, N)
    split = np.array(["train", "valid", "test", ""])[np.arange(N) % 4]
    weight = RNG.random(E)
    vertices = {"id": ids[order], "y": y[order], "split": split[order], "note": np.arange(N)}
    vertices |= {f"f{j}": x[order, j] for j in range(3)}
    source = tables_source(
        _write(tmp_path, form, "edges", {"from": ids[SRC], "to": ids[DST], "w": weight}),
        _write(tmp_path, form, "vertices", vertices),
        columns=TableColumns(src="from", dst="to", edge_values=("w",), features=("f0", "f1", "f2")),
    )
    assert source.notes == ("not imported: note",)
    store = build_store(source, tmp_path / "g.gsplit")
    assert store.num_vertices == N
    assert np.allclose(store.stored_array("features/x"), x, rtol=1e-6)
    assert np.array_equal(store.stored_array("y"), y)
    assert store.stored_array("targets/val").tolist() == list(range(1, N, 4))
    src, dst = stored_edges(store)
    got = sorted(zip(src, dst, store.stored_array("edges/w"), strict=True))
    assert got == sorted(zip(SRC, DST, weight, strict=True))


def test_list_features_missing_labels_and_types(tmp_path: Path) -> None:
    x = RNG.random((N, 4)).astype(np.float16)
    lists = {
        "fixed": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 4),
        "free": pa.array(x.astype(np.float64).tolist()),
    }
    for name, column in lists.items():
        y = pa.array([None if i % 3 == 0 else i % 5 for i in range(N)])
        source = tables_source(
            _write(tmp_path, "parquet", "edges", {"src": SRC, "dst": DST}),
            _write(tmp_path, "parquet", "vertices", {"id": np.arange(N), "x": column, "y": y}),
        )
        store = build_store(source, tmp_path / f"{name}.gsplit")
        assert np.array_equal(store.stored_array("features/x"), x)
        assert store.manifest.arrays["features/x"].dtype == ("float16" if name == "fixed" else "float64")
        assert store.stored_array("y").tolist() == [-1 if i % 3 == 0 else i % 5 for i in range(N)]


def test_ids_that_look_like_numbers_can_be_read_as_names(tmp_path: Path) -> None:
    edges = tmp_path / "edges.csv"
    edges.write_text("src,dst\n007,7\n7,10\n")
    store = build_store(tables_source(edges, ids="names"), tmp_path / "g.gsplit")
    assert store.vertex_names(np.arange(3)) == ["007", "10", "7"]


def test_the_four_ways_of_ids(tmp_path: Path) -> None:
    low = _write(tmp_path, "parquet", "low", {"src": [0, 5], "dst": [3, 0]})  # 5 >= 2 edges * 2
    assert tables_source(low).num_vertices == 3
    assert tables_source(low, ids="dense").num_vertices == 6
    assert tables_source(low, num_vertices=9).num_vertices == 9
    named = _write(tmp_path, "csv", "named", {"src": ["a", "b"], "dst": ["b", "c"]})
    for unknown in ("refuse", "drop"):
        with pytest.raises(InputError, match="num_vertices: expected None with a vertex table or mapped ids .got 9"):
            tables_source(named, num_vertices=9, unknown_ids=unknown)
    assert tables_source(_write(tmp_path, "csv", "low", {"src": [0, 3], "dst": [3, 0]})).num_vertices == 4
    assert tables_source(_write(tmp_path, "csv", "low", {"src": [0, 3], "dst": [3, 0]}), ids="map").num_vertices == 2
    no_statistics = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"src": [0, 3], "dst": [3, 0]}), no_statistics, write_statistics=False)
    assert tables_source(no_statistics).num_vertices == 4


@pytest.mark.parametrize(
    "src, dst",
    [
        (pa.array([0, 1], pa.int32()), pa.array([1, 2], pa.int64())),
        (pa.array(["a", "b"], pa.string()), pa.array(["b", "c"], pa.large_string())),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", "c"])),
        (pa.array([0, 1], pa.uint8()), pa.array([1, 2], pa.uint64())),
    ],
)
def test_id_columns_of_different_width_are_joined(tmp_path: Path, src: Any, dst: Any) -> None:
    store = build_store(
        tables_source(_write(tmp_path, "parquet", "e", {"src": src, "dst": dst})), tmp_path / "g.gsplit"
    )
    assert np.array_equal(stored_edges(store), [[0, 1], [1, 2]])


def test_files_of_a_folder_are_read_as_the_first(tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    pq.write_table(
        pa.table({"src": pa.array([0], pa.int32()), "dst": pa.array([1], pa.int32())}), tmp_path / "e" / "a.parquet"
    )
    pq.write_table(
        pa.table({"src": pa.array([1], pa.int64()), "dst": pa.array([0], pa.int64())}), tmp_path / "e" / "b.parquet"
    )
    assert build_store(tables_source(tmp_path / "e"), tmp_path / "g.gsplit").num_edges == 2
    pq.write_table(pa.table({"src": ["x"], "dst": ["y"]}), tmp_path / "e" / "c.parquet")
    with pytest.raises(InputError, match=r"c.parquet: expected a readable table"):
        build_store(tables_source(tmp_path / "e"), tmp_path / "h.gsplit")
    pq.write_table(pa.table({"src": [0], "dst": [1]}), tmp_path / "_e.parquet")
    assert tables_source(tmp_path / "_e.parquet").num_edges == 1  # a name of one's own choice may begin with _


def test_types_do_not_come_from_the_first_rows_alone(tmp_path: Path) -> None:
    rows = 300_000
    lines = ["id,split,f\n", *(f"{i},,0\n" for i in range(rows - 1)), f"{rows - 1},train,0.5\n"]
    (tmp_path / "v.csv").write_text("".join(lines))
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n")
    source = tables_source(tmp_path / "e.csv", tmp_path / "v.csv", columns=TableColumns(features=("f",)))
    store = build_store(source, tmp_path / "g.gsplit")
    assert store.stored_array("features/x")[-1, 0] == 0.5
    assert store.stored_array("targets/train").tolist() == [rows - 1]


EDGES = {"src": [0, 1], "dst": [1, 2]}


@pytest.mark.parametrize(
    "edges, vertices, options, message",
    [
        ({"a": [1], "b": [2]}, None, {}, "expected a column src .got columns a, b.*it: --src NAME"),
        ({"src": [0.5], "dst": [1.5]}, None, {}, "ids: expected integers or strings"),
        ({"src": ["a"], "dst": ["b"]}, None, {"ids": "dense"}, "expected integer ids for --ids dense"),
        ({"src": [-1, 0], "dst": [0, 0]}, None, {"ids": "dense"}, "expected ids from 0 for --ids dense"),
        ({"src": [0, None], "dst": [0, 0]}, None, {"num_vertices": 2}, "expected ids among the 2 vertices .got None"),
        ({"src": [0, None], "dst": [0, 0]}, None, {"ids": "map"}, "expected an id in every row"),
        (
            EDGES,
            {"id": [0, 1]},
            {},
            "expected ids among the 2 vertices .got 2 in row 1; edges with such ids in rows 0..1: 1",
        ),
        (EDGES, {"id": [0, 1, 1, 2]}, {}, "id: expected every id once .got 3 distinct ids in 4 rows"),
        (EDGES, {"id": [5, 6, 7]}, {"ids": "dense"}, "ids 0 .. n-1 for --ids dense .got 3 ids from 5 to 7"),
        (EDGES, {"name": [0, 1, 2]}, {}, "expected a column id .got columns name.*it: --id-column name"),
        (
            EDGES,
            {"id": [0, 1, 2]},
            {"columns": TableColumns(label="nope")},
            "expected a column nope .got columns id.*it: --label-column NAME",
        ),
        (EDGES, {"id": [0, 1, 2]}, {"num_vertices": 3}, "num_vertices: expected None with a vertex table"),
        (EDGES, {"id": [0, 1, 2], "x": [1.0, 2.0, 3.0]}, {}, "x: expected lists of numbers"),
        (
            EDGES,
            {"id": ["a", "b", "c"]},
            {},
            "expected ids that are strings, as in the vertex table .got integers.*--ids names",
        ),
        ({"src": [0], "dst": ["a"]}, None, {}, "one kind of id for sources and destinations"),
        (
            {"src": pa.array([2**63], pa.uint64()), "dst": [0]},
            None,
            {"ids": "map"},
            r"ids: expected integers below 2\*\*63",
        ),
        (EDGES, None, {"delimiter": ""}, "delimiter: expected one character"),
        (EDGES, {"id": [0, 1, 2], "split": ["train", "x", ""]}, {}, "split: expected one of train, val"),
        (
            EDGES,
            {"id": [0, 1, 2], "x": [[1.0], [1.0, 2.0], [3.0]]},
            {},
            "x: expected lists of one length without nulls .got 0 missing, lengths 1..2 in 3 rows",
        ),
        (
            EDGES | {"w": ["a", "b"]},
            None,
            {"columns": TableColumns(edge_values=("w",))},
            "w: expected a column of numbers",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, edges: dict[str, Any], vertices: dict[str, Any] | None, options: dict[str, Any], message: str
) -> None:
    edge_file = _write(tmp_path, "parquet", "edges", edges)
    vertex_file = _write(tmp_path, "parquet", "vertices", vertices) if vertices else None
    with pytest.raises(InputError, match=message):
        build_store(tables_source(edge_file, vertex_file, **options), tmp_path / "g.gsplit")
    assert not (tmp_path / "g.gsplit").exists()


@pytest.mark.parametrize("ids", [np.array([10, 20, 30]), np.array(["a", "b", "c"])])
def test_edges_with_unknown_ids_are_dropped_and_counted(tmp_path: Path, ids: Any) -> None:
    a, b, c = ids.tolist()
    stranger = c + 1 if isinstance(c, int) else "z"
    edges = {"src": [a, stranger, b, c, stranger], "dst": [b, a, stranger, a, stranger], "w": [1.0, 2.0, 3.0, 4.0, 5.0]}
    edge_file, vertex_file = (_write(tmp_path, "parquet", n, t) for n, t in (("e", edges), ("v", {"id": ids})))
    columns = TableColumns(edge_values=("w",))
    message = (
        rf"among the 3 vertices \(got {stranger!r} in row 1; edges with such ids in rows 0..4: 3\).*--unknown-ids drop"
    )
    with pytest.raises(InputError, match=message):
        build_store(tables_source(edge_file, vertex_file, columns=columns), tmp_path / "g.gsplit")
    source = tables_source(edge_file, vertex_file, columns=columns, unknown_ids="drop")
    store = build_store(source, tmp_path / "g.gsplit")
    src, dst = stored_edges(store)
    assert (src.tolist(), dst.tolist(), store.array("edges/w").tolist()) == ([2, 0], [0, 1], [4.0, 1.0])
    step = store.manifest.provenance[0]
    assert step.settings["unknown_ids"] == "drop"
    assert (step.counts["edges_read"], step.counts["edges_with_unknown_ids_dropped"]) == (5, 3)
    both = build_store(source, tmp_path / "s.gsplit", rules=EdgeRules(symmetrise=True))
    assert both.manifest.provenance[0].counts["reverse_edges_added"] == 2


def test_dropping_wants_to_know_the_vertices(tmp_path: Path) -> None:
    edges = _write(tmp_path, "parquet", "e", {"src": [0, 1, None], "dst": [1, 9, 0]})
    with pytest.raises(InputError, match="unknown_ids: expected a vertex table or num_vertices for drop"):
        tables_source(edges, unknown_ids="drop")
    store = build_store(tables_source(edges, num_vertices=2, unknown_ids="drop"), tmp_path / "g.gsplit")
    assert (store.num_edges, store.manifest.provenance[0].counts["edges_with_unknown_ids_dropped"]) == (1, 2)
    with pytest.raises(InputError, match=r"expected an id in every row .got 1 empty among 6"):
        tables_source(edges, ids="map")


def test_an_empty_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a table, or a folder of them .got a folder without files"):
        tables_source(tmp_path)
    (tmp_path / "edges").write_bytes(b"")
    with pytest.raises(InputError, match="csv.gz file .got"):
        tables_source(tmp_path / "edges")


def test_files_that_are_not_tables_are_refused(tmp_path: Path) -> None:
    for name, content, message in [
        ("a.parquet", b"PAR1 no", "expected a readable table"),
        ("a.csv", b"src,dst\n1,2\n1\n", "expected a readable table"),
        ("b.csv", b"src,dst\n" + b"1,2\n" * 1_200_000 + b"x,2\n", "expected a readable table"),
        ("a.json", b"{}", "expected a .parquet, .csv or .csv.gz file .got a.json"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            build_store(tables_source(tmp_path / name), tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="expected a table, or a folder of them .got no such file"):
        tables_source(tmp_path / "absent.csv")


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_arrow(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_arrow)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gsplit\[arrow\]'"):
        arrow.load_arrow()


def test_words_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A fuzzed Parquet file: its bytes are read as text only when a word is looked at."""
    offsets, words = pa.py_buffer(np.array([0, 5, 10], np.int32)), pa.py_buffer(b"tr\x8ein" * 2)
    column = pa.StringArray.from_buffers(2, offsets, words)
    pq.write_table(pa.table({"id": [0, 1], "split": column}), tmp_path / "v.parquet")
    pq.write_table(pa.table({"src": [0, 1], "dst": [1, 0]}), tmp_path / "e.parquet")
    with pytest.raises(InputError, match="v.parquet: split: expected a readable table .*Fix: write the words in UTF-8"):
        tables_source(tmp_path / "e.parquet", tmp_path / "v.parquet")
