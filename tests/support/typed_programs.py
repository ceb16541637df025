"""Training on the heterogeneous graph and with the models of ``typed_models``, on any mesh."""

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from trainer_programs import EachStep
from typed_models import BATCH, COUNTS, FANOUTS, RELATIONS, make_data, make_model, make_store, run_model

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.parallelize import parallelize

__all__ = [
    "TypedCase",
    "TypedRun",
    "TypedTraining",
    "infer_all",
    "largest_error",
    "train_all",
    "train_and_save",
    "train_typed",
]


@dataclass(frozen=True)
class TypedCase:
    """One training run."""

    kind: str
    strategy: str
    num_parts: int = 6
    fanouts: Any = None
    prefetch: int = 0
    first_step: int = 0


@dataclass
class TypedRun:
    """Losses and gradients of every step, the number of sampled edges, the local input rows of every type, warnings."""

    losses: list[float]
    gradients: list[np.ndarray[Any, Any]]
    num_edges: int
    counts: list[dict[str, int]]
    warnings: list[str]


def train_typed(mesh: Mesh, model: Module, case: TypedCase, steps: int = 3) -> TypedRun:
    """Gradient descent of some steps."""
    store = make_store(case.num_parts)
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gsplit.loading.batch_loader").addHandler(listener)
    loader = NeighborLoader(
        store,
        case.fanouts or FANOUTS,
        ("paper", "train"),
        batch_size=BATCH,
        strategy=case.strategy,
        mesh=mesh,
        seed=2,
        prefetch=case.prefetch,
        sampling_threads=max(1, case.prefetch),
    )
    logging.getLogger("gsplit.loading.batch_loader").removeHandler(listener)
    loader.load_state_dict({"epoch": 0, "step": case.first_step})
    run = TypedRun([], [], 0, [], warnings)
    for batch in _steps(loader, steps):
        loss = batch.mean(F.cross_entropy(run_model(model, batch), batch.y, reduction="none"))
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.num_edges += sum(block.num_edges for block in batch.blocks)
        run.counts.append({name: batch.part(name).layers[0].num_local for name in COUNTS})
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                run.gradients.append(gradient.to("cpu", copy=True).numpy())
                parameter -= 0.05 * gradient  # type: ignore[misc]
        model.zero_grad()
    return run


def _steps(loader: NeighborLoader, steps: int) -> Iterator[TypedBatch]:
    batches = iter(loader)
    for _ in range(steps):
        batch = next(batches)
        assert isinstance(batch, TypedBatch)
        yield batch


def train_all(mesh: Mesh, cases: list[TypedCase]) -> list[TypedRun]:
    """Every case on one start of ranks. Wrapping takes longer than training, so it is done once per model."""
    models: dict[str, tuple[Module, dict[str, Tensor]]] = {}
    runs = []
    for case in cases:
        if case.kind not in models:
            model = parallelize(make_model(case.kind), mesh, graph=make_store(2))
            models[case.kind] = model, {name: value.clone() for name, value in model.state_dict().items()}
        model, weights = models[case.kind]
        model.load_state_dict(weights)
        runs.append(train_typed(mesh, model, case))
    return runs


@dataclass(frozen=True)
class TypedTraining:
    """Losses and weights of a training, exact scores after it, and how many steps were made before it began."""

    losses: list[float]
    weights: dict[str, np.ndarray[Any, Any]]
    scores: dict[str, float]
    num_before: int


def train_and_save(mesh: Mesh, folder: Path, steps: int, killed_at: int | None = None) -> TypedTraining:
    """Train with dropout and Adam from the newest checkpoint of a folder, if any. Rank 1 may end itself on the way."""
    store = make_store(6)
    model = parallelize(make_model("sage"), mesh, graph=make_store(2))
    loader = NeighborLoader(store, FANOUTS, ("paper", "train"), batch_size=BATCH, mesh=mesh, seed=2, prefetch=1)

    def end_rank() -> None:
        if mesh.rank == 1 and trainer.state.num_steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = gsplit.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        loader,
        save_to=folder,
        save_every=2,
        callbacks=[EachStep(lambda report: end_rank())],
    )
    if folder.is_dir() and any(folder.glob("step-*")):
        trainer.load(folder)
    before = trainer.state.num_steps
    while trainer.state.num_steps < steps:
        trainer.train_epoch(steps - trainer.state.num_steps)
    scores = trainer.evaluate(store, ["paper/train"], keep_best="paper/train")
    weights = {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}
    return TypedTraining(list(trainer.state.history.losses), weights, scores, before)


def infer_all(mesh: Mesh, kinds: tuple[str, ...], folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of models for every paper, and the score of one of them."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for kind in kinds:
        model = parallelize(make_model(kind), mesh, graph=make_store(2))
        found[kind] = np.array(gsplit.infer(model, make_store(6), folder / f"{kind}.npy", vertex_type="paper"))
        score = gsplit.evaluate(model, make_store(6), ["paper/train"])["paper/train"]
        found[f"{kind} score"] = np.array(score)
    return found


def largest_error(one: TypedRun, other: TypedRun) -> float:
    """The largest difference of losses and gradients."""
    errors = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    errors += [float(np.abs(a - b).max()) for a, b in zip(one.gradients, other.gradients, strict=True) if a.size]
    return max(errors)


def stored_in_parts(folder: Path, num_parts: int) -> Path:
    """The graph as a partitioned store on disk, whose fields have no features."""
    data = make_data()
    data["paper"].train_mask = torch.arange(COUNTS["paper"]) % 2 == 0
    data["field"].num_nodes = COUNTS["field"]
    del data["field"].x
    store = gsplit.from_pyg(data, folder / "plain.gsplit")
    options: dict[str, Any] = {"batch_size": BATCH, "solver": "random", "objective": "random", "epochs": 2}
    return gsplit.partition(store, folder / "parted.gsplit", num_parts, [3, 2], "paper/train", **options).path


def count_typed(mesh: Mesh, path: Path, strategies: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """For every strategy, what this rank did in two steps: by layer, by type and by relation, and its telemetry."""
    store = gsplit.open(path)
    found = []
    for strategy in strategies:
        loader = NeighborLoader(
            store, FANOUTS, "paper/train", batch_size=BATCH, mesh=mesh, strategy=strategy, cache=500
        )
        steps = []
        for batch in _steps(loader, 2):
            layers = range(len(batch.blocks))
            steps.append(
                {
                    "edges": [[batch.part(r).blocks[layer].num_edges for r in RELATIONS] for layer in layers],
                    "destinations": [[batch.part(t).blocks[layer].num_dst for t in COUNTS] for layer in layers],
                    "sources": [[batch.part(t).blocks[layer].num_src for t in COUNTS] for layer in layers],
                    **{name: batch.telemetry.counts[name] for name in ("rows_loaded", "bytes_loaded")},
                    "rows_sent": _input_rows_sent(batch),
                }
            )
        found.append(steps)
    return found


def _input_rows_sent(batch: TypedBatch) -> list[int]:
    """The input rows of every type that this rank has sent to other ranks while the batch was made."""
    if batch.requested is None:
        return [0 if route is None else route.num_sent for route in (batch.part(t).layers[0].route for t in COUNTS)]
    ids, exchanged = batch.requested  # data_cached: the loader has exchanged the rows
    assert exchanged is not None
    sent: list[int] = torch.bincount(batch.types.of(ids[exchanged.send_rows]), minlength=len(COUNTS)).tolist()
    return sent
