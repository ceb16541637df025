"""Switching the simulated device on, and ``torch.sim``: what code asks of a device's module, as of ``torch.cuda``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.kernels.triton.launch import set_launcher
from gsplit_bench.simulated import backend, execution
from gsplit_bench.simulated.log import DeviceLog
from gsplit_bench.simulated.state import DeviceState, set_state
from gsplit_bench.simulated.streams import Event, Stream, StreamTracker

__all__ = ["SimulatedDevice", "simulated_device", "switched_on"]


@dataclass(frozen=True)
class _Properties:
    name: str
    uuid: str


@dataclass(frozen=True)
class SimulatedDevice:
    """The device while it is switched on: its counts, its streams, and which one it is."""

    log: DeviceLog
    tracker: StreamTracker
    state: DeviceState
    uuid: str

    @property
    def device(self) -> torch.device:
        """The device's name for torch."""
        return backend.sim_device()

    def new_stream(self, name: str | None = None) -> Stream:
        """A stream of the device."""
        return Stream(self.tracker, name)

    def pin(self, tensor: Tensor) -> Tensor:
        """Count a host tensor as pinned."""
        return self.state.pin(tensor)


@dataclass(frozen=True)
class _Driver:
    """What is asked of CUDA's runtime library."""

    state: DeviceState

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  CUDA's name
        self.state.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  CUDA's name
        del self.state.registered[address]
        return 0


class _Module:
    """``torch.sim``, of the device that is switched on."""

    on: SimulatedDevice | None = None

    def _active(self) -> SimulatedDevice:
        if self.on is None:
            raise RuntimeError("the simulated device is off: with simulated_device(): ...")
        return self.on

    def is_initialized(self) -> bool:
        return self.on is not None

    def is_available(self) -> bool:
        return self.on is not None

    def device_count(self) -> int:
        """Those that a rank may choose."""
        return 1

    def current_device(self) -> int:
        return self._active().tracker.current_device()

    def set_device(self, device: Any) -> None:
        self._active().tracker.set_device(torch.device(device).index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """The context in which a thread deals with the device."""
        with self._active().tracker.on_device(), backend.SimMode():  # type: ignore[no-untyped-call]
            yield

    def cudart(self) -> "_Driver":
        return _Driver(self._active().state)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        if self.on is not None:
            self.on.state.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self._active().state.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self._active().state.generator.set_state(state)

    def get_device_properties(self, device: Any = None) -> _Properties:
        return _Properties("simulated device", self._active().uuid)

    def empty_cache(self) -> None:
        """Nothing: freed memory is not kept."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and all bytes; without a limit those of a large GPU."""
        state = self._active().state
        total = 80 << 30 if state.memory_bytes is None else state.memory_bytes
        return total - state.used_bytes - state.outside_bytes, total

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def Stream(self, device: Any = None, priority: int = 0) -> Any:  # noqa: N802  torch's name
        return Stream(self._active().tracker, priority=priority)

    def Event(self, enable_timing: bool = False) -> Any:  # noqa: N802  torch's name
        return Event(self._active().tracker, enable_timing)

    def current_stream(self, device: Any = None) -> Any:
        tracker = self._active().tracker
        return Stream(tracker, tracker.current())

    def stream(self, stream: Any) -> Any:
        return self._active().tracker.on(stream.name)

    def synchronize(self, device: Any = None) -> None:
        self.current_stream().synchronize()


_module = _Module()


def switched_on() -> SimulatedDevice:
    """The device that is on, for programs that were started on it."""
    return _module._active()


def _check_backward() -> None:
    """torch makes the threads of all devices in a process's first backward: later ones have none."""
    try:
        torch.ones(1, device=backend.DEVICE_TYPE, requires_grad=True).sum().backward()
    except RuntimeError as error:
        got, fix = (
            "an earlier backward, on the host",
            "switch it on first, or run it in a process of its own: run_ranks",
        )
        raise InputError(explain("the simulated device", "to come before the first backward", got, fix)) from error


@contextmanager
def simulated_device(
    *,
    check_races: bool = False,
    uuid: str | None = None,
    launches_behind: int = 1000,
    memory_bytes: int | None = None,
) -> Iterator[SimulatedDevice]:
    """Switch the simulated device on: torch device ``sim:0``, one per process.

    ``check_races``: every launch is compared with those of other streams. ``uuid``: what tells this device from those
    of other ranks. ``launches_behind``: after how many launches an event is over that the host does not wait for.
    ``memory_bytes``: tensors of the device that need more raise ``torch.OutOfMemoryError``.
    Triton's kernels are run by the launcher that is in place, on host tensors; ``state.launcher`` can be set to another.
    Threads that the program starts itself have to enter the device too, as with every torch mode. They start on another
    device, ``sim:1``, as every rank's threads start on ``cuda:0``. Nothing may be done there, because torch gives a
    backend in Python one device: setting it, and launching a Triton kernel before, is an error.
    """
    why = backend.why_not_supported()
    if why is not None:
        raise InputError(explain("the simulated device", "a torch with Python backends", why, "use torch 2.9 to 2.13"))
    backend.install(_module, execution.run, execution.copy)
    log = DeviceLog()
    tracker = StreamTracker(log, check=check_races, launches_behind=launches_behind)
    tracker.set_device(0)
    before, launcher = _module.on, set_launcher(execution.launch_triton)
    runs_kernels = launcher if before is None else before.state.launcher
    state = DeviceState(log, tracker, runs_kernels, memory_bytes=memory_bytes)
    state.generator.manual_seed(torch.initial_seed())
    _module.on = SimulatedDevice(log, tracker, state, uuid or f"process {os.getpid()}")
    set_state(state)
    try:
        with backend.SimMode():  # type: ignore[no-untyped-call]
            _check_backward()
            yield _module.on
    finally:
        set_launcher(launcher)
        _module.on = before
        set_state(before.state if before is not None else None)
