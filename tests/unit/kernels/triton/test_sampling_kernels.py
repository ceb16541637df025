"""The sampler on Triton kernels gives the host's layers index by index, holds its own edges, and refuses what the host
does."""

from typing import Any

import pytest
from triton_process import Run

from gsplit.sampling.draw_options import DrawOptions

CASES = {
    "renumbered range, edge ids": ((120, 900, 2.0), (20, 90), [4, 3, -1], True, True),
    "whole graph": ((60, 900, 1.5), (0, 60), [15, 2], False, False),
    "hubs, fanouts at powers of two": ((50, 1500, 3.0), (10, 31), [1, 33, 8], True, False),
    "more than registers hold": ((40, 2000, 3.0), (0, 30), [300], True, True),
    "no edges": ((30, 0, 1.0), (5, 25), [3, -1], False, True),
    "one vertex": ((30, 300, 1.0), (7, 8), [3, 2], False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_the_hosts(interpreter: Run, case: str) -> None:
    num_edges = interpreter("triton_programs.check_sampling", *CASES[case], 1)
    assert (num_edges == 0) == (case == "no edges")


@pytest.mark.parametrize(
    "options", [{"sampler": "labor"}, {"weight_attr": "w"}, {"sampler": "labor", "weight_attr": "w"}, {"replace": True}]
)
def test_other_draws_are_the_hosts(interpreter: Run, options: dict[str, Any]) -> None:
    case = CASES["renumbered range, edge ids"]
    assert interpreter("triton_programs.check_sampling", *case, 1, DrawOptions(**options)) > 0


def test_an_error_in_the_middle_leaves_nothing_behind(interpreter: Run) -> None:
    interpreter("triton_programs.fail_and_go_on", "place_kernel")


@pytest.mark.parametrize(
    "what, message",
    [
        ("damaged offsets", "got offsets 0..5 at vertex 1, of 1 edges"),
        ("damaged ids", "got ids 4..4, of 4 vertices"),
        ("foreign ids", "expected vertices of this rank, 1..2 (got 2..3)"),
        ("no room", "sample_device: expected 8 bytes of meta for edges, or a driver that lets it read host memory"),
    ],
)
def test_what_cannot_be_sampled_is_refused(interpreter: Run, what: str, message: str) -> None:
    refused = interpreter("triton_programs.refuse_sampling", what)
    assert message in str(refused)
