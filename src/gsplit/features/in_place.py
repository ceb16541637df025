"""Input rows that are read where they lie: a tensor of row numbers in a stored matrix, until its values are needed.

On one host every rank maps the whole file of features, so a rank can read the rows of all vertices itself. ``batch.x``
then holds no rows. A layer that can read rows through an index takes ``array`` and ``rows`` from it, and nothing is
copied. Every other torch function works on ``read()``, the rows gathered into a plain tensor, once.

Rows that are stored in fewer bits, float16, bfloat16 or int8 with scales, are decoded by who reads them: such a layer,
or ``read()``. ``x.to(torch.float32)`` has read nothing yet.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from gsplit.features.protocol import RowSource, RowsRead
from gsplit.features.sources import MappedRows, stored_form
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.rows import gather

__all__ = ["METADATA", "InPlaceRows"]

METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, Tensor.is_contiguous),
    *(Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.get_device),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, Tensor.is_inference),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf"),
            *("grad_fn", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "_version"),
        )
    ),
}
"""Functions of tensors that do not read their values."""


_DECODED = frozenset({torch.float32, torch.float64})
"""The types that kernels decode rows to."""
_STORED = _DECODED | {torch.float16, torch.bfloat16, torch.int8}
"""The types that kernels decode rows from."""

OnRead = Callable[[RowsRead, int], None]
"""Called with what was read from the store, and the bytes of the gathered rows."""


class _StoredRows:
    """Rows of a stored matrix as ``dtype``, gathered at most once, however many tensors refer to them."""

    def __init__(
        self, source: RowSource, ids: Tensor, pool: BufferPool, on_read: OnRead | None, dtype: torch.dtype
    ) -> None:
        stored, scales = stored_form(source)
        assert isinstance(stored, MappedRows) and (scales is None or isinstance(scales, MappedRows))
        self.dtype = dtype
        self.rows = stored.rows_of(ids)
        self.gathered: Tensor | None = None
        self._source = source
        self._stored = stored
        self._scales = scales
        self._ids = ids
        self._pool = pool
        self._on_read = on_read
        self._check_files()

    def _check_files(self) -> None:
        for mapped in (self._stored, self._scales):
            if mapped is not None:
                mapped.check_files()

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._stored.row_shape

    @property
    def array(self) -> Tensor:
        """All stored rows, or the gathered ones."""
        if self.gathered is not None:
            return self.gathered
        self._check_files()
        return self._stored.matrix

    @property
    def scales(self) -> Tensor | None:
        """The scales of the rows of ``array``, if these are scaled."""
        return None if self._scales is None or self.gathered is not None else self._scales.matrix

    def convert(self, dtype: torch.dtype) -> "_StoredRows | None":
        """The same rows as another type; None if they cannot be decoded to it."""
        if dtype == self.dtype:
            return self
        if dtype not in _DECODED or self._stored.dtype not in _STORED:
            return None
        return _StoredRows(self._source, self._ids, self._pool, self._on_read, dtype)

    @_disable_dynamo  # a compiled submodule may take the rows
    @torch.inference_mode(False)
    def gather(self) -> Tensor:
        gathered = self._pool.empty((self.rows.numel(), *self.row_shape), self.dtype)
        stored = self.array
        gather(stored, self.rows, gathered, self.scales)
        read = RowsRead(rows=self.rows.numel(), num_bytes=gathered.numel() * stored.element_size())
        self.gathered = gathered
        self.rows = torch.arange(self.rows.numel(), device=gathered.device)
        if self._on_read is not None:
            self._on_read(read, gathered.nbytes)
        return gathered


class InPlaceRows(Tensor):
    """The rows of some ids of a source; see the module. Row k is ``array[rows[k]]``, as the type of this tensor.

    ``source``: ``MappedRows``, or ``ScaledRows`` of them. ``on_read`` is called when the rows are gathered, into memory
    of ``pool``. From then on ``array`` are the gathered rows, in order, so that a layer sees what a torch function has
    written to them. Its first rows, such as ``x[:n]``, are in place too, and are gathered with it. ``x.to(dtype)`` is
    in place too, and is gathered by itself.
    """

    _stored: _StoredRows
    _part: slice

    @staticmethod
    def __new__(cls, source: RowSource, ids: Tensor, pool: BufferPool, on_read: OnRead | None = None) -> Self:
        return cls._of(_StoredRows(source, ids, pool, on_read, source.dtype), slice(None))

    @classmethod
    def _of(cls, stored: _StoredRows, part: slice) -> Self:
        shape = (stored.rows[part].numel(), *stored.row_shape)
        found: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=stored.dtype, device=stored.rows.device)
        found._stored = stored
        found._part = part
        return found

    @property
    def array(self) -> Tensor:
        """All stored rows in their stored type, which must not be written to; or the gathered rows."""
        return self._stored.array

    @property
    def scales(self) -> Tensor | None:
        """What the rows of ``array`` are multiplied by, one number per row; None if they are not stored so."""
        return self._stored.scales

    @property
    def rows(self) -> Tensor:
        """The row of ``array`` for each row of this tensor."""
        return self._stored.rows[self._part]

    def read(self) -> Tensor:
        """The rows as a plain tensor."""
        gathered = self._stored.gathered
        if gathered is None:
            gathered = self._stored.gather()
        return gathered if self._part == slice(None) else gathered[self._part]

    @property
    def is_read(self) -> bool:
        """Whether the rows were gathered."""
        return self._stored.gathered is not None

    def is_cast_of(self, other: "InPlaceRows") -> bool:
        """Whether these are the rows of another tensor, of any type, and were not written to."""
        ours, theirs = self._stored, other._stored
        is_same = ours._source is theirs._source and ours._ids is theirs._ids and self._part == other._part
        return is_same and self._version == 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rows = args[0] if args else None
        if isinstance(rows, InPlaceRows) and rows._stored.gathered is None:
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if rows._part == slice(None) and not kwargs and len(args) == 2:
                if func is Tensor.__getitem__ and _is_prefix(args[1]):
                    return cls._of(rows._stored, args[1])
                converted = rows._stored.convert(args[1]) if func is Tensor.to else None
                if converted is rows._stored:
                    return rows
                if converted is not None:
                    return cls._of(converted, slice(None))
        return func(*map(_read, args), **{name: _read(value) for name, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function without a class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by code that does not call ``__torch_function__``: scripted functions, autograd functions."""
        return func(*map(_read, args), **{name: _read(value) for name, value in (kwargs or {}).items()})


def _is_prefix(index: object) -> bool:
    return isinstance(index, slice) and index.start is None and index.step is None and isinstance(index.stop, int)


def _read(value: Any) -> Any:
    """An argument with rows gathered, also in a list or tuple of tensors, such as that of ``torch.cat``."""
    if isinstance(value, InPlaceRows):
        return value.read()
    if isinstance(value, list | tuple) and any(isinstance(each, InPlaceRows) for each in value):
        return [_read(each) for each in value] if isinstance(value, list) else tuple(map(_read, value))
    return value
