"""The pairs of vertices of each step, for link prediction: which pairs, their negatives and their labels.

Pairs are listed by original id, and a step has the pairs at B positions of the list, by a keyed permutation of it.
Every rank computes these positions and reads the B pairs, because exclusion of edges and negatives need all of them:
nothing is exchanged, and nothing of the size of the list is held. A negative is a hash of (seed, epoch, list position,
slot) to an original id, uniform over all vertices. It does not depend on the numbering or on the ranks (law 1). A
negative may be an edge of the graph, as in PyG.

>>> pairs = ListedPairs.listed(np.array([[0, 1], [2, 3], [4, 5]]))
>>> step = pairs.for_step(StepKey(seed=0, epoch=0, step=0), 2, Negatives("triplet", 2), num_vertices=6)
>>> step.num_pairs, step.neg_dst.numel(), step.neg_pair.tolist()
(2, 4, [0, 1, 0, 1])
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.graph.graph import Graph
from gsplit.keys.kernels_torch import mix, scaled
from gsplit.sampling.minibatch import StepKey, positions_of_step

__all__ = ["MODES", "Negatives", "ListedPairs", "StepPairs", "StoredPairs", "draw_vertices", "parse_negatives"]

MODES = ("binary", "triplet", "joint", "in_batch")
_MAX_VERTICES = 1 << 32
_MOST = 1 << 20  # negatives of a pair, or of a step


@dataclass(frozen=True, slots=True)
class Negatives:
    """How negatives are drawn; modes and amounts are those of PyG's ``NegativeSampling``, and two more modes.

    ``binary``: ``amount`` negative pairs for every pair, with a random source and destination. With a fraction a, a
    step of B pairs has ceil(a * B) negatives. ``triplet``: ``amount`` negative destinations for every pair. ``joint``:
    ``amount`` negative destinations for every step, which all pairs share. ``in_batch``: the destinations of all pairs
    of the step.
    """

    mode: str
    amount: float = 1

    def count(self, num_pairs: int) -> int:
        """The number of negatives of a step."""
        if self.mode == "in_batch":
            return 0
        return int(self.amount) if self.mode == "joint" else math.ceil(self.amount * num_pairs)

    def __str__(self) -> str:
        return self.mode if self.mode == "in_batch" else f"{self.mode} {self.amount:g}"


def parse_negatives(given: object) -> Negatives | None:
    """The negatives from a string, a dictionary, or PyG's ``NegativeSampling``; None for none.

    >>> parse_negatives(dict(mode="triplet", amount=2))
    Negatives(mode='triplet', amount=2)
    """
    if given is None or isinstance(given, Negatives):
        return given
    fix = "give a mode, such as 'binary', or dict(mode='binary', amount=1)"
    expected = f"one of {', '.join(MODES)}, with an amount"
    found: Mapping[str, Any] = vars(given) if hasattr(given, "mode") else {"mode": given}
    if isinstance(given, Mapping):
        found = given
    mode = getattr(found.get("mode"), "value", found.get("mode"))
    amount = found.get("amount", 1)
    unknown = sorted(set(found) - {"mode", "amount", "src_weight", "dst_weight"})
    if mode not in MODES or unknown:
        raise InputError(explain("neg_sampling", expected, given, fix))
    for name in ("src_weight", "dst_weight"):
        if found.get(name) is not None:
            fix = "leave it out: negatives are uniform over all vertices"
            got = f"{name} of type {type(found[name]).__name__}"
            raise InputError(explain("neg_sampling", f"{name}=None", got, fix))
    is_number = isinstance(amount, Real) and not isinstance(amount, bool)
    if not is_number or not 0 < amount <= _MOST or (mode != "binary" and amount != math.ceil(amount)):
        expected = f"a number up to {_MOST}, above 0" if mode == "binary" else f"1 to {_MOST}, for {mode}"
        raise InputError(explain("the amount of neg_sampling", expected, repr(amount), fix))
    return Negatives(mode, int(amount) if amount == math.ceil(amount) else float(amount))


def draw_vertices(key: int, positions: Tensor, slots: Tensor, num_vertices: int) -> Tensor:
    """An original id for every slot of every list position: a hash of both, uniform over all vertices."""
    if positions.numel() and num_vertices >= _MAX_VERTICES:
        fix = "list negative pairs with labels"
        raise InputError(explain("negatives", f"fewer than {_MAX_VERTICES} vertices", num_vertices, fix))
    return scaled(mix(mix(key, positions), slots), num_vertices)


@dataclass(frozen=True, slots=True)
class StoredPairs:
    """The name of stored pairs, and how a training draws its steps from them; for presampling and the planner."""

    name: str
    negatives: Negatives | None = Negatives("binary")
    exclude_seed_edges: str | bool = "reverse"

    @classmethod
    def given(cls, name: str, mode: str, amount: float) -> "StoredPairs":
        """From settings, where the mode of pairs without negatives is "none"."""
        return cls(name, None if mode == "none" else parse_negatives({"mode": mode, "amount": amount}))


@dataclass(frozen=True, slots=True)
class StepPairs:
    """The pairs of one step over all ranks, by ORIGINAL id, in the order of the step.

    ``positions``: where the B pairs ``src``, ``dst`` are in the list. Negative m is ``neg_dst[m]``, of pair
    ``neg_pair[m]``, and the ``neg_slot[m]``-th of that pair. For ``binary`` it has a source ``neg_src[m]`` of its own.
    Joint negatives do not belong to a pair: their ``neg_pair`` is 0. ``time``: of every pair, if pairs have times.
    """

    positions: Tensor
    src: Tensor
    dst: Tensor
    neg_src: Tensor
    neg_dst: Tensor
    neg_pair: Tensor
    neg_slot: Tensor
    negatives: Negatives | None
    time: Tensor | None = None

    @property
    def mode(self) -> str:
        """The mode of the negatives; pairs without negatives are ``binary`` with none."""
        return "binary" if self.negatives is None else self.negatives.mode

    @property
    def num_pairs(self) -> int:
        return self.positions.numel()

    @property
    def num_values(self) -> int:
        """The number of values of the step's loss: of pairs and, for ``binary``, of negative pairs."""
        return self.num_pairs + (self.neg_dst.numel() if self.mode == "binary" else 0)

    def at_times(self) -> "tuple[StepPairs, Tensor]":
        """The distinct times of the step, ascending, and its pairs by (vertex, time): id * S + place of the time.

        A pair's time is that of both endpoints and of its negatives. See ``sampling.temporal``.
        """
        assert self.time is not None
        times, places = torch.unique(self.time, return_inverse=True)
        of_negatives = places[self.neg_pair]
        timed = replace(
            self,
            src=self.src * times.numel() + places,
            dst=self.dst * times.numel() + places,
            neg_src=self.neg_src * times.numel() + of_negatives[: self.neg_src.numel()],
            neg_dst=self.neg_dst * times.numel() + of_negatives,
        )
        return timed, times


