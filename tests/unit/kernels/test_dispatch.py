"""The rule that picks a kernel: numba on the CPU for the types it takes, torch for all else."""

import pytest
import torch

from gsplit.kernels.dispatch import Kernel, Operation, kernel_for

CASES: list[tuple[Operation, str, torch.dtype | None, Kernel]] = [
    ("sample", "cpu", None, "numba"),
    ("sample", "cuda", None, "torch"),
    ("sample", "meta", None, "torch"),
    ("move rows", "cpu", torch.float32, "numba"),
    ("move rows", "cpu", torch.float64, "numba"),
    ("move rows", "cpu", torch.bfloat16, "torch"),
    ("move rows", "cpu", torch.int64, "torch"),
    ("move rows", "cuda", torch.float32, "torch"),
    ("dropout", "cpu", torch.float32, "numba"),
    ("dropout", "cpu", torch.float64, "numba"),
    ("dropout", "cpu", torch.float16, "torch"),
    ("dropout", "cuda", torch.float64, "torch"),
    ("attention", "cpu", torch.float32, "numba"),
    ("attention", "cpu", torch.float64, "numba"),
    ("attention", "cpu", torch.bfloat16, "torch"),
    ("attention", "cuda", torch.float32, "torch"),
]


@pytest.mark.parametrize("operation, device, dtype, want", CASES)
def test_the_kernel_of_an_operation(operation: Operation, device: str, dtype: torch.dtype | None, want: Kernel) -> None:
    assert kernel_for(operation, torch.device(device), dtype) == want
