"""What this machine does per second, by the kernels of training on rows and edges like those of a mini-batch.

Every probe runs one thread and is timed by the CPU time of this process, so that other programs on the machine do not
count; the least of some repeats is taken, for the same reason.
Blocks are sampled from a random graph with hubs: rows of a real block lie in the order in which they were first drawn.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from statistics import median

import numpy as np
import torch
from torch import Tensor

from gsplit.features.sources import MappedRows
from gsplit.graph.blocks import Block
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import own_equally
from gsplit.kernels.attention import gat_attention
from gsplit.kernels.attention_types import AttentionOptions
from gsplit.kernels.csr import make_csr_edges
from gsplit.minibatch.split import ask
from gsplit.partitioning.presample import Workload
from gsplit.planner.shapes import ATTENTION_BACKWARD
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler

__all__ = ["KernelRates", "measure_kernels", "measure_sampling", "measure_thread_gain"]

_WIDTH, _HEADS = 128, 4
_FANOUT = [15, 15]
_REACH_BYTES = 1e8
_MOST_CROWDING = 0.3  # what is measured beyond that is another program in the cache


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Rates of one rank; names are those of ``Hardware``."""

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


def _seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return max(min(found), 1e-9)


def _random_graph(num_vertices: int, num_edges: int) -> Graph:
    """Sources fall off like a power of their number, so that there are hubs."""
    rng = np.random.default_rng(0)
    degrees = rng.multinomial(num_edges, np.full(num_vertices, 1 / num_vertices))
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    sources = (num_vertices * rng.random(num_edges) ** 2).astype(np.int32)
    return Graph(indptr, sources, num_vertices)


