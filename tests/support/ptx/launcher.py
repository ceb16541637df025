"""Starts kernels of ``gsplit.kernels.triton`` as compiled PTX on the host: ``with compiled_kernels(80): ...``

Triton itself specialises and compiles: its JIT is asked for the kernel of a call as on a GPU of that capability, which
depends on the alignment of pointers and on numbers that are 1, and keeps it in its own cache. Programs run in random
order, in two groups one after the other, those of a group together.
"""

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gsplit.kernels.triton.launch import set_launcher
from ptx.instructions import prepare_kernel
from ptx.machine import Kernel, Machine
from ptx.memory import CheckedMemory
from ptx.module import parse_module

__all__ = ["CompiledLauncher", "compiled_kernels", "run_programs"]

_MOST_LANES = 1 << 15
"""That run together: numpy's arrays of all lanes should stay in the caches of a core."""


class CompiledLauncher:
    """See ``gsplit.kernels.triton.launch.Launcher``. Tensors are the host's; threads may share a launcher.

    ``capability``: 80 is sm_80. ``seed`` draws the orders of programs and of racing threads.
    """

    _compiling = threading.Lock()  # the process has one driver

    def __init__(self, capability: int, seed: int = 0) -> None:
        self._seed = seed
        self._gpu = SimpleNamespace(  # what Triton's JIT asks of a driver; it keeps kernels by device
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
        self._launches = itertools.count()
        self._prepared: dict[str, Kernel] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        writes: Sequence[Tensor],
    ) -> None:
        compiled = self._compile(kernel, grid, args, constants)
        named = zip(kernel.arg_names, args, strict=False)  # without the constants, which come last
        kept = [value for name, value in named if compiled.src.signature[name] != "constexpr"]
        rng = np.random.default_rng([self._seed, next(self._launches)])
        run_programs(self._prepared[compiled.hash], grid, kept, writes, compiled.metadata.shared, rng)

    def _compile(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> Any:
        with self._compiling:
            before = driver._active
            driver.set_active(self._gpu)
            try:
                compiled = kernel.warmup(*args, grid=grid, **constants)
            finally:
                driver.set_active(before)
            if compiled.hash not in self._prepared:
                self._prepared[compiled.hash] = prepare_kernel(parse_module(compiled.asm["ptx"]))
            return compiled


def run_programs(
    kernel: Kernel,
    grid: tuple[int, ...],
    args: Sequence[Any],
    writes: Sequence[Tensor],
    shared_bytes: int,
    rng: np.random.Generator,
) -> None:
    """Execute all programs of a grid. ``args``: those of PTX, without the last ones, which are for profilers."""
    memory = CheckedMemory([value for value in args if isinstance(value, Tensor)], writes, rng, may_race=True)
    arguments = dict.fromkeys(kernel.module.parameters, 0)
    for name, value in zip(kernel.module.parameters, args, strict=False):
        arguments[name] = value.data_ptr() if isinstance(value, Tensor) else int(value)
    order = rng.permutation(math.prod(grid))
    at_once = max(1, _MOST_LANES // kernel.module.num_threads)
    for group in np.split(order, rng.integers(0, order.size + 1, 1)):
        for start in range(0, group.size, at_once):
            Machine(kernel, (*grid, 1, 1), group[start : start + at_once], arguments, memory, shared_bytes, rng).run()


@contextmanager
def compiled_kernels(capability: int, seed: int = 0) -> Iterator[None]:
    """Start every kernel as compiled PTX for a compute capability (80 is sm_80), on tensors of the host."""
    before = set_launcher(CompiledLauncher(capability, seed))
    try:
        yield
    finally:
        set_launcher(before)
