"""Strategies by name: for the loader's argument, the command line and the planner.

Every strategy computes the same step. They differ in one number, how many layers nearest the input are split among the
owners of their vertices, and in who takes which target:

    split            all layers are split
    hybrid(k)        the k layers nearest the input are split, the ones above are each rank's own
    data_cached      no layer is split, but the owner of an input row reads it and sends it: hybrid(0)
    data             every layer, and every input row, is each rank's own

Targets go to their owner, or to the ranks in turn: data(owner), data_cached(strided).

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

__all__ = ["StrategySpec", "TargetPlacement", "all_strategies", "parse_strategy"]

TargetPlacement = Literal["owner", "strided"]
"""Who takes a target of the mini-batch: its owner, or the ranks in turn."""

_EXPECTED = "split, data, data_cached or hybrid(k); data(owner), data_cached(strided)"


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy for a model of ``num_layers`` layers.

    ``split_layers``: how many layers, from the input up, are split among the owners of their vertices; input rows are
    read by their owners. None: no owner is asked for anything.
    """

    name: str
    num_layers: int
    split_layers: int | None
    targets: TargetPlacement = "owner"

    @property
    def needs_whole_graph(self) -> bool:
        """Whether a rank samples vertices it does not own, and so needs all edges."""
        return self.split_layers != self.num_layers

    @property
    def reads_own_rows(self) -> bool:
        """Whether a rank reads the features of its own vertices only."""
        return self.split_layers is not None

    @property
    def shuffles_input(self) -> bool:
        """Whether input rows are shuffled between owners; replicas of other ranks' rows are for these strategies."""
        return bool(self.split_layers)

    @property
    def exchanged_levels(self) -> tuple[int, ...]:
        """The layers whose source rows cross between ranks; 0: input rows.

        >>> parse_strategy("split", 3).exchanged_levels, parse_strategy("data_cached", 3).exchanged_levels
        ((0, 1, 2), (0,))
        """
        if self.split_layers is None:
            return ()
        return tuple(range(min(self.split_layers, self.num_layers - 1) + 1))

    def computes_each_vertex_once(self, num_ranks: int, num_replicas: int) -> bool:
        """Whether no vertex of a mini-batch is computed on two ranks, which is what BatchNorm needs."""
        return num_ranks == 1 or (not self.needs_whole_graph and num_replicas == 1)


def parse_strategy(text: str, num_layers: int) -> StrategySpec:
    """The strategy of a name; others are refused. ``num_layers``: of the model."""
    found = re.fullmatch(r"(split|data|data_cached|hybrid)(?:\((\w+)\))?", text) if isinstance(text, str) else None
    if found is None:
        raise InputError(explain("strategy", _EXPECTED, repr(text), "use one of these"))
    family, argument = found[1], found[2]
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
        expected = "hybrid(k), k being the number of layers nearest the input that are split"
        raise InputError(explain("strategy", expected, repr(text), f"choose k from 0 to {num_layers}"))
    k = int(argument)
    name = "data_cached" if k == 0 else "split" if k == num_layers else f"hybrid({k})"
    return StrategySpec(name, num_layers, k)


def all_strategies(num_layers: int) -> list[StrategySpec]:
    """Every strategy for a number of layers.

    >>> [spec.name for spec in all_strategies(2)]
    ['split', 'hybrid(1)', 'data_cached', 'data_cached(strided)', 'data', 'data(owner)']
    """
    names = ["split", *(f"hybrid({k})" for k in range(num_layers - 1, 0, -1)), "data_cached", "data_cached(strided)"]
    return [parse_strategy(name, num_layers) for name in (*names, "data", "data(owner)")]
