"""Stores of the real graphs used in the measurements; their files are found through GSPLIT_TEST_DATA."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.store.build import build_store
from gsplit.store.importers.npz import npz_source
from gsplit.store.reader import Store, open_store
from gsplit.store.source import EdgeRules

__all__ = ["load_real", "real_store"]

_FEATURES = {"debian_packages": "x128", "ogbn_arxiv_nofeat": "prone128"}


def load_real(name: str) -> dict[str, Any]:
    """The arrays of a graph, with dense features where there are any."""
    data = Path(os.environ.get("GSPLIT_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    sys.path.insert(0, str(data))
    from load_graph import load

    found: dict[str, Any] = load(name, dense=_FEATURES[name]) if name in _FEATURES else load(name)
    return found


def real_store(name: str, work: Path) -> Store:
    """An undirected graph as a store; made once. Without features of its own, it gets random ones, labels and targets."""
    path = work / f"{name}.gsplit"
    if path.exists():
        return open_store(path)
    graph = load_real(name)
    if graph.get("x") is None:
        graph |= _random_values(graph["num_nodes"])
    arrays = {"edge_index": graph["edge_index"], "num_nodes": graph["num_nodes"]}
    for key in ("x", "y", "train_idx", "val_idx", "test_idx"):
        if graph.get(key) is not None:
            arrays[key] = graph[key].astype(np.float32) if key == "x" else graph[key]
    work.mkdir(parents=True, exist_ok=True)
    source = work / f"{name}.npz"
    np.savez(source, **arrays)
    return build_store(npz_source(source), path, rules=EdgeRules(symmetrise=True))


def _random_values(num_vertices: int) -> dict[str, Any]:
    """128 features, one of 16 labels, and half of the vertices as targets."""
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((num_vertices, 128), dtype=np.float32),
        "y": random.integers(0, 16, num_vertices),
        "train_idx": np.sort(random.permutation(num_vertices)[: num_vertices // 2]),
    }
