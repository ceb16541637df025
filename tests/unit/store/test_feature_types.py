"""Features in smaller types: the nearest values, everything else as it was, and the same graph for everybody."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import sample_store, source_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import gsplit
from gsplit.errors import InputError, StoreError
from gsplit.store import feature_types
from gsplit.store.build import build_store
from gsplit.store.feature_types import FEATURE_TYPES, feature_values, write_with_features
from gsplit.store.reader import Store
from gsplit.store.shard import write_shard
from gsplit.store.source import stream_rows
from gsplit.store.verify import verify_store

FLOATS = st.floats(-1e4, 1e4, width=32)


def _store_of(path: Path, x: np.ndarray, dtype: str = "float32") -> Store:
    ends = np.arange(x.shape[0])
    return build_store(source_of(x.shape[0], ends, ends[::-1].copy(), features={"x": stream_rows(x, dtype)}), path)


@pytest.mark.parametrize("dtype", FEATURE_TYPES)
def test_everything_else_stays(dtype: str, tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    made = write_with_features(store, tmp_path / "c.gsplit", dtype)
    verify_store(made)
    assert made.dtype("features/x") == dtype
    assert set(made.names) - set(store.names) == ({"scales/x"} if dtype == "int8" else set())
    for name in store.names:
        if not name.startswith("features/"):
            assert np.array_equal(made.stored_array(name), store.stored_array(name)), name
    assert (made.fingerprint, made.num_features) == (store.fingerprint, store.num_features)
    assert made.manifest.provenance[-1].settings == {"features": dtype}


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, (7, 5), elements=FLOATS))
def test_values_are_the_nearest(values: np.ndarray) -> None:
    bits = torch.from_numpy(feature_types._rounded("x", values, "bfloat16")).view(torch.bfloat16)
    assert torch.equal(bits, torch.from_numpy(values).bfloat16())
    assert np.array_equal(feature_types._rounded("x", values, "float16"), values.astype(np.float16))
    stored, scales = feature_types._scaled("x", values)
    back = stored.astype(np.float32) * scales[:, None]
    assert (np.abs(back - values) <= scales[:, None] * 0.5001 + 1e-30).all()
    largest = np.abs(values).max(axis=1)
    assert (np.abs(stored).max(axis=1)[largest > 1e-30] == 127).all()


def test_bfloat16_keeps_what_is_not_a_number() -> None:
    values = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    values.view(np.uint32)[0, 0] = 0x7FFFFFFF  # a NaN whose bits would overflow when rounded
    found = torch.from_numpy(feature_types._rounded("x", values, "bfloat16")).view(torch.bfloat16)[0]
    assert found.isnan().tolist() == [True, False, False] and found[1:].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "float32"])
def test_there_and_back(dtype: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    x[3] = 0
    small = write_with_features(_store_of(tmp_path / "g.gsplit", x), tmp_path / "c.gsplit", dtype)
    back = write_with_features(small, tmp_path / "b.gsplit", "float32")
    found = np.array(back.stored_array("features/x"))
    assert np.array_equal(found, feature_values(small, "x", slice(0, 50)))
    assert np.abs(found - x).max() <= {"float32": 0, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}[dtype]
    assert (found[3] == 0).all() and "scales/x" not in back.names
    assert torch.equal(gsplit.to_pyg(small).x.float(), torch.from_numpy(found))
    part = write_shard(small, tmp_path / "s.gsplit", 10, 20)
    assert np.array_equal(feature_values(part, "x", slice(0, 10)), found[10:20])


def test_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    store = _store_of(tmp_path / "g.gsplit", x)
    values, largest = feature_types.feature_values, list[int]()

    def counted(store: Store, name: str, piece: slice) -> np.ndarray:
        largest.append(piece.stop - piece.start)
        return values(store, name, piece)

    monkeypatch.setattr(feature_types, "feature_values", counted)
    monkeypatch.setattr("gsplit.store.source.CHUNK_BYTES", 320)
    made = write_with_features(store, tmp_path / "c.gsplit", "int8")
    assert largest == [10] * 10
    assert made.stored_array("scales/x").shape == (100,)


@pytest.mark.parametrize(
    "dtype, value, message",
    [
        (
            "float16",
            7e4,
            r"features/x: expected values that float16 can hold .got 1 that would become infinite, such as 70000",
        ),
        ("bfloat16", 3.4e38, r"features/x: expected values that bfloat16 can hold"),
        ("int8", np.nan, r"features/x: expected finite values for int8 .got 1 NaN or infinite"),
    ],
)
def test_what_does_not_fit_is_refused(dtype: str, value: float, message: str, tmp_path: Path) -> None:
    x = np.zeros((4, 2), np.float32)
    x[1, 1] = value
    with pytest.raises(InputError, match=message):
        write_with_features(_store_of(tmp_path / "g.gsplit", x), tmp_path / "c.gsplit", dtype)
    assert not (tmp_path / "c.gsplit").exists()


def test_wrong_wishes_are_refused(tmp_path: Path) -> None:
    store = _store_of(tmp_path / "g.gsplit", np.zeros((4, 2), np.float32))
    with pytest.raises(InputError, match="features: expected one of float32, float16, bfloat16, int8 .got 'int4'"):
        write_with_features(store, tmp_path / "c.gsplit", "int4")
    bare = build_store(source_of(2, np.array([0]), np.array([1])), tmp_path / "bare.gsplit")
    with pytest.raises(InputError, match="bare.gsplit: expected features to convert .got the arrays indices, indptr"):
        write_with_features(bare, tmp_path / "c.gsplit", "int8")


def test_int8_without_its_scales_is_refused(tmp_path: Path) -> None:
    store = write_with_features(
        _store_of(tmp_path / "g.gsplit", np.ones((4, 2), np.float32)), tmp_path / "c.gsplit", "int8"
    )
    text = (store.path / "manifest.json").read_text()
    (store.path / "manifest.json").write_text(text.replace('"scales/x"', '"scales/z"'))
    with pytest.raises(StoreError, match="scales/NAME goes with features/NAME of int8, and with no other"):
        gsplit.open(store.path)


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
def test_verify_reads_the_scales(value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store_of(tmp_path / "g.gsplit", np.ones((4, 2), np.float32))
    scaled = feature_types._scaled

    def planted(name: str, values: Any) -> Any:
        stored, scales = scaled(name, values)
        scales[2] = value
        return stored, scales

    monkeypatch.setattr(feature_types, "_scaled", planted)
    made = write_with_features(store, tmp_path / "c.gsplit", "int8")
    with pytest.raises(StoreError, match=r"scales/x.npy: expected finite numbers from 0 .got .* at element 2"):
        verify_store(made)
