"""What a kind of device computes and how fast it moves data: checked on ranks of this host, against the host's CPU."""

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.array_types import Array
from gsplit.device.devices import resolve_device
from gsplit.distributed.comm.mesh import Mesh
from gsplit.doctor.finding import Finding
from gsplit.doctor.kernels import BOUNDS, compare_kernels
from gsplit.doctor.network import median_seconds, send_rate
from gsplit.doctor.ranks import RunRanks
from gsplit.errors import CommError
from gsplit.kernels.triton.availability import find_obstacle, is_available, is_installed, is_switched_off
from gsplit.loading.loader import NeighborLoader
from gsplit.nn.parallelize import parallelize
from gsplit.run.models import MODELS, make_model
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit.training.verification import verify

__all__ = ["compare_models", "device_checks", "measure_links", "measure_zero_copy", "train_models"]

_PLAIN_MODELS = tuple(model for model in MODELS if model != "gine")  # it needs edge features
_STEP_MODELS = ["sage", "gat", "gcn"]
_SIZES_MB = (1, 16, 64)
_REPEATS = 5
_ROW_LENGTH = 128
_WAIT = "called a synchronizing CUDA operation"  # of torch; switching the mode on gives another warning
_SEND_BACK = "please report this, with the output of gsplit doctor --json"
_FANOUTS = [4, 3, -1]
_NUM_VERTICES = 90
_NUM_FEATURES = 6
_NUM_CLASSES = 5
_BATCH_SIZE = 12


def device_checks(
    device: str,
    nproc: int,
    run: RunRanks,
    *,
    models: tuple[str, ...] = _PLAIN_MODELS,
    sizes_mb: tuple[int, ...] = _SIZES_MB,
) -> dict[str, Callable[[], Finding]]:
    """The checks of a device, "cpu" or "cuda", on ``nproc`` ranks, by name."""
    return {
        "code for this GPU": lambda: check_architectures(device),
        "Triton": lambda: check_triton(device),
        "links": lambda: check_links(device, nproc, run, sizes_mb),
        "models": lambda: check_models(device, nproc, run, models),
        "kernels": lambda: check_kernels(device, run),
        "waits for the device": lambda: check_waits(device, nproc, run),
        "races": lambda: check_races(device, run),
        "a killed rank": lambda: check_killed_rank(device, nproc, run),
    }


def check_architectures(device: str) -> Finding:
    """Check that the installed torch has code for every GPU."""
    name = "code for this GPU"
    if not device.startswith("cuda"):
        return Finding(name, "skipped", f"the device is {device}")
    built = torch.cuda.get_arch_list()
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    missing = [f"sm_{a}{b}" for a, b in sorted(capabilities) if not has_code_for((a, b), built)]
    if missing:
        fix = "install wheels of an older CUDA: those of CUDA 12.6 still have sm_70 (V100)"
        return Finding(name, "error", f"torch {torch.__version__} has {' '.join(built)}, not {' '.join(missing)}", fix)
    return Finding(name, "ok", ", ".join(f"sm_{a}{b}" for a, b in sorted(capabilities)))


def has_code_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a torch built for some architectures runs on a GPU: its own code, of the same generation, or PTX.

    >>> has_code_for((8, 6), ["sm_80", "sm_90"]), has_code_for((7, 0), ["sm_75", "sm_80"])
    (True, False)
    >>> has_code_for((12, 0), ["sm_80", "compute_90"])
    True
    """
    major, minor = capability
    for name in architectures:
        kind, number = re.fullmatch(r"(sm|compute)_(\d+)[a-z]*", name).groups()  # type: ignore[union-attr]
        have = divmod(int(number), 10)
        if kind == "compute" and have <= capability:
            return True
        if kind == "sm" and have[0] == major and have[1] <= minor:
            return True
    return False


def check_triton(device: str) -> Finding:
    """Check whether Triton's kernels are used on the device, or torch operations."""
    name = "Triton"
    instead = "torch operations are used: slower, same results"
    if device == "cpu":
        return Finding(name, "skipped", "the host uses numba kernels")
    if is_switched_off():
        return Finding(name, "skipped", f"GSPLIT_TRITON=0; {instead}", "unset GSPLIT_TRITON")
    if not is_installed():
        return Finding(name, "warning", f"not installed; {instead}", "pip install triton (Linux)")
    obstacle = find_obstacle(resolve_device(device))
    if obstacle is not None:
        return Finding(name, "warning", f"{obstacle.reason}; {instead}", obstacle.fix)
    return Finding(name, "ok", "its kernels are used")


