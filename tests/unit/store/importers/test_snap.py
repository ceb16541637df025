"""Edge lists of SNAP: the graph in the file, random data that any run repeats, and damaged files refused."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from graphs import stored_edges
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.errors import InputError
from gsplit.store.build import build_store
from gsplit.store.importers.snap import RandomVertices, snap_source
from gsplit.store.importers.vertex_ids import collect_ids

COMMENTS = "# Undirected graph: ../../data/output/orkut.txt\n# Nodes: 4 Edges: 4\n# FromNodeId\tToNodeId\n"
LINES = "101\t102\n101\t700\n102\t700\n3\t101\n"
IDS = [3, 101, 102, 700]
EDGES = [(0, 1), (1, 2), (1, 3), (2, 3)]
RANDOM = RandomVertices(num_features=3, num_classes=5, target_share=0.4, seed=7)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: COMMENTS + text,
        lambda text: text,
        lambda text: COMMENTS + text.replace("\t", " "),
        lambda text: (COMMENTS + text).replace("\n", "\r\n"),
        lambda text: COMMENTS + text.rstrip("\n"),
    ],
    ids=["comments", "plain", "spaces", "CRLF", "no last newline"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_store_has_the_edges_of_the_file(tmp_path: Path, change: Callable[[str], str], packed: bool) -> None:
    content = change(LINES).encode()
    path = tmp_path / ("e.txt.gz" if packed else "e.txt")
    path.write_bytes(gzip.compress(content) if packed else content)
    store = build_store(snap_source(path, RANDOM), tmp_path / "g.gsplit")
    assert sorted(zip(*map(np.ndarray.tolist, stored_edges(store)), strict=True)) == EDGES
    assert store.array("vertex_ids").tolist() == IDS


def test_random_data_are_those_of_the_seed_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e.txt"
    path.write_text("".join(f"{v} {(v * 7) % 2000}\n" for v in range(2000)))
    one = build_store(snap_source(path, RANDOM), tmp_path / "one.gsplit")
    other = build_store(snap_source(path, RandomVertices(3, 5, 0.4, seed=8)), tmp_path / "other.gsplit")
    monkeypatch.setattr("gsplit.store.source.CHUNK_BYTES", 5000)
    monkeypatch.setattr("gsplit.store.importers.vertex_ids.BATCH_IDS", 100)
    again = build_store(snap_source(path, RANDOM), tmp_path / "again.gsplit")
    assert one.manifest.arrays == again.manifest.arrays
    x = one.array("features/x")
    assert x.shape == (2000, 3)
    assert abs(float(x.mean())) < 0.05
    assert float(x.std()) == pytest.approx(3**-0.5, abs=0.02)  # of uniform values between -1 and 1
    assert np.bincount(one.array("y")).tolist() == pytest.approx([400] * 5, abs=80)
    sizes = {name: one.array(f"targets/{name}").size for name in ("train", "val", "test")}
    assert sizes == pytest.approx({"train": 640, "val": 80, "test": 80}, abs=60)
    for name in ("features/x", "y", "targets/train"):
        assert one.manifest.arrays[name].sha256 != other.manifest.arrays[name].sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Empty CSV file"),
        (COMMENTS, "no edges"),
        (COMMENTS + "1\t2\t3\n", "Expected 2 columns, got 3"),
        (COMMENTS + "1\t2\n3\n", "Expected 2 columns, got 1"),
        (COMMENTS + "1\t2\n3\tx\n", "CSV conversion error to int64: invalid value 'x'"),
        (COMMENTS + "1\t2\n# late\tcomment\n", "invalid value '# late'"),
        (COMMENTS + "1\t2\n3\t\n", "1 empty among 4"),
        (COMMENTS + "1\t2\n3\t99999999999999999999\n", "invalid value '99999999999999999999'"),
        ("1.5\t2\n", "invalid value '1.5'"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "e.txt"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        snap_source(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "--" not in str(error.value)  # options of gsplit import tables


def test_other_files_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        snap_source(tmp_path / "absent.txt")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress((LINES * 500).encode())[:-20])
    with pytest.raises(InputError, match=r"cut.txt.gz: expected a readable table"):
        snap_source(tmp_path / "cut.txt.gz")
    with pytest.raises(InputError, match=r"target_share: expected 0 to 1 \(got 2\)"):
        RandomVertices(target_share=2)


@pytest.mark.parametrize("apart", [3, 1000])
def test_ids_near_and_far_apart_are_found_and_others_are_not(apart: int) -> None:
    values = np.arange(-4, 50) * apart
    ids = collect_ids("ids", (pa.array(values[start:]) for start in (30, 0, 7)), unique=False)
    assert ids.num_vertices == 54
    asked = pa.array([*values[::-1].tolist(), None, -4 * apart - 1, 49 * apart + 1, 1, 2**63 - 1, -(2**63)])
    assert ids.lookup("ids", asked).tolist() == [*range(53, -1, -1), -1, -1, -1, -1, -1, -1]


def test_the_command_symmetrises(tmp_path: Path) -> None:
    path = tmp_path / "com-test.ungraph.txt"
    path.write_text(COMMENTS + LINES)
    words = ["import", "snap", str(path), str(tmp_path / "g.gsplit"), "--symmetrise", "--json"]
    words += ["--features", "8", "--classes", "2", "--target-share", "1", "--seed", "5"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["num_vertices"], document["num_edges"]) == (4, 8)
    store = gsplit.open(tmp_path / "g.gsplit")
    assert store.array("features/x").shape == (4, 8)
    assert sum(store.array(f"targets/{name}").size for name in ("train", "val", "test")) == 4
    settings = document["provenance"][-1]["settings"]
    assert settings["seed"] == 5
    assert settings["edges"] == path.name