@dataclass(frozen=True)
class ListedPairs:
    """All pairs, by original id, with labels and times. ``read`` returns sources and destinations at some positions."""

    num_pairs: int
    read: Callable[[Ids], tuple[Ids, Ids]]
    labels: Array | None = None
    times: Ids | None = None

    @classmethod
    def listed(cls, pairs: Array, labels: Array | None = None) -> "ListedPairs":
        """The pairs of an array [n, 2], which may be memory-mapped."""

        def read(positions: Ids) -> tuple[Ids, Ids]:
            found = np.array(pairs[positions], np.int64)
            return found[:, 0].copy(), found[:, 1].copy()

        return cls(int(pairs.shape[0]), read, labels)

    def all_vertices(self) -> Ids:
        """Every source and destination, with repetitions: an array of twice the size of the list."""
        return np.concatenate(self.read(np.arange(self.num_pairs)))

    @classmethod
    def edges_of(cls, graph: Graph) -> "ListedPairs":
        """Every edge of a whole graph whose ids are original, in the order of the graph."""

        def read(positions: Ids) -> tuple[Ids, Ids]:
            dst = np.searchsorted(graph.indptr, positions, side="right") - 1
            return np.array(graph.indices[positions], np.int64), dst

        return cls(graph.num_edges, read)

    def for_step(
        self,
        key: StepKey,
        batch_size: int,
        negatives: Negatives | None,
        num_vertices: int,
        *,
        shuffle: bool = True,
        ends: tuple[range, range] | None = None,
    ) -> StepPairs:
        """The pairs of a step, the same on every rank. ``ends``: the ids of sources and destinations, if not all."""
        sources, destinations = ends or (range(num_vertices), range(num_vertices))
        listed = positions_of_step(key, self.num_pairs, batch_size, shuffle=shuffle)
        src, dst = self.read(listed)
        for ids in (src, dst):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_vertices:
                got = f"{ids.min()}..{ids.max()}"
                raise InputError(explain("edge_label_index", f"0..{num_vertices - 1}", got, "give original ids"))
        positions = torch.from_numpy(listed)
        count = 0 if negatives is None else negatives.count(listed.size)
        number = torch.arange(count)
        pair = number % max(1, listed.size)
        slot = number // max(1, listed.size)
        if negatives is not None and negatives.mode == "joint":
            pair = torch.zeros_like(number)
            slot = number
            neg_dst = draw_vertices(key.negatives(), torch.full_like(number, key.step), 2 * slot, len(destinations))
        else:
            neg_dst = draw_vertices(key.negatives(), positions[pair], 2 * slot, len(destinations))
        neg_src = neg_dst[:0]
        if negatives is not None and negatives.mode == "binary":
            neg_src = draw_vertices(key.negatives(), positions[pair], 2 * slot + 1, len(sources))
        return StepPairs(
            positions=positions,
            src=torch.from_numpy(src),
            dst=torch.from_numpy(dst),
            neg_src=neg_src + sources.start,
            neg_dst=neg_dst + destinations.start,
            neg_pair=pair,
            neg_slot=slot,
            negatives=negatives,
            time=None if self.times is None else torch.from_numpy(self.times[listed]),
        )
