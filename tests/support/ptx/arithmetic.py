"""What instructions compute from registers to a register: the table of those that are accepted.

``OPERATIONS`` lists each of them with its modifiers and types. Floats are rounded as IEEE 754 says, but ``fma`` is
rounded twice, in float64 first. Approximate instructions give the nearest number, as the PTX manual allows.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np

from ptx.values import FLOATS, INTEGERS, Values, dtype_of

__all__ = ["OPERATIONS", "Operation", "select"]


class Operation(NamedTuple):
    """The type of the result, those of the sources, and the function of numpy arrays."""

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., Values]


def _shift_left(x: Values, count: Values) -> Values:
    width = 8 * x.dtype.itemsize
    shifted = x << np.minimum(count, width - 1).astype(x.dtype)
    return select(shifted, np.zeros_like(x), count < width)


def _shift_right(x: Values, count: Values) -> Values:
    """Beyond the width, bits of the sign or zeros."""
    width = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(count, width - 1).astype(x.dtype)
    return select(shifted, np.zeros_like(x), (count < width) | (x.dtype.kind == "i"))


def select(x: Values, y: Values, is_first: Values) -> Values:
    """``x`` where the predicate is true, else ``y``."""
    return np.where(is_first, x, y)


def _extract_bits(x: Values, first: Values, count: Values) -> Values:
    """Bits ``first`` to ``first + count - 1`` as a number with or without a sign."""
    width = np.uint32(8 * x.dtype.itemsize)
    if (first + count > width).any():
        raise NotImplementedError("PTX instruction bfe beyond the last bit")
    return _shift_right(_shift_left(x, width - count - first), width - count)


def _permute_bytes(low: Values, high: Values, selector: Values) -> Values:
    """Byte i of the result: the one of 8 that hexadecimal digit i of the selector names, from 8 on its signs."""
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    for place in range(4):
        digit = (selector >> np.uint32(4 * place)).astype(np.uint64)
        byte = (both >> (digit % np.uint64(8) * np.uint64(8))) & np.uint64(255)
        signs = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        result = result | (np.where(digit & np.uint64(8), signs, byte) << np.uint64(8 * place))
    return result.astype(np.uint32)


def _flush(x: Values) -> Values:
    """Numbers too small to be normal become 0 of their sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def _fused_multiply_add(x: Values, y: Values, z: Values) -> Values:
    """``x * y + z``: of float32 numbers with a product and a sum in float64."""
    return (x.astype(np.float64) * y + z).astype(x.dtype)


def _to_bf16(x: Values) -> Values:
    """The bits of the nearest bf16; ties go to the even one, and NaN to 0x7FFF."""
    bits = x.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest).astype(np.uint16)


def _pack_bf16(upper: Values, lower: Values) -> Values:
    return (_to_bf16(upper).astype(np.uint32) << np.uint32(16)) | _to_bf16(lower)


def _pack_f16(upper: Values, lower: Values) -> Values:
    bits_of_upper, bits_of_lower = (x.astype(np.float16).view(np.uint16) for x in (upper, lower))
    return (bits_of_upper.astype(np.uint32) << np.uint32(16)) | bits_of_lower


def _converted(name: str) -> Callable[[Values], Values]:
    dtype = dtype_of(name)
    return lambda x: x.astype(dtype)


def _widened(name: str) -> str:
    return f"{name[0]}{2 * int(name[1:])}"


def _wide_product(name: str) -> Callable[[Values, Values], Values]:
    dtype = dtype_of(_widened(name))
    return lambda x, y: x.astype(dtype) * y.astype(dtype)


