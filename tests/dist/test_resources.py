"""What loaders, trainers, evaluations and inferences take, they return: the twentieth needs no more than the first."""

from pathlib import Path

import pytest
from resource_programs import (
    borrow_after_a_failure,
    count_resources,
    drop_at_different_times,
    exchange_with_a_long_purpose,
)

from gsplit_bench.ranks import run_ranks


@pytest.mark.parametrize("shared_memory, num_rounds", [(True, 20), (False, 5)])
def test_twenty_of_everything_leave_as_much_as_one(shared_memory: bool, num_rounds: int, tmp_path: Path) -> None:
    for one, many in run_ranks(count_resources, 2, str(tmp_path), num_rounds, shared_memory=shared_memory):
        assert {name: many[name] for name in many if many[name] > one[name]} == {}, one


def test_ranks_may_drop_loaders_at_different_times() -> None:
    ranks = run_ranks(drop_at_different_times, 2, 9)
    for losses, num_groups in ranks:
        assert all(each == losses[0] for each in losses)
        assert num_groups == ranks[0][1] <= 12  # the world's, the mesh's five, and as many as are held at once


def test_a_group_that_failed_or_is_out_of_step_is_not_reused() -> None:
    for reused in run_ranks(borrow_after_a_failure, 2):
        assert reused == [True, False, False]


def test_a_call_may_have_a_description_of_any_length() -> None:
    assert run_ranks(exchange_with_a_long_purpose, 2) == [[0, 1], [0, 0, 1, 1]]
