"""Loops over contiguous rows for kernels: sums of products in several lanes, in one fixed order, and prefetching.

A compiler may not reorder a sum of floats, so a plain loop adds one product at a time, 3 to 6 times slower than the
processor can; and ``fastmath``, which would let it, is forbidden here (``kernels.jit``). So the order is written down:
lane l of L adds the products l, l + L, l + 2 L, ..., the lanes are added in halves, and what is left over comes last.
L is 64 bytes of numbers, whatever the processor has: the result is the same on all of them. ``add_scaled`` and
``add_rows`` have no such choice, but loops over rows that are slices of larger arrays are often not vectorised, and
these always are.

Rows that are only read may be stored in fewer bits than the row that they are added or copied to. They are decoded as
they are read: words of int16 are float16, words of uint16 are bfloat16 (numba has neither type), and a row of int8 is a
tuple of the row and its float32 scale. Values are those of torch's conversions. float16 is decoded by integer
operations: not every processor has an instruction for it, and where it is missing LLVM calls a function that numba does
not have.

``prefetch_row`` tells the processor which row a kernel reads some iterations later. Rows of a mini-batch lie anywhere
in memory, so without it a kernel waits for every one of them.
"""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from gsplit.kernels.jit import kernel

__all__ = ["add_rows", "add_scaled", "copy_row", "dot", "prefetch_at", "prefetch_row", "row_at", "with_scale"]

_LANE_BYTES = 64
_LINE_BYTES = 64


_FLOATS = (types.float32, types.float64)
_WORD = ir.IntType(32)


def _is_row(kind: Any, dtypes: tuple[Any, ...] = _FLOATS) -> bool:
    return isinstance(kind, types.Array) and kind.ndim == 1 and kind.layout == "C" and kind.dtype in dtypes


def _is_tuple(kind: Any) -> bool:
    return isinstance(kind, types.BaseTuple)  # type: ignore[attr-defined]


def _is_stored_row(kind: Any) -> bool:
    """Whether ``_Rows`` can read a row as floats."""
    if _is_tuple(kind):
        return len(kind) == 2 and _is_row(kind[0], (types.int8,)) and kind[1] == types.float32
    return _is_row(kind, (*_FLOATS, types.int16, types.uint16))


def _splat(builder: Any, value: Any, shape: Any) -> Any:
    """A value in all lanes of a vector; the value itself if ``shape`` is not a vector."""
    if not isinstance(shape, ir.VectorType):
        return value
    lanes = ir.Constant(shape, ir.Undefined)
    for lane in range(shape.count):
        lanes = builder.insert_element(lanes, value, ir.Constant(_WORD, lane))
    return lanes


def _like(shape: Any, element: Any) -> Any:
    """The type of as many elements as ``shape`` has: a vector or a single one."""
    return ir.VectorType(element, shape.count) if isinstance(shape, ir.VectorType) else element


def _decode_bfloat16(builder: Any, words: Any) -> Any:
    """bfloat16 is the upper half of a float32."""
    bits = builder.zext(words, _like(words.type, _WORD))
    bits = builder.shl(bits, _splat(builder, _WORD(16), bits.type))
    return builder.bitcast(bits, _like(words.type, ir.FloatType()))


def _decode_float16(builder: Any, words: Any) -> Any:
    """float16 has 10 bits of fraction and 5 of exponent, with bias 15; float32 has 23 and 8, with bias 127.

    Exponent 31 (infinities and NaN) becomes 255. Exponent 0 is fraction * 2^-24, computed as (1 + fraction) * 2^-14 -
    2^-14, which no mode of the processor for small numbers changes.
    """
    whole = _like(words.type, _WORD)
    floats = _like(words.type, ir.FloatType())

    def constant(value: int) -> Any:
        return _splat(builder, _WORD(value), whole)

    bits = builder.zext(words, whole)
    magnitude = builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13))
    exponent = builder.and_(magnitude, constant(31 << 23))
    shifted = builder.bitcast(builder.add(magnitude, constant((1 + 127 - 15) << 23)), floats)
    small = builder.fsub(shifted, _splat(builder, ir.Constant(ir.FloatType(), 2.0**-14), floats))
    bias = builder.select(
        builder.icmp_unsigned("==", exponent, constant(31 << 23)),
        constant((255 - 31) << 23),
        constant((127 - 15) << 23),
    )
    is_small = builder.icmp_unsigned("==", exponent, constant(0))
    found = builder.select(is_small, builder.bitcast(small, whole), builder.add(magnitude, bias))
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(found, sign), floats)


def _add_halves(builder: Any, lanes: Any, count: int) -> Any:
    """The sum of all lanes: the lower half plus the upper half, until one is left."""
    index = ir.IntType(32)
    while count > 1:
        count //= 2
        places = [ir.Constant(ir.VectorType(index, count), list(range(f, f + count))) for f in (0, count)]
        low, high = (builder.shuffle_vector(lanes, lanes, half) for half in places)
        lanes = builder.fadd(low, high)
    return builder.extract_element(lanes, ir.Constant(index, 0))


