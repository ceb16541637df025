"""Training that is saved and goes on, in other processes, on other ranks, in other ways: the steps are the same."""

import errno
import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from forked_scripts import ForkedProcess, run_forked, start_forked
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE
from trainer_programs import EachStep

import gsplit
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.training.checkpoints.files import read_checkpoint
from gsplit.training.checkpoints.names import latest_file
from gsplit_bench.ranks import run_ranks

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """Steps of a training, from a checkpoint or from the start, to a checkpoint."""

    stop: int
    begin_from: Path | None = None
    save_to: Path | None = None
    save_every: int | None = None
    strategy: str = "split"
    prefetch: int = 0
    norm: str | None = "batch_norm"
    stop_by_rank: int | None = None
    """Instead of by number, after step ``stop`` this rank asks all to stop."""


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    losses: list[float]
    edges: int
    weights: dict[str, Array]
    stopped: bool


def train_piece(mesh: Mesh, piece: Piece) -> Trained:
    """Train one piece; everything is made anew."""
    store, ownership = small_store("random", 2)
    own = ownership if piece.strategy == "split" and mesh.size == 2 else None
    options = {"strategy": piece.strategy, "prefetch": piece.prefetch, "ownership": own}
    loader = gsplit.NeighborLoader(store, [3, 3], "train", batch_size=6, mesh=mesh, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5, norm=piece.norm).double(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    trainer = gsplit.Trainer(
        model,
        optimizer,
        loader,
        lr_scheduler=scheduler,
        max_grad_norm=1.0,
        save_to=piece.save_to,
        save_every=piece.save_every,
        callbacks=[EachStep(lambda report: _stop(trainer, mesh, piece))],
    )
    if piece.begin_from is not None:
        trainer.load(piece.begin_from)
    while trainer.state.num_steps < piece.stop + (piece.stop_by_rank is not None) and not trainer.stopped:
        trainer.train_epoch(piece.stop + 99 * (piece.stop_by_rank is not None) - trainer.state.num_steps)
    if piece.save_to is not None:
        trainer.save()
    weights = {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}
    return Trained(trainer.state.history.losses.tolist(), trainer.state.train_edges, weights, trainer.stopped)


def _stop(trainer: gsplit.Trainer, mesh: Mesh, piece: Piece) -> None:
    if piece.stop_by_rank == mesh.rank and trainer.state.num_steps == piece.stop:
        trainer.request_stop()


def save_to_full_disk(mesh: Mesh, folder: Path) -> str:
    """Train where no checkpoint can be written; returns the error that this rank ended with."""

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsplit.training.checkpoints.files.write_checkpoint", fail)
        try:
            train_piece(mesh, Piece(5, save_to=folder, save_every=1))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def train_pieces(mesh: Mesh, pieces: list[Piece]) -> list[Trained]:
    """Train several pieces, one after the other."""
    return [train_piece(mesh, piece) for piece in pieces]


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
