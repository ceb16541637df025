"""What ranks are started with: tuned unless told otherwise, what the user has set, and nothing is left behind."""

import os

import pytest

from gsplit.distributed.launch import ALLOCATOR, _environment_of_ranks


def test_ranks_are_tuned_and_this_process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    before = dict(os.environ)
    with _environment_of_ranks(64, tuned_allocator=True, threads=None):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ["MALLOC_MMAP_MAX_"] == "7"  # the user's
        assert os.environ["MALLOC_TOP_PAD_"] == ALLOCATOR["MALLOC_TOP_PAD_"]
    assert dict(os.environ) == before


def test_a_measurement_says_threads_and_may_leave_the_allocator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with _environment_of_ranks(2, tuned_allocator=False, threads=3):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert not ALLOCATOR.keys() & os.environ.keys()
    assert os.environ["OMP_NUM_THREADS"] == "5"
