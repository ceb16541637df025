"""The one rule that picks a kernel for an operation.

Numba kernels run on the CPU and define the result. Elsewhere Triton kernels give the same result where Triton runs, and
torch operations everywhere; torch operations also handle the types that a kernel does not take.
"""

from typing import Literal

import torch

from gsplit.kernels.triton.availability import is_available

__all__ = ["Kernel", "Operation", "kernel_for"]

Kernel = Literal["numba", "triton", "torch"]
Operation = Literal["sample", "gather", "move rows", "dropout", "attention", "dot-product attention", "sum rows"]
_Types = dict[Operation, frozenset[torch.dtype] | None]

_FLOATS = frozenset({torch.float32, torch.float64})
_NUMBA_DTYPES: _Types = {
    "sample": None,  # ids only, always int64
    "gather": None,  # rows are moved as bits
    "move rows": _FLOATS,
    "dropout": _FLOATS,
    "attention": _FLOATS,  # torch: PyG's own layer
    "dot-product attention": _FLOATS,
    "sum rows": _FLOATS,
}
_TRITON_DTYPES: _Types = {
    "sample": None,
    "gather": None,
    "move rows": _FLOATS,
    "dropout": _FLOATS | {torch.bfloat16},
    "attention": _FLOATS,
    "dot-product attention": frozenset(),  # no kernel
    "sum rows": _FLOATS | {torch.bfloat16, torch.float16},
}


def kernel_for(operation: Operation, device: torch.device, dtype: torch.dtype | None = None) -> Kernel:
    """The implementation to use for tensors of ``dtype`` on ``device``."""
    compiled: Kernel = "numba" if device.type == "cpu" else "triton"
    dtypes = (_NUMBA_DTYPES if compiled == "numba" else _TRITON_DTYPES)[operation]
    if dtypes is not None and dtype not in dtypes:
        return "torch"
    return compiled if compiled == "numba" or is_available(device) else "torch"
