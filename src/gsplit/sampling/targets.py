"""Which targets a rank has in each step: those it owns, sorted by their position in the epoch's order.

The target list is ordered by original id; an epoch's order is a keyed permutation of it, so mini-batches are the same
for any number of ranks (law 1). A rank keeps only the targets it owns (law 6): their positions in the list, their ids,
and, of the epoch that is running, their positions in its order.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, StoreError, explain
from gsplit.sampling.minibatch import epoch_positions

__all__ = ["LocalTargets", "SeedTimes", "StoredTargets", "all_local_vertices", "local_listed_targets"]

_PIECE = 1 << 20


@dataclass(frozen=True)
class SeedTimes:
    """The time of every target of the list, which all ranks have, and its position in the ``input_nodes`` given."""

    time: Ids
    input_id: Ids

    @classmethod
    def listed(cls, time: Ids) -> "SeedTimes":
        """Times in the order of the target list."""
        return cls(time, np.arange(time.size))

    @classmethod
    def sorted(cls, time: Ids, ids: Ids) -> "SeedTimes":
        """Times of targets in any order. A vertex may be a target at several times; the list is sorted by both.

        >>> SeedTimes.sorted(np.array([7, 2, 1]), np.array([4, 4, 3])).input_id.tolist()
        [2, 1, 0]
        """
        order = np.lexsort([time, ids])
        twice = np.flatnonzero((np.diff(ids[order]) == 0) & (np.diff(time[order]) == 0))
        if twice.size:
            place = order[twice[0]]
            got = f"{twice.size} repeated, such as vertex {ids[place]} at {time[place]}"
            raise InputError(explain("input_nodes", "every vertex once at each time", got, "remove the duplicates"))
        return cls(time[order], order)


class LocalTargets:
    """The targets one rank owns. ``list_positions`` are positions in the whole list of ``num_targets``.

    ``seed_times``: of all targets, for temporal sampling. Sampling threads may share it.
    """

    def __init__(self, list_positions: Ids, ids: Ids, num_targets: int, seed_times: SeedTimes | None = None) -> None:
        self._list_positions = list_positions
        self._ids = ids
        self.num_targets = num_targets
        self.seed_times = seed_times
        self._epoch: tuple[int, int, bool] | None = None
        self._sorting = threading.Lock()  # an epoch is sorted once, by the first thread that needs it
        self._epoch_positions = list_positions
        self._epoch_ids = ids

    @property
    def ids(self) -> Ids:
        """This rank's targets, by internal id."""
        return self._ids

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @property
    def largest_bytes(self) -> int:
        """The largest single array held."""
        return max(array.nbytes for array in self._arrays)

    @property
    def _arrays(self) -> tuple[Ids, ...]:
        return self._list_positions, self._ids, self._epoch_positions, self._epoch_ids

    def for_step(
        self, seed: int, epoch: int, step: int, batch_size: int, *, shuffle: bool, stride: tuple[int, int] = (0, 1)
    ) -> Tensor:
        """This rank's targets of a step, in the epoch's order.

        ``stride = (start, step)`` keeps the targets at positions start, start + step, ... of the mini-batch.
        """
        return torch.from_numpy(self.places_in_step(seed, epoch, step, batch_size, shuffle=shuffle, stride=stride)[1])

    def places_in_step(
        self, seed: int, epoch: int, step: int, batch_size: int, *, shuffle: bool, stride: tuple[int, int] = (0, 1)
    ) -> tuple[Ids, Ids]:
        """``for_step``, with the place of every target in the mini-batch of all ranks."""
        with self._sorting:
            if self._epoch != (seed, epoch, shuffle):
                self._sort(seed, epoch, shuffle=shuffle)
            positions = self._epoch_positions
            ids = self._epoch_ids
        first, stop = np.searchsorted(positions, [step * batch_size, (step + 1) * batch_size])
        places = positions[first:stop] - step * batch_size
        kept = places % stride[1] == stride[0]
        return places[kept], ids[first:stop][kept]

    def _sort(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Sort the targets by their position in the order of an epoch."""
        positions = epoch_positions(self._list_positions, self.num_targets, seed, epoch, shuffle=shuffle)
        order = np.argsort(positions)
        self._epoch_positions = positions[order]
        self._epoch_ids = self._ids[order]
        twice = self._epoch_positions[1:][self._epoch_positions[1:] == self._epoch_positions[:-1]]
        if twice.size:  # every vertex is a target, by its original id
            fix = "run gsplit inspect --verify, then restore the store"
            raise StoreError(explain("original_ids", "every id once", f"two targets at position {twice[0]}", fix))
        self._epoch = (seed, epoch, shuffle)

    def size_of_step(self, step: int, batch_size: int) -> int:
        """Targets of a step over all ranks: the last mini-batch of an epoch may be smaller."""
        return min((step + 1) * batch_size, self.num_targets) - step * batch_size


@dataclass(frozen=True)
class StoredTargets:
    """A target list as a store keeps it: internal ids of vertices that it holds, ordered by original id.

    ``positions`` are those of ``ids`` in the whole list of ``num_targets``; None if this is the whole list. ``held`` is
    the store's range of vertices. What is read here is checked: the list may not have been read before.
    """

    name: str
    ids: Ids
    positions: Ids | None
    num_targets: int
    held: tuple[int, int]

    def pieces(self) -> Iterator[tuple[int, Ids]]:
        """The ids in pieces, each with the place where it begins."""
        first, stop = self.held
        for start in range(0, self.ids.size, _PIECE):
            piece = np.asarray(self.ids[start : start + _PIECE])
            if not first <= int(piece.min()) <= int(piece.max()) < stop:
                raise self._damaged(f"ids in {first}..{stop - 1}", f"{piece.min()}..{piece.max()}")
            yield start, piece

    def local(self, first: int, stop: int, original_ids: Ids) -> LocalTargets:
        """The part of the vertices ``first .. stop - 1``; ``original_ids`` are theirs, empty where ids are original."""
        own = [np.empty(0, np.int64)]
        ids = [np.empty(0, np.int64)]
        for start, piece in self.pieces():
            mine = start + np.flatnonzero((piece >= first) & (piece < stop))
            own.append(mine if self.positions is None else self.positions[mine])
            ids.append(piece[mine - start])
        positions = np.concatenate(own)
        targets = np.concatenate(ids)
        order = original_ids[targets - first] if original_ids.size else targets
        for what, values in (("every target once, ordered by original id", order), ("rising positions", positions)):
            falls = np.flatnonzero(values[1:] <= values[:-1])
            if falls.size:
                raise self._damaged(what, f"{values[falls[0]]} then {values[falls[0] + 1]}")
        if positions.size and not 0 <= int(positions[0]) <= int(positions[-1]) < self.num_targets:
            got = f"{positions[0]}..{positions[-1]}"
            raise self._damaged(f"positions in the list of {self.num_targets}", got)
        return LocalTargets(positions, targets, self.num_targets)

    def _damaged(self, expected: str, got: str) -> StoreError:
        fix = "run gsplit inspect --verify, then restore the store or import it again"
        return StoreError(explain(f"targets/{self.name}", expected, got, fix))


def local_listed_targets(
    original_targets: Ids, original_ids: Ids, first: int, seed_times: SeedTimes | None = None
) -> LocalTargets:
    """The own part of a list of original ids; ``original_ids`` are those of the range that begins at ``first``.

    With ``seed_times`` a vertex may be listed several times.
    """
    wanted = np.sort(original_targets)
    again = wanted[1:][wanted[1:] == wanted[:-1]]
    if again.size and seed_times is None:
        got = f"{np.unique(again).size} of them more than once, such as {again[0]}"
        fix = "remove the duplicates: a vertex has one loss per mini-batch"
        raise InputError(explain("input_nodes", "every vertex once", got, fix))
    begins = np.searchsorted(wanted, original_ids)
    counts = np.searchsorted(wanted, original_ids, side="right") - begins
    ids = np.repeat(first + np.arange(original_ids.size), counts)
    positions = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(ids.size)
    return LocalTargets(positions, ids, wanted.size, seed_times)


def all_local_vertices(original_ids: Ids, first: int, num_vertices: int) -> LocalTargets:
    """Every vertex is a target; its position is its original id."""
    return LocalTargets(np.array(original_ids), first + np.arange(original_ids.size), num_vertices)
