"""Memory as kernels see it: some tensors of the host, and every access to them is checked.

An address must lie in a tensor that was passed, a write in one that may be written to, and both at a multiple of the
size of the access.
"""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ptx.values import Values

__all__ = ["Addresses", "CheckedMemory", "KernelError"]

Addresses = NDArray[np.uint64]
_FIRST = 4096  # nothing is below it
_LAST = 1 << 47


class KernelError(RuntimeError):
    """A kernel did what a GPU does not define."""


def _address_space(word_bytes: int) -> NDArray[Any]:
    """All addresses of the process from ``_FIRST`` on, as words. Only those of tensors may be used."""
    size = (_LAST - _FIRST) // word_bytes
    interface = {"data": (_FIRST, False), "shape": (size,), "typestr": f"<u{word_bytes}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


_WORDS = {word_bytes: _address_space(word_bytes) for word_bytes in (1, 2, 4, 8)}


def _indices(addresses: Addresses, word_bytes: int) -> NDArray[np.int64]:
    return (addresses.astype(np.int64) - _FIRST) // word_bytes


class _Spans:
    """The addresses of tensors: those that overlap are one span."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans: list[list[int]] = [[0, 0]]
        for start, stop in sorted(_extent(tensor) for tensor in tensors if tensor.numel()):
            if start < spans[-1][1]:
                spans[-1][1] = max(stop, spans[-1][1])
            else:
                spans.append([start, stop])
        self._starts, self._stops = np.array(spans, np.uint64).T

    def check(self, addresses: Addresses, num_bytes: int, what: str) -> None:
        """Raise an error for an access of some threads."""
        span_of = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = addresses + np.uint64(num_bytes) > self._stops[span_of]
        for wrong, name in ((outside, "out of bounds"), (addresses % np.uint64(num_bytes) != 0, "misaligned")):
            if wrong.any():
                raise KernelError(
                    f"{what} of {num_bytes} bytes {name}: {np.count_nonzero(wrong)} of {wrong.size} threads, "
                    f"such as at {addresses[wrong][0]:#x}"
                )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor and the one behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class CheckedMemory:
    """The memory of ``readable`` tensors, of which ``writable`` ones may be changed; racing threads come in any order.

    ``may_race``: whether threads may store different words to one address at the same time; one of them wins.
    """

    def __init__(
        self, readable: Iterable[Tensor], writable: Iterable[Tensor], rng: np.random.Generator, *, may_race: bool
    ) -> None:
        self._readable = _Spans(readable)
        self._writable = _Spans(writable)
        self._rng = rng
        self._may_race = may_race

    def load(self, addresses: Addresses, word_bytes: int, num_words: int) -> list[Values]:
        """Words one behind the other, at every address."""
        self._readable.check(addresses, word_bytes * num_words, "load")
        first = _indices(addresses, word_bytes)
        return [_WORDS[word_bytes][first + number] for number in range(num_words)]

    def store(self, addresses: Addresses, words: Sequence[Values]) -> None:
        """The opposite of ``load``."""
        word_bytes = words[0].dtype.itemsize
        self._writable.check(addresses, word_bytes * len(words), "store")
        order = self._rng.permutation(addresses.size)
        first = _indices(addresses, word_bytes)[order]
        for number, word in enumerate(words):
            _WORDS[word_bytes][first + number] = word[order]
            if not self._may_race and (_WORDS[word_bytes][first + number] != word[order]).any():
                raise KernelError("threads store different words to one address")

    def update(self, addresses: Addresses, dtype: np.dtype[Any], change: Callable[[Values, Any], Values]) -> Values:
        """Atomic updates, one thread after the other; returns what each of them found.

        ``change(old, threads)`` is what some threads, at different addresses, make of what they find.
        """
        self._writable.check(addresses, dtype.itemsize, "atomic")
        memory, words = _WORDS[dtype.itemsize].view(dtype), _indices(addresses, dtype.itemsize)
        old = np.empty(addresses.size, dtype)
        waiting = self._rng.permutation(addresses.size)
        while waiting.size:
            _, first = np.unique(words[waiting], return_index=True)  # of each address
            now = waiting[first]
            old[now] = memory[words[now]]
            memory[words[now]] = change(old[now], now)
            waiting = np.delete(waiting, first)
        return old
