"""numpy files: every layout of the same graph gives the same store; pickles and damage are refused."""

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import expected_edges, stored_edges

from gsplit.errors import InputError
from gsplit.store.build import build_store
from gsplit.store.importers import npz, npz_file
from gsplit.store.importers.npz import npz_source
from gsplit.store.source import EdgeRules

RNG = np.random.default_rng(0)
N, E = 50, 400
EDGES = RNG.integers(0, N, (2, E)).astype(np.int32)
X = RNG.random((N, 6)).astype(np.float32)
Y = RNG.integers(-1, 4, N).astype(np.int16)


def _ends() -> tuple[Any, Any]:
    return EDGES[0].astype(np.int64), EDGES[1].astype(np.int64)


def _save(path: Path, compressed: bool = True, **arrays: Any) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_everything_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool, order: Any, chunk: int
) -> None:
    monkeypatch.setattr(npz, "CHUNK_EDGES", chunk)
    weight, attr = RNG.random(E), RNG.random((E, 3)).astype(np.float16)
    file = _save(
        tmp_path / "g.npz",
        compressed,
        edge_index=np.asarray(EDGES, order=order),
        x=X,
        y=Y,
        train_idx=np.array([5, 3], np.int32),
        edge_weight=weight,
        edge_attr=attr,
        class_names=np.array(["a", "b"]),
    )
    source = npz_source(file)
    assert source.notes == ("not imported: class_names",)
    store = build_store(source, tmp_path / "g.gsplit")
    src, dst, (want_weight, want_attr) = expected_edges(*_ends(), [weight, attr], EdgeRules())
    assert np.array_equal(stored_edges(store), [src, dst])
    assert np.array_equal(store.stored_array("edges/edge_weight"), want_weight)
    assert np.array_equal(store.stored_array("edges/edge_attr"), want_attr)
    assert np.array_equal(store.stored_array("features/x"), X)
    assert np.array_equal(store.stored_array("y"), Y)
    assert store.stored_array("targets/train").tolist() == [3, 5]
    assert (store.num_classes, store.num_features, store.num_vertices) == (4, 6, N)


def test_rows_stream_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsplit.store.source.CHUNK_BYTES", 60)
    file = _save(tmp_path / "g.npz", edge_index=EDGES, x=X.astype(np.int16), y=Y)
    source = npz_source(file)
    assert [c.rows.shape[0] for c in source.features["x"].chunks()] == [5] * 10
    store = build_store(source, tmp_path / "g.gsplit")
    assert store.stored_array("features/x").dtype == np.float32  # whole numbers as features become float32
    assert np.array_equal(store.stored_array("features/x"), X.astype(np.int16))


def test_sparse_features_are_made_dense(tmp_path: Path) -> None:
    dense = np.where(RNG.random((N, 9)) < 0.3, RNG.integers(1, 9, (N, 9)), 0)
    indptr = np.concatenate([[0], np.cumsum((dense > 0).sum(1))])
    rows, columns = np.nonzero(dense)
    sparse: dict[str, Any] = {
        "x_indptr": indptr,
        "x_indices": columns,
        "x_data": dense[rows, columns],
        "x_shape": np.array([N, 9]),
    }
    store = build_store(npz_source(_save(tmp_path / "g.npz", edge_index=EDGES, y=Y, **sparse)), tmp_path / "g.gsplit")
    assert np.array_equal(store.stored_array("features/x"), dense)
    sparse["x_indices"] = columns + 5
    with pytest.raises(
        InputError, match=r"x_indptr: expected a CSR matrix of 50 x 9 .got \d+ offsets, \d+ columns up to \d+"
    ):
        build_store(npz_source(_save(tmp_path / "b.npz", edge_index=EDGES, y=Y, **sparse)), tmp_path / "b.gsplit")


