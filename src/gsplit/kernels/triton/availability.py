"""Where Triton's kernels run, and why not: used by ``kernels.dispatch``, ``gsplit.init`` and ``gsplit doctor``.

Imports without the triton library. A GPU needs compute capability 7.0, and Triton a C compiler and Python's headers:
when the first kernel starts it builds a module that calls the driver (Triton 3.2: one more for every kernel), and would
fail in the middle of a step. So both are searched for as Triton does: CC if it is set, as one program, else
gcc, else clang; ``Python.h`` where this Python says. Without them torch operations compute the same, more slowly.

The environment variable GSPLIT_TRITON decides otherwise: 0 leaves Triton alone, 1 takes it without looking (a module
that Triton has in its cache needs no compiler, and so does ``triton.knobs.build.impl``).
"""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Obstacle", "find_obstacle", "is_available", "is_installed", "is_switched_off"]

_COMPILED = frozenset({"cuda"})
"""Device types that Triton compiles for; ROCm's devices are called cuda as well."""
_LEAST_CAPABILITY = (7, 0)
_SWITCH = "GSPLIT_TRITON"


class Obstacle(NamedTuple):
    """Why an installed Triton cannot run, and what to do about it."""

    reason: str
    fix: str

    def __str__(self) -> str:
        return (
            f"Triton is installed but cannot run here: {self.reason}. Torch operations are used: slower, same results. "
            f"Fix: {self.fix}; {_SWITCH}=0 switches Triton off without this warning"
        )


@functools.cache
def is_installed() -> bool:
    """Whether there is a triton library."""
    return importlib.util.find_spec("triton") is not None


def _switch() -> str:
    return os.environ.get(_SWITCH, "")


def is_switched_off() -> bool:
    """Whether GSPLIT_TRITON=0."""
    return _switch() == "0"


def _capability(device: torch.device) -> tuple[int, int] | None:
    """The device's compute capability; None for ROCm's, which are counted in another way."""
    return None if torch.version.hip else torch.cuda.get_device_capability(device)


@functools.cache
def _find_build_obstacle(compiler: str | None) -> Obstacle | None:
    """What is missing to build Triton's module; ``compiler`` is the variable CC."""
    fix = "install gcc or clang, or name one by the environment variable CC"
    if compiler is not None and shutil.which(compiler) is None:
        return Obstacle(f"the C compiler that CC names, {compiler!r}, is not a program", fix)
    if compiler is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return Obstacle("it needs a C compiler, and there is no gcc or clang", fix)
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    if not (headers / "Python.h").exists() and not {"CPATH", "C_INCLUDE_PATH"} & os.environ.keys():
        return Obstacle(f"it needs Python's headers, and there is no {headers / 'Python.h'}", "install python3-dev")
    return None


def find_obstacle(device: torch.device) -> Obstacle | None:
    """Why an installed Triton, not switched off or on by GSPLIT_TRITON, cannot run on a device that it compiles for."""
    automatic = is_installed() and _switch() not in ("0", "1")
    if device.type not in _COMPILED or not automatic:
        return None
    capability = _capability(device)
    if capability is not None and capability < _LEAST_CAPABILITY:
        fix = "none but a newer GPU (Volta or later)"
        return Obstacle("it needs compute capability 7.0, and {} has {}.{}".format(device, *capability), fix)
    return _find_build_obstacle(os.environ.get("CC"))


def is_available(device: torch.device) -> bool:
    """Whether kernels of this folder can run on ``device``: one that Triton compiles for, any other if GSPLIT_TRITON=1.

    That is for simulated devices, whose launcher knows how to run them. The host has kernels of its own.
    """
    if device.type == "cpu" or not is_installed() or is_switched_off():
        return False
    if device.type not in _COMPILED:
        return _switch() == "1"
    return find_obstacle(device) is None
