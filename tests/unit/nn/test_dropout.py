"""Keyed dropout: two equal versions, the right probability, masks that belong to rows and not to places."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gsplit.keys import kernels_torch
from gsplit.nn.dropout import keyed_dropout, keyed_mask


def _keys(ids: Tensor, call: int = 17) -> Tensor:
    return kernels_torch.mix(call, ids)


@pytest.mark.parametrize("shape", [(7, 1), (7, 2), (50, 33), (4, 3, 5), (9,), (0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_and_torch_masks_are_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.rand(shape) + 0.5).to(dtype)
    keys = _keys(torch.arange(shape[0]))
    out = keyed_dropout(x, keys, 0.4)
    columns = int(np.prod(shape[1:]))
    mask = keyed_mask(keys, columns, 0.4).view(shape)
    assert torch.equal(out != 0, mask)
    assert torch.allclose(
        out.double(), torch.where(mask, x.double() / 0.6, 0.0), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("shape", [(7, 2), (4, 3, 5), (9,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_dropped_may_be_changed_in_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    keys = _keys(torch.arange(shape[0]))
    out = keyed_dropout(x, keys, 0.5)
    out.mul_(3)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, keyed_mask(keys, int(np.prod(shape[1:])), 0.5).view(shape))
    assert float(x.grad.max()) == 6


def test_a_share_p_is_dropped_in_every_row_column_and_pair() -> None:
    mask = keyed_mask(_keys(torch.arange(4000)), 256, 0.3).double()
    assert float(mask.mean()) == pytest.approx(0.7, abs=0.002)
    assert float((mask.mean(0) - 0.7).abs().max()) < 5 * (0.21 / 4000) ** 0.5
    assert float((mask.mean(1) - 0.7).abs().max()) < 6 * (0.21 / 256) ** 0.5
    together = (mask[:, 0::2] * mask[:, 1::2]).mean()  # two columns share a word
    assert float(together) == pytest.approx(0.49, abs=0.003)
    neighbours = (mask[1:] * mask[:-1]).mean()
    assert float(neighbours) == pytest.approx(0.49, abs=0.003)


def test_the_mask_follows_the_row_wherever_it_lies() -> None:
    ids, order = torch.arange(100) * 3, torch.randperm(100)
    x = torch.rand(100, 10) + 1
    assert torch.equal(keyed_dropout(x, _keys(ids), 0.5)[order], keyed_dropout(x[order], _keys(ids[order]), 0.5))
    assert not torch.equal(keyed_dropout(x, _keys(ids), 0.5), keyed_dropout(x, _keys(ids, call=18), 0.5))


def test_backward_drops_what_forward_dropped() -> None:
    x = torch.randn(30, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x, _keys(torch.arange(30)), 0.5), [x])
    wide = torch.randn(7, 30, dtype=torch.float64, requires_grad=True)  # rows that are not contiguous
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x.t(), _keys(torch.arange(30)), 0.5), [wide])


def test_all_and_nothing() -> None:
    x = torch.ones(5, 4)
    assert torch.equal(keyed_dropout(x, _keys(torch.arange(5)), 1.0), torch.zeros(5, 4))
    assert torch.equal(keyed_dropout(x, _keys(torch.arange(5)), 1e-12), x)
