"""Tables as users have them: gaps, words for classes, other names and separators. Each is read, or the fix is named."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.errors import InputError
from gsplit.store.build import build_store
from gsplit.store.importers import vertex_table
from gsplit.store.importers.arrow import LabelType, TableColumns
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store

EDGES = "src,dst\n" + "".join(f"u{i},u{(3 * i + 1) % 6}\n" for i in range(6))
ROWS = [("u0", "cat", "train", 1), ("u1", "dog", "val", 2), ("u2", "", "test", 3)]
ROWS += [("u3", "dog", "", 4), ("u4", "cat", "Train", 5), ("u5", "cat", " TEST ", 6)]
COLUMNS = TableColumns(features=("f0", "f1"))


def _table(head: str = "id,y,split,f0,f1", rows: Any = ROWS) -> str:
    lines = [head, *(f"{vertex},{y},{split},{f},{f / 2}" for vertex, y, split, f in rows)]
    return "\n".join(lines) + "\n"


def _labels(*values: object) -> str:
    return _table(rows=[(f"u{i}", value, "train", 1) for i, value in enumerate(values)])


def _import(folder: Path, vertices: str | bytes, columns: TableColumns = COLUMNS, edges: str = EDGES) -> Store:
    (folder / "e.csv").write_text(edges)
    file = folder / ("v.csv.gz" if isinstance(vertices, bytes) else "v.csv")
    file.write_bytes(vertices if isinstance(vertices, bytes) else vertices.encode())
    return build_store(tables_source(folder / "e.csv", file, columns=columns), folder / "g.gsplit", overwrite=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in text.splitlines()),
        lambda text: gzip.compress(text.encode()),
    ],
    ids=["plain", "semicolons", "tabs", "BOM", "quotes", "gz"],
)
def test_csv_in_every_dress(tmp_path: Path, change: Any) -> None:
    store = _import(tmp_path, change(_table()))
    assert store.class_names == ("cat", "dog")
    assert store.stored_array("y").tolist() == [0, 1, -1, 1, 0, 0]
    assert store.array("features/x")[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    found = {name: store.vertex_names(store.array(f"targets/{name}")) for name in ("train", "val", "test")}
    assert found == {"train": ["u0", "u4"], "val": ["u1"], "test": ["u2", "u5"]}


@pytest.mark.parametrize("label", ["cat", "0.5", "1"])
def test_vertices_without_a_label_are_no_train_targets_and_stay_in_others(tmp_path: Path, label: str) -> None:
    rows = [("u0", label, "train", 1), ("u1", "", "train", 1), ("u2", "", "val", 1), ("u3", "", "test", 1)]
    rows += [("u4", label, "train", 1), ("u5", "", "train", 1)]
    store = _import(tmp_path, _table(rows=rows))
    assert {name: store.array(f"targets/{name}").tolist() for name in ("train", "val", "test")} == {
        "train": [0, 4],
        "val": [2],
        "test": [3],
    }
    notes = store.manifest.provenance[0].settings["notes"]
    assert "targets train: left out, because they have no label: 2" in notes


def test_names_of_classes_outlive_partitioning_and_stay_in_step_with_the_labels(tmp_path: Path) -> None:
    store = _import(tmp_path, _table())
    parted = gsplit.partition(store, tmp_path / "p.gsplit", 2, [2], batch_size=2, epochs=1)
    assert parted.class_names == ("cat", "dog")
    assert [parted.class_names[label] if label >= 0 else "" for label in parted.array("y")] == [row[1] for row in ROWS]
    assert gsplit.open(parted.path).class_names == ("cat", "dog")
    words = pa.array([row[1] for row in ROWS]).dictionary_encode()  # as pandas writes categories
    pq.write_table(pa.table({"id": [row[0] for row in ROWS], "y": words}), tmp_path / "v.parquet")
    source = tables_source(tmp_path / "e.csv", tmp_path / "v.parquet")
    assert source.notes[0] == "y: strings imported as 2 classes, in this order: cat, dog"
    assert build_store(source, tmp_path / "c.gsplit").stored_array("y").tolist() == [0, 1, -1, 1, 0, 0]


@pytest.mark.parametrize(
    "values, label_type, stored, num_classes",
    [
        (("0.0", "1.0", "", "2.0", "0.0", "1.0"), "auto", [0, 1, -1, 2, 0, 1], 3),
        (("0.0", "1.0", "1.0", "2.0", "0.0", "1.0"), "auto", [0.0, 1.0, 1.0, 2.0, 0.0, 1.0], 0),
        (("0.0", "1.0", "1.0", "2.0", "0.0", "1.0"), "classes", [0, 1, 1, 2, 0, 1], 3),
        (("0", "NaN", "1", "2", "", "1"), "auto", [0, -1, 1, 2, -1, 1], 3),
        (("7", "8", "1", "2", "3", "1"), "values", [7.0, 8.0, 1.0, 2.0, 3.0, 1.0], 0),
        (("true", "false", "", "true", "true", "false"), "auto", [1, 0, -1, 1, 1, 0], 2),
    ],
)
def test_labels_with_gaps_and_of_another_type(
    tmp_path: Path, values: tuple[str, ...], label_type: str, stored: list[float], num_classes: int
) -> None:
    columns = TableColumns(features=("f*",), label_type=LabelType(label_type))
    store = _import(tmp_path, _labels(*values), columns)
    assert (store.stored_array("y").tolist(), store.num_classes, store.num_features) == (stored, num_classes, 2)


@pytest.mark.parametrize(
    "vertices, columns, message",
    [
        (_table(rows=[("u0", 1, "trian", 1)]), COLUMNS, r"split: .*got 'trian' in 1 rows or more.. Fix: write train"),
        (
            _table(rows=[("u0", 1, "holdout", 1)]),
            COLUMNS,
            "got 'holdout' .*Fix: rename these values, or leave them empty",
        ),
        (_table("ID,y,split,f0,f1"), COLUMNS, "a column id .got columns ID, y, split, f0, f1.*--id-column ID"),
        (_table("node_id,y,split,f0,f1"), COLUMNS, "--id-column node_id"),
        (_table(), TableColumns(features=("f0", "f1s")), "expected a column f1s .*--feature-column f1\\."),
        (
            _table(),
            TableColumns(features=("f*", "g*")),
            "a column that matches g. .got columns f0, f1.*--feature-column",
        ),
        (_table(), TableColumns(label="label"), "expected a column label .*--label-column y"),
        (_table("id, y, split, f0, f1"), COLUMNS, "expected a column f0 .*remove the spaces around names and values"),
        (
            _table(rows=[("u0", 1, "train", 1), ("u0", 1, "train", 2)]),
            COLUMNS,
            "every id once .got 1 distinct ids in 2.*use --ids names",
        ),
        (_table().replace(",4,", ",?,"), COLUMNS, "got column f0: Row #5: CSV conversion error to double: invalid"),
        (_table(rows=[]), COLUMNS, "v.csv: expected a row per vertex .got no rows"),
        ("", COLUMNS, "v.csv: expected a readable table .got Empty CSV file"),
        (_table(rows=[(7, 1, "train", 1)]), COLUMNS, "ids that are integers, as in the vertex table .got strings"),
        (_labels(*6 * ["0.5"]), TableColumns(label_type=LabelType.CLASSES), "expected classes: whole numbers from 0"),
        (_labels(*"abcabc"), TableColumns(label_type=LabelType.VALUES), "numbers for --label-type values .got strings"),
        (_labels(*6 * ["z" * 300]), COLUMNS, "y: expected names of at most 200 characters .got 300: 'z"),
        (_labels(*6 * ['" "']), COLUMNS, "y: expected a label in some row .got empty rows only.*--label-column"),
    ],
)
def test_the_message_names_what_is_there_and_the_fix(
    tmp_path: Path, vertices: str, columns: TableColumns, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _import(tmp_path, vertices, columns)


def test_a_column_of_free_text_is_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertex_table, "MAX_NAMED_CLASSES", 3)
    with pytest.raises(InputError, match="y: expected at most 3 names of classes .got more than 3.*--label-column"):
        _import(tmp_path, _labels(*"abcdef"))
    monkeypatch.setattr(vertex_table, "MAX_NAMED_CLASSES", 9)
    monkeypatch.setattr(vertex_table, "_NAMES_BYTES", 9)
    with pytest.raises(InputError, match="y: expected names of at most 9 bytes in all .got 30"):
        _import(tmp_path, _labels(*"abcdef"))


def test_ids_that_are_no_text_name_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_bytes("src,dst\nü1,u2\n".encode("latin-1"))
    with pytest.raises(InputError, match="ids: expected integers or strings .got binary.*save the file in UTF-8"):
        tables_source(tmp_path / "e.csv")


def test_csv_ids_that_would_become_other_numbers_are_refused(tmp_path: Path) -> None:
    edges, vertices = tmp_path / "e.csv", tmp_path / "v.csv"
    for written in ("02134", "0x10", "-0", "-07"):
        edges.write_text(f"src,dst\n5,{written}\n")
        for ids in ("auto", "map"):
            with pytest.raises(InputError, match=f"e.csv: dst: .*leading zeros .got '{written}', .*--ids names"):
                tables_source(edges, ids=ids)
        store = build_store(tables_source(edges, ids="names"), tmp_path / "g.gsplit", overwrite=True)
        assert sorted(store.vertex_names()) == sorted(["5", written])
        vertices.write_text(f"id,y\n{written},1\n5,0\n")
        edges.write_text("src,dst\n5,5\n")
        with pytest.raises(InputError, match="v.csv: id: expected integers without leading zeros"):
            tables_source(edges, vertices)
    edges.write_text("src,dst\n0, 10\n-3,5\n")  # a space is no sign of a name
    assert tables_source(edges).num_vertices == 4
    edges.write_text("src,dst\n1.0,2.5\n")
    with pytest.raises(InputError, match="integers or strings .got double.*--ids names reads those of CSV files"):
        tables_source(edges)


def test_an_empty_string_is_no_id(tmp_path: Path) -> None:
    edges, vertices = tmp_path / "e.csv", tmp_path / "v.csv"
    edges.write_text("src,dst\na,b\nb,\n")
    with pytest.raises(InputError, match="e.csv: expected an id in every row .got 1 empty among 4"):
        tables_source(edges)
    vertices.write_text("id,y\na,0\nb,1\n")
    with pytest.raises(InputError, match="ids among the 2 vertices .got '' in row 1;.*--unknown-ids drop"):
        build_store(tables_source(edges, vertices), tmp_path / "g.gsplit")
    store = build_store(tables_source(edges, vertices, unknown_ids="drop"), tmp_path / "g.gsplit")
    assert (store.num_edges, store.vertex_names()) == (1, ["a", "b"])
    pq.write_table(pa.table({"id": ["a", "", None], "y": [0, 1, 1]}), tmp_path / "v.parquet")
    with pytest.raises(InputError, match="v.parquet: id: expected an id in every row .got 2 empty among 3"):
        tables_source(edges, tmp_path / "v.parquet")


def test_options_of_a_vertex_table_need_one(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(EDGES)
    for option, columns in {
        "--id-column": TableColumns(id="name"),
        "--label-type": TableColumns(label_type=LabelType.VALUES),
        "--split-column, --feature-column": TableColumns(split="part", features=["f0"]),
        "--label-column, --list-column": TableColumns(label="label", feature_list="v"),
    }.items():
        with pytest.raises(InputError, match=f"^{option}: expected a vertex table .got edges only.*with --vertices"):
            tables_source(tmp_path / "e.csv", columns=columns)


def test_what_was_left_out_and_what_may_have_been_meant_is_noted(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "v.csv").write_text(_table("id,label,part,f0,").replace(",3,1.5", ",nan,1.5"))
    words = [
        "import",
        "tables",
        str(tmp_path / "e.csv"),
        str(tmp_path / "g.gsplit"),
        "--vertices",
        str(tmp_path / "v.csv"),
    ]
    said = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    for note in (
        "not imported: label, part, f0, (no name)",
        "no labels: there is no column y; if label holds them, add --label-column label",
        "no targets: there is no column split; if part holds them, add --split-column part",
        "no features: name number columns with --feature-column NAME, or several with a pattern, 'f*'",
    ):
        assert f"note: {note}\n" in said
    words += ["--label-column", "label", "--feature-column", "f*", "--overwrite"]
    said = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "classes            2 (cat, dog), unlabelled vertices: 1" in said
    assert "note: features x: 1 values are NaN or infinite, and losses will be; fill them before you import\n" in said
