"""Settings are refused early only where the answer is certain."""

from typing import Any

import pytest

from gsplit import InputError
from gsplit.run import preflight
from gsplit.run.config import TrainSettings


@pytest.mark.parametrize(
    "check, values",
    [
        (preflight.check_precision, {"precision": "tf32"}),
        (preflight.check_threads, {"sampling_threads": 2}),
    ],
)
def test_without_a_device_only_a_torch_for_cpus_is_refused(
    check: Any, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(**values)
    check(settings, "cuda")
    monkeypatch.setattr(preflight, "_torch_for_cpus", lambda: None)  # the run is on GPUs if there are some
    check(settings, None)
    with pytest.raises(InputError):
        check(settings, "cpu")
    monkeypatch.setattr(preflight, "_torch_for_cpus", lambda: "2.13.0+cpu")
    with pytest.raises(InputError):
        check(settings, None)


def test_given_prefetch_is_compared_on_any_device() -> None:
    with pytest.raises(InputError, match="4 threads, --prefetch 3"):
        preflight.check_threads(TrainSettings(sampling_threads=4, prefetch=3), "cuda")
