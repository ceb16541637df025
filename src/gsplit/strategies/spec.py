"""How a strategy is named: by the loader's argument, the command line and the planner.

A name, and for some an argument in parentheses:

>>> parse_strategy("hybrid(1)", num_layers=3)
StrategySpec(name='hybrid(1)', family='hybrid', targets='owner', num_split_layers=1)
>>> parse_strategy("data(owner)").targets
'owner'
>>> parse_strategy("hybrid(3)", num_layers=3).name, parse_strategy("hybrid(0)", num_layers=3).name
('split', 'data_cached')
"""

import re
from dataclasses import dataclass
from typing import Literal

from gsplit.errors import InputError, explain

__all__ = ["FAMILIES", "Family", "StrategySpec", "parse_strategy"]

Family = Literal["split", "data", "data_cached", "hybrid"]
Placement = Literal["owner", "strided"]
FAMILIES: tuple[Family, ...] = ("split", "data", "data_cached", "hybrid")
_PLACEMENTS: dict[Family, Placement] = {
    "split": "owner",
    "data": "strided",
    "data_cached": "owner",
    "hybrid": "owner",
}
_EITHER: tuple[Family, ...] = ("data", "data_cached")
_EXPECTED = "split, data, data_cached or hybrid(k); data(owner), data_cached(strided)"


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy and its arguments.

    ``targets``: who takes a target of the mini-batch, its owner, or the ranks in turn. ``num_split_layers``: of a
    hybrid, the layers nearest the input that are split.
    """

    name: str
    family: Family
    targets: Placement
    num_split_layers: int = 0


def parse_strategy(text: str, num_layers: int | None = None) -> StrategySpec:
    """The strategy of a name; others are refused. ``num_layers``: of the model, where it is known."""
    found = re.fullmatch(r"(\w+)(?:\((\w+)\))?", text) if isinstance(text, str) else None
    family = next((known for known in FAMILIES if found and known == found[1]), None)
    if found is None or family is None:
        raise InputError(explain("strategy", _EXPECTED, repr(text), "use one of these"))
    argument, usual = found[2], _PLACEMENTS[family]
    if family == "hybrid":
        return _hybrid(text, argument, num_layers)
    if argument is None or argument == usual:
        return StrategySpec(family, family, usual)
    placement: Placement | None = "owner" if argument == "owner" else "strided" if argument == "strided" else None
    if placement is None or family not in _EITHER:
        raise InputError(explain("strategy", _EXPECTED, repr(text), "use one of these"))
    return StrategySpec(text, family, placement)


def _hybrid(text: str, argument: str | None, num_layers: int | None) -> StrategySpec:
    most = num_layers if num_layers is not None else 1 << 20
    if argument is None or not argument.isdecimal() or int(argument) > most:
        expected = "hybrid(k), k being the number of layers nearest the input that are split"
        fix = "write hybrid(1)" if num_layers is None else f"choose k from 0 to {num_layers}"
        raise InputError(explain("strategy", expected, repr(text), fix))
    k = int(argument)
    if k == 0:
        return StrategySpec("data_cached", "data_cached", "owner")
    if k == num_layers:
        return StrategySpec("split", "split", "owner")
    return StrategySpec(f"hybrid({k})", "hybrid", "owner", k)