class _Rows:
    """Contiguous rows of one length inside a kernel that is being compiled: vectors and single numbers of them.

    Numbers are read as those of the first row, which is the one that is written to. Its type gives the lanes.
    """

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        self._builder = builder
        self._kinds = []
        self._scales = []
        arrays = []
        for kind, value in zip(kinds, values, strict=True):
            is_scaled = _is_tuple(kind)
            self._kinds.append(kind[0] if is_scaled else kind)
            self._scales.append(builder.extract_value(value, 1) if is_scaled else None)
            row = builder.extract_value(value, 0) if is_scaled else value
            arrays.append(context.make_array(self._kinds[-1])(context, builder, row))
        self._data = [array.data for array in arrays]
        self.count = _LANE_BYTES // (self._kinds[0].dtype.bitwidth // 8)
        self.vector = ir.VectorType(self._data[0].type.pointee, self.count)
        self.size = builder.extract_value(arrays[0].shape, 0)
        step = ir.Constant(self.size.type, self.count)
        self.whole = builder.mul(builder.sdiv(self.size, step), step)

    def vectors(self) -> Any:
        """A loop over whole vectors."""
        zero, step = (ir.Constant(self.size.type, value) for value in (0, self.count))
        return cgutils.for_range_slice(self._builder, zero, self.whole, step)

    def rest(self) -> Any:
        """A loop over what is left, one by one."""
        return cgutils.for_range_slice(self._builder, self.whole, self.size, ir.Constant(self.size.type, 1))

    def each(self, emit: Callable[[Any, bool], None]) -> None:
        """Emit the instructions of ``emit(place, vector)`` for whole vectors, and for what is left."""
        with self.vectors() as (place, _):
            emit(place, True)
        with self.rest() as (place, _):
            emit(place, False)

    def _pointer(self, row: int, place: Any, vector: bool) -> Any:
        pointer = self._builder.gep(self._data[row], [place])
        shape = _like(self.vector, pointer.type.pointee)
        return self._builder.bitcast(pointer, shape.as_pointer()) if vector else pointer

    def load(self, row: int, place: Any, vector: bool) -> Any:
        dtype = self._kinds[row].dtype
        stored = self._builder.load(self._pointer(row, place, vector), align=dtype.bitwidth // 8)
        return stored if dtype == self._kinds[0].dtype else self._decode(row, stored)

    def _decode(self, row: int, stored: Any) -> Any:
        """Numbers of a row as those of the first row."""
        builder = self._builder
        dtype = self._kinds[row].dtype
        floats = _like(stored.type, ir.FloatType())
        if dtype == types.float64:
            return builder.fptrunc(stored, floats)
        if dtype == types.int8:
            stored = builder.fmul(builder.sitofp(stored, floats), _splat(builder, self._scales[row], floats))
        elif dtype != types.float32:
            stored = (_decode_float16 if dtype.signed else _decode_bfloat16)(builder, stored)
        is_double = self._kinds[0].dtype == types.float64
        return builder.fpext(stored, _like(stored.type, ir.DoubleType())) if is_double else stored

    def store(self, value: Any, row: int, place: Any, vector: bool) -> None:
        align = self._kinds[row].dtype.bitwidth // 8
        self._builder.store(value, self._pointer(row, place, vector), align=align)


def _emit_dot(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of ``dot``: a loop over whole vectors, their lanes added up, a loop over the rest."""
    rows = _Rows(context, builder, signature.args, args)

    def add_product(total: Any, place: Any, vector: bool) -> None:
        product = builder.fmul(rows.load(0, place, vector), rows.load(1, place, vector))
        builder.store(builder.fadd(builder.load(total), product), total)

    lanes = cgutils.alloca_once_value(builder, ir.Constant(rows.vector, [0.0] * rows.count))
    with rows.vectors() as (place, _):
        add_product(lanes, place, True)
    total = cgutils.alloca_once_value(builder, _add_halves(builder, builder.load(lanes), rows.count))
    with rows.rest() as (place, _):
        add_product(total, place, False)
    return builder.load(total)


def _emit_add_scaled(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of ``add_scaled``."""
    rows = _Rows(context, builder, (signature.args[0], signature.args[2]), (args[0], args[2]))
    factors = _splat(builder, args[1], rows.vector)

    def add(place: Any, vector: bool) -> None:
        product = builder.fmul(factors if vector else args[1], rows.load(1, place, vector))
        rows.store(builder.fadd(rows.load(0, place, vector), product), 0, place, vector)

    rows.each(add)
    return context.get_dummy_value()


def _emit_add_rows(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of ``add_rows``."""
    rows = _Rows(context, builder, signature.args, args)

    def add(place: Any, vector: bool) -> None:
        total = builder.fadd(rows.load(0, place, vector), rows.load(1, place, vector))
        rows.store(builder.fadd(total, rows.load(2, place, vector)), 0, place, vector)

    rows.each(add)
    return context.get_dummy_value()


def _emit_decode(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of ``_decode``."""
    rows = _Rows(context, builder, signature.args, args)
    rows.each(lambda place, vector: rows.store(rows.load(1, place, vector), 0, place, vector))
    return context.get_dummy_value()


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def _decode(typing_context: Any, target: Any, row: Any) -> Any:
    if _is_row(target) and _is_stored_row(row):
        return types.void(target, row), _emit_decode
    return None


def copy_row(target: npt.NDArray[Any], row: Any) -> None:
    """``target[c] = row[c]`` for rows of one length and type, or for contiguous ones, of which ``row`` is decoded.

    To be called inside kernels.
    """
    raise AssertionError  # compiled below


@overload(copy_row, strict=False)  # type: ignore[misc, untyped-decorator, unused-ignore]
def _copy_row(target: Any, row: Any) -> Callable[[Any, Any], None]:
    if not isinstance(row, types.Array) or row.dtype != target.dtype:
        return lambda target, row: _decode(target, row)

    def copy(target: Any, row: Any) -> None:
        for j in range(target.size):
            target[j] = row[j]

    return copy


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def add_rows(typing_context: Any, target: Any, one: Any, other: Any) -> Any:
    """``target[c] += one[c]``, then ``target[c] += other[c]``, in one pass, for contiguous rows as ``add_scaled``'s."""
    if _is_row(target) and _is_stored_row(one) and _is_stored_row(other):
        return types.void(target, one, other), _emit_add_rows
    return None


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def dot(typing_context: Any, a: Any, b: Any) -> Any:
    """``sum(a[c] * b[c])`` of two contiguous rows of one length and type, to be called inside kernels."""
    if _is_row(a) and a == b:
        return a.dtype(a, b), _emit_dot
    return None


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def add_scaled(typing_context: Any, target: Any, factor: Any, row: Any) -> Any:
    """``target[c] += factor * row[c]`` for contiguous rows of one length that do not overlap. ``row`` is decoded."""
    if _is_row(target) and _is_stored_row(row) and factor == target.dtype:
        return types.void(target, factor, row), _emit_add_scaled
    return None


def _emit_prefetch(builder: Any, first: Any, num_bytes: Any) -> None:
    """LLVM instructions: a hint for every cache line of some bytes."""
    byte = ir.IntType(8)
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    zero, line = (ir.Constant(num_bytes.type, value) for value in (0, _LINE_BYTES))
    with cgutils.for_range_slice(builder, zero, num_bytes, line) as (place, _):
        builder.call(hint, [builder.gep(first, [place]), word(0), word(3), word(1)])  # to read, soon, in all caches


def _emit_prefetch_row(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of ``prefetch_row``."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    size = builder.extract_value(array.strides, 0).type
    num_bytes = ir.Constant(size, signature.args[0].dtype.bitwidth // 8)
    for dimension in range(1, signature.args[0].ndim):
        num_bytes = builder.mul(num_bytes, builder.extract_value(array.shape, dimension))
    begin = builder.mul(builder.sext(args[1], size), builder.extract_value(array.strides, 0))
    first = builder.gep(builder.bitcast(array.data, ir.IntType(8).as_pointer()), [begin])
    _emit_prefetch(builder, first, num_bytes)
    return context.get_dummy_value()


def _emit_prefetch_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of ``prefetch_at``."""
    _emit_prefetch(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()), args[1])
    return context.get_dummy_value()


def _emit_pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    return types.CPointer(like.dtype)(address, like), _emit_pointer  # type: ignore[attr-defined]


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def prefetch_row(typing_context: Any, array: Any, row: Any) -> Any:
    """A hint that ``array[row]`` will be read soon. It reads nothing, so any number is harmless."""
    has_rows = isinstance(array, types.Array) and array.ndim > 1 and array.layout in ("C", "A")
    if has_rows and isinstance(row, types.Integer) and isinstance(array.dtype, types.Number):
        return types.void(array, row), _emit_prefetch_row
    return None


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def prefetch_at(typing_context: Any, address: Any, num_bytes: Any) -> Any:
    """``prefetch_row`` for the bytes from an address on."""
    if address == types.int64 and num_bytes == types.int64:
        return types.void(address, num_bytes), _emit_prefetch_at
    return None


@kernel
def row_at(address: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The row of the length and type of ``like`` that begins at an address.

    For rows that lie in several arrays, whose number varies: a tuple of arrays would be compiled anew for every number.
    The caller has checked that the row is there, because nothing else can.
    """
    row: npt.NDArray[Any] = carray(_pointer(address, like), like.shape)
    return row


def with_scale(row: npt.NDArray[Any], scales: npt.NDArray[Any] | None, number: int) -> Any:
    """A row as the loops above read it: with its scale, if rows have scales. To be called inside kernels."""
    raise AssertionError  # compiled below


@overload(with_scale, strict=False)  # type: ignore[misc, untyped-decorator, unused-ignore]
def _with_scale(row: Any, scales: Any, number: Any) -> Callable[[Any, Any, Any], Any]:
    if isinstance(scales, types.Array):
        return lambda row, scales, number: (row, scales[number])
    return lambda row, scales, number: row
