"""The rule that picks a kernel: numba on the CPU, Triton where it runs, torch for all else and for other types."""

import pytest
import torch

from gsplit.kernels.dispatch import Kernel, Operation, kernel_for
from gsplit.kernels.triton import launch

CASES: list[tuple[Operation, str, torch.dtype | None, Kernel]] = [
    ("sample", "cpu", None, "numba"),
    ("sample", "cuda", None, "triton"),
    ("sample", "meta", None, "torch"),
    ("move rows", "cpu", torch.float32, "numba"),
    ("move rows", "cpu", torch.float64, "numba"),
    ("move rows", "cpu", torch.bfloat16, "torch"),
    ("move rows", "cpu", torch.int64, "torch"),
    ("move rows", "cuda", torch.float32, "triton"),
    ("move rows", "cuda", torch.bfloat16, "torch"),
    ("dropout", "cpu", torch.float32, "numba"),
    ("dropout", "cpu", torch.float64, "numba"),
    ("dropout", "cpu", torch.float16, "torch"),
    ("dropout", "cuda", torch.float64, "triton"),
    ("dropout", "cuda", torch.bfloat16, "triton"),
    ("dropout", "cuda", torch.float16, "torch"),
    ("attention", "cpu", torch.float32, "numba"),
    ("attention", "cpu", torch.float64, "numba"),
    ("attention", "cpu", torch.bfloat16, "torch"),
    ("attention", "cuda", torch.float32, "triton"),
    ("attention", "cuda", torch.bfloat16, "torch"),
]


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("operation, device, dtype, want", CASES)
def test_the_kernel_of_an_operation(
    operation: Operation,
    device: str,
    dtype: torch.dtype | None,
    want: Kernel,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "_is_installed", lambda: installed)
    expected = "torch" if want == "triton" and not installed else want
    assert kernel_for(operation, torch.device(device), dtype) == expected
