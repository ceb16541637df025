"""What ``gsplit inspect --memory`` foresees is what ranks take."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def peak_memory(
    mesh: Mesh, path: str, fanouts: list[int], size: int, hidden: int | None, options: dict[str, Any]
) -> int:
    """Load an epoch, or train it; the largest anonymous memory meanwhile, looked at every 2 ms."""
    found, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            found[0] = max(found[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        graph = gsplit.open(path)
        loader = gsplit.NeighborLoader(graph, fanouts, "train", batch_size=size, mesh=mesh, **options)
        if hidden is None:
            for batch in loader:
                del batch
        else:
            model = GraphSAGE(graph.num_features, hidden, len(fanouts), graph.num_classes)
            wrapped = gsplit.parallelize(model, mesh)
            gsplit.Trainer(wrapped, torch.optim.Adam(wrapped.parameters(), 1e-3), loader).train_epoch(12)
    finally:
        ended.set()
        watcher.join()
    return found[0]


CACHE = 20_000_000


def test_ranks_take_what_was_foreseen(tmp_path: Path) -> None:
    planted = PlantedGraph(100_000, 800_000, num_communities=50, num_features=200, num_classes=4)
    plain = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    store = gsplit.partition(
        plain, tmp_path / "p.gsplit", 4, [8, 8], batch_size=4096, epochs=1, objective="random", solver="random"
    )
    ask = [
        sys.executable,
        "-m",
        "gsplit",
        "inspect",
        str(store.path),
        "--memory",
        "--ranks",
        "2",
        "--cache",
        str(CACHE),
    ]
    answer = subprocess.run([*ask, "--features-on-disk", "--json"], capture_output=True, check=True, timeout=300)
    foreseen = json.loads(answer.stdout)["memory"]
    options = {"cache": CACHE, "features_on_disk": True}
    found = run_ranks(peak_memory, 2, str(store.path), [8, 8], 4096, None, options)
    for peak, rank in zip(found, foreseen, strict=True):
        assert rank["anonymous"]["cache"] == pytest.approx(CACHE, rel=1e-3)
        assert rank["anonymous"]["mini-batches"] > 50e6  # enough of it to be seen beside the program
        assert peak == pytest.approx(rank["num_bytes"], rel=0.15)
