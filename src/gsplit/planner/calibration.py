"""Measure the constants of this machine, once, in about a minute.

``this_machine`` returns the constants from a file in the user's cache folder. It measures them if the file does not
exist, or was written on another machine or by other versions of the packages whose kernels are measured.

``calibrate`` starts two ranks that measure kernels and exchanges, then four ranks that measure exchanges, which gives
the cost of each further rank. They are started as ``gsplit train`` starts its ranks, with the same memory allocator.
Every rank runs this module and writes its results to a file:

    python -m gsplit.planner.calibration FOLDER SCALE KERNELS

Kernels are those of training, on rows and edges like those of a mini-batch. Blocks are sampled from a random graph with
hubs, because the rows of a real block are in the order in which they were first drawn. All ranks measure at the same
time, as they will run. A probe uses one thread. It is timed by the CPU time of its process, and the smallest of some
repetitions is taken, so that other programs on the machine do not count. ``gsplit doctor`` runs some probes on a GPU.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, init
from gsplit.distributed.launch.launcher import launch
from gsplit.errors import InputError
from gsplit.features.sources import MappedRows
from gsplit.files.host_limits import usable_cores
from gsplit.files.places import cache_folder
from gsplit.files.untrusted import Expected, read_document
from gsplit.graph.blocks import Block
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import own_equally
from gsplit.kernels.attention import gat_attention
from gsplit.kernels.attention_types import AttentionOptions
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.csr import CsrEdges, make_csr_edges
from gsplit.kernels.sums import EdgeSums
from gsplit.minibatch.route import Route
from gsplit.minibatch.shuffle import exchange_stored
from gsplit.minibatch.split import group_by_owner
from gsplit.partitioning.presample import Workload
from gsplit.planner.disk import measure_disk
from gsplit.planner.hardware import Hardware, read_hardware, write_hardware
from gsplit.planner.shapes import ATTENTION_BACKWARD
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.protocol import LayerSampler
from gsplit.telemetry import StepTelemetry

__all__ = [
    "CommRates",
    "KernelRates",
    "cache_file",
    "calibrate",
    "device_file",
    "known_machine",
    "least_seconds",
    "measure_comm",
    "measure_kernels",
    "measure_sampling",
    "measure_thread_gain",
    "probe_attention",
    "probe_products",
    "probe_rows",
    "probe_sampling",
    "random_graph",
    "sample_random",
    "this_machine",
]

# Fixed host work of a step, mostly Python. These are set, not measured.
_SAMPLE_S = 0.5e-3
_SPLIT_S = 2e-3
_LOAD_S = 0.2e-3
_STEP_S = 2e-3
_ATTENTION_STEP_S = 3e-3

_WIDTH = 128
_EXCHANGED_WIDTH = 256
_HEADS = 4
_FANOUTS = [15, 15]
_REACH_BYTES = 1e8
_MAX_CROWDING = 0.3  # a larger measured exponent comes from other programs that use the cache
_HOST = torch.device("cpu")
_NO_IDS = np.empty(0, np.int64)


def cache_file() -> Path:
    """The file with the constants of this machine."""
    return cache_folder() / "hardware.json"


def device_file() -> Path:
    """The file for a report of ``gsplit doctor --device cuda`` on this machine, for ``strategy="auto"``."""
    return cache_folder() / "device.json"


def this_machine(*, again: bool = False, path: Path | None = None, progress: Progress = silent) -> Hardware:
    """The constants of this machine, from the file, or measured if the file is not valid; ``again``: measure always."""
    known = None if again else known_machine(path)
    if known is not None:
        return known
    found = calibrate(progress=progress)
    write_hardware(found, path or cache_file(), _identity())
    return found


def known_machine(path: Path | None = None) -> Hardware | None:
    """The constants in the file, or None if they are not those of this machine and these package versions."""
    path = path or cache_file()
    if not path.is_file():
        return None
    expected = Expected("constants that were measured before", "remove the file")
    try:
        same = read_document(path, expected).get("notes") == _identity()
        return read_hardware(path) if same else None
    except InputError:  # a damaged file, or one of a version that measured less
        return None


def _identity() -> dict[str, str]:
    """The machine and the packages that the constants depend on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    cores = str(usable_cores())
    packages = {name: version(name) for name in ("gsplit", "torch", "numba", "numpy")}
    return {"host": platform.node(), "processor": model, "cores": cores, **packages}