def measure_kernels(scale: float = 1.0, repeats: int = 5) -> KernelRates:
    """All kernels. ``scale`` makes everything smaller, for tests."""
    torch.set_num_threads(1)
    num_vertices = max(2000, int(500_000 * scale))
    graph = _random_graph(num_vertices, 15 * num_vertices)
    sampler = HostNeighborSampler(graph, np.empty(0, np.int64))
    small, large = (_sample(sampler, num_vertices, max(20, int(n * scale))) for n in (800, 8000))
    key = StepKey(0, 0, 1)
    targets = torch.arange(max(20, int(4000 * scale)))
    sampling = _seconds(lambda: sample_minibatch(sampler, targets, _FANOUT, key), repeats)
    drawn = sum(block.num_edges for block in sample_minibatch(sampler, targets, _FANOUT, key).blocks)
    aggregates = [_aggregate(batch.blocks[0], repeats) for batch in (small, large)]
    crowding, aggregate = _power(aggregates)
    attention = _attention(large.blocks[0], repeats)
    gather = [_gather(large.blocks[0].num_src, width, repeats) for width in (_WIDTH // 4, _WIDTH)]
    load, overhead = _overhead(gather)
    reach = large.blocks[0].num_src * _WIDTH * 4
    return KernelRates(
        sample_edges_per_s=drawn / sampling,
        split_ids_per_s=_split(graph, num_vertices, max(20, int(4000 * scale)), repeats),
        load_bytes_per_s=load / (_REACH_BYTES / reach) ** crowding,
        row_overhead_bytes=overhead,
        flops_per_s=_products(max(1000, int(40_000 * scale)), repeats),
        aggregate_bytes_per_s=aggregate,
        attention_values_per_s=attention / (_REACH_BYTES / reach) ** (crowding / 2),
        crowding=crowding,
        row_bytes_per_s=_rows(max(1000, int(40_000 * scale)), repeats),
        optimizer_s=_optimizer(repeats),
    )


def _sample(sampler: HostNeighborSampler, num_vertices: int, num_targets: int) -> MiniBatch:
    targets = torch.randperm(num_vertices, generator=torch.Generator().manual_seed(1))[:num_targets]
    return sample_minibatch(sampler, targets, _FANOUT, StepKey(0, 0, 0))


def _aggregate(block: Block, repeats: int) -> tuple[float, float]:
    """Bytes that a sparse product reaches, and its rate along edges."""
    x = torch.randn(block.num_src, _WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls CSR a beta once per process
        size = (block.num_dst, block.num_src)
        matrix = torch.sparse_csr_tensor(block.indptr, block.src_rows, torch.ones(block.num_edges), size=size)
    seconds = _seconds(lambda: torch.sparse.mm(matrix, x, "mean"), repeats)
    return x.nbytes, block.num_edges * _WIDTH * 4 / seconds


def _power(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The exponent by which a rate falls with the bytes reached, and the rate at 100 MB.

    >>> _power([(1e8, 4.0), (1.6e9, 2.0)])
    (0.25, 4.0)
    """
    (small, quick), (large, slow) = points
    exponent = min(_MOST_CROWDING, max(0.0, log(quick / slow) / log(large / small))) if large > small else 0.0
    middle = (quick * (small / _REACH_BYTES) ** exponent * slow * (large / _REACH_BYTES) ** exponent) ** 0.5
    return exponent, middle


def _attention(block: Block, repeats: int) -> float:
    """Values weighed per second; backward counts as ``ATTENTION_BACKWARD`` passes."""
    edges = make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=True)
    values = torch.randn(block.num_src, 1, _WIDTH, requires_grad=True)
    score_src, score_dst = torch.randn(block.num_src, _HEADS), torch.randn(block.num_dst, _HEADS)

    def run() -> None:
        out = gat_attention(edges, values, score_src, score_dst, None, AttentionOptions(0.2))
        torch.autograd.grad(out.sum(), values)

    return (1 + ATTENTION_BACKWARD) * edges.num_edges * _WIDTH * (1 + _HEADS / 8) / _seconds(run, repeats)


def _gather(num_rows: int, width: int, repeats: int) -> tuple[float, float]:
    """Bytes of a row, and seconds per row, through the source of rows in memory; other rows every time."""
    rng = np.random.default_rng(2)
    source = MappedRows("probe", rng.random((2 * num_rows, width), np.float32), torch.float32, 0)
    chosen = iter([torch.from_numpy(rng.integers(2 * num_rows, size=num_rows)) for _ in range(repeats + 1)])
    out = torch.empty(num_rows, width)
    return 4 * width, _seconds(lambda: source.read(next(chosen), out), repeats) / num_rows


def _overhead(points: list[tuple[float, float]]) -> tuple[float, float]:
    """A rate for bytes, and the bytes that a row costs beside its own, from two widths.

    >>> _overhead([(100.0, 2.0), (300.0, 4.0)])
    (100.0, 100.0)
    """
    (narrow, quick), (wide, slow) = points
    rate = (wide - narrow) / max(slow - quick, 1e-3 * slow)
    overhead = min(4 * wide, max(0.0, slow * rate - wide))
    return (wide + overhead) / slow, overhead


def _products(num_rows: int, repeats: int) -> float:
    """Forward and the gradient of the weights."""
    x, w, g = torch.randn(num_rows, _WIDTH), torch.randn(_WIDTH, 2 * _WIDTH), torch.randn(num_rows, 2 * _WIDTH)
    out = torch.empty(num_rows, 2 * _WIDTH)

    def run() -> Tensor:
        torch.mm(x, w, out=out)
        return x.t() @ g

    return 2 * 2 * num_rows * _WIDTH * 2 * _WIDTH / _seconds(run, repeats)


def _rows(num_rows: int, repeats: int) -> float:
    """Bytes read and written by an activation."""
    h = torch.randn(num_rows, 2 * _WIDTH)
    return 2 * h.nbytes / _seconds(lambda: torch.relu(h), repeats)


def _optimizer(repeats: int) -> float:
    """Adam on the nine tensors of a model of three layers, too small to take time themselves."""
    weights = [torch.zeros(8, 8, requires_grad=True) for _ in range(9)]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return _seconds(optimizer.step, repeats)


def _split(graph: Graph, num_vertices: int, num_targets: int, repeats: int) -> float:
    """Ids sorted by owner at one end and located at the other."""
    ownership = own_equally(num_vertices, 2)
    first, stop = ownership.range_of(0)
    sampler = HostNeighborSampler(graph.restrict(first, stop), np.empty(0, np.int64))
    frontier = sampler.start(torch.arange(min(num_targets, stop)))
    drawn = frontier.sample_layer(7, _FANOUT[0])
    asked = torch.randint(stop, drawn.foreign_ids.shape, generator=torch.Generator().manual_seed(3))

    def run() -> None:
        ask(drawn, ownership)
        frontier.locate(asked)

    seconds = _seconds(run, repeats)
    frontier.close()
    return max(1, 2 * asked.numel()) / seconds


def measure_thread_gain(threads: int, num_rows: int = 40_000) -> float:
    """How much of a core every further thread adds to a product, by the clock; 0 where there is one."""
    if threads < 2:
        return 0.0
    x, w = torch.randn(num_rows, _WIDTH), torch.randn(_WIDTH, 2 * _WIDTH)
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
    """Edges drawn per second on the graph itself: how fast depends on its size and its hubs."""
    sampler = HostNeighborSampler(workload.graph, workload.original_ids)
    rates = []
    for step in range(steps + 1):
        rng = np.random.default_rng(step)
        chosen = rng.choice(workload.targets, min(workload.batch_size, workload.targets.size), replace=False)
        targets = torch.from_numpy(np.ascontiguousarray(chosen))
        start = time.process_time()
        batch = sample_minibatch(sampler, targets, workload.num_neighbors, StepKey(0, 0, step))
        seconds = max(time.process_time() - start, 1e-9)
        rates.append(sum(block.num_edges for block in batch.blocks) / seconds)
    return max(1.0, median(rates[1:]))  # the first grows the buffers
