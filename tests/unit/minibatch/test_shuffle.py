"""The shuffle's arithmetic: its backward is the transpose of its forward, for any index, without any process group."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_calls import record_calls
from simulated import cut_points, memory_store, shaped_graphs, simulate_exchange, simulate_split
from torch import Tensor

from gsplit.distributed.comm.comm import Call, SoloComm
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.route import Route
from gsplit.minibatch.shuffle import exchange_rows, fill_mixed, merge_gradients
from gsplit.sampling.minibatch import StepKey
from gsplit.telemetry import StepTelemetry

POOL = BufferPool(torch.device("cpu"))


class AllRanks(torch.autograd.Function):
    """Every rank's shuffle at once: the library's two halves, with a transposition of lists in place of the wire."""

    @staticmethod
    def forward(ctx: Any, indices: list[Route], deterministic: bool, *hs: Tensor) -> tuple[Tensor, ...]:
        ctx.indices, ctx.deterministic = indices, deterministic
        leaving = [h.new_empty(index.num_sent, *h.shape[1:]) for h, index in zip(hs, indices, strict=True)]
        own = [fill_mixed(*args, POOL)[: args[0].size(0)] for args in zip(hs, indices, leaving, strict=True)]
        sent = [rows.split(index.send_counts) for rows, index in zip(leaving, indices, strict=True)]
        mixed = [torch.cat([own[r], *(part[r] for part in sent)]) for r in range(len(hs))]
        dst = [h[: index.num_dst].clone() for h, index in zip(hs, indices, strict=True)]
        return (*mixed, *dst)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count = len(ctx.indices)
        parts = [g[i.num_local :].split(i.recv_counts) for g, i in zip(grads[:count], ctx.indices, strict=True)]
        out = []
        for rank, index in enumerate(ctx.indices):
            returned = tuple(part[rank] for part in parts)
            if rank % 2:  # or in one piece
                returned = (torch.cat(returned),)
            before = grads[rank].clone()
            parts_of_it = (grads[rank], grads[count + rank], returned, index, POOL)
            out.append(merge_gradients(*parts_of_it, deterministic=ctx.deterministic))
            assert torch.equal(grads[rank], before)  # the incoming gradient is not ours to write to
        return (None, None, *out)


def all_ranks(indices: list[Route], deterministic: bool, *hs: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = AllRanks.apply(indices, deterministic, *hs)  # type: ignore[no-untyped-call]
    return outputs


def _indices(data: Any, num_ranks: int) -> list[Route]:
    n, src, dst = data.draw(shaped_graphs())
    targets = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=4)), dtype=torch.int64)
    ownership = data.draw(cut_points(n, num_ranks))
    splits = simulate_split(memory_store(n, src, dst), targets, [2, 2], StepKey(1, 0, 0), ownership)
    return [split.layers[1].route for split in splits]


@settings(max_examples=25)
@given(st.integers(1, 4), st.booleans(), st.data())
def test_gradcheck(num_ranks: int, deterministic: bool, data: Any) -> None:
    indices = _indices(data, num_ranks)
    generator = torch.Generator().manual_seed(0)
    hs = [torch.randn(i.num_local, 2, generator=generator, dtype=torch.float64, requires_grad=True) for i in indices]
    assert torch.autograd.gradcheck(lambda *h: all_ranks(indices, deterministic, *h), hs)


@given(st.integers(1, 7), st.data())
def test_simulated_exchange_is_the_forward(num_ranks: int, data: Any) -> None:
    indices = _indices(data, num_ranks)
    hs = [torch.arange(i.num_local * 3.0).reshape(-1, 3) + 1000 * r for r, i in enumerate(indices)]
    out = all_ranks(indices, False, *hs)
    for got, want in zip(out[:num_ranks], simulate_exchange(hs, indices), strict=True):
        assert torch.equal(got, want)


def _solo_index(num_local: int, num_dst: int) -> Route:
    return Route(torch.empty(0, dtype=torch.int64), (0,), (0,), num_local, num_dst)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_local, num_dst", [(5, 3), (5, 0), (0, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_rank(dtype: torch.dtype, num_local: int, num_dst: int, deterministic: bool) -> None:
    comm = SoloComm()
    calls = record_calls(comm)
    h = torch.randn(num_local, 4).to(dtype).requires_grad_()
    route, call = _solo_index(num_local, num_dst), Call("shuffle", 0, 1)
    mixed, dst = exchange_rows(h, route, comm, call, POOL, StepTelemetry(), deterministic=deterministic)
    assert torch.equal(mixed, h)
    assert torch.equal(dst, h[:num_dst])
    assert mixed.dtype == dst.dtype == dtype
    a, b = torch.randn(num_local, 4).to(dtype), torch.randn(num_dst, 4).to(dtype)
    (mixed * a).sum().add((dst * b).sum()).backward()
    want = a.clone()
    want[:num_dst] += b
    assert h.grad is not None
    assert torch.equal(h.grad, want)
    assert not calls  # nothing travels
    assert num_local == 0 or mixed.data_ptr() == h.data_ptr()  # and nothing is copied


def test_either_output_may_go_unused() -> None:
    for use in (0, 1):
        h = torch.randn(4, 2, requires_grad=True)
        outputs = exchange_rows(h, _solo_index(4, 2), SoloComm(), Call("shuffle"), POOL, StepTelemetry())
        outputs[use].sum().backward()
        assert h.grad is not None
        assert h.grad.tolist() == ([[1.0] * 2] * 4 if use == 0 else [[1.0] * 2] * 2 + [[0.0] * 2] * 2)


def test_two_forwards_before_two_backwards_and_a_shared_gradient() -> None:
    h = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    index, comm = _solo_index(4, 2), SoloComm()
    one, one_dst = exchange_rows(h, index, comm, Call("shuffle"), POOL, StepTelemetry())
    two, two_dst = exchange_rows(h * 2, index, comm, Call("shuffle"), POOL, StepTelemetry())
    total = (one + two).sum() + (one_dst * two_dst).sum()  # one + two hands the same gradient to both
    total.backward()
    again = h.detach().clone().requires_grad_()
    (again.sum() + 2 * again.sum() + (again[:2] * 2 * again[:2]).sum()).backward()
    assert h.grad is not None and again.grad is not None
    assert torch.allclose(h.grad, again.grad)
    expanded = torch.randn(4, 1, requires_grad=True)
    mixed, _ = exchange_rows(expanded, index, comm, Call("shuffle"), POOL, StepTelemetry())
    mixed.sum().backward()  # the gradient of sum is expanded, not writable
    assert expanded.grad is not None
    assert expanded.grad.tolist() == [[1.0]] * 4


def test_second_derivatives_are_refused() -> None:
    h = torch.randn(4, 2, requires_grad=True)
    mixed, _ = exchange_rows(h, _solo_index(4, 2), SoloComm(), Call("shuffle"), POOL, StepTelemetry())
    (g,) = torch.autograd.grad((mixed**2).sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_16_bits_are_added_in_float32(deterministic: bool) -> None:
    """256 receivers return 1 each for a row whose gradient is 256: in bfloat16, 256 + 1 is 256."""
    route = Route(torch.zeros(256, dtype=torch.int64), (1,) * 256, (0,) * 256, num_local=1, num_dst=0)
    g_mixed = torch.full((1, 2), 256.0, dtype=torch.bfloat16)
    returned = torch.ones(256, 2, dtype=torch.bfloat16)
    g = merge_gradients(g_mixed, None, (returned,), route, POOL, deterministic=deterministic)
    assert g.dtype == torch.bfloat16 and g.tolist() == [[512.0, 512.0]]
