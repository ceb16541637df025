"""What ranks run for the checks that train: functions of a mesh and of JSON, whose result is JSON.

Where results are compared, the model is in float64 and the other side is one process on the host.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.array_types import Array
from gsplit.distributed.comm.mesh import Mesh, init, solo_mesh
from gsplit.doctor.finding import largest
from gsplit.inference.evaluate import evaluate
from gsplit.inference.infer import infer
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.run.models import make_model
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import open_store
from gsplit.training.trainer import Trainer
from gsplit.training.verification import verify

__all__ = [
    "FANOUTS",
    "STEP_MODELS",
    "TYPICAL_FANOUTS",
    "compare_bf16",
    "compare_inference",
    "compare_models",
    "compare_options",
    "compare_sizes",
    "die",
    "find_waits",
    "time_stages",
    "train_models",
]

STEP_MODELS = ["sage", "gat", "gcn"]
FANOUTS = [4, 3, -1]
TYPICAL_FANOUTS = [15, 10, 5]

_WAIT = "called a synchronizing CUDA operation"  # of torch; switching the mode on gives another warning
_NUM_STEPS = 3
_BATCH_SIZES = (1, 20, 7, 40)
_NUM_VERTICES = 90
_NUM_FEATURES = 6
_NUM_CLASSES = 5
_BATCH_SIZE = 12


def compare_models(mesh: Mesh, models: list[str]) -> dict[str, float]:
    """The largest error of a few steps on this mesh, by model."""
    found = {}
    for name in models:
        compared = verify(
            _model(name),
            _small_store(mesh.size),
            FANOUTS,
            "train",
            batch_size=_BATCH_SIZE,
            mesh=mesh,
            seed=3,
            reference_device="cpu",
        )
        gradient = compared.max_grad_error / (compared.largest_gradient or 1.0)
        found[name] = largest((compared.max_loss_error, compared.max_buffer_error, gradient))
    return found


def compare_options(mesh: Mesh, path: str, ways: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The largest error of losses and weights, by name of the options: of ``NeighborLoader`` and ``gsplit.init``."""
    store = open_store(path)
    wanted = _train(solo_mesh(), store, {})
    found = {}
    for name, options in ways.items():
        loading = dict(options)
        joining = {key: loading.pop(key) for key in ("sample_device", "replicas") if key in loading}
        ranks = init(mesh.device, **joining) if joining else mesh
        found[name] = float((_train(ranks, store, loading) - wanted).abs().max())
        if joining:
            ranks.close()
    return found


def _train(mesh: Mesh, store: GraphStore, options: dict[str, Any]) -> Tensor:
    """The losses of some steps of gradient descent, and the weights after them."""
    model = parallelize(_model("sage", store).double(), mesh)
    loader = NeighborLoader(store, FANOUTS, "train", batch_size=40, mesh=mesh, seed=3, **options)
    losses = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader).train_epoch(_NUM_STEPS)
    weights = [parameter.detach().cpu().reshape(-1) for parameter in model.parameters()]
    return torch.cat([torch.tensor(losses, dtype=torch.float64), *weights])


def compare_bf16(mesh: Mesh, path: str, models: list[str]) -> dict[str, float]:
    """How far losses of bf16 are from those of float32 on the same mesh, by model."""
    store = open_store(path)
    found = {}
    for name in models:
        losses = []
        for precision in ("float32", "bf16"):
            model = parallelize(_model(name, store), mesh)
            loader = NeighborLoader(store, FANOUTS, "train", batch_size=40, mesh=mesh, seed=3)
            trainer = Trainer(model, torch.optim.Adam(model.parameters()), loader, precision=precision)
            losses.append(torch.tensor(trainer.train_epoch(_NUM_STEPS)))
        found[name] = float((losses[0] - losses[1]).abs().max())
    return found


def compare_inference(mesh: Mesh, path: str, out: str) -> dict[str, float]:
    """The largest errors of the outputs for all vertices and of exact scores."""
    store = open_store(path)
    alone = parallelize(_model("sage", store).double(), solo_mesh())
    model = parallelize(_model("sage", store).double(), mesh)
    wanted = evaluate(alone, store, ["train"])["train"]
    found = {"scores": abs(evaluate(model, store, ["train"])["train"] - wanted)}
    outputs = infer(model, store, out)  # all ranks: before rank 0 compares
    found["outputs"] = float(np.abs(outputs - infer(alone, store)).max())
    return found


