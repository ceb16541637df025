"""Toy mini-batches on which models are tried when they are wrapped.

The toy graph is made of chains with side edges, self-loops and vertices without in-edges. In ``toy_batch`` all numbers
of rows differ, so that each has one meaning; ``toy_halves`` are mini-batches with some targets in common.
"""

import numpy as np
import torch
from torch import Tensor

from gsplit.batch import Batch
from gsplit.blocks import Block, ShuffleIndex
from gsplit.distributed.comm import SoloComm
from gsplit.errors import InputError, explain
from gsplit.graph import Graph
from gsplit.kernels.buffers import BufferPool
from gsplit.nn.forward_pass import RowSpace, num_rows
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import TorchNeighborSampler
from gsplit.telemetry import Telemetry

__all__ = ["ToyBatch", "explain_rows", "toy_batch", "toy_halves", "toy_empty"]

_PAIRS = 4
_TRIES = 200


def explain_rows(where: str, x: Tensor) -> str:
    """What to say where rows belong to no frontier."""
    fix = (
        "hand batch.x and the layers' outputs on as they are; a residual is x[:h.size(0)] + h, "
        "because a layer keeps its destinations only"
    )
    return explain(where, "rows of one frontier of the mini-batch", f"{list(x.shape)}", fix)


class ToyBatch(Batch):
    """A batch whose mixed frontiers have rows from nowhere, to tell them from local ones."""

    def shuffle(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """The shapes of ``Batch.shuffle``; rows that would be received are zero."""
        index = self.indices[layer]
        missing = index.num_mixed - h.size(0)
        if missing not in (0, index.num_received):
            raise InputError(explain_rows(f"layer {layer}", h))
        return torch.cat([h, h.new_zeros(missing, *h.shape[1:])]), h[: index.num_dst]


def _toy_graph(num_layers: int, seed: int) -> tuple[Graph, Tensor]:
    """Chains with side edges, self-loops and vertices without in-edges; targets in neighbouring pairs."""
    rng = np.random.default_rng(seed)
    spacing = 4 * num_layers + 8
    n = _PAIRS * spacing
    sources: list[list[int]] = []
    for v in range(n):
        near = [v + 1, v + 2, v + 3] if v % 5 else [v, v + 1]
        sources.append([u for u in near[: 1 + int(rng.integers(0, 3))] if u < n and (v + 1) % spacing])
    indptr = np.concatenate([[0], np.cumsum([len(s) for s in sources])]).astype(np.int64)
    graph = Graph(indptr, np.array([u for s in sources for u in s], np.int64), n)
    firsts = spacing * np.arange(_PAIRS)
    return graph, torch.from_numpy(np.stack([firsts, firsts + 1]).reshape(-1))


def _batch_of(graph: Graph, targets: Tensor, num_layers: int, x: Tensor, extra: list[int], cls: type[Batch]) -> Batch:
    """A mini-batch of the toy graph on one process; layer l has ``extra[l]`` rows from nowhere."""
    device = x.device
    sampler = TorchNeighborSampler(graph, np.empty(0, np.int64), device)
    sample = sample_minibatch(sampler, targets.to(device), [-1] * num_layers, StepKey(0, 0, 0))
    ids = sample.input_ids
    blocks = [Block(b.indptr, b.src_rows, b.num_src + more) for b, more in zip(sample.blocks, extra, strict=True)]
    indices = [
        ShuffleIndex(ids[:0], (0,), (more,), b.num_src, b.num_dst) for b, more in zip(sample.blocks, extra, strict=True)
    ]
    rows = torch.cat([x[ids], x.new_zeros(extra[0], *x.shape[1:])])
    return cls(
        x=rows,
        labels=None,
        n_id=ids,
        blocks=tuple(blocks),
        indices=tuple(indices),
        batch_size=targets.numel(),
        global_batch_size=targets.numel(),
        key=StepKey(0, 0, 0),
        comm=SoloComm(),
        world=SoloComm(),
        strategy="split",
        telemetry=Telemetry(),
        pool=BufferPool(device),
        scales=tuple(torch.full((b.num_src,), 0.5, dtype=x.dtype, device=device) for b in blocks),
    )


def _features(graph: Graph, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(graph.num_vertices, *like.shape[1:], generator=generator, dtype=torch.float64)
    return x.to(like.device, like.dtype)


def _kinds(num_layers: int) -> list[RowSpace]:
    spaces = [RowSpace(space, layer) for layer in range(num_layers) for space in ("mixed", "edges", "looped edges")]
    return [*(RowSpace("local", level) for level in range(num_layers + 1)), *spaces]


def toy_batch(num_layers: int, like: Tensor) -> tuple[Batch, dict[int, RowSpace]]:
    """A batch in which a number of rows has one meaning only, and those meanings."""
    for seed in range(_TRIES):
        rng = np.random.default_rng(1000 + seed)
        graph, targets = _toy_graph(num_layers, seed)
        extra = [int(more) for more in rng.integers(1, 40 * num_layers, num_layers)]
        batch = _batch_of(graph, targets, num_layers, _features(graph, like), extra, ToyBatch)
        meanings = {num_rows(batch, kind): kind for kind in _kinds(num_layers)}
        if len(meanings) == len(_kinds(num_layers)):
            return batch, meanings
    raise AssertionError(f"no toy batch of {num_layers} layers found")


def toy_empty(num_layers: int, like: Tensor) -> Batch:
    """A mini-batch of which a rank has nothing."""
    graph, targets = _toy_graph(num_layers, 0)
    return _batch_of(graph, targets[:0], num_layers, _features(graph, like), [0] * num_layers, Batch)


def toy_halves(num_layers: int, like: Tensor) -> list[tuple[Batch, slice]]:
    """A toy mini-batch of all targets, of the first half and of the second, and where those stand in the whole.

    Targets of the first half draw from those of the second, which draw from none of the first: mixing along either
    direction of the edges, or along the rows either way, changes one of the two.
    """
    graph, targets = _toy_graph(num_layers, 0)
    x, none = _features(graph, like), [0] * num_layers
    halves = [slice(0, 2 * _PAIRS), slice(0, _PAIRS), slice(_PAIRS, 2 * _PAIRS)]
    return [(_batch_of(graph, targets[half], num_layers, x, none, Batch), half) for half in halves]
