"""A cache holds the hottest rows of a rank, knows them by their position alone, and changes nothing."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_sources import DTYPES, as_tensor, stored_array, wanted_rows

from gsplit.errors import InputError
from gsplit.features.cache import CachedRows, HotOrder, expected_hit_rate, hottest_prefixes
from gsplit.features.sources import ConcatRows, MappedRows, ScaledRows, torch_dtype
from gsplit.files.byte_sizes import parse_bytes


@st.composite
def hot_parts(draw: st.DrawFn) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Boundaries of a rank's parts, some empty, and a hotness that falls inside each, with many equals."""
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum))
    first = draw(st.sampled_from([0, 17]))
    parts = [sorted(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), reverse=True) for n in sizes]
    return np.cumsum([first, *sizes]).tolist(), np.array([value for part in parts for value in part], np.int64)


@settings(max_examples=150, deadline=None)
@given(hot_parts(), st.integers(0, 200))
def test_the_hottest_rows_are_taken_as_prefixes(found: tuple[list[int], Any], num_rows: int) -> None:
    boundaries, hotness = found
    taken = hottest_prefixes(hotness, boundaries, num_rows)
    assert sum(taken) == min(num_rows, hotness.size)
    cached = _cached_ids(boundaries, taken) - boundaries[0]
    assert sorted(hotness[cached], reverse=True) == sorted(hotness, reverse=True)[: sum(taken)]
    order = HotOrder(tuple(boundaries), taken)
    rate = hotness[cached].sum() / max(1, hotness.sum())
    assert expected_hit_rate(hotness, order) == pytest.approx(rate)


def _cached_ids(boundaries: Sequence[int], taken: Sequence[int]) -> npt.NDArray[np.int64]:
    starts = (start for start, _ in pairwise(boundaries))
    return np.concatenate([np.arange(start, start + n) for start, n in zip(starts, taken, strict=True)])


def test_among_equals_earlier_parts_come_first() -> None:
    assert hottest_prefixes(np.full(9, 4), [0, 3, 6, 9], 5) == (3, 2, 0)


class _Counted(np.ndarray[Any, Any]):
    """Counts how often elements are looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            _Counted.looks += 1
        return super().__getitem__(index)


def test_choosing_looks_at_few_elements() -> None:
    hotness = np.sort(np.random.default_rng(0).integers(0, 1000, 100_000))[::-1].copy().view(_Counted)
    assert sum(hottest_prefixes(hotness, [0, 100_000], 30_000)) == 30_000
    assert 0 < _Counted.looks < 500


@settings(max_examples=100, deadline=None)
@given(hot_parts(), st.integers(0, 200))
def test_positions_are_an_order_with_the_cached_in_front(found: tuple[list[int], Any], num_rows: int) -> None:
    boundaries, hotness = found
    taken = hottest_prefixes(hotness, boundaries, num_rows)
    order = HotOrder(tuple(boundaries), taken)
    ids = np.arange(boundaries[0], boundaries[-1])
    positions = order.positions(ids)
    assert sorted(positions) == list(range(ids.size))
    assert set(ids[positions < order.num_cached]) == set(_cached_ids(boundaries, taken))
    assert order.ids(0, ids.size).tolist() == ids[np.argsort(positions)].tolist()
    assert (np.diff(positions[positions >= order.num_cached]) > 0).all()  # the rest keeps its order
    with pytest.raises(InputError, match="vertices: expected ids in"):
        order.positions(np.array([boundaries[-1]]))


def test_the_tables_are_of_the_size_of_the_parts() -> None:
    """Law 6: nothing of the number of vertices."""
    order = HotOrder((0, 10**12, 3 * 10**12), (10**11, 5))
    assert order.positions(np.array([10**11 - 1, 10**11, 10**12, 10**12 + 5])).tolist() == [
        10**11 - 1,
        10**11 + 5,
        10**11,
        10**12 + 5,
    ]
    assert sum(table.nbytes for table in order._tables) == 4 * 2 * 8


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cached_rows_are_the_rows(data: st.DataObject) -> None:
    boundaries, hotness = data.draw(hot_parts())
    first, num_rows = boundaries[0], boundaries[-1] - boundaries[0]
    dtype, columns = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([0, 1, 3, 64]))
    array = stored_array(dtype, num_rows, columns)
    taken = hottest_prefixes(hotness, boundaries, data.draw(st.integers(0, num_rows)))
    order = HotOrder(tuple(boundaries), taken)
    rows = CachedRows(MappedRows("x", array, torch_dtype(dtype), first), order)
    ids = data.draw(wanted_rows(num_rows))
    out = torch.zeros(ids.size, columns, dtype=rows.dtype)
    read = rows.read(torch.from_numpy(ids + first), out)
    assert torch.equal(out, as_tensor(array, dtype)[ids])
    assert (read.rows, read.num_bytes) == (ids.size, out.nbytes)
    assert read.hits == np.isin(ids + first, _cached_ids(boundaries, taken)).sum()
    assert rows.num_bytes == order.num_cached * columns * out.element_size()


@settings(max_examples=40, deadline=None)
@given(ids=wanted_rows(50), columns=st.integers(0, 70))
def test_int8_rows_are_scaled(ids: npt.NDArray[np.int64], columns: int) -> None:
    array, scales = stored_array("int8", 50, columns), np.random.default_rng(1).random(50, np.float32)
    rows = ScaledRows("x", CachedRows(MappedRows("x", array, torch.int8, 7), HotOrder((7, 57), (20,))), scales, 7)
    out = torch.zeros(ids.size, columns)
    read = rows.read(torch.from_numpy(ids + 7), out)
    assert torch.equal(out, torch.from_numpy(array[ids].astype(np.float32) * scales[ids, None]))
    assert (read.num_bytes, read.hits) == (ids.size * columns, (ids < 20).sum())
    with pytest.raises(InputError, match=r"x: expected ids in 7..56, which are held here .got 57..57"):
        rows.read(torch.tensor([57]), out[:1])


@pytest.mark.parametrize("dtypes", [["float32", "float32"], ["float16", "bfloat16"], ["float16", "float64", "float32"]])
@settings(max_examples=20, deadline=None)
@given(ids=wanted_rows(30))
def test_arrays_side_by_side_are_those_of_cat(dtypes: list[str], ids: npt.NDArray[np.int64]) -> None:
    arrays = [stored_array(dtype, 30, 3 + k, seed=k) for k, dtype in enumerate(dtypes)]
    rows = ConcatRows(
        [MappedRows("x", array, torch_dtype(dtype), 0) for array, dtype in zip(arrays, dtypes, strict=True)]
    )
    want = torch.cat([as_tensor(array, dtype)[ids] for array, dtype in zip(arrays, dtypes, strict=True)], 1)
    out = torch.zeros(want.shape, dtype=rows.dtype)
    assert rows.dtype == want.dtype
    assert rows.read(torch.from_numpy(ids), out).num_bytes == sum(array[ids].nbytes for array in arrays)
    assert torch.equal(out, want)
    places = np.random.default_rng(0).permutation(ids.size)
    rows.place(ids, places, out)
    assert torch.equal(out[torch.from_numpy(places)], want)


@pytest.mark.parametrize("text", ["", "GB", "2XB", "-1", "nan", "inf", "2 G B", True, "1e400"])
def test_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"cache: expected a size in bytes .got .*write it as 500MB"):
        parse_bytes(text)