def compare_sizes(mesh: Mesh, path: str, num_steps: int) -> dict[str, float]:
    """The largest error of the losses of steps with mini-batches of changing sizes, and the times of the steps."""
    losses, seconds = _train_sizes(mesh, path, num_steps)
    wanted, _ = _train_sizes(solo_mesh(), path, num_steps)
    figures = {
        "largest_error": float((losses - wanted).abs().max()),
        "median_ms": 1e3 * median(seconds),
        "slowest_ms": 1e3 * max(seconds[num_steps // 2 :]),
    }
    if mesh.device.type == "cuda":
        figures["reserved_bytes"] = float(torch.cuda.memory_reserved(mesh.device))
        figures["peak_bytes"] = float(torch.cuda.max_memory_allocated(mesh.device))
    return figures


def _train_sizes(mesh: Mesh, path: str, num_steps: int) -> tuple[Tensor, list[float]]:
    store = open_store(path)
    model = parallelize(_model("sage", store).double(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    trainers = [
        Trainer(model, optimizer, NeighborLoader(store, FANOUTS, "train", batch_size=size, mesh=mesh, seed=3))
        for size in _BATCH_SIZES
    ]
    losses, seconds = [], []
    for number, trainer in enumerate(islice(cycle(trainers), num_steps)):
        loader = trainer.state.loader
        start = time.perf_counter()
        losses.append(trainer.train_step(loader.make_batch(0, number % len(loader))))
        seconds.append(time.perf_counter() - start)
    return torch.tensor(losses, dtype=torch.float64), seconds


def time_stages(mesh: Mesh, path: str, num_steps: int = 20) -> dict[str, float]:
    """Medians of the stages of a step, in ms, of this rank; "step_ms": from loss to loss."""
    store = open_store(path)
    model = parallelize(_model("sage", store, TYPICAL_FANOUTS, hidden=256), mesh)
    batch_size = min(1024, store.stored_array("targets/train").size)
    loader = NeighborLoader(store, TYPICAL_FANOUTS, "train", batch_size=batch_size, mesh=mesh, seed=3)
    loader.telemetry.times_devices = True
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), loader)
    while trainer.state.num_steps < num_steps:
        trainer.train_epoch(num_steps - trainer.state.num_steps)
    seconds = trainer.state.history.step_seconds
    half = num_steps // 2
    records = list(loader.telemetry.records)[-half:]
    names = dict.fromkeys(name for record in records for name in record.seconds)
    stages = {f"{name}_ms": 1e3 * median(record.seconds.get(name, 0.0) for record in records) for name in names}
    return {"step_ms": 1e3 * median(seconds[-half:])} | stages


def find_waits(mesh: Mesh, models: list[str]) -> dict[str, list[str]]:
    """Where the host waits for the GPU in a step, after loading, by model."""
    found = {}
    for name in models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _train_by_hand(mesh, name, lambda: torch.cuda.set_sync_debug_mode("warn"))
            torch.cuda.set_sync_debug_mode("default")
        found[name] = [f"{each.filename}:{each.lineno}" for each in caught if _WAIT in str(each.message)]
    return found


def train_models(mesh: Mesh, models: list[str]) -> None:
    """Train each model for an epoch of a few steps, on batches that are prefetched."""
    for name in models:
        model = parallelize(_model(name), mesh)
        loader = _small_loader(mesh, prefetch=2)
        Trainer(model, torch.optim.Adam(model.parameters()), loader).train_epoch()


def die(mesh: Mesh) -> None:
    """Kill rank 1 in a step, while the others wait for it."""

    def kill() -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _train_by_hand(mesh, "sage", kill)


def _train_by_hand(mesh: Mesh, name: str, before: Callable[[], Any]) -> None:
    """Train a little; ``before`` is called in the last step, after loading."""
    model = parallelize(_model(name), mesh)
    optimizer = torch.optim.Adam(model.parameters())
    loader = _small_loader(mesh, prefetch=0)
    for step in range(_NUM_STEPS):
        batch = loader.make_batch(0, step)
        if step == _NUM_STEPS - 1:
            before()
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _model(name: str, store: GraphStore | None = None, fanouts: list[int] = FANOUTS, hidden: int = 8) -> Module:
    torch.manual_seed(0)
    return make_model(
        name,
        in_channels=_NUM_FEATURES if store is None else store.num_features,
        hidden_channels=hidden,
        num_layers=len(fanouts),
        out_channels=_NUM_CLASSES if store is None else store.num_classes,
        dropout=0.5,
        heads=2,
        degrees=torch.arange(1, 6),
    )


def _small_loader(mesh: Mesh, prefetch: int) -> NeighborLoader:
    store = _small_store(mesh.size)
    return NeighborLoader(store, FANOUTS, "train", batch_size=_BATCH_SIZE, mesh=mesh, seed=3, prefetch=prefetch)


def _small_store(num_parts: int) -> MemoryStore:
    """A random graph with hubs, self-loops and duplicate edges, in parts of random size."""
    rng = np.random.default_rng(7)
    num_edges = 6 * _NUM_VERTICES
    src = (_NUM_VERTICES * rng.random(num_edges) ** 2).astype(np.int64)
    dst = (_NUM_VERTICES * rng.random(num_edges) ** 1.5).astype(np.int64)
    src[:10] = dst[:10]
    features = rng.normal(size=(_NUM_VERTICES, _NUM_FEATURES)).astype(np.float32)
    arrays: dict[str, tuple[Array, str]] = {
        "features/x": (features, "float32"),
        "y": (rng.integers(0, _NUM_CLASSES, _NUM_VERTICES), "int64"),
    }
    targets = rng.permutation(_NUM_VERTICES)[: 5 * _BATCH_SIZE]
    parts = rng.integers(0, num_parts, _NUM_VERTICES)
    parts[:num_parts] = np.arange(num_parts)
    return renumbered_store(src, dst, parts, arrays, {"train": targets})
