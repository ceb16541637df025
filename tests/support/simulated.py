"""All ranks of a split group in one process: the index arithmetic of split and shuffle without any process group."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from gsplit.graph.blocks import Block
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.route import Route
from gsplit.minibatch.split import Split, split_in_one_process
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler, TorchNeighborSampler
from gsplit.store.in_memory import MemoryStore, renumbered_store

CPU = torch.device("cpu")
NONE = np.empty(0, np.int64)


@st.composite
def shaped_graphs(draw: st.DrawFn) -> tuple[int, Any, Any]:
    """Vertices, sources, destinations: power-law, star, chain or sparse, with self-loops and duplicates mixed in."""
    n = draw(st.integers(1, 60))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    count = draw(st.integers(0, 6 * n))
    kind = draw(st.sampled_from(["power law", "star", "chain", "sparse"]))
    if kind == "power law":
        src, dst = (n * rng.random(count) ** 2).astype(np.int64), (n * rng.random(count) ** 2).astype(np.int64)
    elif kind == "star":
        src, dst = rng.integers(0, n, count), np.where(rng.random(count) < 0.8, 0, rng.integers(0, n, count))
    elif kind == "chain":
        src, dst = np.arange(n - 1), np.arange(1, n)
    else:
        src, dst = rng.integers(0, n, n // 3), rng.integers(0, n, n // 3)
    loops, twice = rng.integers(0, n, n // 4), rng.integers(0, max(1, src.size), min(src.size, 5))
    src, dst = np.concatenate([src, loops, src[twice]]), np.concatenate([dst, loops, dst[twice]])
    return n, src, dst


@st.composite
def cut_points(draw: st.DrawFn, n: int, num_ranks: int) -> Ownership:
    """Any ranges: empty ones, everything on one rank, and even ones."""
    inner = sorted(draw(st.lists(st.integers(0, n), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return Ownership((0, *inner, n))


def memory_store(n: int, src: Any, dst: Any, order: Any | None = None) -> MemoryStore:
    """A store of one part; with ``order``, vertices are renumbered so that ``order[i]`` is the i-th."""
    if order is None:
        return renumbered_store(src, dst, np.zeros(n, np.int64), {}, {})
    parts = np.empty(n, np.int64)
    parts[order] = np.arange(n)
    return renumbered_store(src, dst, parts, {}, {})


def one_process(
    store: MemoryStore, targets: Tensor, fanouts: list[int], key: StepKey, *, use_torch: bool = False
) -> MiniBatch:
    """The reference mini-batch."""
    sampler = _sampler(store.graph, store.original_ids(), use_torch)
    return sample_minibatch(sampler, targets, fanouts, key)


def _sampler(graph: Graph, original: Any, use_torch: bool) -> Any:
    return TorchNeighborSampler(graph, original, CPU) if use_torch else HostNeighborSampler(graph, original)


def simulate_split(
    store: MemoryStore,
    targets: Tensor,
    fanouts: list[int],
    key: StepKey,
    ownership: Ownership,
    *,
    use_torch: bool = False,
) -> list[Split]:
    """What ``split_minibatch`` makes on every rank."""
    samplers = [
        _sampler(store.graph.restrict(first, stop), store.original_ids(first, stop), use_torch)
        for first, stop in map(ownership.range_of, range(ownership.num_ranks))
    ]
    return split_in_one_process(samplers, targets, fanouts, key, ownership)


def mixed_ids(splits: list[Split], layer: int) -> list[Tensor]:
    """Vertex ids of the mixed frontiers of a layer, moved along the shuffle index like any other rows."""
    locals_ = [split.input_ids[: split.layers[layer].route.num_local] for split in splits]
    return simulate_exchange(locals_, [split.layers[layer].route for split in splits])


def simulate_exchange(rows: list[Tensor], indices: list[Route]) -> list[Tensor]:
    """[own rows | rows received, grouped by owner] on every rank."""
    sent = [h[index.send_rows].split(index.send_counts) for h, index in zip(rows, indices, strict=True)]
    return [torch.cat([rows[r], *(sent[peer][r] for peer in range(len(rows)))]) for r in range(len(rows))]


def edges_in_ids(block: Block, src_ids: Tensor, dst_ids: Tensor) -> list[tuple[int, int]]:
    """The edges of a block as (source, destination) vertices, sorted."""
    src, dst = block.edge_index()
    return sorted(zip(src_ids[src].tolist(), dst_ids[dst].tolist(), strict=True))
