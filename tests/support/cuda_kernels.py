"""torch's own table of kernels: which operations have one for CUDA, by the file that torch is generated from.

The file is ``native_functions.yaml``, which every build of torch contains in ``torchgen``. It says nothing of types.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torchgen

__all__ = ["without_cuda_kernel"]

_TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
_EVERYWHERE = {"CompositeImplicitAutograd", "CompositeExplicitAutograd"}
_KEYS = {
    "dense": {"CUDA", "CompositeExplicitAutogradNonFunctional", "Generic"},  # Generic: generated for CPU and CUDA
    "sparse": {"SparseCsrCUDA"},
}
_CALLS = {"_sparse_addmm": "addmm"}
"""What an operation for all backends calls on one."""


@dataclass
class _Entry:
    """The backends that an operation has kernels for; ``delegate``: the overload that computes it."""

    backends: set[str] = field(default_factory=set)
    delegate: str | None = None


@functools.cache
def _entries() -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    entry = _Entry()
    for line in _TABLE.read_text().splitlines():
        if start := re.match(r"- func: ([\w.]+)\(", line):
            entry = found[start[1]] = _Entry()
        elif delegate := re.match(r"  structured_delegate: ([\w.]+)", line):
            entry.delegate = delegate[1]
        elif backends := re.match(r"    ([A-Z][\w, ]*): \w", line):
            entry.backends |= {name.strip() for name in backends[1].split(",")}
        elif generated := re.match(r"  autogen: (.*)", line):  # from the operation itself, on every backend
            found |= {name.strip(): _Entry({"CompositeExplicitAutograd"}) for name in generated[1].split(",")}
    return found


def _backends(name: str) -> set[str]:
    entry = _entries()[name]
    delegated = _backends(entry.delegate) if entry.delegate is not None else set()
    return entry.backends | delegated or {"CompositeImplicitAutograd"}


def without_cuda_kernel(operations: Iterable[tuple[str, str, tuple[str, ...]]]) -> list[str]:
    """The operations, with overload, layout and types, that CUDA has no kernel for, or that torch does not have."""
    found = []
    for full, layout, types in sorted(operations):
        name = full.removeprefix("aten::")
        name = _CALLS.get(name, name)
        if name not in _entries() or not _backends(name) & (_EVERYWHERE | _KEYS[layout]):
            found.append(f"{full}, {layout}, {' '.join(types)}")
    return found
