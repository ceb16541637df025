"""The places that choose a Triton kernel, led to it by the rule of ``kernels.dispatch`` and run in the interpreter.

The rule never picks Triton for tensors of the host, so it is replaced for the time of a call; on a device it is not.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton_programs import CPU, assert_same_bits, random_graph

import gsplit.minibatch.shuffle
import gsplit.nn.dropout
import gsplit.sampling.neighbor
from gsplit.kernels.buffers import BufferPool
from gsplit.kernels.triton.launch import set_launcher
from gsplit.minibatch.route import Route


@contextmanager
def _triton_chosen() -> Iterator[list[str]]:
    """The rule says Triton; yields the names of the kernels that are started."""
    started: list[str] = []
    modules = (gsplit.nn.dropout, gsplit.minibatch.shuffle, gsplit.sampling.neighbor)
    rules = [module.kernel_for for module in modules]

    def record(
        kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
    ) -> None:
        started.append(kernel.__name__)
        assert all(any(arg is tensor for arg in args) for tensor in writes)
        before(kernel, grid, args, constants, writes)

    before = set_launcher(record)
    for module in modules:
        module.kernel_for = lambda *_: "triton"  # type: ignore[attr-defined]
    try:
        yield started
    finally:
        set_launcher(before)
        for module, rule in zip(modules, rules, strict=True):
            module.kernel_for = rule  # type: ignore[attr-defined]


def check_dropout_site() -> list[str]:
    """Forward and backward of keyed dropout, by both kernels; returns those started."""
    keys, g = torch.arange(9) * 7919, torch.randn(9, 2, 5)

    def run() -> tuple[Tensor, Tensor]:
        x = torch.linspace(-2, 2, 90).view(9, 2, 5).requires_grad_()
        out = gsplit.nn.dropout.keyed_dropout(x, keys, 0.4)
        out.backward(g)
        assert x.grad is not None
        return out.detach(), x.grad

    want = run()
    with _triton_chosen() as started:
        got = run()
    for one, two in zip(got, want, strict=True):
        assert_same_bits(one, two)
    return started


def check_shuffle_sites() -> list[str]:
    """Both halves of a shuffle, with and without a gradient of the destinations."""
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
    with _triton_chosen() as started:
        got = run()
    for one, two in zip(got, want, strict=True):
        assert_same_bits(one, two)
    return started


def check_sampler_site() -> list[str]:
    """The sampler that ``make_sampler`` makes, used once."""
    graph = random_graph(30, 200, 2.0, 1)
    layers = []
    with _triton_chosen() as started:
        sampler = gsplit.sampling.neighbor.make_sampler(graph, np.empty(0, np.int64), CPU, edge_ids=True)
        layers.append(sampler.start(torch.tensor([3, 1])).sample_layer(5, 4))
    sampler = gsplit.sampling.neighbor.make_sampler(graph, np.empty(0, np.int64), CPU, edge_ids=True)
    layers.append(sampler.start(torch.tensor([3, 1])).sample_layer(5, 4))
    for name in ("indptr", "sources", "edge_ids"):
        assert_same_bits(getattr(layers[0], name), getattr(layers[1], name))
    return started
