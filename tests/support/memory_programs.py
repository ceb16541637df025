"""What ranks run to find out how much memory they take."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh


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
