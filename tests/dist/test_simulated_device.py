"""Real gloo ranks on simulated devices: what a GPU would compute is what the host computes, bit for bit.

The difference is 0.0: kernels of the simulated device are the host's, so any difference is one of the code around them.
Attention is computed by numba kernels on the host and by PyG's layers on the device, which sum in another order.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from triton_process import triton_process

from gsplit.bench.exactness import Case, TrainedCase, compare, train_cases
from gsplit.run.models import MODELS
from gsplit.testing import RankFailedError, run_ranks
from gsplit.testing.simulated import why_not_supported
from simulated_programs import (
    checked_training,
    count_steps,
    edges_held,
    leave_a_collective_alone,
    share_a_device,
    simulated_cases,
    use_everything,
)

pytestmark = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
ATTENTION = 1e-9  # float64; outputs and gradients are within 1e-14, Adam divides by their roots


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "replicas, splits, strategy, sample_device, part",
    [
        (1, 2, "split", None, slice(0, None, 2)),
        (1, 2, "split", "cpu", slice(1, None, 2)),
        (1, 1, "split", None, slice(0, None, 3)),
        (1, 2, "data", None, slice(1, None, 3)),
        (1, 3, "split", None, slice(2, None, 4)),
        (2, 2, "split", None, slice(2, None, 4)),
    ],
)
def test_ranks_on_devices_equal_ranks_on_the_host(
    replicas: int, splits: int, strategy: str, sample_device: str | None, part: slice
) -> None:
    """All models on two ranks, a part of them elsewhere; the whole matrix is ``gsplit bench exactness --device sim``."""
    cases = simulated_cases(replicas, (strategy,))
    assert {case.model for case in cases} == set(MODELS)
    cases = cases[part]
    size = replicas * splits
    host = run_ranks(train_cases, size, cases, splits, replicas=replicas, timeout_s=200)
    there: list[list[TrainedCase]] = run_ranks(
        train_cases,
        size,
        cases,
        splits,
        replicas=replicas,
        timeout_s=250,
        device="sim:0",
        sample_device=sample_device,
    )
    for place, case in enumerate(cases):
        for rank in range(size):
            worst = compare(host[rank][place], [there[rank][place]])
            assert worst.largest <= (ATTENTION if case.model in ("gat", "gatv2") else 0.0), (case, rank, worst)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trainer_infer_evaluate_and_verify_equal_those_of_the_host(num_ranks: int, tmp_path: Path) -> None:
    host = run_ranks(use_everything, num_ranks, str(tmp_path))[0]
    there = run_ranks(use_everything, num_ranks, str(tmp_path), device="sim:0")[0]
    assert there["losses"] == host["losses"] and there["scores"] == host["scores"]
    np.testing.assert_array_equal(there["rows"], host["rows"])
    assert max(there["verified"]) < 1e-9


def test_a_sampler_on_a_device_holds_its_own_edges_only() -> None:
    counts = run_ranks(edges_held, 2, device="sim:0")
    assert all(held == own for own, held in counts) and counts[0] != counts[1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_in_the_interpreter_compute_the_same_step() -> None:
    """Sampling, splitting, shuffles and dropout by Triton kernels, on two ranks: every bit is the host's."""
    case = Case("sage", "split", "random", 0.5, None, None)
    host = run_ranks(train_cases, 2, [case], 2)
    with triton_process({"TRITON_INTERPRET": "1"}) as run:
        there = run("simulated_programs.train_with_triton", case)
    for rank in range(2):
        assert compare(host[rank][0], [there[rank][0]]).largest == 0.0
        assert len(there[rank][1]) >= 8, there[rank][1]  # kernels of all four


def test_no_step_waits_for_the_device() -> None:
    """Everything behind loading; reading the loss is the training loop's, once per step (see the trainer)."""
    cases = simulated_cases(1, ("split",))
    for case, counts in zip(cases, run_ranks(count_steps, 2, cases, device="sim:0", timeout_s=200)[0], strict=True):
        assert counts["step"].num_waits == 0, (case, counts["step"].waits)
        assert counts["step"].launches > 100 and counts["loading"].num_waits > 0  # it does count


@pytest.mark.parametrize("unused_on", [None, 1])
def test_collectives_come_in_one_order_on_all_ranks_and_nothing_races(unused_on: int | None) -> None:
    (zero, gradients, launches), (one, others, _) = run_ranks(checked_training, 2, unused_on, True, device="sim:0")
    assert zero == one and sum("average gradients" in entry for entry in zero) == 2  # one bucket per backward
    assert gradients == others and len(gradients[-1]) > 0
    assert launches > 1000


def test_a_device_that_two_ranks_share_is_refused() -> None:
    with pytest.raises(RankFailedError, match="ranks 0 and 1 both on .*one for all"):
        run_ranks(share_a_device, 2)


def test_a_collective_that_never_ends_is_named() -> None:
    """As on NCCL, where the host does not wait in it."""
    (said,), nothing = run_ranks(leave_a_collective_alone, 2, device="sim:0")
    assert nothing == []
    assert "rank 0: average gradients of step 7: expected all ranks to join" in said
    assert "1 later ones wait behind it" in said and "the last that ended is: sum" in said
