"""Attention layers and whole training steps: our kernels against PyG's own layers and DGL 1.1.3's, in one run.

    python -m gsplit_bench attention --out benchmarks/results/DATE-attention

Everything is measured in CPU seconds and taken in turn (ours, PyG's, DGL's, ours, ...), so that whatever the machine
does meanwhile falls on all. A layer: forward and backward on one block, float32. A step: make the batch, forward,
backward, Adam, as real ranks; the seconds of all ranks together. "pyg" is the same program whose dispatch knows no
attention kernel. DGL runs where it can be imported (``pip install --no-deps dgl==1.1.3`` beside psutil, requests,
tqdm, networkx, scipy); it gets the same blocks without self-loops, and in steps only one rank; it does not have
TransformerConv.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from gsplit_bench.waiting_ranks import WaitingRanks, answer_steps

__all__ = ["main"]

SIZES = {"num_dst": 12_000, "num_src": 80_000, "num_edges": 220_000, "width": 128, "heads": 4, "channels": 64}
GRAPH = {"vertices": 50_000, "edges": 1_000_000, "features": 128, "batch": 256, "hidden": 128}
FANOUT = [15, 10, 5]


def _block() -> Any:
    import numpy as np
    import torch

    from gsplit.graph.blocks import Block

    rng, n = np.random.default_rng(0), SIZES
    counts = rng.multinomial(n["num_edges"], np.ones(n["num_dst"]) / n["num_dst"])
    indptr = torch.from_numpy(np.concatenate([[0], counts.cumsum()]))
    src = torch.from_numpy((n["num_src"] * rng.random(n["num_edges"]) ** 1.3).astype(np.int64))
    return Block(indptr, src, n["num_src"])


def _runs_dgl(kind: str) -> bool:
    return kind != "transformer" and find_spec("dgl") is not None


def _layers(kind: str, block: Any) -> dict[str, Any]:
    """For every implementation: a layer, and how it is called with rows."""
    import torch
    from torch_geometric import nn as pyg

    from gsplit.kernels.csr import csr_matrix, make_csr_edges
    from gsplit.nn.attention import run_attention_layer
    from gsplit.nn.layers import adds_self_loops

    width, heads, channels, d = SIZES["width"], SIZES["heads"], SIZES["channels"], SIZES["num_dst"]
    edge_index = block.edge_index()
    if kind == "sage":
        conv = pyg.SAGEConv(width, heads * channels)
        matrix = csr_matrix(block.indptr, block.src_rows, torch.ones(block.num_edges), num_columns=block.num_src)
        bare = torch.nn.Linear(width, heads * channels), torch.nn.Linear(width, heads * channels, bias=False)

        def sparse(x: Any) -> Any:
            return bare[0](torch.sparse.mm(matrix, x, "mean")) + bare[1](x[:d])

        return {
            "ours": (conv, lambda x: conv((x, x[:d]), matrix)),
            "torch.sparse": (bare[0], sparse),
            "pyg": (conv, lambda x: conv((x, x[:d]), edge_index)),
        }
    kinds = {"gat": pyg.GATConv, "gatv2": pyg.GATv2Conv, "transformer": pyg.TransformerConv}
    conv = kinds[kind](width, channels, heads)

    def ours(x: Any) -> Any:
        edges = make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=adds_self_loops(conv))
        return run_attention_layer(conv, (x, x[:d]), None, block, edges, None)

    found = {"ours": (conv, ours), "pyg": (conv, lambda x: conv((x, x[:d]), edge_index))}
    if _runs_dgl(kind):
        import dgl
        from dgl.nn import pytorch as theirs

        graph = dgl.create_block(tuple(edge_index), num_src_nodes=block.num_src, num_dst_nodes=d)
        layer = (theirs.GATConv if kind == "gat" else theirs.GATv2Conv)(
            width, channels, heads, allow_zero_in_degree=True
        )
        found["dgl"] = (layer, lambda x: layer(graph, (x, x[:d])).flatten(1))
    return found


def measure_layer(kind: str, rounds: int, needs_gradient: bool) -> dict[str, list[float]]:
    """CPU seconds of forward and backward, by implementation; ``needs_gradient``: of the rows too, as behind layer 0."""
    import torch

    torch.manual_seed(0)
    runs = _layers(kind, _block())
    x = torch.randn(SIZES["num_src"], SIZES["width"], requires_grad=needs_gradient)
    g = torch.randn(SIZES["num_dst"], SIZES["heads"] * SIZES["channels"])
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (layer, run) in runs.items():
            start = time.process_time()
            run(x).backward(g)
            taken = time.process_time() - start
            layer.zero_grad()
            x.grad = None
            if number:
                seconds[name].append(taken)
    return seconds


def _dgl_model(kind: str) -> Any:
    """Three DGL layers on our blocks, with the widths and dropouts of the PyG model."""
    import dgl
    import torch
    import torch.nn.functional as F
    from dgl.nn import pytorch as theirs

    layer = theirs.GATConv if kind == "gat" else theirs.GATv2Conv
    width, hidden = GRAPH["features"], GRAPH["hidden"]
    sizes = [(width, hidden // 4, 4), (hidden, hidden // 4, 4), (hidden, 16, 1)]
    convs = torch.nn.ModuleList(layer(*size, attn_drop=0.5, allow_zero_in_degree=True) for size in sizes)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = convs

        def forward(self, batch: Any) -> Any:
            h = batch.x
            for number, conv in enumerate(self.convs):
                mixed, dst = batch.shuffle(number, h)
                block = batch.blocks[number]
                ends = tuple(block.edge_index())
                graph = dgl.create_block(ends, num_src_nodes=block.num_src, num_dst_nodes=block.num_dst)
                h = conv(graph, (mixed, dst)).flatten(1)
                h = F.dropout(h.relu(), 0.5) if number < 2 else h
            return h

    return Model()


def work(name: str, kind: str) -> None:
    """One rank: a step for every line of standard input."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch_geometric.data import Data

    import gsplit
    from gsplit.nn import attention
    from gsplit.run.models import make_model

    torch.set_num_threads(1)
    if name == "pyg":
        setattr(attention, "kernel_for", lambda *operation: "torch")  # noqa: B010
    rng = np.random.default_rng(0)
    n, e = GRAPH["vertices"], GRAPH["edges"]
    src, dst = (n * rng.random(e) ** 1.5).astype(np.int64), rng.integers(0, n, e)
    data = Data(
        x=torch.from_numpy(rng.normal(size=(n, GRAPH["features"])).astype(np.float32)),
        y=torch.from_numpy(rng.integers(0, 16, n)),
        edge_index=torch.from_numpy(np.stack([src, dst])),
    )
    mesh = gsplit.init("cpu")
    parts = torch.from_numpy(rng.integers(0, 4, n))
    loader = gsplit.NeighborLoader(data, FANOUT, None, batch_size=GRAPH["batch"], mesh=mesh, partition=parts)
    torch.manual_seed(0)
    hidden, width = GRAPH["hidden"], GRAPH["features"]
    if name == "dgl":
        model = _dgl_model(kind)
    else:
        plain = make_model(
            kind,
            in_channels=width,
            hidden_channels=hidden,
            num_layers=3,
            out_channels=16,
            heads=4,
            dropout=0.5,
        )
        model = gsplit.parallelize(plain, mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def step(number: int) -> float:
        batch = loader.make_batch(0, number)
        out = model(batch) if name == "dgl" else model(batch.x, batch.edge_index)
        loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    answer_steps(step)


def measure_steps(kind: str, ranks: int, steps: int) -> dict[str, list[float]]:
    names = ["ours", "pyg", *(["dgl"] if ranks == 1 and _runs_dgl(kind) else [])]
    running = {name: WaitingRanks(["-m", "gsplit_bench.attention", "--worker", name, kind], ranks) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for group in running.values():
        group.wait_until_ready()
    for number in range(steps + 1):
        losses = {}
        for name, group in running.items():
            taken, losses[name] = group.step()
            if number:
                seconds[name].append(taken)
        assert abs(losses["ours"] - losses["pyg"]) < 1e-3, "they train differently"
    for group in running.values():
        group.close()
    return seconds


def _row(what: str, seconds: dict[str, list[float]]) -> tuple[str, list[str]]:
    """Medians, and of every other implementation the median ratio of neighbouring runs with its quartiles."""
    cells = [what, f"{median(seconds['ours']):.3f}"]
    for name in [name for name in seconds if name != "ours"]:
        ratios = [other / own for own, other in zip(seconds["ours"], seconds[name], strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        cells.append(f"{name} {median(seconds[name]):.3f}: {middle:.2f} x ({low:.2f} to {high:.2f})")
    return what, cells


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["gat", "gatv2", "transformer"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--no-layers", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write .json and .md")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args(arguments)
    if options.worker:
        work(*options.worker)
        return
    records: dict[str, dict[str, list[float]]] = {}
    lines = ["| | ours, CPU s | against |", "|---|---|---|"]

    def add(what: str, seconds: dict[str, list[float]]) -> None:
        records[what] = seconds
        cells = _row(what, seconds)[1]
        lines.append(f"| {cells[0]} | {cells[1]} | {'; '.join(cells[2:])} |")
        print(lines[-1], flush=True)
        if options.out is not None:  # after every row: a run may be cut short
            about = {"layer": SIZES, "graph": GRAPH, "fanout": FANOUT, "machine": platform.platform()}
            options.out.with_suffix(".json").write_text(json.dumps({**about, "records": records}))
            options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")

    if not options.no_layers:
        import torch

        torch.set_num_threads(1)
        for kind in [*options.kinds, "sage"]:
            for needs_gradient in (False, True):
                rows = "rows too" if needs_gradient else "weights only"
                add(f"{kind} layer, gradients of {rows}", measure_layer(kind, options.rounds, needs_gradient))
    for ranks in options.ranks:
        for kind in options.kinds:
            add(f"{kind} step, {ranks} rank(s)", measure_steps(kind, ranks, options.steps))


if __name__ == "__main__":
    main(sys.argv[1:])
