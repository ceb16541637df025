"""Everything a batch needs on a device, in one copy: many small host tensors in one pinned buffer.

A batch is a dozen index tensors of a few hundred kilobytes. Copied one by one from ordinary memory each makes the host
wait for the device. Here they are laid side by side in a pinned buffer, cross the bus in one asynchronous copy, and are
views of one device tensor on the other side. Packing is work of the host alone and may run in another thread;
``unpack`` launches the copy. A buffer is written again only when it was unpacked and its copy is over.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsplit.devices import StreamEvent

__all__ = ["Packed", "PinnedBuffers", "map_tensors"]

P = TypeVar("P")
_ALIGNMENT = 64
_SLACK = 1.25


def map_tensors(change: Callable[[Tensor], Tensor], value: P) -> P:
    """Dataclasses and tuples with every tensor in them changed; all else, such as process groups, as it is."""
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


def _tensors(value: object) -> list[Tensor]:
    """Every tensor of a value, once."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return found.setdefault(id(tensor), tensor)

    map_tensors(note, value)
    return list(found.values())


@dataclass
class _Buffer:
    """Pinned memory, and the end of the last copy out of it."""

    data: Tensor
    copied: StreamEvent | None = None


@dataclass(frozen=True)
class Packed:
    """Tensors of some value in pinned memory, which is theirs until they are unpacked."""

    value: Any
    num_bytes: int
    places: dict[int, int]
    """Where a tensor lies, by the tensor's ``id``."""
    buffer: _Buffer
    free: deque[_Buffer]

    def unpack(self, device: torch.device) -> Any:
        """The value with its tensors on the device, in memory that they share. Waits for nothing; once only."""
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        memory.copy_(self.buffer.data[: self.num_bytes], non_blocking=True)
        self.buffer.copied = StreamEvent(device)
        self.free.append(self.buffer)

        def view(tensor: Tensor) -> Tensor:
            first = self.places[id(tensor)]
            return memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return map_tensors(view, self.value)


class PinnedBuffers:
    """Pinned buffers, used in turn. ``count`` are made before one is used again; more only if all are taken."""

    def __init__(self, count: int) -> None:
        self._num_new = count
        self._free: deque[_Buffer] = deque()

    def pack(self, value: object) -> Packed:
        """Copy every tensor of a value into a buffer that nobody uses, and whose last copy to the device is over."""
        tensors, places, at = _tensors(value), dict[int, int](), 0
        for tensor in tensors:
            places[id(tensor)] = at
            at += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        num_bytes = max(at, _ALIGNMENT)
        buffer = self._take(num_bytes)
        for tensor in tensors:
            first = places[id(tensor)]
            buffer.data[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return Packed(value, num_bytes, places, buffer, self._free)

    def _take(self, num_bytes: int) -> _Buffer:
        self._num_new -= 1
        if self._num_new < 0 and self._free:
            buffer = self._free.popleft()  # the one whose copy was launched first
            if buffer.copied is not None:
                buffer.copied.wait()
            if buffer.data.numel() >= num_bytes:
                return buffer
        return _Buffer(torch.empty(int(num_bytes * _SLACK), dtype=torch.uint8, device="cpu", pin_memory=True))
