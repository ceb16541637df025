"""Labels as users have them: columns, bools and pandas floats become classes, and every importer says so."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data

import gsplit
from gsplit.store.build import build_store
from gsplit.store.importers.labels import as_labels
from gsplit.store.importers.npz import npz_source
from gsplit.store.importers.pyg import memory_store
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store
from gsplit.store.source import stream_rows

NAN = float("nan")
EDGES = np.array([[0, 1, 2], [1, 2, 3]])
CASES: dict[str, tuple[Any, list[Any], int, int, str]] = {  # given, stored, classes, unlabelled, note
    "column": (np.array([[0], [2], [1], [0]]), [0, 2, 1, 0], 3, 0, "y: int64 of shape [n, 1] imported as one class"),
    "bool": (np.array([True, False, True, True]), [1, 0, 1, 1], 2, 0, "y: bool imported as classes 0 and 1"),
    "bool column": (
        np.array([[True], [False], [1], [0]], bool),
        [1, 0, 1, 0],
        2,
        0,
        "y: bool of shape [n, 1] imported",
    ),
    "gaps": (
        np.array([0.0, NAN, 4.0, NAN]),
        [0, -1, 4, -1],
        5,
        2,
        "y: whole numbers of float64 imported as classes; missing, stored as -1: 2",
    ),
    "gaps, column": (np.array([[1.0], [NAN], [0.0], [1.0]], np.float32), [1, -1, 0, 1], 2, 1, "of shape [n, 1]"),
    "values": (np.array([0.5, NAN, 2.0, 1.0], np.float32), [0.5, NAN, 2.0, 1.0], 0, 1, ""),
    "infinite": (np.array([1.0, NAN, np.inf, 1.0]), [1.0, NAN, np.inf, 1.0], 0, 1, ""),
    "large": (np.array([1.0, NAN, 2.0**40, 1.0]), [1.0, NAN, 2.0**40, 1.0], 0, 1, ""),
    "nothing": (np.array([NAN] * 4), [NAN] * 4, 0, 4, ""),
    "whole": (np.array([0.0, 1.0, 2.0, 1.0]), [0.0, 1.0, 2.0, 1.0], 0, 0, "kept as values to regress on"),
    "plain": (np.array([0, -1, 2, 1]), [0, -1, 2, 1], 3, 1, ""),
    "values, column": (np.array([[0.5], [1.0], [2.0], [1.5]]), [[0.5], [1.0], [2.0], [1.5]], 0, 0, ""),
    "several": (np.array([[0, 1]] * 4), [[0, 1]] * 4, 0, 0, ""),
}


def _check(store: Store, case: str) -> None:
    _, want, classes, unlabelled, note = CASES[case]
    np.testing.assert_array_equal(store.array("y"), np.array(want))
    step = store.manifest.provenance[0]
    assert (store.num_classes, step.counts["unlabelled_vertices"]) == (classes, unlabelled)
    notes = step.settings.get("notes", [])
    assert len(notes) == bool(note)
    assert all(note in line for line in notes)


@pytest.mark.parametrize("case", CASES)
def test_npz(tmp_path: Path, case: str) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES, y=CASES[case][0])
    _check(build_store(npz_source(tmp_path / "g.npz"), tmp_path / "g.gsplit"), case)


@pytest.mark.parametrize("case", CASES)
def test_pyg_on_disk_and_back(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gsplit")
    data = Data(edge_index=torch.from_numpy(EDGES), num_nodes=4, y=torch.from_numpy(CASES[case][0]))
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    _check(store, case)
    assert [record.message for record in caplog.records] == store.manifest.provenance[0].settings.get("notes", [])
    for whole in (store, gsplit.partition(store, tmp_path / "p.gsplit", 2, [2], input_nodes=None, epochs=1)):
        back = gsplit.to_pyg(whole).y
        assert (back.dtype, back.shape) == (data.y.dtype, data.y.shape)
        np.testing.assert_array_equal(back.numpy(), data.y.numpy())


@pytest.mark.parametrize("case", CASES)
def test_pyg_in_memory(case: str) -> None:
    given, want, classes, _, _ = CASES[case]
    store = memory_store(Data(edge_index=torch.from_numpy(EDGES), num_nodes=4, y=torch.from_numpy(given)), None)
    np.testing.assert_array_equal(store.array("y"), np.array(want))
    assert store.num_classes == classes


@pytest.mark.parametrize(
    "y, want, classes, note",
    [
        (pa.array([0, None, 3, 1], pa.uint8()), [0, -1, 3, 1], 4, ""),
        (pa.array([True, None, False, True]), [1, -1, 0, 1], 2, "y: bool imported as classes 0 and 1"),
        (
            pa.array([0.0, None, 3.0, 1.0]),
            [0, -1, 3, 1],
            4,
            "y: whole numbers of float32 imported as classes; missing, stored as -1: 1",
        ),
        (pa.array([0.0, NAN, 3.0, 1.0]), [0, -1, 3, 1], 4, "missing, stored as -1: 1"),
        (pa.array([0.5, None, 3.0, 1.0]), [0.5, NAN, 3.0, 1.0], 0, ""),
    ],
)
def test_tables(tmp_path: Path, y: Any, want: list[float], classes: int, note: str) -> None:
    pq.write_table(pa.table({"src": EDGES[0], "dst": EDGES[1]}), tmp_path / "e.parquet")
    pq.write_table(pa.table({"id": [0, 1, 2, 3], "y": y}), tmp_path / "v.parquet")
    store = build_store(tables_source(tmp_path / "e.parquet", tmp_path / "v.parquet"), tmp_path / "g.gsplit")
    np.testing.assert_array_equal(store.array("y"), np.array(want))
    assert store.num_classes == classes
    assert store.manifest.provenance[0].counts["unlabelled_vertices"] == 1
    notes = store.manifest.provenance[0].settings.get("notes", [])
    assert len(notes) == bool(note) and all(note in line for line in notes)


def test_a_label_too_large_for_a_class_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"src": [0], "dst": [0]}), tmp_path / "e.parquet")
    pq.write_table(pa.table({"id": [0], "y": pa.array([2**63], pa.uint64())}), tmp_path / "v.parquet")
    with pytest.raises(gsplit.InputError, match=r"v.parquet: y: .*Fix: use whole numbers below 2\*\*63"):
        build_store(tables_source(tmp_path / "e.parquet", tmp_path / "v.parquet"), tmp_path / "g.gsplit")


def test_an_odd_note_in_the_manifest_does_no_harm(tmp_path: Path) -> None:
    data = Data(edge_index=torch.from_numpy(EDGES), num_nodes=4, y=torch.tensor([[0], [1], [2], [0]]))
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    file = store.path / "manifest.json"
    document = json.loads(file.read_text())
    for odd in ("int64", {"dtype": "save", "dim": 2}, {"dtype": 3}, None):
        document["provenance"][0]["settings"]["y_given"] = odd
        file.write_text(json.dumps(document))
        assert gsplit.to_pyg(gsplit.open(store.path)).y.tolist() == [0, 1, 2, 0]


def test_labels_in_half_precision_are_classes_too() -> None:
    """Comparing float16 with the most classes there can be overflowed, which is a warning."""
    labels = as_labels(stream_rows(np.array([0, np.nan, 3], np.float16), "float16"))
    assert [int(value) for chunk in labels.rows.chunks() for value in chunk.rows] == [0, -1, 3]
