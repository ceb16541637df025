"""Ranks are compared with one process at the first step: what is wrong is named, and what is right is not changed."""

import re
from pathlib import Path

import pytest
import torch

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks
from tests.dist.first_step_models import (
    CASES,
    RIGHT,
    between_evaluations,
    encoders,
    is_forgotten,
    losses_of_a_trainer,
    not_compared,
    run_cases,
    states,
    train,
    when,
)

Said = tuple[dict[str, str | None], dict[str, list[float]]]
"""Of ``run_cases``."""


@pytest.fixture(scope="module")
def said() -> dict[int, list[Said]]:
    return {size: run_ranks(run_cases, size, timeout_s=300.0) for size in (2, 3)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_what_is_silently_wrong_is_named_on_every_rank(name: str, said: dict[int, list[Said]]) -> None:
    wanted = CASES[name].message
    for of_ranks in said.values():
        for found, _ in of_ranks:
            if wanted is None:
                assert found[name] is None
            else:
                assert re.search(wanted, found[name] or "nothing", re.DOTALL), found[name]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_compared_and_not_refused(name: str, said: dict[int, list[Said]]) -> None:
    of_one = train(solo_mesh(), RIGHT[name])
    for found, losses in (of_rank for of_ranks in said.values() for of_rank in of_ranks):
        assert found[name] is None
        torch.testing.assert_close(losses[name], of_one, rtol=1e-3, atol=0.0)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_is_changed_by_the_comparison(size: int) -> None:
    without, never = run_ranks(states, size, 0)[0]
    compared, comparisons = run_ranks(states, size, None)[0]
    assert never == []
    assert len(comparisons) == (0 if size == 1 else 6)  # one process compares nothing
    torch.testing.assert_close(compared, without, rtol=0.0, atol=0.0)


@pytest.mark.timeout(200)
def test_when_steps_are_compared() -> None:
    frozen, whole = "3 trained", "6 trained"
    for found in run_ranks(when, 2):
        assert found == [
            f"first: {frozen}",
            "again: none",
            f"evaluated: {frozen}",
            "evaluated: none",
            f"unfrozen: {whole}",
            f"another loss: {whole}",
            f"every 4: {whole}",
            f"evaluating: {whole}, {whole}",  # one of every 4 steps, and one step after the mode has changed
        ]


@pytest.mark.timeout(200)
def test_what_a_loop_has_not_compared_is_told_once_with_the_call_that_compares_it() -> None:
    first, second = run_ranks(not_compared, 2)
    reasons = {
        "tensor": "tensors that are not the mini-batch's",
        "loader": "does not exist",
        "memory": "at most .* bytes",
    }
    assert first.keys() == reasons.keys()
    for kind, lines in first.items():
        (line,) = lines
        assert re.search(rf"not compared with one process: .*{reasons[kind]}", line), line
        assert line.endswith("gsplit.verify_step(model, loss_of, batch)")
        assert "\n" not in line
        assert second[kind] == []


@pytest.mark.timeout(200)
def test_evaluated_mini_batches_leave_no_comparison_out() -> None:
    assert run_ranks(between_evaluations, 2) == [[0, 2, 4]] * 2


@pytest.mark.timeout(200)
def test_a_compared_loop_leaves_no_parameters_behind() -> None:
    assert run_ranks(is_forgotten, 2) == [[True, True]] * 2


@pytest.mark.timeout(200)
def test_the_loss_of_a_trainer_and_that_of_verify_step_are_compared() -> None:
    for penalty, of_outputs, right in run_ranks(losses_of_a_trainer, 2):
        assert "expected the same numbers in the loss on every rank" in penalty
        assert "expected a loss whose terms are from batch.mean, batch.sum or batch.gather" in of_outputs
        assert right is None


@pytest.mark.timeout(200)
def test_encoders_of_types_and_of_pairs_are_compared_in_loops() -> None:
    for found in run_ranks(encoders, 3):
        assert len(found) == 5
        for kind, right, wrong in found:
            assert right is None, (kind, right)
            assert "expected the loss and the gradients of one process" in (wrong or "nothing"), kind


def test_the_table_of_the_documentation_has_every_case() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    head = "| mistake that gives wrong results on several ranks without an error | found by |\n|---|---|\n"
    table = page.split(head)[1].split("\n\n")[0]
    rows = dict(line.strip("| ").split(" | ") for line in table.splitlines())
    assert list(rows) == list(CASES)
    for name, found_by in rows.items():
        is_found = not found_by.startswith("nothing") and not found_by.partition(":")[0].endswith(" only")
        assert is_found == (CASES[name].message is not None), name
