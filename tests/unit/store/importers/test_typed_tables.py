"""Heterogeneous graphs from tables: every edge, row and id by the ids of the tables, and clear refusals."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typed_graphs import stored_edge_set
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.errors import InputError
from gsplit.inference.infer import _class_names
from gsplit.store.build import build_store
from gsplit.store.importers.typed_tables import typed_tables_source
from gsplit.store.reader import open_store
from gsplit.store.verify import verify_store

AUTHORS = [f"name {i:02d}" for i in range(20)]
PAPERS = list(range(100, 130))
WRITES = [(AUTHORS[i % 20], PAPERS[(7 * i) % 30]) for i in range(60)]
CITES = [(PAPERS[(3 * i) % 30], PAPERS[i % 30]) for i in range(40)]
HOLDS = [(i % 4, PAPERS[i]) for i in range(30)]

TOML = """
[vertices.author]
file = "authors.csv"
id = "name"

[vertices.paper]
file = "papers.csv"
features = ["f*"]
label = "topic"

[vertices.venue]
num_vertices = 5

[edges."author writes paper"]
file = "writes.csv"
reverse = "rev_writes"

[edges."paper cites paper"]
file = "cites.parquet"
src = "from"
dst = "to"

[edges."venue holds paper"]
file = "holds.csv"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graph.toml").write_text(TOML)
    (tmp_path / "authors.csv").write_text("name\n" + "\n".join(reversed(AUTHORS)) + "\n")
    rows = [f"{v},{'abc'[v % 3]},{'train' if v % 2 else 'test'},{v}.5,{-v}" for v in PAPERS]
    (tmp_path / "papers.csv").write_text("id,topic,split,f0,f1\n" + "\n".join(rows) + "\n")
    (tmp_path / "writes.csv").write_text("src,dst\n" + "\n".join(f"{a},{p}" for a, p in WRITES) + "\n")
    (tmp_path / "holds.csv").write_text("src,dst\n" + "\n".join(f"{a},{p}" for a, p in HOLDS) + "\n")
    pq.write_table(pa.table({"from": [a for a, _ in CITES], "to": [b for _, b in CITES]}), tmp_path / "cites.parquet")
    return tmp_path


def test_every_edge_row_and_id_is_that_of_the_tables(folder: Path) -> None:
    store = build_store(typed_tables_source(folder / "graph.toml"), folder / "g.gsplit")
    verify_store(store)
    paper = {v: i for i, v in enumerate(PAPERS)}
    author = {v: i for i, v in enumerate(AUTHORS)}
    written = sorted((author[a], paper[p]) for a, p in WRITES)
    assert stored_edge_set(store) == {
        ("author", "writes", "paper"): written,
        ("paper", "rev_writes", "author"): sorted((p, a) for a, p in written),
        ("paper", "cites", "paper"): sorted((paper[a], paper[b]) for a, b in CITES),
        ("venue", "holds", "paper"): sorted((a, paper[p]) for a, p in HOLDS),
    }
    assert store.vertex_names(None, "author") == AUTHORS and store.vertex_names([3], "author") == ["name 03"]
    assert store.array("vertex_ids/paper").tolist() == PAPERS
    np.testing.assert_array_equal(store.array("features/paper/x"), [[v + 0.5, -v] for v in PAPERS])
    assert [store.manifest.vertex_types[1].class_names[c] for c in store.array("y/paper")] == [
        "abc"[v % 3] for v in PAPERS
    ]
    assert list(_class_names(store, "paper")) == ["a", "b", "c"] and not _class_names(store, "author")
    assert store.array("targets/paper/train").tolist() == [paper[v] for v in PAPERS if v % 2]
    assert store.manifest.vertex_types[1].feature_columns == ["f0", "f1"]
    assert store.manifest.vertex_types[2].count == 5


def test_a_command_imports_and_partitions_them(folder: Path) -> None:
    plain, parts = str(folder / "g.gsplit"), str(folder / "p.gsplit")
    how = ["--parts", "3", "--targets", "paper/train", "--fanout", "2,2", "--epochs", "1", "--solver", "random"]
    for words in (
        ["import", "typed", str(folder / "graph.toml"), plain],
        ["partition", plain, parts, *how, "--objective", "random"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    before, after = open_store(plain), open_store(parts)
    verify_store(after)
    assert stored_edge_set(after) == stored_edge_set(before)
    assert after.vertex_names(None, "author") == AUTHORS and after.vertex_names([3, 1], "author") == [
        "name 03",
        "name 01",
    ]
    assert after.rows("vertex_ids/paper", [5]).tolist() == [105]
    np.testing.assert_array_equal(after.array("features/paper/x"), before.array("features/paper/x"))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"author writes paper"', '"author writes"', 'SRC NAME DST" with vertex types of author, paper, venue'),
        ('"author writes paper"', '"author writes town"', "SRC NAME DST"),
        ('id = "name"', 'id = "key"', r"vertices\.author.*a column key.*id = "),
        ('src = "from"', 'src = "source"', r"edges\.'paper cites paper'.*a column source.*src = "),
        ("num_vertices = 5", "", "file or num_vertices .got neither"),
        ("num_vertices = 5", 'num_vertices = 5\nlabel = "y"', "a file for these keys .got label"),
        ("num_vertices = 5", "num_vertices = 2", r"edges\.'venue holds paper'.*ids among the 2 vertices.*2 in row 2"),
        ("num_vertices = 5", "num_vertices = -1", r"key vertices\.venue\.num_vertices"),
        ('file = "holds.csv"', 'file = "holds.csv"\nvalues = ["w"]', r"key edges\.venue holds paper\.values"),
        ('file = "writes.csv"', 'file = "cites.parquet"', "a column src"),
        ('file = "authors.csv"', 'file = "other.csv"', "no such file"),
        ('reverse = "rev_writes"', 'reverse = "', "a TOML file with"),
        ('src = "from"\ndst = "to"', 'src = "to"\ndst = "from"\nreverse = "cites"', "different names"),
    ],
)
def test_mistakes_are_named_with_their_place(folder: Path, old: str, new: str, message: str) -> None:
    assert old in TOML
    (folder / "graph.toml").write_text(TOML.replace(old, new))
    with pytest.raises(InputError, match=message):
        build_store(typed_tables_source(folder / "graph.toml"), folder / "g.gsplit")


def test_unknown_ids_can_be_dropped(folder: Path) -> None:
    text = 'unknown_ids = "drop"\n' + TOML.replace("num_vertices = 5", "num_vertices = 2")
    (folder / "graph.toml").write_text(text)
    store = build_store(typed_tables_source(folder / "graph.toml"), folder / "g.gsplit")
    assert len(stored_edge_set(store)["venue", "holds", "paper"]) == sum(a < 2 for a, _ in HOLDS)
    assert store.manifest.provenance[0].counts["edges_with_unknown_ids_dropped"] == sum(a >= 2 for a, _ in HOLDS)


def test_ids_of_two_types_may_be_of_two_kinds_but_not_those_of_one(folder: Path) -> None:
    (folder / "writes.csv").write_text("src,dst\n1,100\n")
    with pytest.raises(InputError, match=r"edges\.'author writes paper'.*ids that are strings"):
        build_store(typed_tables_source(folder / "graph.toml"), folder / "g.gsplit")
