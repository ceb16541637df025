"""What a vertex and an edge cost a layer, forward and backward, on one core: the ground for c_v and c_e.

    python -m gsplit_bench layer-cost

Times a layer on blocks of several sizes and fanouts and fits seconds = a * vertices + b * edges.
"""

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch_geometric.nn import GATConv, GINConv, SAGEConv

__all__ = ["main"]

SIZES = [(n, f) for n in (5_000, 20_000) for f in (1, 3, 6, 10, 15)]
REPEATS = 7


def _layer(name: str, width: int) -> Any:
    if name == "gin":
        mlp = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
        return GINConv(mlp)
    return SAGEConv(width, width) if name == "sage" else GATConv(width, width // 4, 4, add_self_loops=False)


def measure(name: str, width: int) -> dict[str, float]:
    layer = _layer(name, width)
    seconds: dict[tuple[int, int], list[float]] = {size: [] for size in SIZES}
    for _ in range(REPEATS):
        for num_dst, fanout in SIZES:
            num_src = 3 * num_dst
            source = torch.randint(num_src, (num_dst * fanout,))
            edges = torch.stack([source, torch.arange(num_dst).repeat_interleave(fanout)])
            x = torch.randn(num_src, width, requires_grad=True)
            start = time.perf_counter()
            layer((x, x[:num_dst]), edges).sum().backward()
            seconds[num_dst, fanout].append(time.perf_counter() - start)
    rows = np.array([[n, n * f] for n, f in SIZES], float)
    times = np.array([median(seconds[size]) for size in SIZES])
    weights = 1 / times  # relative errors count alike
    (per_vertex, per_edge), *_ = np.linalg.lstsq(rows * weights[:, None], times * weights, rcond=None)
    error = float(np.abs(rows @ [per_vertex, per_edge] / times - 1).max())
    return {
        "us_per_vertex": 1e6 * per_vertex,
        "us_per_edge": 1e6 * per_edge,
        "ratio": per_vertex / per_edge,
        "worst_fit": error,
    }


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    print(
        json.dumps(
            {f"{name}-{width}": measure(name, width) for name in ("sage", "gat", "gin") for width in (64, 256)},
            indent=1,
        )
    )
