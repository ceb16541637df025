"""Loops around a wrapped model are exact on several ranks, or raise: one table (tests/exactness/loops.py)."""

import pytest
import torch

from gsplit_bench.ranks import run_ranks
from tests.exactness.loops import CASES, Record, run_loops, warned_once

Found = dict[int, list[dict[str, Record | str]]]
_BOUND = 1e-9


@pytest.fixture(scope="module")
def found() -> Found:
    names = {size: list(CASES) for size in (1, 2, 3)}
    names[4] = [name for name in CASES if name.startswith(("beside", "gathered"))]
    return {size: run_ranks(run_loops, size, names[size], timeout_s=500.0) for size in names}


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", CASES)
def test_a_loop_equals_one_process_or_raises_on_every_rank(name: str, found: Found) -> None:
    wanted = found[1][0][name]
    for size in (2, 3, 4):
        for of_rank in found[size]:
            if name not in of_rank:
                continue  # not run on 4 ranks
            got = of_rank[name]
            raises = CASES[name].raises
            if raises is not None:
                assert isinstance(got, str) and raises in got, got if isinstance(got, str) else "no error"
            else:
                assert not isinstance(got, str) and not isinstance(wanted, str), got
                _assert_equal(got, wanted)


def _assert_equal(got: Record, wanted: Record) -> None:
    assert len(got) == len(wanted) > 0
    for (loss, grads), (wanted_loss, wanted_grads) in zip(got, wanted, strict=True):
        assert abs(loss - wanted_loss) <= _BOUND * max(1.0, abs(wanted_loss))
        largest = max((float(grad.abs().max()) for grad in wanted_grads.values()), default=0.0)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted_grads[name], rtol=0.0, atol=_BOUND * max(largest, 1e-6), msg=name)


@pytest.mark.timeout(300)
def test_a_step_that_is_not_compared_is_named_once_by_rank_0() -> None:
    lines = run_ranks(warned_once, 2)
    assert [len(of_case) for of_case in lines[0]] == [1, 1]
    assert lines[1] == [[], []]