def check_links(device: str, nproc: int, run: RunRanks, sizes_mb: tuple[int, ...]) -> Finding:
    """Measure copies to the device and exchanges between ranks."""
    try:
        rates = run(measure_links, nproc, device, sizes_mb=list(sizes_mb))
    except CommError as error:
        return Finding("links", "error", str(error), "run nvidia-smi topo -m; NCCL_DEBUG=INFO shows what NCCL tried")
    largest = [f"{what.split(',')[0]} {rate:.1f} GB/s" for what, rate in rates.items() if f"{sizes_mb[-1]} MB" in what]
    if not any(what.startswith("zero-copy") for what in rates):
        largest.append("zero-copy gather not measured: it needs a GPU that runs Triton")
    return Finding("links", "ok", "; ".join(largest), figures={what: round(rate, 3) for what, rate in rates.items()})


def check_models(
    device: str, nproc: int, run: RunRanks, models: tuple[str, ...] = _PLAIN_MODELS, tolerance: float = 1e-9
) -> Finding:
    """Compare training on 1 and on ``nproc`` ranks of the device with one process on the host."""
    worst: dict[str, float] = {}
    sizes = sorted({1, nproc})
    for size in sizes:
        try:
            found = run(compare_models, size, device, models=list(models))
        except CommError as error:
            return Finding("models", "error", str(error), _SEND_BACK)
        worst |= {f"{model} on {size}": error for model, error in found.items()}
    largest = max(worst.values())
    text = f"{len(models)} models on {' and '.join(map(str, sizes))} rank(s): {largest:.1e} from the host"
    if not largest <= tolerance:
        return Finding("models", "error", f"{text}: results differ", _SEND_BACK, worst)
    return Finding("models", "ok", text, figures=worst)


def check_kernels(device: str, run: RunRanks) -> Finding:
    """Compare Triton's kernels with the host's."""
    if check_triton(device).verdict != "ok":
        return Finding("kernels", "skipped", "Triton's kernels are not used here")
    units: dict[str, float] = run(compare_kernels, 1, device)
    wrong = [kernel for kernel, value in units.items() if not value <= BOUNDS[kernel]]
    if wrong:
        return Finding("kernels", "error", f"{', '.join(wrong)} differ from the host's", _SEND_BACK, units)
    text = f"{len(units)} as the host's; sums to {max(units.values()):.0f} roundings"
    return Finding("kernels", "ok", text, figures=units)


def check_waits(device: str, nproc: int, run: RunRanks) -> Finding:
    """Check that the host does not wait for a GPU in a step."""
    name = "waits for the device"
    if not device.startswith("cuda"):
        return Finding(name, "skipped", f"the device is {device}")
    sites: dict[str, list[str]] = run(find_waits, nproc, device, models=_STEP_MODELS)
    figures = {model: float(len(found)) for model, found in sites.items()}
    if any(figures.values()):
        lines = ", ".join(sorted({site for found in sites.values() for site in found}))
        return Finding(name, "error", f"in a step, after loading: {lines}", _SEND_BACK, figures)
    return Finding(name, "ok", "none in a step, after loading", figures=figures)


def check_races(device: str, run: RunRanks) -> Finding:
    """Train on one GPU under torch's CUDA sanitizer."""
    if not device.startswith("cuda"):
        return Finding("races", "skipped", f"the device is {device}")
    try:
        run(train_models, 1, device, sanitize=True, models=_STEP_MODELS)
    except CommError as error:
        return Finding("races", "error", f"torch's CUDA sanitizer: {error}", _SEND_BACK)
    return Finding("races", "ok", "none found by torch's CUDA sanitizer in training on one GPU")


