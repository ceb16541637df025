"""The constants of a GPU for ``gsplit plan --hardware report.json``: rates of the kernels that train, on one rank."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.doctor.network import median_seconds
from gsplit.graph.blocks import Block
from gsplit.graph.graph import Graph
from gsplit.kernels.attention import gat_attention
from gsplit.kernels.attention_types import AttentionOptions
from gsplit.kernels.csr import make_csr_edges
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.sums import EdgeSums
from gsplit.planner.calibration import random_graph
from gsplit.planner.shapes import ATTENTION_BACKWARD
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import make_sampler

__all__ = ["measure_constants"]

_REPEATS = 5
_WIDTH = 128
_HEADS = 4
_FANOUTS = [15, 15]


def measure_constants(mesh: Mesh, num_vertices: int = 500_000) -> dict[str, float]:
    """Measure the constants of ``planner.hardware.Hardware`` that a device decides, by their names there."""
    device = mesh.device
    graph = random_graph(num_vertices, 15 * num_vertices)
    found = {}
    found["sample_edges_per_s"], _ = _measure_sampling(graph, device)
    found["host_sample_edges_per_s"], block = _measure_sampling(graph, torch.device("cpu"))
    x = torch.randn(block.num_src, _WIDTH, device=device)
    found |= _measure_sums(block, x)
    weights = torch.randn(_WIDTH, 2 * _WIDTH, device=device)
    rows = torch.randperm(block.num_src, device=device)
    found["flops_per_s"] = 4 * x.numel() * _WIDTH / _seconds(lambda: x @ weights, device)
    found["row_bytes_per_s"] = 2 * x.nbytes / _seconds(lambda: torch.relu(x), device)
    found["cache_bytes_per_s"] = x.nbytes / _seconds(lambda: x.index_select(0, rows), device)
    found["memory_bytes"] = float(torch.get_device_module(device).mem_get_info(device)[1])
    if mesh.size > 1:
        one = torch.zeros(1, device=device)
        found["collective_s"] = _seconds(lambda: mesh.world.all_reduce(Call("measure"), one).wait(), device)
    return found


def _measure_sampling(graph: Graph, device: torch.device) -> tuple[float, Block]:
    """Edges drawn per second on a device, and the last block that was drawn."""
    sampler = make_sampler(graph, np.empty(0, np.int64), device)
    targets = torch.arange(graph.num_vertices // 125, device=device)
    seconds = _seconds(lambda: sample_minibatch(sampler, targets, _FANOUTS, StepKey(0, 0, 0)), device)
    blocks = sample_minibatch(sampler, targets, _FANOUTS, StepKey(0, 0, 0)).blocks
    return sum(block.num_edges for block in blocks) / seconds, blocks[0]


def _measure_sums(block: Block, x: Tensor) -> dict[str, float]:
    """Rates of the sums over the edges of a block, and of attention if a kernel of ours computes it."""
    indptr, src_rows = (tensor.to(x.device) for tensor in (block.indptr, block.src_rows))
    sums = EdgeSums(indptr, src_rows, block.num_src, None)
    num_values = block.num_edges * _WIDTH
    found = {"aggregate_bytes_per_s": 4 * num_values / _seconds(lambda: sums(x, mean=True), x.device)}
    if kernel_for("attention", x.device, x.dtype) == "torch":
        return found
    made = make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=False)
    edges = replace(made, indptr=indptr, src_rows=src_rows, places=made.places.to(x.device))
    values = x.view(-1, 1, _WIDTH).requires_grad_()
    score_src = torch.randn(block.num_src, _HEADS, device=x.device)
    score_dst = torch.randn(block.num_dst, _HEADS, device=x.device)

    def attend() -> None:
        out = gat_attention(edges, values, score_src, score_dst, None, AttentionOptions(0.2))
        torch.autograd.grad(out.sum(), values)

    work = (1 + ATTENTION_BACKWARD) * num_values * (1 + _HEADS / 8)
    found["attention_values_per_s"] = work / _seconds(attend, x.device)
    return found


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    return max(median_seconds(run, _REPEATS, device), 1e-9)
