"""Sums over edges by torch's operations; the kernel beside them is tested in triton/test_row_kernels.py."""

import torch

from gsplit.kernels.sums import EdgeSums


def test_means_of_16_bits_neither_overflow_nor_lose_large_degrees() -> None:
    large = torch.full((3, 1), 40000.0, dtype=torch.float16)
    out = EdgeSums(torch.tensor([0, 3]), torch.arange(3), 3, None)(large, mean=True)
    assert out.dtype == torch.float16 and out.item() == 40000.0  # their sum is more than float16 holds
    num_edges = 70000  # as float16: infinite
    x = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    out = EdgeSums(torch.tensor([0, num_edges]), torch.zeros(num_edges, dtype=torch.int64), 1, None)(x, mean=True)
    out.sum().backward()
    assert x.grad is not None and out.item() == 1.0
    assert abs(x.grad.item() - 1.0) < 0.01  # 70000 times 1 / 70000