def calibrate(*, scale: float = 1.0, rank_numbers: tuple[int, int] = (2, 4), progress: Progress = silent) -> Hardware:
    """Measure all constants. ``scale`` below 1 makes all probes smaller, for tests."""
    few, many = rank_numbers
    first = _run_ranks(few, scale, kernels=True)
    progress("calibrate", 1, 3)
    second = _run_ranks(many, scale, kernels=False) if many > few else first
    progress("calibrate", 2, 3)
    with tempfile.TemporaryDirectory(prefix="gsplit-disk-") as folder:
        disk = measure_disk(Path(folder), max(2000, int(50_000 * scale)))
    progress("calibrate", 3, 3)
    latency = first.comm["latency_s"]
    added_latency = max(0.0, (second.comm["latency_s"] - latency) / (many - few)) if many > few else 0.0
    rates = first.kernels
    return Hardware(
        name="this",
        far_sample_edges_per_s=rates["sample_edges_per_s"],
        cache_bytes_per_s=rates["load_bytes_per_s"],
        disk_reads_per_s=disk.reads_per_s,
        disk_bytes_per_s=disk.bytes_per_s,
        exchange_bytes_per_s=first.comm["exchange_bytes_per_s"],
        reduce_bytes_per_s=first.comm["reduce_bytes_per_s"],
        collective_s=latency,
        collective_per_rank_s=added_latency,
        sample_s=_SAMPLE_S,
        split_s=_SPLIT_S,
        load_s=_LOAD_S,
        step_s=_STEP_S,
        attention_step_s=_ATTENTION_STEP_S,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cores=usable_cores(),
        thread_gain=first.thread_gain,
        **rates,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """The medians over the ranks of one launch."""

    kernels: dict[str, float]
    comm: dict[str, float]
    thread_gain: float


def _run_ranks(num_ranks: int, scale: float, *, kernels: bool) -> _Measured:
    """Start ranks that run this module, and collect their results."""
    with tempfile.TemporaryDirectory(prefix="gsplit-calibration-") as name:
        program = [sys.executable, "-P", "-m", "gsplit.planner.calibration", name, str(scale)]
        launch([*program, "yes" if kernels else "no"], num_ranks)
        found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(Path(name).glob("rank-*.json"))]
    return _Measured(
        kernels=_medians([rank["kernels"] for rank in found]) if kernels else {},
        comm=_medians([rank["comm"] for rank in found]),
        thread_gain=max(rank["thread_gain"] for rank in found),
    )


def _medians(documents: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(document[name] for document in documents) for name in documents[0]}


def _main(folder: Path, scale: float, kernels: bool) -> None:
    """The program of one rank."""
    mesh = init("cpu")
    rates: KernelRates | None = measure_kernels(scale) if kernels else None
    comm = measure_comm(mesh, max(100, int(20_000 * scale)))
    thread_gain = 0.0
    if kernels and mesh.rank == 0:
        thread_gain = measure_thread_gain(usable_cores(), max(1000, int(40_000 * scale)))
    # all ranks: the others are idle while rank 0 measures its threads
    mesh.control.gather_text(Call("probes done", long_wait=True), "")
    found = {"kernels": asdict(rates) if rates else None, "comm": asdict(comm), "thread_gain": thread_gain}
    (folder / f"rank-{mesh.rank}.json").write_text(json.dumps(found))
    mesh.close()


@dataclass(frozen=True, slots=True)
class CommRates:
    """Rates of exchanges between the ranks of a launch. The names are those of ``Hardware``."""

    latency_s: float
    exchange_bytes_per_s: float
    reduce_bytes_per_s: float


def measure_comm(mesh: Mesh, num_rows: int, repeats: int = 9) -> CommRates:
    """Measure empty and large exchanges, and an all-reduce. A collective."""
    empty = _prepare_exchange(mesh, 0)
    full = _prepare_exchange(mesh, num_rows)
    gradient = torch.zeros(1 << 18)

    def reduce() -> None:
        mesh.gradients.all_reduce(Call("probe"), gradient).wait()  # all ranks: the same number of repetitions

    latency = _median_cpu_s(empty, 3 * repeats)  # on a host, latency is CPU time: system calls and Python
    exchanged_bytes = max(1, num_rows) * _EXCHANGED_WIDTH * 4
    exchange_s = _median_cpu_s(full, repeats)
    reduce_s = max(_median_cpu_s(reduce, repeats) - latency, 1e-6)
    reduced_bytes = 2 * (mesh.size - 1) / mesh.size * gradient.nbytes
    return CommRates(
        latency_s=latency,
        exchange_bytes_per_s=exchanged_bytes / exchange_s,
        reduce_bytes_per_s=reduced_bytes / reduce_s,
    )


