"""What ranks run in a selftest."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.kernels.triton.availability import is_available
from gsplit.selftest.training import train_model

__all__ = ["count_waits", "die", "measure_links", "measure_zero_copy"]

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


def count_waits(mesh: Mesh, models: list[str]) -> dict[str, list[str]]:
    """Where the host waits for the device in a step, behind loading, by model."""
    return {model: _wait_sites(mesh, model) for model in models}


def _wait_sites(mesh: Mesh, model: str) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_model(mesh, model, mesh.num_splits, 3, lambda: torch.cuda.set_sync_debug_mode("warn"))
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in said if "synchron" in str(w.message)]


def die(mesh: Mesh) -> None:
    """Rank 1 is killed in the middle of a step; the others wait for it."""

    def kill() -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train_model(mesh, "sage", mesh.num_splits, 3, kill)
