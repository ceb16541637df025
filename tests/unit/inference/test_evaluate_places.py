"""Targets of a chunk are found by a search in the sorted list, not by sorting the list again for every chunk."""

import time

import numpy as np
import numpy.typing as npt
import pytest

from gsplit.inference.evaluate import _places


@pytest.mark.parametrize("listed", [[], [3], [0, 4, 9], list(range(12))])
@pytest.mark.parametrize("ids", [[], [3, 4], list(range(10)), [11, 12, 13]])
def test_places_are_those_of_the_listed_ids(ids: list[int], listed: list[int]) -> None:
    own = np.array(ids, np.int64)
    wanted = np.array(listed, np.int64)
    assert _places(own, wanted).tolist() == np.flatnonzero(np.isin(own, wanted)).tolist()


def test_a_chunk_does_not_sort_all_targets() -> None:
    rng = np.random.default_rng(0)
    listed: npt.NDArray[np.int64] = np.sort(rng.choice(1 << 40, 1 << 20, replace=False))  # too wide for a lookup table
    chunk = listed[:1000]

    def cpu_s(find: object) -> float:
        assert callable(find)
        begin = time.process_time()
        for _ in range(5):
            find()
        return time.process_time() - begin

    sorting = cpu_s(lambda: np.isin(chunk, listed))
    assert cpu_s(lambda: _places(chunk, listed)) < sorting / 10