def _prepare_exchange(mesh: Mesh, num_rows: int) -> Callable[[], None]:
    """A function in which every rank sends ``num_rows`` rows, divided among its peers. A collective."""
    peers = [peer for peer in range(mesh.size) if peer != mesh.rank]
    counts = [0] * mesh.size
    for place, peer in enumerate(peers):
        counts[peer] = num_rows // len(peers) + (1 if place < num_rows % len(peers) else 0)
    received = mesh.shuffles.all_to_all_counts(Call("probe counts"), tuple(counts))
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(mesh.rank))
    route = Route(rows, tuple(counts), received, num_local=num_rows, num_dst=num_rows)
    pool = BufferPool(mesh.device)
    mixed = torch.randn(route.num_mixed, _EXCHANGED_WIDTH)
    telemetry = StepTelemetry()

    def run() -> None:
        # all ranks: the same number of repetitions
        exchange_stored(mixed, route, mesh.shuffles, Call("probe"), pool, telemetry)

    return run


def _median_cpu_s(run: Callable[[], None], repeats: int) -> float:
    """Median CPU time of a function, after two runs to warm up."""
    found = []
    for repeat in range(repeats + 2):
        start = time.process_time()
        run()
        if repeat >= 2:
            found.append(time.process_time() - start)
    return max(median(found), 1e-9)


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Rates of the kernels of one rank. The names are those of ``Hardware``."""

    sample_edges_per_s: float
    split_ids_per_s: float
    load_bytes_per_s: float
    row_overhead_bytes: float
    flops_per_s: float
    aggregate_bytes_per_s: float
    attention_values_per_s: float
    crowding: float
    row_bytes_per_s: float
    optimizer_s: float


def measure_kernels(scale: float = 1.0, repeats: int = 5) -> KernelRates:
    """Measure all kernels. ``scale`` below 1 makes all probes smaller, for tests."""
    torch.set_num_threads(1)
    num_vertices = max(2000, int(500_000 * scale))
    num_targets = max(20, int(4000 * scale))
    num_rows = max(1000, int(40_000 * scale))
    graph = random_graph(num_vertices, 15 * num_vertices)
    sampler = HostNeighborSampler(graph, _NO_IDS)
    small = sample_random(sampler, num_vertices, max(20, int(800 * scale))).blocks[0]
    large = sample_random(sampler, num_vertices, max(20, int(8000 * scale))).blocks[0]
    crowding, aggregate = _fit_power([_probe_aggregation(small, repeats), _probe_aggregation(large, repeats)])
    load, overhead = _fit_overhead([_probe_gather(large.num_src, width, repeats) for width in (_WIDTH // 4, _WIDTH)])
    reach = _REACH_BYTES / (large.num_src * _WIDTH * 4)
    return KernelRates(
        sample_edges_per_s=probe_sampling(sampler, num_targets, repeats),
        split_ids_per_s=_probe_split(graph, num_vertices, num_targets, repeats),
        load_bytes_per_s=load / reach**crowding,
        row_overhead_bytes=overhead,
        flops_per_s=probe_products(num_rows, repeats),
        aggregate_bytes_per_s=aggregate,
        attention_values_per_s=probe_attention(large, repeats) / reach ** (crowding / 2),
        crowding=crowding,
        row_bytes_per_s=probe_rows(num_rows, repeats),
        optimizer_s=_probe_optimizer(repeats),
    )


def least_seconds(run: Callable[[], object], repeats: int, device: torch.device = _HOST) -> float:
    """The smallest time of a function, after one run to warm up.

    On the host it is CPU time; on other devices wall time to the end of the device's work.
    """
    on_host = device.type == "cpu"
    now = time.process_time if on_host else time.perf_counter
    finish = (lambda: None) if on_host else torch.get_device_module(device).synchronize
    run()
    found = []
    for _ in range(repeats):
        finish()
        start = now()
        run()
        finish()
        found.append(now() - start)
    return max(min(found), 1e-9)


def random_graph(num_vertices: int, num_edges: int) -> Graph:
    """A random graph with hubs: vertices with small ids are sources more often."""
    rng = np.random.default_rng(0)
    degrees = rng.multinomial(num_edges, np.full(num_vertices, 1 / num_vertices))
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    sources = (num_vertices * rng.random(num_edges) ** 2).astype(np.int32)
    return Graph(indptr, sources, num_vertices)


def sample_random(sampler: LayerSampler, num_vertices: int, num_targets: int) -> MiniBatch:
    """A mini-batch of random targets, as the probes use it, on the host."""
    targets = torch.randperm(num_vertices, generator=torch.Generator().manual_seed(1))[:num_targets]
    return sample_minibatch(sampler, targets, _FANOUTS, StepKey(0, 0, 0))


def probe_sampling(sampler: LayerSampler, num_targets: int, repeats: int, device: torch.device = _HOST) -> float:
    """Edges drawn per second. ``device``: that of the sampler."""
    targets = torch.arange(num_targets, device=device)
    key = StepKey(0, 0, 1)
    seconds = least_seconds(lambda: sample_minibatch(sampler, targets, _FANOUTS, key), repeats, device)
    batch = sample_minibatch(sampler, targets, _FANOUTS, key)
    return sum(block.num_edges for block in batch.blocks) / seconds


def _probe_split(graph: Graph, num_vertices: int, num_targets: int, repeats: int) -> float:
    """Ids per second that are sorted by owner on one rank and located on another."""
    ownership = own_equally(num_vertices, 2)
    first, stop = ownership.range_of(0)
    sampler = HostNeighborSampler(graph.restrict(first, stop), _NO_IDS)
    frontier = sampler.start(torch.arange(min(num_targets, stop)))
    drawn = frontier.sample_layer(7, _FANOUTS[0])
    asked = torch.randint(stop, drawn.foreign_ids.shape, generator=torch.Generator().manual_seed(3))

    def run() -> None:
        group_by_owner(drawn, ownership)
        frontier.locate(asked)

    seconds = least_seconds(run, repeats)
    frontier.close()
    return max(1, 2 * asked.numel()) / seconds


def _probe_aggregation(block: Block, repeats: int) -> tuple[float, float]:
    """Bytes of the rows that a sparse product reads, and its rate in bytes along edges per second."""
    x = torch.randn(block.num_src, _WIDTH)
    sums = EdgeSums(block.indptr, block.src_rows, block.num_src, None)
    seconds = least_seconds(lambda: sums(x, mean=True), repeats)
    return x.nbytes, block.num_edges * _WIDTH * 4 / seconds


def _fit_power(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The exponent by which a rate falls with the bytes that are read, and the rate at 100 MB.

    >>> _fit_power([(1e8, 4.0), (1.6e9, 2.0)])
    (0.25, 4.0)
    """
    (small_bytes, small_rate), (large_bytes, large_rate) = points
    exponent = 0.0
    if large_bytes > small_bytes:
        exponent = min(_MAX_CROWDING, max(0.0, log(small_rate / large_rate) / log(large_bytes / small_bytes)))
    rate_from_small = small_rate * (small_bytes / _REACH_BYTES) ** exponent
    rate_from_large = large_rate * (large_bytes / _REACH_BYTES) ** exponent
    return exponent, (rate_from_small * rate_from_large) ** 0.5


