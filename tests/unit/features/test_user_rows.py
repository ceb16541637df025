"""Rows of a source of the program's own: asked by original id, put where they are wanted, under every tier."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from extending_programs import ComputedRows
from torch import Tensor

from gsplit.errors import InputError
from gsplit.features.protocol import RowsRead
from gsplit.features.sources import ConcatRows, UserRows, describe_rows
from gsplit.graph.ownership import original_ids_of

ORIGINAL = np.random.default_rng(0).permutation(40)


def _given(source: ComputedRows) -> UserRows:
    return UserRows(source, lambda ids: original_ids_of(ids, ORIGINAL[10:], 10))


def test_a_source_is_asked_for_original_ids() -> None:
    source, ids, out = ComputedRows(), torch.tensor([30, 12, 12]), torch.empty(3, 6)
    assert _given(source).read(ids, out) == RowsRead(3, 36)
    assert source.asked == ORIGINAL[[30, 12, 12]].tolist()
    assert torch.equal(out, source.rows(torch.from_numpy(ORIGINAL)[ids])) and ids.tolist() == [30, 12, 12]


def test_rows_go_to_places_and_columns_and_nothing_is_asked_for_nothing() -> None:
    source, wide = ComputedRows(), torch.zeros(5, 12)
    rows, ids = _given(source), np.array([20, 39])
    both = ConcatRows([rows, rows])
    both.place(ids, np.array([4, 1]), wide)
    want = source.rows(torch.from_numpy(ORIGINAL[ids])).repeat(1, 2)
    assert torch.equal(wide[[4, 1]], want) and not wide[[0, 2, 3]].any()
    both.place(ids, None, wide[:2])
    assert torch.equal(wide[:2], want)
    asked = len(source.asked)
    assert rows.read(torch.empty(0, dtype=torch.int64), torch.empty(0, 6)) == RowsRead(0, 0)
    assert len(source.asked) == asked


def test_a_source_must_say_what_it_read() -> None:
    class Silent(ComputedRows):
        def read(self, ids: Tensor, out: Tensor) -> RowsRead:
            return None  # type: ignore[return-value]

    with pytest.raises(InputError, match=r"Silent: expected read to return RowsRead\(1, bytes\) .got None"):
        _given(Silent()).place(np.array([11]), None, torch.empty(1, 6))

    class Vague(ComputedRows):
        def read(self, ids: Tensor, out: Tensor) -> RowsRead:
            return RowsRead(ids.numel(), None)  # type: ignore[arg-type]

    with pytest.raises(InputError, match=r"Vague: expected read to return RowsRead\(1, bytes\)"):
        _given(Vague()).place(np.array([11]), None, torch.empty(1, 6))


def test_numbers_of_numpy_become_those_of_telemetry() -> None:
    read = _given(ComputedRows()).place(np.array([11]), None, torch.empty(1, 6))  # which gives NumPy's
    assert json.loads(json.dumps(asdict(read))) == {"rows": 1, "num_bytes": 12, "hits": 0}


def test_rows_of_several_dimensions_are_not_put_side_by_side() -> None:
    flat, cube = ComputedRows(), ComputedRows()
    cube.row_shape = (2, 3)  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"rows of one dimension to concatenate .got rows of \[2, 3\]"):
        ConcatRows([_given(flat), _given(cube)])


def test_what_ranks_compare_of_a_source() -> None:
    assert describe_rows(ComputedRows("v2")) == "ComputedRows [6] float32 v2"
    plain = ComputedRows()
    del plain.fingerprint
    assert describe_rows(plain) == "ComputedRows [6] float32"
