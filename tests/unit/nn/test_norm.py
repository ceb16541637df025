"""Batch norm over ranks, on one: what torch computes, running statistics and gradients included."""

import pytest
import torch
import torch.nn.functional as F

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm.comm import SoloComm
from gsplit.errors import InputError
from gsplit.nn.norm import global_batch_norm
from gsplit.telemetry import StepTelemetry


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_one_rank_is_torch(affine: bool, momentum: float) -> None:
    x = (torch.randn(40, 6, dtype=torch.float64) * 3 + 2).requires_grad_()
    weight = torch.rand(6, dtype=torch.float64).requires_grad_() if affine else None
    bias = torch.rand(6, dtype=torch.float64).requires_grad_() if affine else None
    mean, var = torch.rand(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    theirs = (mean.clone(), var.clone())
    out = global_batch_norm(
        x, mean, var, weight, bias, momentum, 1e-5, SoloComm(), 0, DeferredChecks(), StepTelemetry()
    )
    want = F.batch_norm(x, *theirs, weight, bias, True, momentum, 1e-5)
    assert torch.allclose(out, want, atol=1e-12)
    assert torch.allclose(mean, theirs[0], atol=1e-12) and torch.allclose(var, theirs[1], atol=1e-12)
    inputs = [x, weight, bias] if weight is not None and bias is not None else [x]
    g = torch.randn(40, 6, dtype=torch.float64)
    for got, wanted in zip(torch.autograd.grad(out, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        assert torch.allclose(got, wanted, atol=1e-12)


def test_the_output_may_be_changed_in_place() -> None:
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    out = global_batch_norm(x, None, None, None, None, 0.1, 1e-5, SoloComm(), 0, DeferredChecks(), StepTelemetry())
    (got,) = torch.autograd.grad(out.relu_().square().sum(), [x])
    want = F.batch_norm(x, None, None, training=True).relu().square().sum()
    assert torch.allclose(got, torch.autograd.grad(want, [x])[0], atol=1e-12)


def test_float32_keeps_the_variance_of_rows_far_from_zero() -> None:
    x = torch.randn(5000, 3) + 1000
    var = torch.zeros(3)
    global_batch_norm(x, torch.zeros(3), var, None, None, 1.0, 0.0, SoloComm(), 0, DeferredChecks(), StepTelemetry())
    assert torch.allclose(var, x.double().var(0).float(), rtol=1e-3)


def test_a_single_row_is_refused_as_torch_does() -> None:
    with pytest.raises(InputError, match=r"batch norm: expected at least 2 rows .got 1 in the whole mini-batch"):
        global_batch_norm(
            torch.ones(1, 2), None, None, None, None, 0.1, 1e-5, SoloComm(), 0, DeferredChecks(), StepTelemetry()
        )
