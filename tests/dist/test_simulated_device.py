"""Real gloo ranks on simulated devices: what a GPU would compute is what the host computes, bit for bit.

The difference is 0.0: kernels of the simulated device are the host's, so any difference is one of the code around them.
Attention is computed by numba kernels on the host and by PyG's layers on the device, which sum in another order.
"""

import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from compiled_ranks import run_compiled_ranks
from simulated_programs import (
    callback_fails,
    checked_training,
    count_steps,
    edges_held,
    mixed_kinds,
    share_a_device,
    simulated_cases,
    small_steps,
    use_everything,
    violate_late,
)
from small_graph import OTHER_STRATEGIES, Case, TrainedCase, compare, train_cases
from trainer_programs import device_fails

from gsplit.run.models import MODELS
from gsplit_bench.ranks import RankFailedError, run_ranks
from gsplit_bench.simulated import why_not_supported

pytestmark = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
STEPS = 2  # the second from weights that the first has changed
OWN_ORDER = 1e-9  # float64; outputs and gradients are within 1e-14, Adam divides by their roots
SUMS_OF_ITS_OWN = (
    "gat",
    "gatv2",
    "transformer",
    "sage",
    "sage_max",
    "graphconv",
    "gin",
    "gcn",
)  # not in the host's order
KERNELS = ("count", "draw", "meet", "flag", "place", "gather", "spread", "merge", "dropout")
KERNELS_OF_MODELS = {
    "sage": ("sum",),
    "gat": ("attention_forward", "attention_backward_dst", "attention_backward_src"),
}


@pytest.mark.parametrize(
    "replicas, splits, strategy, sample_device, part",
    [
        (1, 2, "split", None, slice(0, None, 2)),
        (1, 2, "split", "sim:0", slice(1, None, 4)),
        (1, 2, "data", None, slice(1, None, 5)),
        (2, 2, "split", None, slice(5, None, 8)),
    ],
)
def test_ranks_on_devices_equal_ranks_on_the_host(
    replicas: int, splits: int, strategy: str, sample_device: str | None, part: slice
) -> None:
    """Half of the models on two ranks, a part of them elsewhere, for two steps.

    All, and five steps: ``python -m gsplit_bench exactness --device sim``.
    """
    cases = simulated_cases(replicas, (strategy,))
    assert {case.model for case in cases} == set(MODELS)
    cases = cases[part]
    size = replicas * splits
    host = run_ranks(train_cases, size, cases, splits, STEPS, replicas=replicas)
    there: list[list[TrainedCase]] = run_ranks(
        train_cases,
        size,
        cases,
        splits,
        STEPS,
        replicas=replicas,
        device="sim:0",
        sample_device=sample_device,
    )
    for place, case in enumerate(cases):
        for rank in range(size):
            worst = compare(host[rank][place], [there[rank][place]])
            assert worst.largest <= (OWN_ORDER if case.model in SUMS_OF_ITS_OWN else 0.0), (case, rank, worst)


def test_every_other_strategy_on_devices_equals_itself_on_the_host() -> None:
    cases = [Case("sage", strategy, "no targets on rank 1", 0.5, None, None) for strategy in OTHER_STRATEGIES]
    host = run_ranks(train_cases, 2, cases, 2, STEPS)
    there: list[list[TrainedCase]] = run_ranks(train_cases, 2, cases, 2, STEPS, device="sim:0")
    for place, case in enumerate(cases):
        for rank in range(2):
            assert compare(host[rank][place], [there[rank][place]]).largest <= OWN_ORDER, (case, rank)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.weekly), 2])
def test_trainer_infer_evaluate_and_verify_equal_those_of_the_host(num_ranks: int, tmp_path: Path) -> None:
    host = run_ranks(use_everything, num_ranks, str(tmp_path))[0]
    there = run_ranks(use_everything, num_ranks, str(tmp_path), device="sim:0")[0]
    assert there["losses"] == host["losses"] and there["scores"] == host["scores"]
    np.testing.assert_array_equal(there["rows"], host["rows"])
    assert max(there["verified"]) < 1e-9


