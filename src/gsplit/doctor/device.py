"""What a kind of device computes and how fast it moves data: checked on ranks of this host, against the host's CPU."""

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gsplit.device.devices import free_memory, new_pages, register_memory, resolve_device
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.doctor.finding import SEND_BACK, Finding, amount
from gsplit.doctor.kernels import BOUNDS, compare_kernels
from gsplit.doctor.network import median_seconds, send_rate
from gsplit.doctor.ranks import RunRanks
from gsplit.errors import CommError
from gsplit.files.host_limits import free_bytes
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.sums import EdgeSums
from gsplit.kernels.triton.availability import find_obstacle, is_available, is_installed, is_switched_off
from gsplit.planner.calibration import (
    least_seconds,
    probe_attention,
    probe_products,
    probe_rows,
    probe_sampling,
    random_graph,
    sample_random,
)
from gsplit.sampling.neighbor import make_sampler

__all__ = ["device_checks", "gather_large_rows", "measure_constants", "measure_links", "measure_zero_copy"]

_SIZES_MB = (1, 16, 64)
_REPEATS = 5
_ROW_LENGTH = 128
_NO_IDS = np.empty(0, np.int64)
_NUM_LARGE = 2**31 + 2**20  # values of 4 bytes: positions times the width of a row no longer fit into 32 bits