def check_killed_rank(device: str, nproc: int, run: RunRanks) -> Finding:
    """Kill a rank in a step: all ranks must end, and the error must name it."""
    name = "a killed rank"
    if nproc < 2:
        return Finding(name, "skipped", "one rank only", "--nproc 2 starts two")
    start = time.perf_counter()
    try:
        run(die, nproc, device)
    except CommError as error:
        seconds = time.perf_counter() - start
        if "rank 1" in str(error) and "SIGKILL" in str(error):
            return Finding(name, "ok", f"all ranks ended {seconds:.0f} s after the start, with an error that names it")
        return Finding(name, "error", f"the error does not name it: {error}", _SEND_BACK)
    return Finding(name, "error", "training continued without it", _SEND_BACK)


def measure_links(mesh: Mesh, sizes_mb: list[int]) -> dict[str, float]:
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
            found[f"all-to-all, {size} MB per rank"] = send_rate(mesh.shuffles, size << 18) / 1e9
    return found


def _copy_rate(rows: Tensor, device: torch.device) -> float:
    there = torch.empty(rows.shape, device=device)
    return rows.nbytes / 1e9 / median_seconds(lambda: there.copy_(rows, non_blocking=True), _REPEATS, device)


def measure_zero_copy(rows: Tensor, device: torch.device) -> float:
    """GB/s of rows that the device reads from pinned memory of the host in a random order, by the gather kernel."""
    from gsplit.kernels.triton.gather import gather_rows

    stored = rows.pin_memory()
    cached = torch.empty(0, rows.size(1), device=device)  # every row is on the host
    positions = torch.randperm(rows.size(0)).to(device)
    out = torch.empty(rows.shape, device=device)
    return rows.nbytes / 1e9 / median_seconds(lambda: gather_rows(cached, stored, positions, out), _REPEATS, device)


def compare_models(mesh: Mesh, models: list[str]) -> dict[str, float]:
    """The largest error of a few steps in float64 on this mesh, against one process on the host, by model."""
    found = {}
    for name in models:
        compared = verify(
            _model(name),
            _small_store(mesh.size),
            _FANOUTS,
            "train",
            batch_size=_BATCH_SIZE,
            mesh=mesh,
            seed=3,
            reference_device="cpu",
        )
        gradient = compared.max_grad_error / (compared.largest_gradient or 1.0)
        found[name] = max(compared.max_loss_error, compared.max_buffer_error, gradient)
    return found


def find_waits(mesh: Mesh, models: list[str]) -> dict[str, list[str]]:
    """Where the host waits for the GPU in a step, after loading, by model."""
    found = {}
    for name in models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _train(mesh, name, lambda: torch.cuda.set_sync_debug_mode("warn"))
            torch.cuda.set_sync_debug_mode("default")
        found[name] = [f"{each.filename}:{each.lineno}" for each in caught if _WAIT in str(each.message)]
    return found


def train_models(mesh: Mesh, models: list[str]) -> None:
    """Train each model for a few steps."""
    for name in models:
        _train(mesh, name, lambda: None)


def die(mesh: Mesh) -> None:
    """Kill rank 1 in a step, while the others wait for it."""

    def kill() -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _train(mesh, "sage", kill)


def _train(mesh: Mesh, name: str, before: Callable[[], Any], steps: int = 3) -> None:
    """Train a little; ``before`` is called in the last step, after loading."""
    model = parallelize(_model(name), mesh)
    optimizer = torch.optim.Adam(model.parameters())
    store = _small_store(mesh.size)
    loader = NeighborLoader(store, _FANOUTS, "train", batch_size=_BATCH_SIZE, mesh=mesh, seed=3)
    for step in range(steps):
        batch = loader.make_batch(0, step)
        if step == steps - 1:
            before()
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _model(name: str) -> Module:
    torch.manual_seed(0)
    return make_model(
        name,
        in_channels=_NUM_FEATURES,
        hidden_channels=8,
        num_layers=len(_FANOUTS),
        out_channels=_NUM_CLASSES,
        dropout=0.5,
        heads=2,
        degrees=torch.arange(1, 6),
    )


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
