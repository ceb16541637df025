"""Shared settings: hypothesis profiles, and where the real graphs lie."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gsplit_bench.ranks import IMPORTED_BEFORE
from gsplit_bench.s3_server import FaultyProxy, s3_environment, start_s3_server

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("dev", max_examples=50, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("ci", max_examples=50, derandomize=True, **_COMMON)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

IMPORTED_BEFORE.append("warm_server")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weekly", action="store_true", help="also run the tests marked weekly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked weekly, with a count in the summary, unless --weekly or their file is asked for."""
    if config.getoption("--weekly"):
        return
    named = {Path(arg.partition("::")[0]).resolve() for arg in config.args}
    weekly = [item for item in items if item.get_closest_marker("weekly") and item.path.resolve() not in named]
    if weekly:
        left_out = set(weekly)
        config.hook.pytest_deselected(items=weekly)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real graphs; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("GSPLIT_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "cora.npz").is_file():
        pytest.skip(f"no real graphs in {folder}; set GSPLIT_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """The port of an S3 server on this host, with an empty bucket."""
    with start_s3_server() as port:
        yield port


@pytest.fixture
def s3_proxy(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, which the environment points to. It has no faults until a test sets them."""
    with FaultyProxy(s3_server).serve() as proxy:
        for name, value in s3_environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy
