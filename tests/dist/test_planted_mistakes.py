"""The simulated device finds what a GPU would punish: every planted mistake is named, and nothing that is right."""

import pytest
from planted_mistakes import ALONE, TOGETHER, make_mistakes, make_together

from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

pytestmark = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    found: dict[str, str | None] = run_ranks(make_mistakes, 1, device="sim:0")[0]
    return found


@pytest.mark.parametrize("name", ALONE)
def test_mistakes_on_one_device(name: str, said: dict[str, str | None]) -> None:
    want = ALONE[name][1]
    assert (said[name] is None) if want is None else want in (said[name] or "nothing")


@pytest.mark.parametrize("name", TOGETHER)
def test_mistakes_of_two_ranks(name: str) -> None:
    want, found = TOGETHER[name][1], run_ranks(make_together, 2, name, device="sim:0")[0]
    assert (found is None) if want is None else want in (found or "nothing")