_COMPARED: dict[str, Callable[[Values, Values], Values]] = {
    "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
"""Of floats: false where one of them is NaN."""
_OPPOSITES = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _integer_operations() -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for t in INTEGERS:
        table |= {
            f"add.{t}": Operation(t, (t, t), np.add),
            f"sub.{t}": Operation(t, (t, t), np.subtract),
            f"mul.lo.{t}": Operation(t, (t, t), np.multiply),
            f"mad.lo.{t}": Operation(t, (t, t, t), lambda x, y, z: x * y + z),
            f"min.{t}": Operation(t, (t, t), np.minimum),
            f"max.{t}": Operation(t, (t, t), np.maximum),
            f"shr.{t}": Operation(t, (t, "u32"), _shift_right),
        }
        table |= {f"setp.{name}.{t}": Operation("pred", (t, t), compare) for name, compare in _COMPARED.items()}
        if t[0] == "s":
            table[f"neg.{t}"] = Operation(t, (t,), np.negative)
        if t in ("s16", "u16", "s32", "u32"):
            wide, product_of = _widened(t), _wide_product(t)
            table[f"mul.wide.{t}"] = Operation(wide, (t, t), product_of)
            table[f"mad.wide.{t}"] = Operation(wide, (t, t, wide), lambda x, y, z, f=product_of: f(x, y) + z)
    for to, of in product(("s8", "u8", *INTEGERS), repeat=2):
        if to != of:
            table[f"cvt.{to}.{of}"] = Operation(to, (of,), _converted(to))
    for to, of in product(FLOATS, ("s8", "u8", *INTEGERS)):
        table[f"cvt.rn.{to}.{of}"] = Operation(to, (of,), _converted(to))
    return table


def _bit_operations() -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for t in ("pred", "b16", "b32", "b64"):
        table |= {
            f"and.{t}": Operation(t, (t, t), np.bitwise_and),
            f"or.{t}": Operation(t, (t, t), np.bitwise_or),
            f"xor.{t}": Operation(t, (t, t), np.bitwise_xor),
            f"not.{t}": Operation(t, (t,), np.invert),
        }
    for t in ("b16", "b32", "b64"):
        table[f"shl.{t}"] = Operation(t, (t, "u32"), _shift_left)
        table[f"setp.eq.{t}"] = Operation("pred", (t, t), np.equal)
        table[f"setp.ne.{t}"] = Operation("pred", (t, t), np.not_equal)
    for t in ("b16", "b32", "b64", *INTEGERS, *FLOATS):
        table[f"selp.{t}"] = Operation(t, (t, t, "pred"), select)
    table |= {f"bfe.{t}": Operation(t, (t, "u32", "u32"), _extract_bits) for t in ("s32", "u32")}
    table["prmt.b32"] = Operation("b32", ("b32", "b32", "b32"), _permute_bytes)
    return table


def _float_operations() -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for t in FLOATS:
        for rounding in ("", "rn."):
            table |= {
                f"add.{rounding}{t}": Operation(t, (t, t), np.add),
                f"sub.{rounding}{t}": Operation(t, (t, t), np.subtract),
                f"mul.{rounding}{t}": Operation(t, (t, t), np.multiply),
            }
        table |= {
            f"fma.rn.{t}": Operation(t, (t, t, t), _fused_multiply_add),
            f"div.rn.{t}": Operation(t, (t, t), np.divide),
            f"min.{t}": Operation(t, (t, t), np.fmin),  # a number where one of them is NaN
            f"max.{t}": Operation(t, (t, t), np.fmax),
            f"neg.{t}": Operation(t, (t,), np.negative),
            f"abs.{t}": Operation(t, (t,), np.abs),
            f"setp.num.{t}": Operation("pred", (t, t), lambda x, y: ~(np.isnan(x) | np.isnan(y))),
            f"setp.nan.{t}": Operation("pred", (t, t), lambda x, y: np.isnan(x) | np.isnan(y)),
        }
        for name, compare in _COMPARED.items():
            opposite = _COMPARED[_OPPOSITES[name]]
            table[f"setp.{name}.{t}"] = Operation("pred", (t, t), compare)
            table[f"setp.{name}u.{t}"] = Operation("pred", (t, t), lambda x, y, f=opposite: ~f(x, y))
    return table | {
        "abs.ftz.f32": Operation("f32", ("f32",), lambda x: _flush(np.abs(x))),
        "ex2.approx.f32": Operation("f32", ("f32",), np.exp2),
        "div.full.f32": Operation("f32", ("f32", "f32"), np.divide),
        "cvt.f64.f32": Operation("f64", ("f32",), _converted("f64")),
        "cvt.rn.f32.f64": Operation("f32", ("f64",), _converted("f32")),
        "cvt.f32.f16": Operation("f32", ("f16",), _converted("f32")),
        "cvt.rn.f16.f32": Operation("f16", ("f32",), _converted("f16")),
        "cvt.f32.bf16": Operation("f32", ("bf16",), lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32)),
        "cvt.rn.bf16.f32": Operation("bf16", ("f32",), _to_bf16),
        "cvt.rn.f16x2.f32": Operation("b32", ("f32", "f32"), _pack_f16),
        "cvt.rn.bf16x2.f32": Operation("b32", ("f32", "f32"), _pack_bf16),
    }


OPERATIONS: dict[str, Operation] = _integer_operations() | _bit_operations() | _float_operations()
