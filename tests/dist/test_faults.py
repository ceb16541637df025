"""A few of the trials of python -m gsplit_bench faults: real commands, with a fault in one of their ranks."""

import json
import socket
from importlib import import_module
from pathlib import Path

import pytest
from forked_scripts import run_forked, start_forked
from link_programs import store_with_pairs

from gsplit.run.folder import finished_folder, history_path
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.faults import PLACES, Fault, run_command

MODEL = ["--hidden", "16", "--fanout", "5,5", "--batch-size", "256", "--epochs", "1000"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = PlantedGraph(4000, 60_000, num_features=16)
    return str(build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit").path)


@pytest.mark.parametrize(
    "fault, code, said",
    [
        (Fault("sampling", "exception", call=4), 2, "error: rank 1: ValueError: a fault on purpose ("),
        (Fault("backward", "SIGKILL of the launcher", call=4), -9, ""),
        (
            Fault("start", "exit 0"),
            2,
            "error: rank 1: expected to work with the others (got exit code 0 before it had joined",
        ),
    ],
    ids=lambda value: f"{value.place}-{value.kind}" if isinstance(value, Fault) else "",
)
def test_a_fault_ends_everything_in_seconds_and_is_named(
    fault: Fault, code: int, said: str, store: str, tmp_path: Path
) -> None:
    more = ["--prefetch", "1", "--out", str(tmp_path / "run"), "--nproc", "2"]
    outcome = run_command(["train", store, *MODEL, *more], fault, tmp_path / "trial", timeout_s=500)
    assert outcome.reached
    assert outcome.exit_codes == [code], outcome
    assert outcome.message.startswith(said)
    assert outcome.seconds is not None and outcome.seconds < 100, outcome  # seconds, were the machine not busy
    assert outcome.left == []


def test_without_a_fault_a_command_ends_well(store: str, tmp_path: Path) -> None:
    """And a trial sees that it does: what it would call left is not always there."""
    outcome = run_command(["inspect", store], None, tmp_path / "trial", timeout_s=500)
    assert (outcome.exit_codes, outcome.reached, outcome.message, outcome.left) == ([0], False, "", [])


@pytest.mark.parametrize(
    "changed, said",
    [(["--lr", "0.5"], "command: lr: expected the same on every rank"), (["--seed", "7"], "command: seed: ")],
)
def test_ranks_that_were_given_different_words_say_which(
    changed: list[str], said: str, store: str, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        start_forked(
            ["-m", "gsplit", "train", store, *MODEL, *(changed if rank else [])],
            tmp_path,
            {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            name=f"rank-{rank}",
        )
        for rank in range(2)
    ]
    for rank, done in enumerate([each.wait(300) for each in ranks]):
        assert done.returncode == 2
        assert f"error: rank {rank}: {said}" in done.stderr


def test_a_run_goes_on_after_its_ranks_were_killed_in_the_end_with_fewer(store: str, tmp_path: Path) -> None:
    """Two ranks, killed twice at their 12th mini-batch, then one: the losses are those of one process."""
    steps = ["--hidden", "16", "--fanout", "5,5", "--batch-size", "256", "--steps", "30", "--evaluate-every", "0"]
    words = ["train", store, *steps, "--save-every", "5", "--nproc", "2", "--max-restarts", "1", "--min-ranks", "1"]
    words += ["--verify-every", "0"]  # which would sample, too
    fault = Fault("sampling", "SIGKILL", call=12, repeat=True)
    outcome = run_command([*words, "--out", str(tmp_path / "run")], fault, tmp_path / "trial", timeout_s=500)
    assert outcome.exit_codes == [0], outcome
    first, second = outcome.message.splitlines()
    assert first.startswith("restart 1 of at most 3, 2 rank(s), from ") and "10" in first.rpartition("/")[2], outcome
    assert second.startswith("restart 2 of at most 3, 1 rank(s), from "), outcome
    assert outcome.left == []
    whole = run_forked(["-m", "gsplit", "train", store, *steps, "--json"], tmp_path)
    expected = json.loads(whole.stdout)["losses"]
    found = json.loads(history_path(tmp_path / "run").read_text())["losses"]
    assert len(found) == 30
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_run_of_pairs_whose_rank_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Two ranks, one killed at its 9th mini-batch: started again from step 5, with the weights of a run without it."""
    pairs = str(store_with_pairs(tmp_path / "links.gsplit", num_vertices=1000, num_pairs=600).path)
    model = ["--task", "link", "--hidden", "8", "--embedding", "8", "--fanout", "4,4", "--batch-size", "100"]
    words = ["train", pairs, *model, "--epochs", "2", "--evaluate-every", "1", "--ranked-negatives", "20"]
    words += ["--save-every", "5", "--nproc", "2"]
    fault = Fault("sampling", "SIGKILL", call=9)
    killed = tmp_path / "killed"
    outcome = run_command(
        [*words, "--max-restarts", "1", "--out", str(killed)], fault, tmp_path / "trial", timeout_s=500
    )
    assert outcome.exit_codes == [0], outcome
    assert outcome.message.startswith("restart 1 of at most 1, 2 rank(s), from ") and outcome.left == [], outcome
    whole = tmp_path / "whole"
    done = run_forked(["-m", "gsplit", *words, "--out", str(whole)], tmp_path)
    assert done.returncode == 0, done.stderr
    histories = [json.loads(history_path(run).read_text()) for run in (killed, whole)]
    assert len(histories[1]["losses"]) == 12 and len(histories[1]["evaluations"]) == 2
    assert histories[0]["losses"] == histories[1]["losses"]
    assert histories[0]["evaluations"] == histories[1]["evaluations"]
    weights = [(finished_folder(run) / "weights.safetensors").read_bytes() for run in (killed, whole)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("place", PLACES)
def test_a_place_of_faults_is_a_function(place: str) -> None:
    """A fault at a function that is not there ends the command before it, and proves nothing."""
    module, function = PLACES[place].split(":")
    assert callable(getattr(import_module(module), function))
