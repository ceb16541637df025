"""Losses, class weights, metrics, accumulation and bf16 on real ranks: what one process computes."""

import functools
from typing import Any

import pytest
import torch
from learning_programs import METRICS, learn_everything, shuffle_bf16

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

DISTANCE_BF16 = 0.02
"""Of the losses of W ranks from those of one process: bfloat16 has 8 bits, and sums run in another order."""


@functools.cache
def _one_process() -> tuple[Any, Any, Any]:
    return learn_everything(solo_mesh())


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.weekly) for n in (3, 4))])
def test_ranks_learn_what_one_process_learns(num_ranks: int) -> None:
    """In one start: processes are what costs."""
    want, want_accumulated, want_bf16 = _one_process()
    for found, accumulated, bf16 in run_ranks(learn_everything, num_ranks):
        for name, (losses, weights, scores) in found.items():
            assert losses == pytest.approx(want[name][0], abs=1e-12), name
            torch.testing.assert_close(weights, want[name][1], rtol=0, atol=1e-9)
            assert scores == pytest.approx(want[name][2], abs=1e-12), name
        for name, (losses, weights) in accumulated.items():
            assert losses == pytest.approx(want_accumulated[name][0], abs=1e-12), name
            torch.testing.assert_close(weights, want_accumulated[name][1], rtol=0, atol=1e-9)
        for name, (losses, plain, types) in bf16.items():
            assert types == want_bf16[name][2], name
            assert losses == pytest.approx(want_bf16[name][0], abs=DISTANCE_BF16), name
            assert plain == pytest.approx(want_bf16[name][1], abs=1e-4), name


def test_one_process_tells_the_cases_apart() -> None:
    """What the ranks are compared with is not the same for all: weights, scores and types do something."""
    found, accumulated, bf16 = _one_process()
    assert found["cross_entropy"][0] != pytest.approx(found["class weights"][0], abs=1e-3)
    assert list(found["bce"][2]) == ["train", *(f"train {name}" for name in METRICS["entries"][1:])]
    for name in ("class weights", "bce"):
        large, small = accumulated[f"{name}, large"], accumulated[f"{name}, small"]
        assert len(large[0]) == 4 and large[0] == pytest.approx(small[0], abs=1e-13)
        torch.testing.assert_close(large[1], small[1], rtol=0, atol=1e-11)
    assert "torch.bfloat16" in bf16["sage"][2]  # hidden rows travel as they are
    for losses, plain, _ in bf16.values():
        assert losses != plain and losses == pytest.approx(plain, abs=DISTANCE_BF16)


@pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
def test_rows_of_bfloat16_are_shuffled_on_the_host_and_on_devices() -> None:
    want = shuffle_bf16(solo_mesh())
    for device in ("cpu", "sim"):
        for losses in run_ranks(shuffle_bf16, 2, device=device):
            assert losses == pytest.approx(want, abs=0.05)
