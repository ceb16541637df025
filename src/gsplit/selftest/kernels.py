"""Every Triton kernel against its definition, the host's kernel, on a device: a program of its own.

``python -m gsplit.selftest.kernels DEVICE`` prints a JSON document: by kernel, the largest difference, in units of
rounding (float32) where sums are made in another order. On the simulated device Triton's interpreter has to be on from
the start of the process (TRITON_INTERPRET=1).
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from gsplit.graph import Graph
from gsplit.kernels import attention_numba, rows
from gsplit.kernels.attention import AttentionInputs, AttentionOptions, attend
from gsplit.kernels.csr import CsrEdges, make_csr_edges
from gsplit.nn.dropout import keyed_dropout
from gsplit.sampling.neighbor import HostNeighborSampler, make_sampler
from gsplit.sampling.protocol import LayerSampler

__all__ = ["BOUNDS", "compare_kernels"]

BOUNDS = {"gather": 0.0, "dropout": 0.0, "row moves": 0.0, "sampling": 0.0, "GAT": 64.0, "GATv2": 64.0}
"""How far each may be from its definition: nothing, or so many units of rounding of the largest element."""
_NUM_SRC, _NUM_DST, _WIDTH, _HEADS = 40, 15, 24, 2


def _units(found: Tensor, wanted: Tensor) -> float:
    """The largest difference in units of rounding of the largest element; 0.0 for equal bits."""
    if torch.equal(found.cpu(), wanted.to(found.dtype)):
        return 0.0
    scale = max(1.0, float(wanted.abs().max())) * torch.finfo(torch.float32).eps
    return float((found.cpu().double() - wanted.double()).abs().max()) / scale


def _edges() -> CsrEdges:
    counts = torch.randint(0, 9, (_NUM_DST,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return make_csr_edges(indptr, torch.randint(0, _NUM_SRC, (int(indptr[-1]),)), _NUM_SRC, add_self_loops=True)


def _there(edges: CsrEdges, device: torch.device) -> CsrEdges:
    return CsrEdges(edges.indptr.to(device), edges.src_rows.to(device), edges.places.to(device), edges.num_src)


def _gather(device: torch.device) -> float:
    from gsplit.kernels.triton.gather import gather_rows

    stored, positions = torch.randn(_NUM_SRC, _WIDTH), torch.randint(0, _NUM_SRC, (33,))
    out = torch.empty(33, _WIDTH, device=device)
    gather_rows(stored[:10].to(device), stored.pin_memory(), positions.to(device), out)
    return _units(out, stored[positions])


def _dropout(device: torch.device) -> float:
    x, keys = torch.randn(37, _WIDTH), torch.randint(-(2**63), 2**63 - 1, (37,))
    return max(
        _units(keyed_dropout(x.to(device, dtype), keys.to(device), 0.37), keyed_dropout(x.to(dtype), keys, 0.37))
        for dtype in (torch.float32, torch.float64)
    )


def _row_moves(device: torch.device) -> float:
    from gsplit.kernels.triton import rows as device_rows

    h, send = torch.randn(_NUM_SRC, _WIDTH), torch.cat([torch.randperm(_NUM_SRC)[:20], torch.randperm(_NUM_SRC)[:11]])
    own, sent, merged = torch.empty_like(h), torch.empty(31, _WIDTH), torch.empty_like(h)
    there = [tensor.to(device) for tensor in (h, send, own, sent, merged)]
    rows.copy_and_gather(h, send, own, sent)
    rows.merge_gradient(h, h[:7], send, (sent,), merged)
    device_rows.copy_and_gather(there[0], there[1], there[2], there[3])
    device_rows.merge_gradient(there[0], there[0][:7], there[1], there[3], there[4])
    pairs = zip(there[2:], (own, sent, merged), strict=True)
    return max(_units(found, wanted) for found, wanted in pairs)


def _sampling(device: torch.device) -> float:
    rng = np.random.default_rng(0)
    dst = np.sort(rng.integers(0, 200, 3000))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=200))]).astype(np.int64)
    graph = Graph(indptr, rng.integers(0, 200, 3000).astype(np.int32), 200).restrict(40, 160)
    names, targets = rng.permutation(200)[40:160].astype(np.int64), torch.arange(50, 90)
    host, there = HostNeighborSampler(graph, names), make_sampler(graph, names, device)
    differing = 0
    for one, two in zip(_layers(host, targets), _layers(there, targets.to(device)), strict=True):
        differing += not torch.equal(one, two.cpu())
    return float(differing)


def _layers(sampler: LayerSampler, targets: Tensor) -> list[Tensor]:
    frontier, found = sampler.start(targets), []
    for key, fanout in enumerate((5, -1, 15)):
        layer = frontier.sample_layer(key + 1, fanout)
        found += [layer.indptr, layer.sources.clone(), layer.foreign_ids]
    found.append(frontier.ids(frontier.num_rows))
    frontier.close()
    return found


def _attention(kind: str, device: torch.device) -> float:
    from gsplit.kernels.triton import attention as attention_triton

    edges = _edges()
    keep = torch.rand(edges.num_edges, _HEADS) > 0.3
    x_src, x_dst = torch.randn(_NUM_SRC, _HEADS, _WIDTH), torch.randn(_NUM_DST, _HEADS, _WIDTH)
    scores = torch.randn(_NUM_SRC, _HEADS), torch.randn(_NUM_DST, _HEADS)
    inputs = AttentionInputs(x_src, scores[0], scores[1], edge_terms=None, att=None)
    if kind == "GATv2":
        inputs = AttentionInputs(x_src, None, x_dst, edge_terms=None, att=torch.randn(_HEADS, _WIDTH) / 5)
    g = torch.randn(_NUM_DST, _HEADS, _WIDTH)
    there = AttentionInputs._make(None if t is None else t.to(device).requires_grad_() for t in inputs)
    host = AttentionInputs._make(None if t is None else t.double().requires_grad_() for t in inputs)
    found = attend(attention_triton, _there(edges, device), AttentionOptions(0.2, keep.to(device), 0.3), there)
    wanted = attend(attention_numba, edges, AttentionOptions(0.2, keep, 0.3), host)
    found.backward(g.to(device))
    wanted.backward(g.double())
    worst = _units(found.detach(), wanted.detach())
    for one, two in zip(there, host, strict=True):
        if one is not None and two is not None:
            assert one.grad is not None and two.grad is not None
            worst = max(worst, _units(one.grad, two.grad))
    return worst


def compare_kernels(device: torch.device) -> dict[str, float]:
    """By kernel, how far it is from its definition."""
    checks: dict[str, Callable[[torch.device], float]] = {
        "gather": _gather,
        "dropout": _dropout,
        "row moves": _row_moves,
        "sampling": _sampling,
        "GAT": lambda device: _attention("GAT", device),
        "GATv2": lambda device: _attention("GATv2", device),
    }
    torch.manual_seed(0)
    return {name: check(device) for name, check in checks.items()}


def _main(name: str) -> None:
    from gsplit.testing.simulated import simulated_device

    with simulated_device() if name.startswith("sim") else nullcontext():
        sys.stdout.write(json.dumps(compare_kernels(torch.device(name, 0))) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
