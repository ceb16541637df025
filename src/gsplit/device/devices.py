"""Devices: which one a rank uses, how its work is timed, and how results are read without a wait.

A device runs asynchronously: the host launches work and continues. If the host reads a result at once, it waits, and
then the device is idle. So values that the host needs are copied to pinned memory and read one step later
(``AsyncHostCopy``), and stages are timed by events on the stream of the device (``StageClock``). On the CPU all values
are available at once, and nothing is deferred.
"""

import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from gsplit.errors import InputError, explain

__all__ = [
    "DEVICE_MARGIN",
    "DeferredChecks",
    "AsyncHostCopy",
    "StreamEvent",
    "SideStream",
    "StageClock",
    "copy_to_device",
    "fork_random_states",
    "free_memory",
    "identify",
    "in_thread",
    "new_pages",
    "register_memory",
    "random_states",
    "resolve_device",
]


DEVICE_MARGIN = 8 * 10**9
"""Bytes of a device's memory that caches leave to the model, its gradients and the mini-batches."""


def _module(device: torch.device) -> Any:
    """The torch module for a type of device, such as ``torch.cuda``."""
    return torch.get_device_module(device)


def resolve_device(device: torch.device | str) -> torch.device:
    """A device with an index. By default LOCAL_RANK chooses one of the devices that are visible to this process."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise InputError(explain("device", "cpu or cuda", device, "choose one of these")) from None
    if device.type == "cpu":
        return device
    module = _module(device)
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        fix = "leave device out to train on the CPU, or install a torch that sees it"
        raise InputError(explain("device", f"a machine with a {device.type} device", "0 that torch sees", fix))
    index = cast(int | None, device.index)
    if index is None:
        return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % count)
    if index >= count:
        got = f"{device}, of {count}"
        fix = f"use {device.type!r} without an index: LOCAL_RANK chooses the device of a rank"
        raise InputError(explain("device", f"one of the {count} that this process sees", got, fix))
    return device


def identify(device: torch.device) -> str:
    """A name of the hardware of a device. Two ranks of a host have equal names only if they share the device."""
    uuid = getattr(_module(device).get_device_properties(device), "uuid", None)
    return str(uuid) if uuid is not None else f"{device} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the torch generators that a forward pass on a device may use."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(_module(device).get_rng_state(device).cpu())
    return states


@contextmanager
def fork_random_states(device: torch.device) -> Iterator[None]:
    """Restore the states of the generators of the CPU and of a device at the end of the block."""
    with torch.random.fork_rng(devices=[]):
        if device.type == "cpu":
            yield
            return
        module = _module(device)
        state = module.get_rng_state(device)
        try:
            yield
        finally:
            module.set_rng_state(state, device)


class StreamEvent:
    """An event after everything that was launched on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        module = _module(device)
        self._event = module.Event()
        self._event.record(module.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if not self._event.query():
            self._event.synchronize()


class SideStream:
    """A second stream of a device, for work that may run at the same time as that of the current stream.

    It starts after all work that was launched on the current stream before. Its small kernels come before those that
    wait on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _module(device)
        self._stream = self._module.Stream(device, priority=-1)
        self._stream.wait_stream(self._module.current_stream(device))

    def running(self) -> AbstractContextManager[Any]:
        """Launch the work of a block on this stream, whatever is on the others."""
        return cast(AbstractContextManager[Any], self._module.stream(self._stream))

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch the work of a block on this stream, after all work that is now on the current stream."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self.running():
            yield

    def mark(self) -> Any:
        """An event after all work that was launched on this stream."""
        return self._stream.record_event()

    def join(self, mark: Any, tensors: list[Tensor]) -> None:
        """Make the current stream wait for an event, and mark tensors of this stream as used by the current one."""
        current = self._module.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)


def free_memory(device: torch.device) -> int:
    """The bytes that can still be allocated on a device, once what torch keeps of freed memory is returned."""
    module = _module(device)
    gc.collect()  # loaders that were dropped may wait for it with their rows
    module.empty_cache()
    return int(module.mem_get_info(device)[0])


def new_pages(shape: tuple[int, ...], dtype: torch.dtype, *, huge: bool = True) -> Tensor:
    """A host tensor in whole memory pages of its own, which registering requires.

    ``huge``: in huge pages where the system has them, in which a device finds rows faster; otherwise in small ones.
    """
    num_bytes = prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


def register_memory(tensor: Tensor, device: torch.device) -> Callable[[], object] | None:
    """Let a device read a host tensor in place. Returns a function that ends it; None if the driver refuses.

    ``pin_memory`` would copy the tensor and round its size up to a power of two.
    """
    if not tensor.nbytes:
        return lambda: None
    module = _module(device)
    address = tensor.data_ptr()
    driver = module.cudart()
    if int(driver.cudaHostRegister(address, tensor.nbytes, 0)) != 0:
        with suppress(RuntimeError):  # CUDA reports the failed call again at the next launch
            torch.zeros(1, device=device)
        return None

    def release() -> None:
        module.synchronize(device)  # a running kernel may still read the memory
        driver.cudaHostUnregister(address)

    return release


def in_thread(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current device of this thread."""
    return nullcontext() if device.type == "cpu" else cast(AbstractContextManager[Any], _module(device).device(device))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host does not wait: a host tensor is copied through pinned memory."""
    if tensor.device == device:
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)  # torch reuses pinned memory when its copies are over


class AsyncHostCopy:
    """An asynchronous copy of values to the host. Reading waits for the copy, but not for work launched later."""

    def __init__(self, values: Tensor) -> None:
        values = values.detach()
        self._mark: StreamEvent | None = None
        if values.device.type == "cpu":
            self._host = values
        else:
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._mark = StreamEvent(values.device)

    @property
    def is_pending(self) -> bool:
        """Whether reading may wait."""
        return self._mark is not None

    def read(self) -> Tensor:
        """The values on the host."""
        if self._mark is not None:
            self._mark.wait()
        self._mark = None
        return self._host

    def __float__(self) -> float:
        return float(self.read())


class DeferredChecks:
    """Checks of values on a device without a wait. A failed check is raised some steps later.

    Deferred checks fire at the same step on every rank, because the other ranks would wait for a rank that raises
    alone: a forward pass runs the checks that were added two forward passes before. ``finish`` runs all checks.
    """

    def __init__(self) -> None:
        self._new: list[tuple[AsyncHostCopy, Callable[[Tensor], None]]] = []
        self._old: list[tuple[AsyncHostCopy, Callable[[Tensor], None]]] = []

    def add(self, values: Tensor, check: Callable[[Tensor], None]) -> None:
        """Add a check, which is called with the values on the host; at once for values on the CPU."""
        if values.device.type == "cpu":
            check(values)
        else:
            self._new.append((AsyncHostCopy(values), check))

    def begin_forward(self) -> None:
        """Run the checks that were added before the previous forward pass; their values have been copied by now."""
        due = self._old
        self._old = self._new
        self._new = []
        for values, check in due:
            check(values.read())

    def finish(self) -> None:
        """Run all checks. Waits for the device."""
        self.begin_forward()
        self.begin_forward()


class StageClock:
    """Times work on one device by events on its stream. A time is available when the device has finished the work.

    ``is_read``: whether anybody reads the times; no events are recorded otherwise.
    """

    def __init__(self, device: torch.device, *, is_read: bool = True) -> None:
        self._device = device
        self._module = _module(device)
        self.is_read = is_read

    def mark(self) -> Any:
        """An event after everything that was launched; None if nobody reads the times."""
        if not self.is_read:
            return None
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two events. Waits for the second."""
        if not stop.query():
            stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000.0
