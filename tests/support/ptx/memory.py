"""Memory as kernels see it: that of the tensors of a launch, and what the threads of a program share.

Every access is checked. An address must lie in a tensor that was passed, a write in one that the launch says it may
write to, and both at a multiple of the access's size. A thread may read or overwrite what another warp wrote to or read
from shared memory only after a barrier.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ptx.values import Values

__all__ = ["SHARED_BASE", "GlobalMemory", "KernelError", "SharedMemory", "WARP"]

SHARED_BASE = 1024
"""The address of shared memory; not 0, so that a register without an address does not lead there."""
WARP = 32
_ALIGNED = 16
_NOBODY, _SEVERAL = -1, -2
Addresses = NDArray[np.uint64]


class KernelError(RuntimeError):
    """A kernel did what a GPU does not define."""


def _check_alignment(addresses: Addresses, num_bytes: int, what: str) -> None:
    misaligned = addresses % np.uint64(num_bytes) != 0
    if misaligned.any():
        raise KernelError(
            f"misaligned {what} of {num_bytes} bytes: {np.count_nonzero(misaligned)} of {addresses.size} threads, "
            f"such as at {addresses[misaligned][0]:#x}"
        )


class _Spans:
    """The addresses of tensors: those that overlap are one span."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans: list[tuple[int, int]] = []
        for start, stop in sorted(_extent(tensor) for tensor in tensors if tensor.numel()):
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
            else:
                spans.append((start, stop))
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._stops = np.array([stop for _, stop in spans], np.uint64)
        self._views: dict[tuple[int, int], NDArray[Any]] = {}

    def locate(self, addresses: Addresses, num_bytes: int, what: str) -> list[tuple[int, Any]]:
        """The spans that these bytes lie in, each with those of the addresses that are there."""
        _check_alignment(addresses, num_bytes, what)
        span_of = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = span_of >= 0
        inside[inside] = addresses[inside] + np.uint64(num_bytes) <= self._stops[span_of[inside]]
        if not inside.all():
            raise KernelError(
                f"{what} of {num_bytes} bytes out of bounds: {np.count_nonzero(~inside)} of {inside.size} threads, "
                f"such as at {addresses[~inside][0]:#x}"
            )
        first = int(span_of[0])
        if (span_of == first).all():
            return [(first, slice(None))]
        return [(int(span), np.flatnonzero(span_of == span)) for span in np.unique(span_of)]

    def words(self, span: int, addresses: Addresses, num_bytes: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """A span's memory as words of so many bytes, and which of them these addresses are."""
        base = int(self._starts[span]) // _ALIGNED * _ALIGNED  # bytes before the span are never accessed
        key = (span, num_bytes)
        if key not in self._views:
            count = (int(self._stops[span]) - base) // num_bytes
            memory = (ctypes.c_uint8 * (count * num_bytes)).from_address(base)
            self._views[key] = np.ctypeslib.as_array(memory).view(f"u{num_bytes}")
        return self._views[key], ((addresses - np.uint64(base)) // np.uint64(num_bytes)).astype(np.int64)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor and the one behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class GlobalMemory:
    """The memory of ``readable`` tensors, of which ``writable`` ones may be changed; racing threads win at random."""

    def __init__(self, readable: Iterable[Tensor], writable: Iterable[Tensor], rng: np.random.Generator) -> None:
        self._readable = _Spans(readable)
        self._writable = _Spans(writable)
        self._rng = rng

    def load(self, addresses: Addresses, word_bytes: int, num_words: int) -> list[Values]:
        """Words one behind the other, at every address."""
        found = [np.empty(addresses.size, f"u{word_bytes}") for _ in range(num_words)]
        for span, here in self._readable.locate(addresses, word_bytes * num_words, "load"):
            memory, first = self._readable.words(span, addresses[here], word_bytes)
            for number, words in enumerate(found):
                words[here] = memory[first + number]
        return found

    def store(self, addresses: Addresses, words: Sequence[Values]) -> None:
        """The opposite of ``load``; where several threads write to an address, one of them wins."""
        word_bytes = words[0].dtype.itemsize
        order = self._rng.permutation(addresses.size)
        addresses = addresses[order]
        for span, here in self._writable.locate(addresses, word_bytes * len(words), "store"):
            memory, first = self._writable.words(span, addresses[here], word_bytes)
            for number, word in enumerate(words):
                memory[first + number] = np.broadcast_to(word, order.shape)[order][here]

    def update(self, addresses: Addresses, dtype: np.dtype[Any], change: Callable[[Values, Any], Values]) -> Values:
        """Atomic updates, one thread after the other; returns what each of them found.

        ``change(old, threads)`` is what some threads, at different addresses, make of what they find.
        """
        found = np.empty(addresses.size, dtype)
        for span, here in self._writable.locate(addresses, dtype.itemsize, "atomic"):
            memory, words = self._writable.words(span, addresses[here], dtype.itemsize)
            memory = memory.view(dtype)
            threads = np.arange(addresses.size)[here]
            order = self._rng.permutation(threads.size)
            threads, words = threads[order], words[order]
            turns = _turns(words)
            for turn in range(int(turns.max()) + 1):
                now = threads[turns == turn]
                at = words[turns == turn]
                found[now] = memory[at]
                memory[at] = change(found[now], now)
        return found


def _turns(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many earlier ones are equal, for each.

    >>> _turns(np.array([5, 3, 5, 5, 3])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(words, kind="stable")
    ordered = words[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    lengths = np.diff(np.append(starts, words.size))
    turns = np.empty_like(words)
    turns[order] = np.arange(words.size) - np.repeat(starts, lengths)
    return turns


class SharedMemory:
    """The shared memory of programs that run together, lane by lane; before a store it holds random bytes."""

    def __init__(self, num_programs: int, num_threads: int, num_bytes: int, rng: np.random.Generator) -> None:
        self._num_threads = num_threads
        self._bytes = rng.integers(0, 256, (num_programs, num_bytes), np.uint8)
        self._writer = np.full((num_programs, num_bytes), _NOBODY)
        self._reader = np.full((num_programs, num_bytes), _NOBODY)

    def load(self, lanes: NDArray[np.int64], addresses: Addresses, num_bytes: int) -> NDArray[np.uint8]:
        """Rows of bytes, one per lane."""
        at = self._locate(lanes, addresses, num_bytes, "load")
        warps = (lanes // WARP)[:, None]
        self._check((self._writer[at] == warps) | (self._writer[at] == _NOBODY), "loads what another warp has stored")
        before = self._reader[at]
        self._reader[at] = np.where((before == _NOBODY) | (before == warps), warps, _SEVERAL)
        shared_by_now = self._reader[at] != warps
        self._reader[at[0][shared_by_now], at[1][shared_by_now]] = _SEVERAL
        rows: NDArray[np.uint8] = self._bytes[at]
        return rows

    def store(self, lanes: NDArray[np.int64], addresses: Addresses, rows: NDArray[np.uint8]) -> None:
        """Write rows of bytes, one per lane."""
        at = self._locate(lanes, addresses, rows.shape[1], "store")
        warps = (lanes // WARP)[:, None]
        for other, what in ((self._reader[at], "loaded"), (self._writer[at], "stored")):
            mine = (other == warps) | (other == _NOBODY)
            same = (self._bytes[at] == rows) if what == "stored" else np.False_
            self._check(mine | same, f"stores over what another warp has {what}")
        self._writer[at] = warps
        self._bytes[at] = rows

    def pass_barrier(self, programs: NDArray[np.int64]) -> None:
        """All threads of these programs have arrived at a barrier."""
        self._writer[programs] = _NOBODY
        self._reader[programs] = _NOBODY

    def _locate(self, lanes: NDArray[np.int64], addresses: Addresses, num_bytes: int, what: str) -> Any:
        _check_alignment(addresses, num_bytes, f"shared {what}")
        first = addresses.astype(np.int64) - SHARED_BASE
        outside = (first < 0) | (first + num_bytes > self._bytes.shape[1])
        if outside.any():
            raise KernelError(
                f"shared {what} of {num_bytes} bytes out of bounds: {np.count_nonzero(outside)} of {outside.size} "
                f"threads, such as byte {first[outside][0]} of {self._bytes.shape[1]}"
            )
        columns = first[:, None] + np.arange(num_bytes)
        return np.broadcast_to((lanes // self._num_threads)[:, None], columns.shape), columns

    @staticmethod
    def _check(fine: NDArray[np.bool_], what: str) -> None:
        if not fine.all():
            raise KernelError(f"a thread {what} with no barrier between them")
