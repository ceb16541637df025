"""Shared settings: hypothesis profiles, and where the real graphs lie."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gsplit_bench.ranks import IMPORTED_BEFORE

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("dev", max_examples=50, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("ci", max_examples=50, derandomize=True, **_COMMON)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

IMPORTED_BEFORE.append("warm_server")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real graphs; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("GSPLIT_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "cora.npz").is_file():
        pytest.skip(f"no real graphs in {folder}; set GSPLIT_TEST_DATA")
    return folder