@pytest.mark.parametrize("more, n", [({}, 50), ({"num_nodes": np.int64(77)}, 77), ({"y": np.zeros(60)}, 60)])
def test_number_of_vertices(tmp_path: Path, more: dict[str, Any], n: int) -> None:
    edges = np.array([[0, 49], [3, 2]])
    assert npz_source(_save(tmp_path / "g.npz", edge_index=edges, **more)).num_vertices == n


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"edges": EDGES}, "expected a member edge_index"),
        ({"edge_index": EDGES.T}, r"edge_index: expected integers of shape \[2, E\]"),
        ({"edge_index": EDGES.astype(float)}, r"expected integers of shape \[2, E\]"),
        ({"edge_index": EDGES, "x": np.asfortranarray(X)}, r"x: expected rows one after the other \(C order\)"),
        ({"edge_index": EDGES, "x": X[0]}, r"x: expected numbers of shape \[N, D\]"),
        ({"edge_index": EDGES, "x": X.astype(np.longdouble)}, "x: expected float16, float32 or float64"),
        ({"edge_index": EDGES, "y": np.array(["a"] * N)}, "y: expected numbers"),
        ({"edge_index": EDGES, "edge_weight": np.zeros(3)}, r"edge_weight: expected numbers of shape \[400\]"),
        ({"edge_index": EDGES, "edge_weight": np.zeros(E, complex)}, "edge_weight: expected numbers"),
        ({"edge_index": EDGES, "edge_attr": np.zeros((2, E)).T}, r"edge_attr: expected rows one after the other"),
        ({"edge_index": EDGES, "train_idx": np.array([0.0, 1.9])}, "train_idx: expected integers in one dimension"),
        ({"edge_index": EDGES, "train_idx": np.ones(N, bool)}, "flatnonzero"),
        ({"edge_index": EDGES, "num_nodes": np.float64(3.7)}, "num_nodes: expected integers"),
        ({"edge_index": EDGES, "num_nodes": np.array([1, 2])}, "num_nodes: expected one number"),
        ({"edge_index": EDGES, "num_nodes": np.int64(N), "x": np.zeros((N + 3, 2))}, "features/x: expected 50 rows"),
        ({"edge_index": EDGES, "y": np.zeros((N, 1, 1))}, "y: expected one or two dimensions"),
        ({"edge_index": EDGES, "y": np.array([None] * N)}, "pickled objects, which are not opened"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    file = _save(tmp_path / "g.npz", **arrays)
    with pytest.raises(InputError, match=message):
        build_store(npz_source(file), tmp_path / "g.gsplit")


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    sound = _save(tmp_path / "g.npz", edge_index=EDGES, x=X).read_bytes()
    file = tmp_path / "bad.npz"
    refused = 0
    for at in range(0, len(sound), 37):
        for bad in (sound[:at], sound[:at] + bytes([sound[at] ^ 0x55]) + sound[at + 1 :]):
            file.write_bytes(bad)
            try:
                build_store(npz_source(file), tmp_path / "g.gsplit", overwrite=True)
            except InputError as error:
                assert "Fix: " in str(error)  # noqa: PT017
                refused += 1
    assert refused > len(sound) // 37
    with pytest.raises(InputError, match=r"expected a .npz file"):
        npz_source(tmp_path / "absent.npz")
    assert npz_file.__all__ == ["NpzMember", "npz_members"]


def test_a_member_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _save(tmp_path / "g.npz", x=np.zeros(1 << 26, np.float32))
    assert file.stat().st_size < 1 << 20
    member = npz_file.npz_members(file)["x"]
    monkeypatch.setattr(npz_file, "free_bytes", lambda: 1 << 20)
    with pytest.raises(InputError, match="at most half of the 1048576 bytes of memory free .got 268435456 bytes"):
        member.read()


def test_an_archive_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "g.npz"
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", stream.getvalue())
    with pytest.raises(InputError, match="a: expected 4398046511232 bytes, .*got 128, packed"):
        npz_file.npz_members(file)
    data = bytearray(file.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)  # the directory says so, too
    file.write_bytes(data)
    with pytest.raises(InputError, match="a: expected"):
        npz_file.npz_members(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", stream.getvalue())
    with pytest.raises(InputError, match="a: expected"):
        npz_file.npz_members(file)


def test_arrays_without_columns(tmp_path: Path) -> None:
    file = _save(tmp_path / "g.npz", edge_index=EDGES, x=np.zeros((N, 0), np.float32), edge_attr=np.zeros((E, 0)))
    store = build_store(npz_source(file), tmp_path / "g.gsplit")
    assert store.stored_array("features/x").shape == (N, 0)
    assert store.stored_array("edges/edge_attr").shape == (E, 0)


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff.npz"))
    np.savez(tmp_path / "g.npz", edge_index=EDGES)
    (tmp_path / "g.npz").rename(file)
    store = build_store(npz_source(file), tmp_path / "g.gsplit")
    assert store.manifest.provenance[0].settings["input"] == "x\ufffd.npz"
