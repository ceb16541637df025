"""Training that is saved and goes on, in other processes, on other ranks, in other ways: the steps are the same."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from forked_scripts import ForkedProcess, run_forked, start_forked
from resume_programs import Piece, Trained, save_to_full_disk, train_piece, train_pieces

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.training.checkpoints.files import read_checkpoint
from gsplit.training.checkpoints.names import latest_file
from gsplit_bench.ranks import run_ranks

STEPS = 9  # of five in an epoch


def _differ(one: Trained, two: Trained) -> float:
    """The largest difference of a loss or a weight."""
    assert len(one.losses) == len(two.losses) and one.weights.keys() == two.weights.keys()
    losses = [abs(a - b) for a, b in zip(one.losses, two.losses, strict=True)]
    return max(*losses, *(float(np.abs(one.weights[name] - two.weights[name]).max()) for name in one.weights))


def test_ranks_go_on_where_others_stopped(tmp_path: Path) -> None:
    """1 -> 2 -> 1 ranks, split -> data -> split, other prefetching, stops in mid-epoch; dropout, BatchNorm, float64."""
    folders = [tmp_path / name for name in "abcdef"]
    want = train_piece(solo_mesh(), Piece(STEPS))
    plain = train_piece(solo_mesh(), Piece(STEPS, norm=None))
    train_piece(solo_mesh(), Piece(3, save_to=folders[0]))
    train_piece(solo_mesh(), Piece(4, save_to=folders[1], norm=None))
    on_ranks = run_ranks(
        train_pieces,
        2,
        [
            Piece(7, begin_from=folders[0], save_to=folders[2], prefetch=2),
            Piece(STEPS, begin_from=folders[2]),
            Piece(STEPS),  # the same ranks without a stop
            Piece(7, begin_from=folders[1], save_to=folders[3], strategy="data", norm=None, save_every=2),
            Piece(2, save_to=folders[4], stop_by_rank=1, prefetch=1),
            Piece(STEPS, begin_from=folders[4]),
        ],
    )
    for first, second, whole, data, stopped, after in on_ranks:
        assert first.losses == pytest.approx(want.losses[:7], abs=1e-9)
        # ranks add in another order, and Adam divides differences of small gradients by their size
        assert _differ(second, want) < 5e-9 and second.edges == want.edges
        assert data.losses == pytest.approx(plain.losses[:7], abs=1e-9)
        assert stopped.stopped and len(stopped.losses) == 3  # asked after two, on rank 1: all leave after the next
        assert not after.stopped and _differ(after, whole) == 0.0 and after.edges == whole.edges
    assert on_ranks[0][1].losses == on_ranks[1][1].losses
    saved = latest_file(folders[3])
    assert saved is not None and read_checkpoint(saved).manifest.free["ranks"] == "2"
    back = train_piece(solo_mesh(), Piece(STEPS, begin_from=folders[3], norm=None))
    assert _differ(back, plain) < 5e-9
    assert [path.name[5:13] for path in sorted(folders[3].glob("step-*"))] == ["00000006", "00000007"]


def test_one_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    want = train_piece(solo_mesh(), Piece(STEPS))
    begun = None
    for stop in range(1, STEPS + 1):  # a process of its own for every step
        found = train_piece(solo_mesh(), Piece(stop, begin_from=begun, save_to=tmp_path, prefetch=stop % 3))
        begun = tmp_path
    assert _differ(found, want) == 0.0 and found.edges == want.edges


SMALL = ["--hidden", "16", "--fanout", "5,5", "--batch-size", "256", "--evaluate-every", "0", "--json"]


def test_a_failed_save_ends_all_ranks_with_the_same_error(tmp_path: Path) -> None:
    """Not rank 0 alone, with the others waiting for it until the timeout."""
    errors = run_ranks(save_to_full_disk, 2, tmp_path)
    assert errors == ["UnavailableError: [Errno 28] No space left on device"] * 2


def _start_ranks(words: list[str], folder: Path) -> list[ForkedProcess]:
    """Two ranks as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = ({**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01")
    return [start_forked(words, folder, each, name=f"rank-{each['RANK']}") for each in own]


def test_the_command_saves_when_it_is_told_to_stop(tmp_path: Path) -> None:
    graph = PlantedGraph(4000, 60_000, num_features=16)
    store = str(build_store(synthetic_source(graph), tmp_path / "demo.gsplit").path)
    run, train = tmp_path / "run", ["-m", "gsplit", "train", store, *SMALL]
    ranks = _start_ranks([*train, "--epochs", "10000", "--out", str(run), "--save-every", "1000000"], tmp_path)
    steps, deadline = run / "1" / "steps-rank-1.jsonl", time.monotonic() + 300
    while not (steps.exists() and steps.read_text().count("\n") > 3):
        assert time.monotonic() < deadline and all(rank.process.is_alive() for rank in ranks), ranks[0].err.read_text()
        time.sleep(0.05)
    os.kill(ranks[1].pid, signal.SIGTERM)  # one of them is enough
    ended = [rank.wait(300) for rank in ranks]
    assert [rank.returncode for rank in ended] == [75, 75], ended[0].stderr
    stopped = json.loads(ended[0].stdout)
    assert stopped["finished"] is False and stopped["steps"] == len(stopped["losses"]) > 3
    more = [*train[2:4], "--resume", str(run), "--steps", str(stopped["steps"] + 4), "--json"]
    done = run_forked(["-m", "gsplit", *more], tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout)
    assert resumed["finished"] is True and resumed["ranks"] == 1
    assert resumed["losses"][: stopped["steps"]] == stopped["losses"]
    whole = run_forked([*train, "--steps", str(stopped["steps"] + 4)], tmp_path)
    assert json.loads(whole.stdout)["losses"] == pytest.approx(resumed["losses"], abs=1e-4)
    refused = run_forked(["-m", "gsplit", *more, "--batch-size", "128"], tmp_path)
    assert refused.returncode == 2 and "batch_size 128 instead of 256" in json.loads(refused.stdout)["error"]
