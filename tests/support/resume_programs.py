"""What ranks run in the tests of exact resume: the same training, in pieces, on other ranks and in other ways."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE
from trainer_programs import EachStep

import gsplit
from gsplit.distributed.comm.mesh import Mesh

Array = npt.NDArray[np.float64]

__all__ = ["Piece", "Trained", "save_to_full_disk", "train_piece", "train_pieces"]


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
