"""Copies many small host tensors to a device at once, through one pinned buffer.

A batch has a dozen index tensors of a few hundred kilobytes. A copy of each from ordinary memory would make the host
wait for the device. Here all are written into one pinned buffer (``PinnedBuffers.pin``). One asynchronous copy moves
them to the device, where they are views of one tensor (``PinnedMemory.to``). ``pin`` uses the host only and may run in
another thread; ``to`` launches the copy. A buffer is used again only after its tensors have been copied.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsplit.device.devices import StreamEvent

__all__ = ["PinnedBuffers", "PinnedMemory", "map_tensors"]

P = TypeVar("P")
_ALIGNMENT = 64
_SLACK = 1.25


def map_tensors(change: Callable[[Tensor], Tensor], value: P) -> P:
    """Apply a function to every tensor in dataclasses and tuples. Other objects, such as process groups, stay."""
    return _map(change, value)  # type: ignore[no-any-return]


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map(change, inner) for inner in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    changed = {name: _map(change, inner) for name, inner in held.items()}
    return value if all(changed[name] is held[name] for name in held) else type(value)(**changed)


@dataclass
class _Buffer:
    """Pinned memory, and the end of the last copy from it."""

    data: Tensor
    copied: StreamEvent | None = None


@dataclass(frozen=True)
class PinnedMemory:
    """The first ``num_bytes`` of a pinned buffer, which are reserved for some tensors until these are moved."""

    buffer: _Buffer
    num_bytes: int
    free: deque[_Buffer]

    def to(self, device: torch.device, value: P) -> P:
        """Move all tensors of a value from this memory to a device, in one copy, without a wait. Call it once."""
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        memory.copy_(self.buffer.data[: self.num_bytes], non_blocking=True)
        self.buffer.copied = StreamEvent(device)
        self.free.append(self.buffer)

        def move(tensor: Tensor) -> Tensor:
            first = tensor.storage_offset() * tensor.element_size()
            return memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return map_tensors(move, value)


class PinnedBuffers:
    """Pinned buffers that are used in turn. ``count`` are made before one is used again; more if all are in use.

    Sampling threads may share them.
    """

    def __init__(self, count: int) -> None:
        self._num_new = count
        self._free: deque[_Buffer] = deque()
        self._taking = threading.Lock()  # a buffer that is returned is appended, which needs none

    def pin(self, value: P) -> tuple[P, PinnedMemory]:
        """Copy every tensor of a value into a buffer that is not in use. Returns the value with the copies."""
        tensors: dict[int, Tensor] = {}
        map_tensors(lambda tensor: tensors.setdefault(id(tensor), tensor), value)
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
        num_bytes = max(sum(sizes), _ALIGNMENT)
        buffer = self._take(num_bytes)
        pinned: dict[int, Tensor] = {}
        first = 0
        for (key, tensor), size in zip(tensors.items(), sizes, strict=True):
            copy = buffer.data[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            pinned[key] = copy.copy_(tensor)
            first += size
        return map_tensors(lambda tensor: pinned[id(tensor)], value), PinnedMemory(buffer, num_bytes, self._free)

    def _take(self, num_bytes: int) -> _Buffer:
        buffer: _Buffer | None = None
        with self._taking:
            self._num_new -= 1
            if self._num_new < 0 and self._free:
                buffer = self._free.popleft()  # the one whose copy was launched first
        if buffer is not None:
            if buffer.copied is not None:
                buffer.copied.wait()
            if buffer.data.numel() >= num_bytes:
                return buffer
        return _Buffer(torch.empty(int(num_bytes * _SLACK), dtype=torch.uint8, device="cpu", pin_memory=True))
