"""N ranks compute what one process computes, in every combination of two options; what raises, raises as it says.

On every change: a covering array in three starts of ranks. The whole grid is in ``python -m tests.exactness``.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.exactness.case import AXES, Case, refusal
from tests.exactness.cover import covering_cases, missing_pairs, refused_cases
from tests.exactness.graphs import write_stores
from tests.exactness.record import EQUAL, digest, read_record, train_on_mesh
from tests.exactness.training import BOUND, Run, difference

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("exactness")]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exactness")
    write_stores(folder)
    return folder


@cache
def _trained(mesh: str, folder: Path) -> dict[Case, list[Run | str]]:
    return train_on_mesh(mesh, [case for case in (*EQUAL, *refused_cases()) if case.mesh == mesh], folder)


def _runs(case: Case, folder: Path) -> list[Run]:
    runs = []
    for run in _trained(case.mesh, folder)[case]:
        assert not isinstance(run, str), run
        runs.append(run)
    return runs


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_ranks_equal_one_process(case: Case, stores: Path) -> None:
    assert difference(case, _runs(case, stores)) <= BOUND


@pytest.mark.parametrize("case", refused_cases(), ids=str)
def test_what_is_not_built_raises_on_every_rank(case: Case, stores: Path) -> None:
    text = refusal(case)
    assert text is not None
    for error in _trained(case.mesh, stores)[case]:
        assert isinstance(error, str) and text in error, error


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_losses_and_gradients_are_those_of_the_record(case: Case, stores: Path) -> None:
    wanted = read_record()[str(case)]
    for run in _runs(case, stores):
        found = digest(run)
        np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-11, atol=0)
        np.testing.assert_allclose(found["gradients"], wanted["gradients"], rtol=1e-8, atol=1e-11)


def test_all_values_of_every_two_options_meet() -> None:
    assert missing_pairs() == []
    assert {name for case in covering_cases() for name in case.chosen} == set(AXES)
