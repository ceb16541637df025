"""The one place that starts a Triton kernel.

Imports without the triton library. The launcher can be replaced, so that a simulated device can unwrap its tensors,
count the launch, check for races and have the kernel run on the host.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Launcher", "launch", "num_blocks", "set_launcher", "tile_of"]


class Launcher(Protocol):
    """Starts ``kernel`` on a grid of programs. ``writes`` are the tensors among ``args`` that it may write to."""

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        writes: Sequence[Tensor],
    ) -> None: ...


def _start(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
) -> None:
    device = next((arg.device for arg in args if isinstance(arg, Tensor) and arg.is_cuda), None)
    with nullcontext() if device is None else torch.cuda.device(device):  # Triton would use the current one
        kernel[grid](*args, **constants)


_launcher: Launcher = _start  # of the whole process: backward runs in a thread of its own and must find the same one


def set_launcher(launcher: Launcher) -> Launcher:
    """Start kernels through ``launcher`` from now on; returns the one before, to be set again."""
    global _launcher
    before, _launcher = _launcher, launcher
    return before


def launch(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
) -> None:
    """Start ``kernel(*args, **constants)`` for every program of ``grid``; a grid without programs starts nothing."""
    if all(grid):
        _launcher(kernel, grid, args, constants, writes)


def num_blocks(count: int, size: int) -> int:
    """Blocks of ``size`` that cover ``count``."""
    return -(-count // size)


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns, powers of two, of the tile that one program handles in a matrix of ``width`` columns."""
    columns = min(128, 1 << max(0, width - 1).bit_length())
    return 512 // columns, columns
