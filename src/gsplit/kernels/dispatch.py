"""The one rule that picks a kernel for an operation.

Numba kernels run on the CPU and define the result; torch operations are their equals everywhere else, and for the types
that a numba kernel does not take.
"""

from typing import Literal

import torch

__all__ = ["Kernel", "Operation", "kernel_for"]

Kernel = Literal["numba", "torch"]
Operation = Literal["sample", "move rows", "dropout", "attention"]

_FLOATS = frozenset({torch.float32, torch.float64})
_NUMBA_DTYPES: dict[Operation, frozenset[torch.dtype] | None] = {
    "sample": None,  # ids only, always int64
    "move rows": _FLOATS,
    "dropout": _FLOATS,
    "attention": _FLOATS,  # torch: PyG's own layer
}


def kernel_for(operation: Operation, device: torch.device, dtype: torch.dtype | None = None) -> Kernel:
    """The implementation to use for tensors of ``dtype`` on ``device``."""
    dtypes = _NUMBA_DTYPES[operation]
    return "numba" if device.type == "cpu" and (dtypes is None or dtype in dtypes) else "torch"