def test_a_sampler_on_a_device_holds_its_own_edges_only() -> None:
    counts = run_ranks(edges_held, 2, device="sim:0", sample_device="sim:0")
    assert all(held == own for own, held in counts) and counts[0] != counts[1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_compiled_kernels_compute_the_same_step() -> None:
    """Sampling, shuffles, dropout and attention by Triton kernels, on two ranks; sums run in another order."""
    cases = [Case(model, "split", "random", 0.5, None, None) for model in KERNELS_OF_MODELS]
    host = run_ranks(small_steps, 2, cases)
    there = run_compiled_ranks(small_steps, 2, cases, sample_device="sim:0")
    for rank, (place, case) in product(range(2), enumerate(cases)):
        (expected, _, _), (found, waits, kernels) = host[rank][place], there[rank][place]
        assert len(found) == len(expected) > 5
        for here, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, here, rtol=0.0, atol=OWN_ORDER)
        assert kernels == {f"{name}_kernel" for name in (*KERNELS, *KERNELS_OF_MODELS[case.model])}
        assert [line for line in waits if not line.startswith("gsplit/nn/gradients.py")] == []  # flags, the first time


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_step_waits_for_the_device(num_ranks: int) -> None:
    """Making a batch, and all behind it; reading the loss is the training loop's, once per step (see the trainer).

    All models on one rank; on two, attention, and GCN, whose norm needs the degrees of received rows.
    """
    cases = simulated_cases(1, ("split",))
    cases = cases if num_ranks == 1 else [case for case in cases if case.model in ("gat", "gcn")]
    found = run_ranks(count_steps, num_ranks, cases, device="sim:0")[0]
    for case, counts in zip(cases, found, strict=True):
        assert counts["step"].num_waits == 0, (case, counts["step"].waits)
        assert counts["loading"].num_waits == 0, (case, counts["loading"])
        grouped = 8 * 2  # launches for two layers whose edges are grouped by source for backward
        assert 2 <= counts["loading"].launches <= 5 + grouped, (case, counts["loading"])
        assert counts["step"].launches > 100  # it does count


@pytest.mark.parametrize("unused_on, hosts", [(None, (2,)), (1, (2,)), (None, (2, 2))])
def test_collectives_come_in_one_order_on_all_ranks_and_nothing_races(
    unused_on: int | None, hosts: tuple[int, ...]
) -> None:
    (zero, gradients, launches), *rest = run_ranks(
        checked_training, sum(hosts), unused_on, True, device="sim:0", hosts=hosts
    )
    assert sum("average gradients" in entry for entry in zero) == 2  # one bucket per backward
    assert any("shuffles far" in entry for entry in zero) == (len(hosts) > 1)
    for one, others, _ in rest:
        assert zero == one
        assert gradients == others and len(gradients[-1]) > 0
    assert launches > 1000


def test_a_device_that_two_ranks_share_is_refused() -> None:
    with pytest.raises(RankFailedError, match="ranks 0 and 1 both on .*one for all"):
        run_ranks(share_a_device, 2)


def test_ranks_on_different_kinds_of_devices_are_refused() -> None:
    said = run_ranks(mixed_kinds, 2)
    assert all("expected the same kind on every rank (got rank 0: cpu, rank 1: sim)" in text for text in said)


def test_what_a_device_tells_late_is_raised_all_the_same() -> None:
    (said,) = run_ranks(violate_late, 1, device="sim:0")
    assert "batch norm: expected at least 2 rows (got 1 in the whole mini-batch)" in said["batch norm"]
    assert "the loss of epoch 0, step 0: expected a number (got nan)" in said["loss"]


def test_steps_that_are_in_the_weights_are_in_the_history() -> None:
    ((steps, losses),) = run_ranks(callback_fails, 1, device="sim:0")
    assert steps == losses == 3  # the callback of step 1 comes when step 2 has been launched


def test_the_first_error_is_raised_where_no_loss_can_be_read_after_it() -> None:
    ((error, steps),) = run_ranks(device_fails, 1, device="sim:0")
    assert error == "the first error" and steps == 2  # the callback of step 0 comes when step 1 has been launched
