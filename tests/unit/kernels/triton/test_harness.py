"""The harness itself: kernels are interpreted, programs run in other orders, and what fails there fails here."""

import pytest
from triton_process import Run


def test_kernels_are_interpreted_and_in_the_other_process_compiled(interpreter: Run, compiler: Run) -> None:
    assert interpreter("triton_programs.interpreted") is True
    assert compiler("triton_programs.interpreted") is False


def test_programs_run_in_the_order_asked_for(interpreter: Run) -> None:
    (usual,) = interpreter("triton_programs.orders_of_programs", 0)
    (shuffled,) = interpreter("triton_programs.orders_of_programs", 1)
    assert usual == list(range(32))
    assert shuffled != usual and sorted(shuffled) == usual


def test_a_kernel_that_depends_on_the_order_is_noticed(interpreter: Run) -> None:
    assert interpreter("triton_programs.last_writer", 0) == 39
    assert interpreter("triton_programs.last_writer", 1) != 39


def test_a_failure_there_is_a_failure_here(interpreter: Run) -> None:
    with pytest.raises(AssertionError):
        interpreter("triton_programs.check_words", [1 << 64])
