"""Dropout, shuffle and sampling lead to their kernels where the rule says so; elsewhere Triton is not even imported.

The rule of ``kernels.dispatch`` never picks Triton for tensors of the host, so it is replaced here.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from graphs import random_graph
from same_bits import assert_same_bits
from torch import Tensor

import gsplit.minibatch.shuffle
import gsplit.nn.dropout
import gsplit.sampling.neighbor
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.triton.launch import set_launcher
from gsplit.minibatch.route import Route

CPU = torch.device("cpu")
on_sm_80 = pytest.mark.parametrize("compiled", [80], indirect=True)


@contextmanager
def triton_chosen() -> Iterator[list[str]]:
    """The rule says Triton; yields the names of the kernels that are started."""
    started: list[str] = []

    def record(
        kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
    ) -> None:
        started.append(kernel.__name__)
        assert all(any(arg is tensor for arg in args) for tensor in writes)
        before(kernel, grid, args, constants, writes)

    before = set_launcher(record)
    with pytest.MonkeyPatch.context() as patches:
        for module in (gsplit.nn.dropout, gsplit.minibatch.shuffle, gsplit.sampling.neighbor):
            patches.setattr(module, "kernel_for", lambda *_: "triton")
        yield started
    set_launcher(before)


@on_sm_80
def test_dropout_starts_its_kernel_in_both_directions(compiled: int) -> None:
    keys, g = torch.arange(9) * 7919, torch.randn(9, 2, 5)

    def run() -> tuple[Tensor, Tensor]:
        x = torch.linspace(-2, 2, 90).view(9, 2, 5).requires_grad_()
        out = gsplit.nn.dropout.keyed_dropout(x, keys, 0.4)
        out.backward(g)
        assert x.grad is not None
        return out.detach(), x.grad

    want = run()
    with triton_chosen() as started:
        got = run()
    assert started == ["dropout_kernel"] * 2
    for one, two in zip(got, want, strict=True):
        assert_same_bits(one, two)


@on_sm_80
def test_the_shuffle_takes_one_launch_each_way(compiled: int) -> None:
    """With and without a gradient of the destinations."""
    index = Route(torch.tensor([3, 0, 1, 3]), (0, 2, 2), (0, 1, 1), 4, 2)
    pool, h = BufferPool(CPU), torch.randn(4, 3)
    g_mixed, g_dst, returned = torch.randn(6, 3), torch.randn(2, 3), torch.randn(4, 3)

    def run() -> list[Tensor]:
        sent = torch.empty(4, 3)
        mixed = gsplit.minibatch.shuffle.fill_mixed(h, index, sent, pool)
        merged = [
            gsplit.minibatch.shuffle.merge_gradients(g_mixed, g, (returned,), index, pool, deterministic=False)
            for g in (g_dst, None)
        ]
        return [sent, mixed[:4].clone(), *merged]

    want = run()
    with triton_chosen() as started:
        got = run()
    assert started == ["spread_kernel", "merge_kernel", "merge_kernel"]
    for one, two in zip(got, want, strict=True):
        assert_same_bits(one, two)


@on_sm_80
def test_the_sampler_is_the_one_of_kernels(compiled: int) -> None:
    graph = random_graph(30, 200, 2.0, seed=1)

    def sample() -> Any:
        sampler = gsplit.sampling.neighbor.make_sampler(graph, np.empty(0, np.int64), CPU, edge_ids=True)
        return sampler.start(torch.tensor([3, 1])).sample_layer(5, 4)

    want = sample()
    with triton_chosen() as started:
        got = sample()
    assert started == ["count_kernel", "draw_kernel", "meet_kernel", "flag_kernel", "place_kernel"]
    for name in ("indptr", "sources", "edge_ids"):
        assert_same_bits(getattr(got, name), getattr(want, name))


def test_the_host_never_imports_triton() -> None:
    code = (
        "import sys, torch, numpy as np; from gsplit.nn.dropout import keyed_dropout;"
        "from gsplit.sampling.neighbor import make_sampler; from gsplit.graph.graph import Graph;"
        "import gsplit.minibatch.shuffle;"
        "keyed_dropout(torch.ones(2, 2), torch.arange(2), 0.5);"
        "make_sampler(Graph(np.array([0, 0]), np.array([], int), 1), np.array([], int), torch.device('cpu'));"
        "print('triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "False"
