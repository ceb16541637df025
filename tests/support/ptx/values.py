"""Values of PTX as numpy has them: types by name, bits, and constants."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOATS", "INTEGERS", "Values", "bits_of", "constant", "dtype_of", "width_of"]

Values = NDArray[Any]
"""One value per lane, or a numpy scalar where all lanes have the same."""

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
FLOATS = ("f32", "f64")
_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def width_of(name: str) -> int:
    """Bits of a type; 1 of a predicate."""
    return {"pred": 1, "bf16": 16}.get(name) or int(name[1:])


def dtype_of(name: str) -> np.dtype[Any]:
    """What arrays of a type have; numpy has no bf16, so it is 16 bits."""
    if name == "pred":
        return np.dtype(np.bool_)
    return np.dtype(f"{'u' if name == 'bf16' else _KINDS[name[0]]}{width_of(name) // 8}")


def bits_of(values: Values) -> Values:
    """The same bits as unsigned integers; predicates stay what they are."""
    return values if values.dtype == np.bool_ else values.view(f"u{values.dtype.itemsize}")


def constant(text: str, name: str) -> Values:
    """A constant of a type: an integer, or the bits of a float behind 0f or 0d.

    >>> float(constant("0f3F800000", "f32")), int(constant("-1", "u32")), int(constant("0x10", "b64"))
    (1.0, 4294967295, 16)
    """
    is_float = re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text) is not None and len(text) == 2 + width_of(name) // 4
    if not is_float and re.fullmatch(r"-?(\d+|0x[0-9a-fA-F]+)U?", text) is None:
        raise NotImplementedError(f"PTX constant {text} of type {name}")
    number = int(text[2:], 16) if is_float else int(text.removesuffix("U"), 0)
    if name == "pred":
        return np.array(number != 0)
    return np.array(number & ((1 << width_of(name)) - 1), f"u{width_of(name) // 8}").view(dtype_of(name))
