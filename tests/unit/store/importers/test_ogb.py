"""OGB's folders in both layouts, made here as OGB makes them."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import expected_edges, stored_edges
from torch_geometric.data import HeteroData

from gsplit.errors import InputError
from gsplit.store.build import build_store
from gsplit.store.importers.ogb import ogb_source
from gsplit.store.importers.pyg import to_pyg
from gsplit.store.source import EdgeRules

RNG = np.random.default_rng(0)
N, E = 30, 200
EDGES = RNG.integers(0, N, (2, E))
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = np.where(np.arange(N) % 7 == 0, np.nan, np.arange(N) % 5)


def _csv(path: Path, array: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.asarray(array).reshape(len(array), -1)
    lines = [",".join("" if np.isnan(v) else repr(v.item()) for v in row) for row in rows]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


def _splits(folder: Path, name: str = "time") -> None:
    for split, start in (("train", 0), ("valid", 1), ("test", 2)):
        _csv(folder / "split" / name / f"{split}.csv.gz", np.arange(start, N, 3))


def _csv_layout(folder: Path) -> Path:
    _csv(folder / "raw" / "edge.csv.gz", EDGES.T)
    _csv(folder / "raw" / "node-feat.csv.gz", X)
    _csv(folder / "raw" / "node-label.csv.gz", Y)
    _csv(folder / "raw" / "num-node-list.csv.gz", [N])
    _csv(folder / "raw" / "num-edge-list.csv.gz", [E])
    _splits(folder)
    return folder


def _binary_layout(folder: Path) -> Path:
    (folder / "raw").mkdir(parents=True)
    counts: dict[str, Any] = {"num_nodes_list": np.array([N]), "num_edges_list": np.array([E])}
    np.savez_compressed(folder / "raw" / "data.npz", edge_index=EDGES, node_feat=X.astype(np.float16), **counts)
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=Y.reshape(-1, 1).astype(np.float32))
    _splits(folder)
    return folder


@pytest.mark.parametrize("layout", [_csv_layout, _binary_layout])
def test_both_layouts(tmp_path: Path, layout: Any) -> None:
    store = build_store(ogb_source(layout(tmp_path / "ogbn_test")), tmp_path / "g.gsplit")
    src, dst, _ = expected_edges(EDGES[0], EDGES[1], [], EdgeRules())
    assert np.array_equal(stored_edges(store), [src, dst])
    assert np.allclose(store.stored_array("features/x"), X, atol=2e-3)
    assert np.array_equal(store.stored_array("y"), np.nan_to_num(Y, nan=-1).astype(np.int64))
    assert {n: store.stored_array(f"targets/{n}").tolist() for n in store.manifest.names("targets")} == {
        "train": list(range(0, N, 3)),
        "val": list(range(1, N, 3)),
        "test": list(range(2, N, 3)),
    }
    assert store.num_classes == 5
    step = store.manifest.provenance[0]
    assert step.counts["unlabelled_vertices"] == int(np.isnan(Y).sum())
    assert any("imported as classes" in note for note in step.settings["notes"])


def test_what_is_not_imported_is_named(tmp_path: Path) -> None:
    plain = _csv_layout(tmp_path / "plain")
    assert not any("not imported" in note for note in ogb_source(plain).notes)
    for name in ("edge-feat", "node_species"):
        _csv(plain / "raw" / f"{name}.csv.gz", [[1.0]])
    assert "not imported: edge-feat.csv.gz, node_species.csv.gz" in ogb_source(plain).notes
    binary = _binary_layout(tmp_path / "binary")
    assert not any("not imported" in note for note in ogb_source(binary).notes)
    np.savez_compressed(binary / "raw" / "data.npz", edge_index=EDGES, num_nodes_list=np.array([N]), node_year=Y)
    assert "not imported: node_year" in ogb_source(binary).notes


def test_several_splits_want_a_choice(tmp_path: Path) -> None:
    folder = _csv_layout(tmp_path / "ogbn_test")
    _splits(folder, "random")
    with pytest.raises(InputError, match=r"expected one of random, time .got None.*--split"):
        ogb_source(folder)
    assert len(ogb_source(folder, split="time").targets) == 3
    with pytest.raises(InputError, match=r"expected one of random, time .got other"):
        ogb_source(folder, split="other")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"expected raw/edge.csv.gz, .*triplet-type-list.csv.gz .got only an empty folder",
    ):
        ogb_source(tmp_path)
    with pytest.raises(InputError, match=r"expected raw/edge.csv.gz, .*triplet-type-list.csv.gz .got no such folder"):
        ogb_source(tmp_path / "absent")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"expected raw/edge.csv.gz, .*triplet-type-list.csv.gz .got only notes.txt"):
        ogb_source(tmp_path)
    half = _binary_layout(tmp_path / "half")
    np.savez(half / "raw" / "node-label.npz", other=Y)
    with pytest.raises(InputError, match=r"node-label.npz: expected an array node_label .got only other"):
        ogb_source(half)
    empty = _csv_layout(tmp_path / "empty")
    for name in ("node-feat", "node-label"):
        sound = (empty / "raw" / f"{name}.csv.gz").read_bytes()
        (empty / "raw" / f"{name}.csv.gz").write_bytes(b"")
        with pytest.raises(InputError, match=r"expected one row per vertex .got an empty file"):
            ogb_source(empty)
        (empty / "raw" / f"{name}.csv.gz").write_bytes(sound)
    for edges, message in (
        (np.array([[0.7, 1.9]]), "expected whole numbers"),
        (np.array([[0], [1]]), "expected two columns"),
        (np.array([[0, 1]]), "expected 200 edges, as in num-edge-list"),
    ):
        _csv(empty / "raw" / "edge.csv.gz", edges)
        with pytest.raises(InputError, match=message):
            build_store(ogb_source(empty), tmp_path / "g.gsplit")
    (empty / "raw" / "edge.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match="expected a readable table"):
        build_store(ogb_source(empty), tmp_path / "g.gsplit")


def test_splits_of_links_are_refused_because_they_are_pickles(tmp_path: Path) -> None:
    folder = _csv_layout(tmp_path / "ogbl_collab")
    for split in ("train", "valid", "test"):
        (folder / "split" / "time" / f"{split}.csv.gz").unlink(missing_ok=True)
        (folder / "split" / "time" / f"{split}.pt").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InputError, match=r"node property prediction .got .*train.pt, a pickle.*pairs=\.\.\."):
        ogb_source(folder)


COUNTS = {"author": 12, "paper": 30, "topic": 4}
RELATIONS = {("author", "writes", "paper"): 40, ("paper", "cites", "paper"): 90, ("paper", "has_topic", "topic"): 20}


def _text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


def _typed_layout(folder: Path) -> dict[tuple[str, str, str], Any]:
    raw = folder / "raw"
    _text(raw / "num-node-dict.csv.gz", ",".join(COUNTS), ",".join(map(str, COUNTS.values())))
    _text(raw / "triplet-type-list.csv.gz", *(",".join(relation) for relation in RELATIONS))
    _csv(raw / "node-feat" / "paper" / "node-feat.csv.gz", X)
    _csv(raw / "node-label" / "paper" / "node-label.csv.gz", Y)
    edges = {}
    for relation, count in RELATIONS.items():
        edges[relation] = RNG.integers(0, (COUNTS[relation[0]], COUNTS[relation[2]]), (count, 2))
        _csv(raw / "relations" / "___".join(relation) / "edge.csv.gz", edges[relation])
        _csv(raw / "relations" / "___".join(relation) / "num-edge-list.csv.gz", [count])
    for split, start in (("train", 0), ("valid", 1), ("test", 2)):
        _csv(folder / "split" / "time" / "paper" / f"{split}.csv.gz", np.arange(start, N, 3))
    return edges


@pytest.mark.parametrize("reverse", [False, True])
def test_a_heterogeneous_set(tmp_path: Path, reverse: bool) -> None:
    edges = _typed_layout(tmp_path / "ogbn_mag")
    store = build_store(ogb_source(tmp_path / "ogbn_mag", reverse=reverse), tmp_path / "g.gsplit")
    data = to_pyg(store)
    assert isinstance(data, HeteroData)
    turned = {(dst, f"rev_{name}", src): pairs[:, ::-1] for (src, name, dst), pairs in edges.items()}
    wanted = {**edges, **turned} if reverse else edges
    assert data.edge_types == list(wanted)
    for relation, pairs in wanted.items():
        assert sorted(data[relation].edge_index.T.tolist()) == sorted(pairs.tolist())
    assert {name: data[name].num_nodes for name in data.node_types} == COUNTS
    assert np.allclose(data["paper"].x, X)
    assert np.array_equal(store.stored_array("y/paper"), np.nan_to_num(Y, nan=-1).astype(np.int64))
    assert store.stored_array("targets/paper/val").tolist() == (np.arange(1, N, 3) + COUNTS["author"]).tolist()


def test_damaged_heterogeneous_sets_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ogbn_mag"
    _typed_layout(folder)
    _csv(folder / "raw" / "relations" / "paper___cites___paper" / "edge.csv.gz", [[0, N]] * 90)
    with pytest.raises(InputError, match=r"ids of paper from 0 to 29 .got 30..30"):
        build_store(ogb_source(folder), tmp_path / "g.gsplit")
    _csv(folder / "raw" / "node-label" / "paper" / "node-label.csv.gz", [1e300] * N)
    with pytest.raises(
        InputError, match=r"node-label.csv.gz: expected labels within the range of float32 .got 1e\+300"
    ):
        ogb_source(folder)
    counts = folder / "raw" / "num-node-dict.csv.gz"
    counts.write_bytes(counts.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"num-node-dict.csv.gz: expected a readable table"):
        ogb_source(folder)
    _text(folder / "raw" / "num-node-dict.csv.gz", "author,paper,../topic", "12,30,4")
    with pytest.raises(InputError, match=r"expected names of folders .got '../topic'"):
        ogb_source(folder)
    _text(folder / "raw" / "num-node-dict.csv.gz", "author,paper,topic", "12,30")
    with pytest.raises(InputError, match=r"a row of vertex types and a row of their counts"):
        ogb_source(folder)
    _text(folder / "raw" / "num-node-dict.csv.gz", "author,paper", "12,30")
    with pytest.raises(InputError, match=r"rows of source type, name, destination type"):
        ogb_source(folder)
    with pytest.raises(InputError, match=r"reverse: expected a heterogeneous OGB set"):
        ogb_source(_csv_layout(tmp_path / "ogbn_test"), reverse=True)
