"""Quality on real graphs: samplers, link prediction and vertex types, against what they replace.

    python -m gsplit_bench quality samplers WORK    # uniform, LABOR and weighted draws on three graphs
    python -m gsplit_bench quality links WORK       # MRR against a plain loop with PyG's meaning, two graphs
    python -m gsplit_bench quality types WORK       # Debian's packages with and without their types

WORK is a folder for stores; the real graphs are found through GSPLIT_TEST_DATA. Results are exact on any number of
ranks, so accuracy is measured on two.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE, HeteroConv, SAGEConv

import gsplit
from gsplit.array_types import Ids
from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.real_graphs import load_real

__all__ = ["main", "study_links", "study_samplers", "study_types"]

HIDDEN = 128
SEEDS = (0, 1, 2)
FANOUTS = [10, 10, 5]
PAIR_FANOUTS = [10, 10]
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "labor": {"sampler": "labor"},
    "labor, layer_dependency": {"sampler": "labor", "layer_dependency": True},
    "weighted": {"weight_attr": "draw_by"},
}
EPOCHS = {"arxiv": 2, "debian": 2, "computers": 15}
NAMES = {"arxiv": "ogbn_arxiv_nofeat", "debian": "debian_packages", "computers": "amazon_computers"}


def _undirected(edges: Ids, num_vertices: int) -> Ids:
    ends = edges.astype(np.int64)
    keys = np.unique(np.concatenate([ends[0] * num_vertices + ends[1], ends[1] * num_vertices + ends[0]]))
    return np.stack([keys // num_vertices, keys % num_vertices])


def _store(name: str, work: Path) -> Path:
    """A graph with features, labels, splits and weights to draw by, partitioned into four; made once.

    An edge's weight is one over the square root of its source's degree: hubs are drawn less often.
    """
    path = work / f"{name}-quality.gsplit"
    if path.exists():
        return path
    graph = load_real(NAMES[name])
    num_vertices = graph["num_nodes"]
    edges = _undirected(graph["edge_index"], num_vertices)
    degrees = np.bincount(edges[0], minlength=num_vertices)
    data = Data(
        x=torch.from_numpy(np.ascontiguousarray(graph["x"], np.float32)),
        y=torch.from_numpy(graph["y"].astype(np.int64)),
        edge_index=torch.from_numpy(edges),
        draw_by=torch.from_numpy((1 / np.sqrt(degrees[edges[0]])).astype(np.float32)),
    )
    splits = [graph.get(f"{split}_idx") for split in ("train", "val", "test")]
    if splits[0] is None:
        order = np.random.default_rng(0).permutation(num_vertices)
        splits = list(np.split(order, [num_vertices * 6 // 10, num_vertices * 8 // 10]))
    for split, ids in zip(("train", "val", "test"), splits, strict=True):
        data[f"{split}_mask"] = torch.zeros(num_vertices, dtype=torch.bool).index_fill(
            0, torch.from_numpy(ids).long(), True
        )
    gsplit.partition(data, path, 4, FANOUTS)
    return path


def _accuracy_and_cost(mesh: Mesh, path: str, options: dict[str, Any], seed: int, epochs: int) -> dict[str, Any]:
    """Train a GraphSAGE and report the accuracy of the test targets and what this rank spent on a step."""
    store = gsplit.open(path)
    torch.manual_seed(seed)
    model = gsplit.parallelize(
        GraphSAGE(store.num_features, HIDDEN, len(FANOUTS), store.num_classes, dropout=0.5), mesh
    )
    loader = gsplit.NeighborLoader(store, FANOUTS, "train", batch_size=1024, mesh=mesh, seed=seed, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps = []
    for epoch in range(max(1, epochs)):
        for step in range(len(loader) if epochs else min(10, len(loader))):
            start = time.process_time()
            batch = loader.make_batch(epoch, step)
            loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counts = batch.telemetry.counts
            steps.append((time.process_time() - start, counts["input_rows"], counts["edges"], counts["rows_sent"]))
    model.eval()
    scores = gsplit.evaluate(model, store, ["test"]) if epochs else {}
    return {"test": scores.get("test"), "steps": steps[2:]}


def study_samplers(work: Path) -> list[dict[str, Any]]:
    """Accuracy of every sampler on two ranks, and the costs of a step on two and four."""
    rows = []
    for name in NAMES:
        path = str(_store(name, work))
        for sampler, options in SAMPLERS.items():
            row: dict[str, Any] = {"graph": name, "sampler": sampler}
            tests = []
            for seed in SEEDS:
                found = run_ranks(_accuracy_and_cost, 2, path, options, seed, EPOCHS[name], timeout_s=3000.0)
                tests.append(found[0]["test"])
            row["test"] = tests
            for ranks in (2, 4):
                each = run_ranks(_accuracy_and_cost, ranks, path, options, 0, 0, timeout_s=3000.0)
                steps = [
                    np.sum([rank["steps"][step] for rank in each], axis=0) for step in range(len(each[0]["steps"]))
                ]
                names = ("cpu_s", "input_rows", "edges", "rows_sent")
                row[f"{ranks} ranks"] = {key: float(median(step[k] for step in steps)) for k, key in enumerate(names)}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


NUM_TEST_PAIRS, NUM_CANDIDATES, NUM_TRAIN_PAIRS, PAIR_STEPS, PAIR_BATCH = 2000, 500, 120_000, 100, 1024


def _pair_store(name: str, work: Path) -> Path:
    """A graph without its test edges, partitioned into two, with pairs to train on and to test."""
    path = work / f"{name}-pairs.gsplit"
    if path.exists():
        return path
    graph = load_real(NAMES[name])
    num_vertices = graph["num_nodes"]
    edges = _undirected(graph["edge_index"], num_vertices)
    once = edges[:, edges[0] < edges[1]]
    rng = np.random.default_rng(0)
    once = once[:, rng.permutation(once.shape[1])]
    test = once[:, :NUM_TEST_PAIRS]
    train = once[:, NUM_TEST_PAIRS:]
    x = torch.from_numpy(np.ascontiguousarray(graph["x"], np.float32))
    data = Data(x=x, edge_index=torch.from_numpy(np.concatenate([train, train[::-1]], axis=1)))
    store = gsplit.partition(data, path, 2, PAIR_FANOUTS, None, epochs=2)
    candidates = rng.integers(0, num_vertices, (NUM_TEST_PAIRS, NUM_CANDIDATES))
    store = gsplit.add_pairs(store, "test", test, negatives=candidates)
    gsplit.add_pairs(store, "train", train[:, :NUM_TRAIN_PAIRS])
    return path


def _pair_model(num_features: int, seed: int) -> GraphSAGE:
    torch.manual_seed(seed)
    return GraphSAGE(num_features, HIDDEN, len(PAIR_FANOUTS), HIDDEN)


def _pair_loss(z: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits((z[pairs[0]] * z[pairs[1]]).sum(-1), labels, reduction="none")


def _gsplit_mrr(mesh: Mesh, path: str, seed: int, exclude: Any) -> float:
    store = gsplit.open(path)
    model = gsplit.parallelize(_pair_model(store.num_features, seed), mesh)
    loader = gsplit.LinkNeighborLoader(
        store,
        PAIR_FANOUTS,
        "train",
        neg_sampling={"mode": "binary", "amount": 1},
        exclude_seed_edges=exclude,
        batch_size=PAIR_BATCH,
        mesh=mesh,
        seed=seed,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(PAIR_STEPS):
        batch = loader.make_batch(*divmod(step, len(loader)))
        z = model(batch.x, batch.edge_index)
        batch.mean(_pair_loss(z, batch.edge_label_index, batch.edge_label.to(z.dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return float(gsplit.evaluate_links(model, store, "test", metrics=("mrr",))["mrr"])


def _draw_neighbors(indptr: Ids, indices: Ids, frontier: Ids, fanout: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """At most ``fanout`` in-edges of every vertex, without replacement, by NumPy alone."""
    starts = indptr[frontier]
    degrees = indptr[frontier + 1] - starts
    dst = np.repeat(np.arange(frontier.size), degrees)
    places = np.arange(dst.size) - np.repeat(np.cumsum(degrees) - degrees, degrees)
    order = np.lexsort([rng.random(dst.size), dst])
    kept = order[places < fanout]
    return indices[starts[dst[kept]] + places[kept]], frontier[dst[kept]]


def _sampled_pairs(rng: np.random.Generator, pairs: Ids, graph: tuple[Ids, Ids]) -> tuple[Ids, Tensor, Tensor]:
    """A mini-batch as PyG's LinkNeighborLoader makes it: the vertices of all hops, their edges, the pairs' rows.

    A vertex is drawn once, at the hop that meets it first; every layer uses the edges of all hops; seed edges stay.
    """
    indptr, indices = graph
    negatives = rng.integers(0, indptr.size - 1, pairs.shape)
    ends = np.concatenate([pairs, negatives], axis=1)
    known = frontier = np.unique(ends)
    edges = []
    for fanout in PAIR_FANOUTS:
        src, dst = _draw_neighbors(indptr, indices, frontier, fanout, rng)
        edges.append(np.stack([src, dst]))
        frontier = np.setdiff1d(src, known)
        known = np.union1d(known, frontier)
    rows = torch.from_numpy(np.searchsorted(known, ends))
    return known, torch.from_numpy(np.searchsorted(known, np.concatenate(edges, axis=1))), rows


def _plain_mrr(data: Data, train: Ids, test: Ids, candidates: Ids, seed: int) -> float:
    """MRR of a plain PyTorch loop in one process, and of PyG's model on the whole graph."""
    rng = np.random.default_rng(seed)
    src, dst = data.edge_index.numpy()
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=data.num_nodes))])
    graph = (indptr, src[np.argsort(dst, kind="stable")])
    model = _pair_model(data.num_features, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    labels = torch.cat([torch.ones(PAIR_BATCH), torch.zeros(PAIR_BATCH)])
    batches = _shuffled(rng, train)
    for _ in range(PAIR_STEPS):
        vertices, edge_index, rows = _sampled_pairs(rng, next(batches), graph)
        z = model(data.x[torch.from_numpy(vertices)], edge_index)
        _pair_loss(z, rows, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        z = model.eval()(data.x, data.edge_index)
        positive = (z[test[0]] * z[test[1]]).sum(-1, keepdim=True)
        negative = torch.einsum("nd,nkd->nk", z[test[0]], z[candidates])
    ranks = 1 + ((negative > positive).sum(1) + (negative >= positive).sum(1)) / 2
    return float((1 / ranks).mean())


def _shuffled(rng: np.random.Generator, pairs: Ids) -> Iterator[Ids]:
    while True:
        order = rng.permutation(pairs.shape[1])
        for start in range(0, order.size - PAIR_BATCH + 1, PAIR_BATCH):
            yield pairs[:, order[start : start + PAIR_BATCH]]


def study_links(work: Path) -> list[dict[str, Any]]:
    """MRR of both loops, seed by seed."""
    rows = []
    for name in ("arxiv", "debian"):
        path = _pair_store(name, work)
        store = gsplit.open(path)
        data = gsplit.to_pyg(store)
        assert isinstance(data, Data)
        lists = {key: np.asarray(store.stored_array(f"pairs/{key}")).T for key in ("train", "test")}
        candidates = np.asarray(store.stored_array("pair_negatives/test"))
        row: dict[str, Any] = {"graph": name, "plain": [], "gsplit, seed edges kept": [], "gsplit, excluded": []}
        for seed in SEEDS:
            row["plain"].append(_plain_mrr(data, lists["train"], lists["test"], candidates, seed))
            for key, exclude in (("gsplit, seed edges kept", False), ("gsplit, excluded", "reverse")):
                row[key].append(run_ranks(_gsplit_mrr, 2, str(path), seed, exclude, timeout_s=3000.0)[0])
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def debian_types() -> HeteroData:
    """Binary and source packages; a relation for every kind of dependency, and its reverse."""
    graph = load_real("debian_packages")
    is_source = graph["node_type"] == 1
    rows = np.where(is_source, np.cumsum(is_source), np.cumsum(~is_source)) - 1
    data = HeteroData()
    x = torch.from_numpy(graph["x"].astype(np.float32))
    data["package"].x = x[torch.from_numpy(~is_source)]
    data["source"].x = x[torch.from_numpy(is_source)]
    data["package"].y = torch.from_numpy(graph["y"].astype(np.int64)[~is_source])
    for split in ("train", "val", "test"):
        mask = torch.zeros(data["package"].num_nodes, dtype=torch.bool)
        data["package"][f"{split}_mask"] = mask.index_fill(0, torch.from_numpy(rows[graph[f"{split}_idx"]]), True)
    src, dst = graph["edge_index"].astype(np.int64)
    for bit, name in enumerate(map(str, graph["rel_names"])):
        taken = (graph["edge_rel"] >> bit) & 1 == 1
        for ends in sorted(
            {(bool(a), bool(b)) for a, b in zip(is_source[src[taken]], is_source[dst[taken]], strict=True)}
        ):
            mine = taken & (is_source[src] == ends[0]) & (is_source[dst] == ends[1])
            words = ["source" if end else "package" for end in ends]
            pairs = torch.from_numpy(np.stack([rows[src[mine]], rows[dst[mine]]]))
            data[words[0], name, words[1]].edge_index = pairs
            data[words[1], f"rev_{name}", words[0]].edge_index = pairs.flip(0)
    return data


class TypedSage(Module):
    """Two layers of HeteroConv with a SAGEConv for every relation."""

    def __init__(self, data: HeteroData, num_classes: int) -> None:
        super().__init__()
        widths = {name: data[name].num_features for name in data.node_types}
        last = [relation for relation in data.edge_types if relation[2] == "package"]
        self.convs = ModuleList(
            [
                HeteroConv({r: SAGEConv((widths[r[0]], widths[r[2]]), HIDDEN) for r in data.edge_types}, aggr="mean"),
                HeteroConv({r: SAGEConv((HIDDEN, HIDDEN), num_classes) for r in last}, aggr="mean"),
            ]
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        hidden = {name: rows.relu() for name, rows in self.convs[0](x_dict, edge_index_dict).items()}
        hidden = {name: F.dropout(rows, 0.5, self.training) for name, rows in hidden.items()}
        out: Tensor = self.convs[1](hidden, edge_index_dict)["package"]
        return out


def _train_packages(mesh: Mesh, side: str, seed: int, epochs: int) -> dict[str, Tensor]:
    """Train on Debian's packages with or without types. Returns the weights."""
    data = debian_types()
    num_classes = int(data["package"].y.max()) + 1
    torch.manual_seed(seed)
    if side == "typed":
        plain: Module = TypedSage(data, num_classes)
        graph: Any = data
        targets: Any = ("package", "train")
        model = gsplit.parallelize(plain, mesh, graph=data)
    else:
        graph = data.to_homogeneous(node_attrs=["x"], edge_attrs=[])
        del graph.node_type, graph.edge_type
        graph.y = torch.cat([data["package"].y, torch.full((data["source"].num_nodes,), -1)])
        graph.train_mask = torch.cat(
            [data["package"].train_mask, torch.zeros(data["source"].num_nodes, dtype=torch.bool)]
        )
        targets = "train"
        plain = GraphSAGE(graph.num_features, HIDDEN, 2, num_classes, dropout=0.5)
        model = gsplit.parallelize(plain, mesh)
    fanouts = [5, 5] if side == "typed" else [15, 15]
    loader = gsplit.NeighborLoader(graph, fanouts, targets, batch_size=1024, mesh=mesh, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for step in range(len(loader)):
            batch: Any = loader.make_batch(epoch, step)
            inputs = (batch.x_dict, batch.edge_index_dict) if side == "typed" else (batch.x, batch.edge_index)
            batch.mean(F.cross_entropy(model(*inputs), batch.y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}


def study_types(_work: Path, epochs: int = 4) -> list[dict[str, Any]]:
    """Test accuracy of PyG's models on the whole graph, with the weights of both sides."""
    data = debian_types()
    num_classes = int(data["package"].y.max()) + 1
    rows = []
    for side in ("untyped", "typed"):
        row: dict[str, Any] = {"graph": "debian", "side": side, "relations": len(data.edge_types), "test": []}
        for seed in SEEDS:
            weights = run_ranks(_train_packages, 2, side, seed, epochs, timeout_s=3000.0)[0]
            model: Module = TypedSage(data, num_classes)
            inputs: tuple[Any, ...] = (data.x_dict, data.edge_index_dict)
            if side == "untyped":
                model = GraphSAGE(data["package"].num_features, HIDDEN, 2, num_classes, dropout=0.5)
                fused = data.to_homogeneous(node_attrs=["x"], edge_attrs=[])
                inputs = (fused.x, fused.edge_index)
            model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
            with torch.no_grad():
                out = model.eval()(*inputs)[: data["package"].num_nodes]
            right = out.argmax(-1) == data["package"].y
            row["test"].append(float(right[data["package"].test_mask].double().mean()))
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


STUDIES: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "samplers": study_samplers,
    "links": study_links,
    "types": study_types,
}


def main(arguments: Sequence[str]) -> None:
    """Run one study and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("work", type=Path)
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    json.dump(STUDIES[given.study](given.work), sys.stdout, indent=1)
