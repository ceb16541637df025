"""What ranks run in a selftest."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsplit.bench.exactness import Case, make_model, small_store
from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.kernels.triton.availability import is_available
from gsplit.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize

__all__ = ["count_waits", "die", "measure_links", "measure_zero_copy", "train_checked"]

_REPEATS = 5
_ROW_LENGTH = 128


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _seconds(device: torch.device, act: Callable[[], object]) -> float:
    """The median of a few runs, each to its end on the device."""
    taken = []
    for _ in range(_REPEATS + 1):
        _finish(device)
        start = time.perf_counter()
        act()
        _finish(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def measure_links(mesh: Mesh, sizes_mb: tuple[int, ...]) -> dict[str, float]:
    """GB/s of copies to the device and of exchanges between ranks, by MB; zero-copy on a GPU that runs Triton."""
    found: dict[str, float] = {}
    for size in sizes_mb:
        rows = torch.ones(size << 18, dtype=torch.float32)
        found[f"copy from pageable memory, {size} MB"] = _copy_rate(rows, mesh.device)
        if mesh.device.type != "cpu":
            found[f"copy from pinned memory, {size} MB"] = _copy_rate(rows.pin_memory(), mesh.device)
        if mesh.device.type == "cuda" and is_available(mesh.device):
            found[f"zero-copy gather, {size} MB"] = measure_zero_copy(rows.view(-1, _ROW_LENGTH), mesh.device)
        if mesh.size > 1:
            found[f"all-to-all, {size} MB per rank"] = _exchange_rate(mesh, size)
    return found


def _copy_rate(rows: Tensor, device: torch.device) -> float:
    there = torch.empty(rows.shape, device=device)
    return rows.nbytes / 1e9 / _seconds(device, lambda: there.copy_(rows, non_blocking=True))


def measure_zero_copy(rows: Tensor, device: torch.device) -> float:
    """GB/s of rows that the device reads from pinned memory of the host in a random order, by the gather kernel."""
    from gsplit.kernels.triton.gather import gather_rows

    stored, cached = rows.pin_memory(), torch.empty(0, rows.size(1), device=device)  # every row is on the host
    positions, out = torch.randperm(rows.size(0)).to(device), torch.empty(rows.shape, device=device)
    return rows.nbytes / 1e9 / _seconds(device, lambda: gather_rows(cached, stored, positions, out))


def _exchange_rate(mesh: Mesh, size_mb: int) -> float:
    """GB/s that leave a rank when every rank sends as much to every other."""
    each = (size_mb << 18) // mesh.size
    counts = (each,) * mesh.size
    sent = torch.ones(each * mesh.size, device=mesh.device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        mesh.shuffles.all_to_all(Call("measure"), received, sent, counts, counts).wait()

    leaving = sent.nbytes * (mesh.size - 1) / mesh.size
    return leaving / 1e9 / _seconds(mesh.device, exchange)


def _steps(mesh: Mesh, model_name: str, before: Callable[[], None], steps: int = 3) -> None:
    """Train a little; ``before`` is called in the last step, when its batch is there."""
    store, ownership = small_store("random", mesh.num_splits)
    model = parallelize(make_model(Case(model_name, "split", "random", 0.5, None, None)), mesh)
    optimizer = torch.optim.Adam(model.parameters())
    own = ownership if mesh.size > 1 else None
    loader = NeighborLoader(store, [4, 3, -1], "train", batch_size=12, mesh=mesh, seed=3, ownership=own)
    for step in range(steps):
        batch = loader.make_batch(0, step)
        if step == steps - 1:
            before()
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def count_waits(mesh: Mesh, models: list[str]) -> dict[str, list[str]]:
    """Where the host waits for the device in a step, behind loading, by model."""
    return {model: _wait_sites(mesh, model) for model in models}


def _wait_sites(mesh: Mesh, model: str) -> list[str]:
    if mesh.device.type == "cuda":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _steps(mesh, model, lambda: torch.cuda.set_sync_debug_mode("warn"))
            torch.cuda.set_sync_debug_mode("default")
        return [f"{w.filename}:{w.lineno}" for w in said if "synchron" in str(w.message)]
    from gsplit.testing.simulated import switched_on

    log, marks = switched_on().log, []
    _steps(mesh, model, lambda: marks.append(log.counts()))
    return list((log.counts() - marks[0]).waits.elements())


def train_checked(mesh: Mesh, models: list[str]) -> int:
    """Train with every launch checked for races; how many there were."""
    from gsplit.testing.simulated import CollectiveRules, checked_mesh, switched_on

    device: Any = switched_on()
    device.tracker.check = True
    rules = CollectiveRules(device.tracker)
    mesh = checked_mesh(mesh, rules)
    for model in models:
        _steps(mesh, model, lambda: None)
    rules.compare_ranks(mesh.world)
    assert not device.tracker.errors, device.tracker.errors[0]
    launches: int = device.tracker.num_launches
    return launches


def die(mesh: Mesh) -> None:
    """Rank 1 is killed in the middle of a step; the others wait for it."""

    def kill() -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _steps(mesh, "sage", kill)
