"""Kernels run as compiled PTX on three architectures; tests that start them are left out where there is no Triton."""

import importlib.metadata
import os
from collections.abc import Iterator

import pytest

_NEED_TRITON = ["test_compiled.py", "test_interpreted.py", "test_large_arrays.py", "test_ptx.py", "test_*_kernels.py"]


def _has_triton() -> bool:
    """Whether there is one whose compiler can be asked for the kernel of a call: Triton 3.2 has another interface."""
    try:
        return tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) > (3, 2)
    except importlib.metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if _has_triton() else _NEED_TRITON


@pytest.fixture(params=[75, 80, 90], ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels are compiled for this compute capability; if TRITON_INTERPRET=1, Triton's interpreter runs them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield request.param
        return
    from ptx.launcher import compiled_kernels

    with compiled_kernels(request.param, seed=request.param):
        yield request.param
