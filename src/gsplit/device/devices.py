"""What the host does with a device besides launching work: name it, time it, and read results without stopping it.

A device runs asynchronously: the host launches work and goes on. Reading a result at once makes the host wait, and the
device then idles. So values that the host needs are copied to pinned memory behind the work that makes them, and read a
step later (``AsyncHostCopy``), and stages are timed by events in the device's own queue (``StageClock``). On the CPU
everything is available at once and nothing is deferred.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor

from gsplit.errors import InputError, explain

__all__ = [
    "DeferredChecks",
    "AsyncHostCopy",
    "StreamEvent",
    "SideStream",
    "StageClock",
    "fork_random_states",
    "identify",
    "in_thread",
    "register_memory",
    "random_states",
    "resolve_device",
]


def _module(device: torch.device) -> Any:
    """torch's module for a kind of device, such as ``torch.cuda``."""
    return torch.get_device_module(device)


def resolve_device(device: torch.device | str) -> torch.device:
    """A device with its number: without one, the rank's own by LOCAL_RANK, among those that this process sees."""
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
        got, fix = f"{device}, of {count}", f"say {device.type!r} alone: the rank's own is found by LOCAL_RANK"
        raise InputError(explain("device", f"one of the {count} that this process sees", got, fix))
    return device


def identify(device: torch.device) -> str:
    """Which piece of hardware a device is: the same for two ranks of a host only if they share it."""
    uuid = getattr(_module(device).get_device_properties(device), "uuid", None)
    return str(uuid) if uuid is not None else f"{device} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"


def random_states(device: torch.device) -> list[Tensor]:
    """States of torch's generators that a forward on a device may draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(_module(device).get_rng_state(device).cpu())
    return states


@contextmanager
def fork_random_states(device: torch.device) -> Iterator[None]:
    """Put the generators back afterwards, that of the CPU and that of a device."""
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
    """An event behind everything launched on a device's current stream up to now."""

    def __init__(self, device: torch.device) -> None:
        module = _module(device)
        self._event = module.Event()
        self._event.record(module.current_stream(device))

    def is_over(self) -> bool:
        """Whether the device has reached it."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if not self._event.query():
            self._event.synchronize()


class SideStream:
    """A second queue of a device, for work that may run beside that of the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, _module(device)
        self._stream = self._module.Stream(device)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch here, behind what the current stream has been given up to now."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def mark(self) -> Any:
        """The end of what has been launched here up to now."""
        return self._stream.record_event()

    def join(self, mark: Any, tensors: list[Tensor]) -> None:
        """Let the current stream go on behind the mark, with tensors that were made here before it."""
        current = self._module.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)


def register_memory(tensor: Tensor, device: torch.device) -> Callable[[], object] | None:
    """Let a device read a host tensor in place, until what is returned is called; None if the driver will not.

    Not ``pin_memory``, which would copy, and round sizes up to powers of two.
    """
    if not tensor.nbytes:
        return lambda: None
    module, address = _module(device), tensor.data_ptr()
    driver = module.cudart()
    if int(driver.cudaHostRegister(address, tensor.nbytes, 0)) != 0:
        with suppress(RuntimeError):  # CUDA reports a failed call once more, at the next launch, whosever that is
            torch.zeros(1, device=device)
        return None

    def release() -> None:
        module.synchronize(device)  # a kernel under way may still read
        driver.cudaHostUnregister(address)

    return release


def in_thread(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one of this thread."""
    return nullcontext() if device.type == "cpu" else cast(AbstractContextManager[Any], _module(device).device(device))


class AsyncHostCopy:
    """Values on their way from a device to the host; reading waits for their copy, not for work launched later."""

    def __init__(self, values: Tensor) -> None:
        values = values.detach()
        self._mark: StreamEvent | None = None
        if values.device.type == "cpu":
            self._host = values
        else:
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._mark = StreamEvent(values.device)

    def read(self) -> Tensor:
        """The values on the host."""
        if self._mark is not None:
            self._mark.wait()
        self._mark = None
        return self._host

    def __float__(self) -> float:
        return float(self.read())


class DeferredChecks:
    """Conditions on values of a device that are checked without waiting: a violation is raised some steps later.

    Deferred checks fire at the same step on every rank, because a rank that raised alone would leave the others
    waiting: a forward checks what was added before the last forward but one. ``finish`` waits for all.
    """

    def __init__(self) -> None:
        self._new: list[tuple[AsyncHostCopy, Callable[[Tensor], None]]] = []
        self._old: list[tuple[AsyncHostCopy, Callable[[Tensor], None]]] = []

    def add(self, values: Tensor, check: Callable[[Tensor], None]) -> None:
        """Have ``check`` called with the values on the host; at once if they are there."""
        if values.device.type == "cpu":
            check(values)
        else:
            self._new.append((AsyncHostCopy(values), check))

    def begin_forward(self) -> None:
        """Check what was added before the last forward but one: the device has long reached it."""
        checked, self._old, self._new = self._old, self._new, []
        for values, check in checked:
            check(values.read())

    def finish(self) -> None:
        """Check everything; waits for the device."""
        self.begin_forward()
        self.begin_forward()


class StageClock:
    """Times work on one device by events on its stream; a time is available once the device has reached its end."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, _module(device)

    def mark(self) -> Any:
        """A moment behind everything launched up to now."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two moments; waits until the second is over."""
        if not stop.query():
            stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000.0
