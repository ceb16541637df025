"""The names of strategies, for the loader, the command line and the planner.

All strategies compute the same step. They differ in the number of layers, from the input up, that are split among the
owners of their vertices, and in the rank that takes a target:

    split            all layers are split
    hybrid(k)        the k layers nearest the input are split; each rank computes the layers above alone
    data_cached      no layer is split, but the owner of an input row reads and sends it; the same as hybrid(0)
    data             each rank computes all layers and reads all its input rows alone

A target is taken by its owner, or by the ranks in turn (strided). data(owner) and data_cached(strided) name the way
that is not the default.

>>> parse_strategy("hybrid(1)", num_layers=3)
StrategySpec(name='hybrid(1)', num_layers=3, split_layers=1, targets='owner')
>>> parse_strategy("data(owner)", num_layers=3).targets
'owner'
>>> parse_strategy("hybrid(3)", num_layers=3).name, parse_strategy("hybrid(0)", num_layers=3).name
('split', 'data_cached')
"""

import re
from dataclasses import dataclass
from typing import Literal

from gsplit.errors import InputError, explain

__all__ = ["AUTO", "StrategySpec", "TargetPlacement", "all_strategies", "parse_strategy"]

TargetPlacement = Literal["owner", "strided"]
"""The rank that takes a target of the mini-batch: its owner, or the ranks in turn."""

AUTO = "auto"
"""Stands for the strategy that the planner chooses, in place of a name."""

_EXPECTED = "split, data, data_cached or hybrid(k); data(owner), data_cached(strided)"


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy for a model of ``num_layers`` layers.

    ``split_layers``: the number of layers, from the input up, that are split among the owners of their vertices. Input
    rows are then read by their owners, also if it is 0. None: a rank reads and computes everything alone.
    """

    name: str
    num_layers: int
    split_layers: int | None
    targets: TargetPlacement = "owner"

    @property
    def needs_whole_graph(self) -> bool:
        """Whether a rank samples vertices that it does not own, so that it needs all edges."""
        return self.split_layers != self.num_layers

    @property
    def reads_own_rows(self) -> bool:
        """Whether a rank reads only the features of its own vertices."""
        return self.split_layers is not None

    @property
    def shuffles_input(self) -> bool:
        """Whether input rows are shuffled between owners, so that copies of other ranks' rows can be used."""
        return bool(self.split_layers)

    @property
    def exchanged_levels(self) -> tuple[int, ...]:
        """The layers whose source rows are exchanged between ranks; 0 for input rows.

        >>> parse_strategy("split", 3).exchanged_levels, parse_strategy("data_cached", 3).exchanged_levels
        ((0, 1, 2), (0,))
        """
        if self.split_layers is None:
            return ()
        return tuple(range(min(self.split_layers, self.num_layers - 1) + 1))

    def computes_each_vertex_once(self, num_ranks: int, num_replicas: int) -> bool:
        """Whether each vertex of a mini-batch is computed on one rank only, which BatchNorm requires."""
        return num_ranks == 1 or (not self.needs_whole_graph and num_replicas == 1)


def parse_strategy(text: str, num_layers: int) -> StrategySpec:
    """Parse the name of a strategy. ``num_layers``: of the model."""
    found = re.fullmatch(r"(split|data|data_cached|hybrid)(?:\((\w+)\))?", text) if isinstance(text, str) else None
    if found is None:
        raise InputError(explain("strategy", _EXPECTED, repr(text), "use one of these"))
    family = found[1]
    argument = found[2]
    if family == "hybrid":
        return _parse_hybrid(text, argument, num_layers)
    if argument not in (None, "owner", "strided") or (family == "split" and argument == "strided"):
        raise InputError(explain("strategy", _EXPECTED, repr(text), "use one of these"))
    if family == "split":
        return StrategySpec("split", num_layers, num_layers)
    usual: TargetPlacement = "strided" if family == "data" else "owner"
    targets: TargetPlacement = "owner" if (argument or usual) == "owner" else "strided"
    name = family if targets == usual else f"{family}({targets})"
    return StrategySpec(name, num_layers, None if family == "data" else 0, targets)


def _parse_hybrid(text: str, argument: str | None, num_layers: int) -> StrategySpec:
    if argument is None or not argument.isdecimal() or int(argument) > num_layers:
        expected = "hybrid(k), where k is the number of layers nearest the input that are split"
        raise InputError(explain("strategy", expected, repr(text), f"choose k from 0 to {num_layers}"))
    k = int(argument)
    name = {0: "data_cached", num_layers: "split"}.get(k, f"hybrid({k})")
    return StrategySpec(name, num_layers, k)


def all_strategies(num_layers: int) -> list[StrategySpec]:
    """Every strategy for a number of layers.

    >>> [spec.name for spec in all_strategies(2)]
    ['split', 'hybrid(1)', 'data_cached', 'data_cached(strided)', 'data', 'data(owner)']
    """
    names = ["split", *(f"hybrid({k})" for k in range(num_layers - 1, 0, -1)), "data_cached", "data_cached(strided)"]
    return [parse_strategy(name, num_layers) for name in (*names, "data", "data(owner)")]
