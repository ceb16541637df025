"""A covering array: few cases in which all values of every two options meet, where a case with both can run.

It is kept in ``cases.json``, which ``python -m tests.exactness cover`` writes. Greedy: a case begins with a pair that
no case has yet, and every other option takes the value that adds most pairs. A combination that raises is a case of its
own, with nothing but the options that raise.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from tests.exactness.case import AXES, REFUSED, Case, is_meaningful, refusal
from tests.exactness.graphs import ODD

__all__ = ["covering_cases", "missing_pairs", "more_cases", "refused_cases", "write_covering_cases"]

TABLE = Path(__file__).parent / "cases.json"
Pair = tuple[tuple[str, str], tuple[str, str]]
_TRIES, _CANDIDATES = 400, 8


def _pairs_of(case: Case) -> Iterator[Pair]:
    return itertools.combinations(((name, getattr(case, name)) for name in AXES), 2)


def _runs(case: Case) -> bool:
    return is_meaningful(case) and refusal(case) is None


def _complete(pair: Pair, draw: random.Random) -> Case | None:
    """A case with both values that runs: with the fewest other options, if there is one, or found by chance."""
    case = next((case for case in _with_least(dict(pair)) if _runs(case)), None)
    if case is not None:
        return case
    case = replace(Case(), **dict(pair))
    names = [name for name in AXES if name not in dict(pair)]
    for _ in range(_TRIES):
        name = draw.choice(names)
        case = replace(case, **{name: draw.choice(AXES[name])})
        if _runs(case):
            return case
    return None


def _grow(pair: Pair, missing: set[Pair], draw: random.Random) -> Case | None:
    """A case with the pair, and with as many other missing pairs as a greedy search finds."""
    case = _complete(pair, draw)
    if case is None:
        return None
    names = [name for name in AXES if name not in dict(pair)]
    draw.shuffle(names)
    for name in names:
        values = list(AXES[name])
        draw.shuffle(values)
        values.sort(key=partial(_num_new, case, name, missing), reverse=True)
        case = next(other for value in values if _runs(other := replace(case, **{name: value})))
    return case


def _num_new(case: Case, name: str, missing: set[Pair], value: str) -> int:
    """How many missing pairs a value of one option has with the others of a case."""
    found = 0
    is_behind = False
    for other in AXES:
        if other == name:
            is_behind = True
            continue
        option = (other, getattr(case, other))
        found += (((name, value), option) if is_behind else (option, (name, value))) in missing
    return found


def _num_missing(case: Case, missing: set[Pair]) -> int:
    return sum(pair in missing for pair in _pairs_of(case))


def _all_pairs() -> set[Pair]:
    return {
        ((a, v), (b, w)) for (a, of_a), (b, of_b) in itertools.combinations(AXES.items(), 2) for v in of_a for w in of_b
    }


def _find_cases(seed: int = 0) -> Iterator[Case]:
    draw = random.Random(seed)
    missing = _all_pairs()
    while missing:
        pair = min(missing)
        grown = [case for _ in range(_CANDIDATES) if (case := _grow(pair, missing, draw)) is not None]
        if not grown:
            missing.discard(pair)  # nothing that runs has both
            continue
        case = max(grown, key=lambda case: _num_missing(case, missing))
        missing -= set(_pairs_of(case))
        yield case


def write_covering_cases() -> None:
    """Find the cases anew, after an option or a refusal has changed."""
    lines = [json.dumps(case.chosen) for case in _find_cases()]
    TABLE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


@cache
def covering_cases() -> tuple[Case, ...]:
    """The cases of the table."""
    return tuple(Case(**chosen) for chosen in json.loads(TABLE.read_text()))


def missing_pairs() -> list[Pair]:
    """Pairs of values that no case of the table has, although a case with both can run."""
    found = _all_pairs() - {pair for case in covering_cases() for pair in _pairs_of(case)}
    draw = random.Random(0)
    return [pair for pair in sorted(found) if _complete(pair, draw) is not None]


@cache
def more_cases() -> tuple[Case, ...]:
    """Models and graphs that the array leaves to the whole grid, once each."""
    models = ("sage_max", "gatv2", "gin", "gine", "pna", "graphconv", "edgecnn", "rgat")
    of_models = [
        Case(
            model=model,
            types="three" if model == "rgat" else "one",
            values="stored" if model == "gine" else "none",
            strategy=strategy,
            jk="max" if model != "rgat" else "none",
            mesh=mesh,
        )
        for model, strategy, mesh in zip(
            models, itertools.cycle(AXES["strategy"]), itertools.cycle(AXES["mesh"]), strict=False
        )
    ]
    strategies = itertools.cycle(("split", "data", "data_cached", "hybrid(1)"))
    of_graphs = [
        Case(types=types, strategy=strategy, mesh="1 x 3") for types, strategy in zip(ODD, strategies, strict=False)
    ]
    return (*of_models, *of_graphs)


@cache
def refused_cases() -> tuple[Case, ...]:
    """For every row of ``REFUSED`` each combination of its values, with defaults where they are meaningful."""
    found: dict[Case, None] = {}
    for row in REFUSED:
        for values in itertools.product(*row.when.values()):
            chosen = dict(zip(row.when, values, strict=True))
            case = next((case for case in _with_least(chosen) if is_meaningful(case)), None)
            if case is not None and refusal(case) == row.text:
                found[case] = None
    return tuple(found)


def _with_least(chosen: dict[str, str]) -> Iterator[Case]:
    """Cases with some options, and none, one or two others that make them meaningful."""
    others = [
        {name: value} for name in ("task", "types", "model", "tier") if name not in chosen for value in AXES[name]
    ]
    for more in ({}, *others, *(a | b for a, b in itertools.combinations(others, 2))):
        yield Case(**chosen, **more)