def device_checks(
    device: str,
    nproc: int,
    run: RunRanks,
    *,
    sizes_mb: tuple[int, ...] = _SIZES_MB,
    num_vertices: int = 500_000,
) -> dict[str, Callable[[], Finding]]:
    """The checks of a device, "cpu" or "cuda", and of its links on ``nproc`` ranks, by name.

    ``num_vertices``: those of the graph that constants are measured on.
    """
    return {
        "code for this GPU": lambda: check_architectures(device),
        "Triton": lambda: check_triton(device),
        "links": lambda: check_links(device, nproc, run, sizes_mb),
        "kernels": lambda: check_kernels(device, run),
        "large arrays": lambda: check_large_rows(device, run),
        "constants": lambda: check_constants(device, nproc, run, num_vertices),
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


def check_kernels(device: str, run: RunRanks) -> Finding:
    """Compare Triton's kernels with the host's."""
    if check_triton(device).verdict != "ok":
        return Finding("kernels", "skipped", "Triton's kernels are not used here")
    units: dict[str, float] = run(compare_kernels, 1, device)
    wrong = [kernel for kernel, value in units.items() if not value <= BOUNDS[kernel]]
    if wrong:
        return Finding("kernels", "error", f"{', '.join(wrong)} differ from the host's", SEND_BACK, units)
    text = f"{len(units)} as the host's; sums to {max(units.values()):.0f} roundings"
    return Finding("kernels", "ok", text, figures=units)


def check_large_rows(device: str, run: RunRanks, num_values: int = _NUM_LARGE) -> Finding:
    """Gather rows of an array with more than 2**31 values, in registered host memory and in memory of the device."""
    name = "large arrays"
    if check_triton(device).verdict != "ok":
        return Finding(name, "skipped", "Triton's kernels are not used here")
    needed = 4 * num_values
    if free_bytes() < 2 * needed:
        return Finding(
            name, "skipped", f"{amount(free_bytes())} of host memory are free, and it needs {amount(needed)}"
        )
    rates: dict[str, float] = run(gather_large_rows, 1, device, num_values=num_values)
    wrong = [where for where, rate in rates.items() if not rate > 0]
    if wrong:
        return Finding(name, "error", f"other rows were gathered from {', '.join(wrong)}", SEND_BACK, rates)
    text = ", ".join(f"{where} {rate:.1f} GB/s" for where, rate in rates.items())
    return Finding(name, "ok", f"random rows of {amount(needed)}: {text}", figures=rates)


def check_constants(device: str, nproc: int, run: RunRanks, num_vertices: int) -> Finding:
    """Measure the constants of a device for the planner."""
    name = "constants"
    if device == "cpu":
        return Finding(name, "skipped", "gsplit plan --recalibrate measures those of the host")
    figures: dict[str, float] = run(measure_constants, nproc, device, num_vertices=num_vertices)
    text = f"{len(figures)} for gsplit plan --hardware, with the file of --out"
    return Finding(name, "ok", text, figures={constant: float(f"{value:.4g}") for constant, value in figures.items()})


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


def gather_large_rows(mesh: Mesh, num_values: int, num_gathered: int = 100_000) -> dict[str, float]:
    """GB/s of random rows by the memory that an array lies in; 0 where other rows came than were asked for.

    The host's memory is registered in huge and in small pages. The device's own is left out if it is too small.
    """
    rates = {}
    rows = torch.empty(0)
    for kind in ("huge pages", "small pages"):
        rows = new_pages((num_values // _ROW_LENGTH, _ROW_LENGTH), torch.int32, huge=kind == "huge pages")
        rows[:, 0] = torch.arange(rows.size(0), dtype=torch.int32)
        release = register_memory(rows, mesh.device)
        if release is None:
            continue
        rates[kind] = _gather_rate(
            torch.empty(0, _ROW_LENGTH, dtype=torch.int32, device=mesh.device), rows, num_gathered
        )
        release()
    if free_memory(mesh.device) > 1.2 * rows.nbytes:
        there = rows.to(mesh.device)
        rates["memory of the device"] = _gather_rate(there, there, num_gathered)
    return rates


def _gather_rate(cached: Tensor, stored: Tensor, num_gathered: int) -> float:
    from gsplit.kernels.triton.gather import gather_rows

    device = cached.device
    positions = torch.randint(stored.size(0), (num_gathered,), device=device)
    positions[0] = stored.size(0) - 1
    out = torch.empty(num_gathered, stored.size(1), dtype=stored.dtype, device=device)
    seconds = median_seconds(lambda: gather_rows(cached, stored, positions, out), _REPEATS, device)
    return out.nbytes / 1e9 / seconds if torch.equal(out[:, 0].long(), positions) else 0.0


def measure_constants(mesh: Mesh, num_vertices: int = 500_000) -> dict[str, float]:
    """The constants of ``planner.hardware.Hardware`` that a device decides, by their names there, on one rank."""
    device = mesh.device
    graph = random_graph(num_vertices, 15 * num_vertices)
    num_targets = num_vertices // 125
    host_sampler = make_sampler(graph, _NO_IDS, torch.device("cpu"))
    block = sample_random(host_sampler, num_vertices, num_targets).blocks[0]
    x = torch.randn(block.num_src, _ROW_LENGTH, device=device)
    rows = torch.randperm(block.num_src, device=device)
    sums = EdgeSums(block.indptr.to(device), block.src_rows.to(device), block.num_src, None)
    summed_bytes = block.num_edges * _ROW_LENGTH * 4
    found = {
        "sample_edges_per_s": probe_sampling(make_sampler(graph, _NO_IDS, device), num_targets, _REPEATS, device),
        "host_sample_edges_per_s": probe_sampling(host_sampler, num_targets, _REPEATS),
        "aggregate_bytes_per_s": summed_bytes / least_seconds(lambda: sums(x, mean=True), _REPEATS, device),
        "flops_per_s": probe_products(block.num_src, _REPEATS, device),
        "row_bytes_per_s": probe_rows(block.num_src, _REPEATS, device),
        "cache_bytes_per_s": x.nbytes / least_seconds(lambda: x.index_select(0, rows), _REPEATS, device),
        "memory_bytes": float(torch.get_device_module(device).mem_get_info(device)[1]),
    }
    if kernel_for("attention", device, x.dtype) != "torch":  # as in training: one of our kernels computes it
        found["attention_values_per_s"] = probe_attention(block, _REPEATS, device)
    if mesh.size > 1:
        one = torch.zeros(1, device=device)
        # all ranks: as many repetitions
        found["collective_s"] = median_seconds(
            lambda: mesh.world.all_reduce(Call("measure"), one).wait(), _REPEATS, device
        )
    return found