def probe_attention(block: Block, repeats: int, device: torch.device = _HOST) -> float:
    """Values weighted per second; the backward pass counts as ``ATTENTION_BACKWARD`` forward passes."""
    made = make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=True)
    indptr, src_rows, places = (tensor.to(device) for tensor in (made.indptr, made.src_rows, made.places))
    edges = CsrEdges(indptr, src_rows, places, made.num_src)
    values = torch.randn(block.num_src, 1, _WIDTH, device=device, requires_grad=True)
    score_src = torch.randn(block.num_src, _HEADS, device=device)
    score_dst = torch.randn(block.num_dst, _HEADS, device=device)

    def run() -> None:
        out = gat_attention(edges, values, score_src, score_dst, None, AttentionOptions(0.2))
        torch.autograd.grad(out.sum(), values)

    num_values = (1 + ATTENTION_BACKWARD) * edges.num_edges * _WIDTH * (1 + _HEADS / 8)
    return num_values / least_seconds(run, repeats, device)


def _probe_gather(num_rows: int, width: int, repeats: int) -> tuple[float, float]:
    """Bytes of a row, and seconds per row to gather rows from memory; other rows in every repetition."""
    rng = np.random.default_rng(2)
    source = MappedRows("probe", rng.random((2 * num_rows, width), np.float32), torch.float32, 0)
    chosen = iter([torch.from_numpy(rng.integers(2 * num_rows, size=num_rows)) for _ in range(repeats + 1)])
    out = torch.empty(num_rows, width)
    return 4 * width, least_seconds(lambda: source.read(next(chosen), out), repeats) / num_rows


