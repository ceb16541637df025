"""Equality of tensors to the bit, for tests that compare implementations."""

import torch
from torch import Tensor

__all__ = ["assert_same_bits"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Compares -0 and 0 as different and NaN as equal to itself."""
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.dtype, want.shape)
    one, two = (tensor.detach().contiguous().view(_BITS[tensor.element_size()]) for tensor in (got, want))
    assert torch.equal(one, two), (got, want)
