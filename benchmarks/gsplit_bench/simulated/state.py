"""What the simulated device remembers, and what copies over its bus cost the host."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gsplit.kernels.triton.launch import Launcher
from gsplit_bench.simulated.log import DeviceLog
from gsplit_bench.simulated.streams import Clock, StreamTracker, parts_of

__all__ = ["DeviceState", "active", "moved", "set_state"]

_BLOCK = 512  # bytes; torch's allocator hands out CUDA memory in multiples of it


@dataclass
class DeviceState:
    """What the device remembers: its log, its streams, its random numbers, and which host memory is pinned."""

    log: DeviceLog
    tracker: StreamTracker
    launcher: Launcher
    """Runs Triton's kernels on host tensors."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    pinned: set[int] = field(default_factory=set)
    registered: dict[int, int] = field(default_factory=dict)
    """Host memory that the driver was told about: sizes by address."""
    operations: set[tuple[str, str, tuple[str, ...]]] | None = None
    """Name with overload, layout ("dense" or "sparse") and types of every operation that was launched; None: not kept."""
    memory_bytes: int | None = None
    """How much memory the device has; None: not counted."""
    peak_bytes: int = 0
    """The most that was in use at once, of what was allocated while there was a limit."""
    communicators: set[str] = field(default_factory=set)
    """Process groups that have had a collective on the device: then NCCL allocates their buffers."""
    communicator_bytes: int = 0
    """How much memory each of them takes, outside of torch."""
    _allocated: dict[int, int] = field(default_factory=dict)
    copies_under_way: list[tuple[Tensor, Tensor, Clock]] = field(default_factory=list)
    """Pinned host tensors that nobody has waited for, what they will hold, and after which launches."""
    _finishing: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.tracker.when_host_waits = self.finish_copies

    def allocate(self, tensor: Tensor) -> None:
        """Count the memory of a new tensor of the device; views share what is counted."""
        if self.memory_bytes is None:
            return
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            key, wanted = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
            if key in self._allocated:
                continue
            used = self.used_bytes + self.outside_bytes
            if used + wanted > self.memory_bytes:
                raise torch.OutOfMemoryError(
                    f"simulated device out of memory. Tried to allocate {wanted} bytes; {used} of {self.memory_bytes} "
                    "bytes are in use."
                )
            self._allocated[key] = wanted
            self.peak_bytes = max(self.peak_bytes, used + wanted)
            weakref.finalize(storage, self._allocated.pop, key, None)

    @property
    def used_bytes(self) -> int:
        """What is allocated of the device's memory, counted where there is a limit."""
        return sum(self._allocated.values())

    @property
    def outside_bytes(self) -> int:
        """What is allocated outside of torch."""
        return len(self.communicators) * self.communicator_bytes

    def open_communicator(self, group: str) -> None:
        """A process group has a collective; its first one takes memory."""
        self.communicators.add(group)
        if self.memory_bytes is not None and self.used_bytes + self.outside_bytes > self.memory_bytes:
            raise RuntimeError(f"NCCL error: out of memory: {len(self.communicators)} communicators")

    def note_operation(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep an operation on tensors of the device, if somebody asks for them."""
        if self.operations is not None:
            layout = "dense" if all(tensor.layout is torch.strided for tensor in tensors) else "sparse"
            dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
            self.operations.add((name, layout, tuple(dtypes)))

    def start_copy(self, target: Tensor, source: Tensor, clock: Clock) -> None:
        """A copy to pinned host memory that nobody has waited for."""
        with self._finishing:
            self.copies_under_way.append((target, source, clock))

    def finish_copies(self) -> None:
        """What is on its way to the host is there once the host has waited."""
        with self._finishing:  # a thread must not go on while another one finishes what it has waited for
            under_way, self.copies_under_way = self.copies_under_way, []
            for target, source, clock in under_way:
                if self.tracker.host_knows(clock):
                    target.copy_(source)
                else:
                    self.copies_under_way.append((target, source, clock))

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Draw from the device's generator, not from the host's."""
        host = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(host)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor lies in pinned memory."""
        if tensor.untyped_storage()._cdata in self.pinned:
            return True
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(first <= start and stop <= first + size for first, size in self.registered.items())

    def pin(self, tensor: Tensor) -> Tensor:
        """Count a host tensor's memory as pinned while it lives."""
        storage = tensor.untyped_storage()
        self.pinned.add(storage._cdata)
        weakref.finalize(storage, self.pinned.discard, storage._cdata)
        return tensor


_state: DeviceState | None = None


def set_state(state: DeviceState | None) -> None:
    """The state that operations use from now on."""
    global _state
    _state = state


def active() -> DeviceState:
    """The state of the device that is switched on."""
    if _state is None:
        raise RuntimeError("tensors of the simulated device need `with simulated_device():` around them")
    return _state


def moved(
    num_bytes: int, to: Literal["device", "host"], host: Tensor | None, *, non_blocking: bool, reason: str = ""
) -> None:
    """Bytes crossed the bus; the host waits unless it asked not to and its memory is pinned."""
    state = active()
    state.log.copy(num_bytes, to)
    if non_blocking and host is not None and state.is_pinned(host):
        return
    unpinned = " from unpinned memory" if non_blocking else ""
    state.log.wait(reason or f"copy to {to}{unpinned}")
    state.tracker.host_waited(state.tracker.snapshot(state.tracker.current()))