def _fit_overhead(points: list[tuple[float, float]]) -> tuple[float, float]:
    """A rate in bytes per second, and the bytes that a row costs in addition to its own, from two row widths.

    >>> _fit_overhead([(100.0, 2.0), (300.0, 4.0)])
    (100.0, 100.0)
    """
    (narrow_bytes, narrow_s), (wide_bytes, wide_s) = points
    rate = (wide_bytes - narrow_bytes) / max(wide_s - narrow_s, 1e-3 * wide_s)
    overhead = min(4 * wide_bytes, max(0.0, wide_s * rate - wide_bytes))
    return (wide_bytes + overhead) / wide_s, overhead


def probe_products(num_rows: int, repeats: int, device: torch.device = _HOST) -> float:
    """Floating-point operations per second of a linear layer and of the gradient of its weights."""
    x = torch.randn(num_rows, _WIDTH, device=device)
    w = torch.randn(_WIDTH, 2 * _WIDTH, device=device)
    g = torch.randn(num_rows, 2 * _WIDTH, device=device)
    out = torch.empty(num_rows, 2 * _WIDTH, device=device)

    def run() -> Tensor:
        torch.mm(x, w, out=out)
        return x.t() @ g

    return 2 * 2 * num_rows * _WIDTH * 2 * _WIDTH / least_seconds(run, repeats, device)


def probe_rows(num_rows: int, repeats: int, device: torch.device = _HOST) -> float:
    """Bytes read and written per second by an activation."""
    h = torch.randn(num_rows, 2 * _WIDTH, device=device)
    return 2 * h.nbytes / least_seconds(lambda: torch.relu(h), repeats, device)


def _probe_optimizer(repeats: int) -> float:
    """Seconds of Adam on nine small tensors, as many as a model of three layers has: its fixed cost."""
    weights = [torch.zeros(8, 8, requires_grad=True) for _ in range(9)]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return least_seconds(optimizer.step, repeats)


def measure_thread_gain(threads: int, num_rows: int = 40_000) -> float:
    """How much of a core each further thread adds to a matrix product, by wall time; 0 for a single thread."""
    if threads < 2:
        return 0.0
    x = torch.randn(num_rows, _WIDTH)
    w = torch.randn(_WIDTH, 2 * _WIDTH)
    seconds = []
    for number in (1, threads):
        torch.set_num_threads(number)
        found = []
        for _ in range(7):
            start = time.perf_counter()
            torch.mm(x, w)
            found.append(time.perf_counter() - start)
        seconds.append(min(found))
    torch.set_num_threads(1)
    return min(1.0, max(0.0, (seconds[0] / seconds[1] - 1) / (threads - 1)))


def measure_sampling(workload: Workload, steps: int = 3) -> float:
    """Edges drawn per second on a given graph. The rate depends on the size of the graph and on its hubs."""
    sampler = workload.sampler_of(workload.graph, workload.original_ids)
    rates = []
    for step in range(steps + 1):
        rng = np.random.default_rng(step)
        chosen = rng.choice(workload.targets, min(workload.batch_size, workload.targets.size), replace=False)
        targets = torch.from_numpy(np.ascontiguousarray(chosen))
        start = time.process_time()
        batch = sample_minibatch(sampler, targets, workload.fanouts, workload.key(0, step))
        seconds = max(time.process_time() - start, 1e-9)
        rates.append(sum(block.num_edges for block in batch.blocks) / seconds)
    return max(1.0, median(rates[1:]))  # the first step grows the sampler's buffers


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "yes")
