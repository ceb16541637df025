"""Damaging inputs at random: bytes, JSON documents and arrays. All from one generator, so that a number is an input."""

import copy
import json
import math
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["mutate_array", "mutate_bytes", "mutate_document", "mutate_text", "strange_value"]

_INTERESTING = (b"", b"\0", b"\xff" * 8, b"-1", b"9" * 25, b"[" * 3000, b"{", b"\x1b[2J", b"../../x", b"nan", b"1e999")
_INTEGERS = (
    -1,
    0,
    1,
    2,
    255,
    1 << 15,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
)
_TEXTS = (
    "",
    "x",
    "..",
    "../../secret",
    "/dev/zero",
    "\0",
    "\x1b[31m",
    "a\nb",
    "9" * 40,
    "x" * 3000,
    "\ud800",
    "ä≠",
    "nan",
)


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """One to three changes: a bit, a byte, a piece removed, doubled, moved or replaced, the end cut off."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randrange(len(found) + 1)
        end = min(len(found), at + int(random.expovariate(1 / 8)) + 1)
        kind = random.randrange(7)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = random.randrange(256)
        elif kind == 2:
            del found[at:end]
        elif kind == 3:
            found[at:at] = found[at:end] * random.choice((1, 2, 50))
        elif kind == 4:
            found[at:end] = random.choice(_INTERESTING)
        elif kind == 5:
            del found[at:]
        else:
            other = random.randrange(len(found) + 1)
            found[at:end] = found[other : other + end - at]
    return bytes(found)


def strange_value(random: Random) -> Any:
    """A value of any kind that a document may hold where another was meant."""
    kind = random.randrange(10)
    if kind < 3:
        return random.choice(_INTEGERS) + random.choice((-1, 0, 0, 1))
    if kind == 3:
        return random.choice((0.0, -0.0, 1e-320, 1e300, -1e300, math.inf, -math.inf, math.nan, 0.5, 1e16))
    if kind == 4:
        return random.choice(_TEXTS)
    if kind == 5:
        return random.choice((None, True, False))
    if kind == 6:
        many = [random.choice(_INTEGERS)] * random.choice((65, 3000))
        return many if random.random() < 0.02 else [strange_value(random) for _ in range(random.randrange(4))]
    if kind == 7:
        return {random.choice(_TEXTS): strange_value(random) for _ in range(random.randrange(3))}
    if kind == 8:
        return _deep(random.choice((3, 70, 200)))
    return 10 ** random.choice((20, 100, 400))


def _deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def _places(document: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a document."""
    found, pending = [], [document]
    while pending:
        value = pending.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        found += [(value, key) for key in keys]
        pending += [value[key] for key in keys]
    return found


def mutate_document(random: Random, text: str) -> Any:
    """A document, given as JSON, with one to three values replaced, nudged, removed, doubled or moved."""
    changed = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = _places(changed)
        if not places:
            return strange_value(random)
        holder, key = random.choice(places)
        kind = random.randrange(7)
        value = holder[key]
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = value + random.choice((-1, 1, -1000, 1000, 1 << 20))
        elif kind == 2:
            other, place = random.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                holder[key] = copy.deepcopy(other[place])
        elif kind == 3 and isinstance(holder, dict):
            holder[random.choice(_TEXTS)] = holder.pop(key)
        elif kind == 4 and isinstance(value, list):
            holder[key] = value * 2
        else:
            holder[key] = strange_value(random)
    return changed


def mutate_text(random: Random, text: str) -> bytes:
    """JSON with its values changed, its bytes changed, or both."""
    kind = random.randrange(4)
    if kind:
        text = json.dumps(mutate_document(random, text))
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(random, data) if kind in (0, 1) else data


def mutate_array(random: Random, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy with some elements replaced: by extremes, by other elements, in runs or single."""
    changed = array.copy()
    flat = changed.reshape(-1)
    if not flat.size:
        return changed
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(flat.size)
        stop = min(flat.size, at + random.choice((1, 1, 1, 7, flat.size)))
        kind = random.randrange(4)
        if kind == 0:
            flat[at:stop] = flat[random.randrange(flat.size)]
        elif kind == 1:
            flat[at:stop] = flat[at:stop][::-1].copy()
        elif flat.dtype.kind == "f":
            flat[at:stop] = random.choice((np.nan, np.inf, -1.0, 0.0, 1e30))
        elif flat.dtype.kind == "b":
            flat[at:stop] = ~flat[at:stop]
        else:
            limits = np.iinfo(flat.dtype)
            wanted = random.choice((limits.min, limits.max, -1, 0, 1, int(flat[at]) + 1, int(flat[at]) - 1, flat.size))
            flat[at:stop] = min(max(wanted, limits.min), limits.max)
    return changed
