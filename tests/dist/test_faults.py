"""A few of the trials of benchmarks/faults.py: real commands, with a fault in one of their ranks."""

from pathlib import Path

import pytest

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.testing.fault_trials import Fault, run_command

MODEL = ["--hidden", "16", "--fanout", "5,5", "--batch-size", "256", "--epochs", "1000"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = PlantedGraph(4000, 60_000, num_features=16)
    return str(build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit").path)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "fault, code, said",
    [
        (Fault("sampling", "exception", call=4), 2, "error: rank 1: ValueError: a fault on purpose ("),
        (Fault("backward", "SIGKILL of the launcher", call=4), -9, ""),
        (Fault("start", "exit 0"), 2, "error: rank 1: expected to work with the others (got exit code 0 before it had joined"),
    ],
    ids=lambda value: f"{value.place}-{value.kind}" if isinstance(value, Fault) else "",
)
def test_a_fault_ends_everything_in_seconds_and_is_named(fault: Fault, code: int, said: str, store: str, tmp_path: Path) -> None:
    more = ["--prefetch", "1", "--out", str(tmp_path / "run"), "--nproc", "2"]
    outcome = run_command(["train", store, *MODEL, *more], fault, tmp_path / "trial", timeout_s=120)
    assert outcome.reached
    assert outcome.exit_codes == [code], outcome
    assert outcome.message.startswith(said)
    assert outcome.seconds is not None and outcome.seconds < 10, outcome
    assert outcome.left == []


def test_without_a_fault_a_command_ends_well(store: str, tmp_path: Path) -> None:
    """And a trial sees that it does: what it would call left is not always there."""
    outcome = run_command(["inspect", store], None, tmp_path / "trial", timeout_s=100)
    assert (outcome.exit_codes, outcome.reached, outcome.message, outcome.left) == ([0], False, "", [])
