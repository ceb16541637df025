"""Every Triton kernel against its definition, the host's kernel, on a device.

Differences are in units of rounding (float32) where sums are made in another order, and otherwise 0.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm.mesh import Mesh
from gsplit.doctor.finding import largest
from gsplit.graph.graph import Graph
from gsplit.kernels import rows
from gsplit.kernels.attention import gat_attention, gatv2_attention
from gsplit.kernels.attention_types import AttentionOptions
from gsplit.kernels.csr import CsrEdges, make_csr_edges
from gsplit.nn.dropout import keyed_dropout
from gsplit.sampling.neighbor import HostNeighborSampler, make_sampler
from gsplit.sampling.protocol import LayerSampler

__all__ = ["BOUNDS", "compare_kernels"]

BOUNDS = {"gather": 0.0, "dropout": 0.0, "row moves": 0.0, "sampling": 0.0, "GAT": 64.0, "GATv2": 64.0}
"""How far each kernel may be from its definition, in units of rounding of the largest element."""
_NUM_SRC = 40
_NUM_DST = 15
_WIDTH = 24
_HEADS = 2


def compare_kernels(mesh: Mesh) -> dict[str, float]:
    """How far each kernel on the mesh's device is from its definition, by name."""
    checks: dict[str, Callable[[torch.device], float]] = {
        "gather": _gather,
        "dropout": _dropout,
        "row moves": _row_moves,
        "sampling": _sampling,
        "GAT": _gat,
        "GATv2": _gatv2,
    }
    torch.manual_seed(0)
    return {name: check(mesh.device) for name, check in checks.items()}


def _units(found: Tensor, wanted: Tensor) -> float:
    """The largest difference in units of rounding of the largest element; 0.0 for equal bits."""
    if torch.equal(found.cpu(), wanted.to(found.dtype)):
        return 0.0
    scale = max(1.0, float(wanted.abs().max())) * torch.finfo(torch.float32).eps
    return float((found.cpu().double() - wanted.double()).abs().max()) / scale


def _gather(device: torch.device) -> float:
    from gsplit.kernels.triton.gather import gather_rows

    stored = torch.randn(_NUM_SRC, _WIDTH)
    positions = torch.randint(0, _NUM_SRC, (33,))
    out = torch.empty(33, _WIDTH, device=device)
    gather_rows(stored[:10].to(device), stored.pin_memory(), positions.to(device), out)
    return _units(out, stored[positions])


def _dropout(device: torch.device) -> float:
    x = torch.randn(37, _WIDTH)
    keys = torch.randint(-(2**63), 2**63 - 1, (37,))
    return largest(
        _units(keyed_dropout(x.to(device, dtype), keys.to(device), 0.37), keyed_dropout(x.to(dtype), keys, 0.37))
        for dtype in (torch.float32, torch.float64)
    )


def _row_moves(device: torch.device) -> float:
    from gsplit.kernels.triton import rows as device_rows

    h = torch.randn(_NUM_SRC, _WIDTH)
    send = torch.cat([torch.randperm(_NUM_SRC)[:20], torch.randperm(_NUM_SRC)[:11]])
    own = torch.empty_like(h)
    sent = torch.empty(31, _WIDTH)
    merged = torch.empty_like(h)
    there = [tensor.to(device) for tensor in (h, send, own, sent, merged)]
    rows.copy_and_gather(h, send, own, sent)
    rows.merge_gradient(h, h[:7], send, (sent,), merged)
    device_rows.copy_and_gather(there[0], there[1], there[2], there[3])
    device_rows.merge_gradient(there[0], there[0][:7], there[1], there[3], there[4])
    pairs = zip(there[2:], (own, sent, merged), strict=True)
    return largest(_units(found, wanted) for found, wanted in pairs)


def _sampling(device: torch.device) -> float:
    rng = np.random.default_rng(0)
    dst = np.sort(rng.integers(0, 200, 3000))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=200))]).astype(np.int64)
    graph = Graph(indptr, rng.integers(0, 200, 3000).astype(np.int32), 200).restrict(40, 160)
    names = rng.permutation(200)[40:160].astype(np.int64)
    targets = torch.arange(50, 90)
    host = HostNeighborSampler(graph, names)
    there = make_sampler(graph, names, device)
    differing = 0
    for one, two in zip(_layers(host, targets), _layers(there, targets.to(device)), strict=True):
        differing += not torch.equal(one, two.cpu())
    return float(differing)


def _layers(sampler: LayerSampler, targets: Tensor) -> list[Tensor]:
    frontier = sampler.start(targets)
    found = []
    for key, fanout in enumerate((5, -1, 15)):
        layer = frontier.sample_layer(key + 1, fanout)
        found += [layer.indptr, layer.sources.clone(), layer.foreign_ids]
    found.append(frontier.ids(frontier.num_rows))
    frontier.close()
    return found


def _gat(device: torch.device) -> float:
    inputs = [torch.randn(_NUM_SRC, _HEADS, _WIDTH), torch.randn(_NUM_SRC, _HEADS), torch.randn(_NUM_DST, _HEADS)]

    def attend(edges: CsrEdges, given: list[Tensor], options: AttentionOptions) -> Tensor:
        values, score_src, score_dst = given
        return gat_attention(edges, values, score_src, score_dst, None, options)

    return _compare_attention(attend, inputs, device)


def _gatv2(device: torch.device) -> float:
    x_src = torch.randn(_NUM_SRC, _HEADS, _WIDTH)
    inputs = [x_src, torch.randn(_NUM_DST, _HEADS, _WIDTH), torch.randn(_HEADS, _WIDTH) / 5]

    def attend(edges: CsrEdges, given: list[Tensor], options: AttentionOptions) -> Tensor:
        x_src, x_dst, att = given
        return gatv2_attention(edges, x_src, x_dst, None, att, options)

    return _compare_attention(attend, inputs, device)


def _compare_attention(
    attend: Callable[[CsrEdges, list[Tensor], AttentionOptions], Tensor], inputs: list[Tensor], device: torch.device
) -> float:
    """Output and gradients on the device in float32 against the host's in float64."""
    counts = torch.randint(0, 9, (_NUM_DST,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    edges = make_csr_edges(indptr, torch.randint(0, _NUM_SRC, (int(indptr[-1]),)), _NUM_SRC, add_self_loops=True)
    edges_there = CsrEdges(edges.indptr.to(device), edges.src_rows.to(device), edges.places.to(device), edges.num_src)
    keep = torch.rand(edges.num_edges, _HEADS) > 0.3
    g = torch.randn(_NUM_DST, _HEADS, _WIDTH)
    host = [tensor.double().requires_grad_() for tensor in inputs]
    there = [tensor.to(device).requires_grad_() for tensor in inputs]
    found = attend(edges_there, there, AttentionOptions(0.2, keep.to(device), 0.3))
    wanted = attend(edges, host, AttentionOptions(0.2, keep, 0.3))
    found.backward(g.to(device))
    wanted.backward(g.double())
    errors = [_units(found.detach(), wanted.detach())]
    for one, two in zip(there, host, strict=True):
        assert one.grad is not None
        assert two.grad is not None
        errors.append(_units(one.grad, two.grad))
    return largest(errors)
