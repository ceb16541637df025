"""Which targets a rank has in each step: those it owns, sorted by their position in the epoch's order.

The target list is ordered by original id; an epoch's order is a keyed permutation of it, so mini-batches are the same
for any number of ranks (law 1). A rank keeps only the targets it owns (law 6): their positions in the list, their ids,
and, of the epoch that is running, their positions in its order.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.sampling.minibatch import epoch_positions

__all__ = ["LocalTargets", "all_local_vertices", "local_listed_targets", "local_stored_targets"]

Ids = npt.NDArray[np.int64]
_PIECE = 1 << 20


class LocalTargets:
    """The targets one rank owns. ``list_positions`` are positions in the whole list of ``num_targets``."""

    def __init__(self, list_positions: Ids, ids: Ids, num_targets: int) -> None:
        self._list_positions, self._ids, self.num_targets = list_positions, ids, num_targets
        self._epoch: tuple[int, int, bool] | None = None
        self._epoch_positions, self._epoch_ids = list_positions, ids

    @property
    def ids(self) -> Ids:
        """This rank's targets, by internal id."""
        return self._ids

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def largest_bytes(self) -> int:
        """The largest single array held."""
        return max(array.nbytes for array in self._arrays)

    @property
    def _arrays(self) -> tuple[Ids, ...]:
        return self._list_positions, self._ids, self._epoch_positions, self._epoch_ids

    def for_step(
        self, seed: int, epoch: int, step: int, batch_size: int, *, shuffle: bool, cut: tuple[int, int] = (0, 1)
    ) -> Tensor:
        """This rank's targets of a step, in the epoch's order.

        ``cut = (first, stride)`` keeps those whose position in the mini-batch is first, first + stride, and so on.
        """
        if self._epoch != (seed, epoch, shuffle):
            positions = epoch_positions(self._list_positions, self.num_targets, seed, epoch, shuffle=shuffle)
            order = np.argsort(positions)
            self._epoch_positions, self._epoch_ids = positions[order], self._ids[order]
            self._epoch = (seed, epoch, shuffle)
        first, stop = np.searchsorted(self._epoch_positions, [step * batch_size, (step + 1) * batch_size])
        kept = (self._epoch_positions[first:stop] - step * batch_size) % cut[1] == cut[0]
        return torch.from_numpy(self._epoch_ids[first:stop][kept])

    def size_of_step(self, step: int, batch_size: int) -> int:
        """Targets of a step over all ranks: the last mini-batch of an epoch may be smaller."""
        return min((step + 1) * batch_size, self.num_targets) - step * batch_size


def local_stored_targets(targets: Ids, positions: Ids | None, num_targets: int, first: int, stop: int) -> LocalTargets:
    """The own part of a stored target list (internal ids, ordered by original id), read in pieces.

    ``positions`` are those of ``targets`` in the whole list of ``num_targets``; None if this is the whole list.
    """
    own, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, targets.size, _PIECE):
        piece = np.asarray(targets[start : start + _PIECE])
        mine = start + np.flatnonzero((piece >= first) & (piece < stop))
        own.append(mine if positions is None else positions[mine])
        ids.append(piece[mine - start])
    return LocalTargets(np.concatenate(own), np.concatenate(ids), num_targets)


def local_listed_targets(original_targets: Ids, original_ids: Ids, first: int) -> LocalTargets:
    """The own part of a list of original ids; ``original_ids`` are those of the range that begins at ``first``."""
    wanted = np.sort(original_targets)
    again = wanted[1:][wanted[1:] == wanted[:-1]]
    if again.size:
        got = f"{np.unique(again).size} of them more than once, such as {again[0]}"
        fix = "remove the duplicates: a vertex has one loss per mini-batch"
        raise InputError(explain("input_nodes", "every vertex once", got, fix))
    places = np.searchsorted(wanted, original_ids)
    found = places < wanted.size
    found[found] = wanted[places[found]] == original_ids[found]
    return LocalTargets(places[found], first + np.flatnonzero(found), wanted.size)


def all_local_vertices(original_ids: Ids, first: int, num_vertices: int) -> LocalTargets:
    """Every vertex is a target; its position is its original id."""
    return LocalTargets(np.array(original_ids), first + np.arange(original_ids.size), num_vertices)
