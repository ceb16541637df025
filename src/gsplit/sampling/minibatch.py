"""One mini-batch in one process: the definition of what every strategy and every number of ranks must compute.

It is the reference of the tests, and what presampling runs. Keys of a step live here as well, and with them law 1:
the batch is a function of (seed, epoch, step) and of the target list, nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gsplit.graph.blocks import Block
from gsplit.keys import scalar
from gsplit.keys.kernels_numba import permute, unpermute
from gsplit.sampling.protocol import Fanout, LayerSampler

__all__ = [
    "MiniBatch",
    "StepKey",
    "embedding_key",
    "epoch_positions",
    "evaluation_key",
    "positions_of_step",
    "sample_minibatch",
]


class _Domain(IntEnum):
    """What a key is for, so that no two uses share a hash."""

    TARGETS = 0
    NEIGHBORS = 1
    DROPOUT = 2
    NEGATIVES = 3
    EVALUATION = 4
    EMBEDDING = 5


@dataclass(frozen=True, slots=True)
class StepKey:
    """The name of one training step; all its randomness is a hash of it.

    ``layer_dependency``: one key for the neighbours of all layers.
    """

    seed: int
    epoch: int
    step: int
    layer_dependency: bool = False

    def targets(self) -> int:
        """The key of the epoch's order of targets, or of pairs."""
        return scalar.mix(self.seed, _Domain.TARGETS, self.epoch)

    def negatives(self) -> int:
        """The key of the epoch's negatives."""
        return scalar.mix(self.seed, _Domain.NEGATIVES, self.epoch)

    def layer(self, layer: int) -> int:
        """The key of the neighbours drawn at one layer."""
        of_step = scalar.mix(self.seed, _Domain.NEIGHBORS, self.epoch, self.step)
        return of_step if self.layer_dependency else scalar.mix(of_step, layer)

    def dropout(self, call: int) -> int:
        """The key of the masks of one dropout call within the step."""
        return scalar.mix(self.seed, _Domain.DROPOUT, self.epoch, self.step, call)


def evaluation_key(seed: int) -> int:
    """The key of the negatives of an evaluation, which do not change from epoch to epoch."""
    return scalar.mix(seed, _Domain.EVALUATION)


def embedding_key(seed: int) -> int:
    """The key of the first rows of an embedding."""
    return scalar.mix(seed, _Domain.EMBEDDING)


def epoch_positions(
    list_positions: npt.NDArray[np.int64], num_targets: int, seed: int, epoch: int, *, shuffle: bool
) -> npt.NDArray[np.int64]:
    """Where the targets at some positions of the target list are in an epoch's order.

    Mini-batch t holds the targets at positions tB to (t+1)B - 1 of that order, B being the batch size. Without
    ``shuffle`` it is the order of the list.
    """
    if not shuffle or not list_positions.size:
        return list_positions
    return unpermute(list_positions, num_targets, scalar.mix(seed, _Domain.TARGETS, epoch))


def positions_of_step(key: StepKey, num_listed: int, batch_size: int, *, shuffle: bool) -> npt.NDArray[np.int64]:
    """The positions in a list of targets or pairs that one step has, in the order of the step; for all ranks."""
    first = key.step * batch_size
    places = np.arange(first, min(first + batch_size, num_listed))
    return permute(places, num_listed, key.targets()) if shuffle and places.size else places


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Blocks from the bottom layer up, and the vertices that are their rows; destinations are prefixes."""

    blocks: tuple[Block, ...]
    input_ids: Tensor

    @property
    def num_targets(self) -> int:
        """Destinations of the top layer."""
        return self.blocks[-1].num_dst


def sample_minibatch(
    sampler: LayerSampler, targets: Tensor, num_neighbors: Sequence[Fanout], key: StepKey, *, bottom_layer: int = 0
) -> MiniBatch:
    """Sample layers from the targets down. ``num_neighbors[0]`` is the targets' own hop, as in PyG.

    The sampler holds the whole graph: nothing is foreign. ``bottom_layer``: the number of the lowest of these layers,
    where those below it are sampled elsewhere.
    """
    frontier = sampler.start(targets)
    try:
        blocks: list[Block] = []
        for hop, fanout in enumerate(num_neighbors):
            drawn = frontier.sample_layer(key.layer(bottom_layer + len(num_neighbors) - 1 - hop), fanout)
            assert drawn.foreign_ids.numel() == 0
            blocks.insert(0, Block(drawn.indptr, drawn.sources, frontier.num_rows, drawn.edge_ids))
        return MiniBatch(tuple(blocks), frontier.ids(frontier.num_rows))
    finally:
        frontier.close()
