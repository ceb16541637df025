"""A graph such as ogbn-papers100M (111 M vertices, 1.6 G edges, 57 GB of features) that is larger than memory.

Features stay on disk, each rank caches its hottest rows in memory and prefetches batches, and training writes
checkpoints: start the same command again to continue.

gsplit import ogb dataset/ogbn_papers100M papers.gsplit --symmetrise
gsplit partition papers.gsplit papers8.gsplit --parts 8 --fanout 12,12,12 --solver cluster     # METIS: 320 GB
gsplit inspect papers8.gsplit --memory --ranks 8 --cache 4GB --hidden 256                      # memory of a rank
torchrun --nproc-per-node 8 examples/papers100m.py papers8.gsplit run --cache 4GB

gsplit import synthetic demo.gsplit --vertices 20000 --edges 400000                            # without a download
gsplit partition demo.gsplit demo8.gsplit --parts 8 --fanout 12,12,12
python examples/papers100m.py demo8.gsplit run --cache 1MB --steps 50
"""

import argparse
from pathlib import Path

import torch
from torch_geometric.nn import GraphSAGE

import gsplit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("run", type=Path, help="folder for checkpoints, shared by all ranks")
    parser.add_argument("--cache", default="4GB", help="memory per rank for its hottest rows")
    parser.add_argument("--prefetch", type=int, default=2, help="batches to prefetch; 0 if every core has a rank")
    parser.add_argument("--batch-size", type=int, default=1024, help="of the global mini-batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()

    mesh = gsplit.init()
    graph = gsplit.open(options.store)
    loader = gsplit.NeighborLoader(
        graph,
        [12, 12, 12],
        "train",
        batch_size=options.batch_size,
        mesh=mesh,
        features_on_disk=True,
        cache=options.cache,
        prefetch=options.prefetch,
    )
    torch.manual_seed(0)
    model = GraphSAGE(graph.num_features, options.hidden, 3, graph.num_classes, dropout=0.2)
    model = gsplit.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = gsplit.Trainer(model, optimizer, loader, save_to=options.run, save_every=500)
    if list(options.run.glob("step-*.safetensors")):
        trainer.load(options.run)
    while (done := trainer.state.num_steps) < options.steps:
        losses = trainer.train_epoch(min(500, options.steps - done))
        record = loader.telemetry.records[-1]
        if mesh.rank == 0:
            hits = record.counts["cache_hits"] / record.counts["rows_loaded"]
            print(f"step {done + len(losses)} loss {losses[-1]:.6f} rows from the cache {hits:.0%}", flush=True)
    trainer.save()
    scores = trainer.evaluate(graph, ["val"])
    if mesh.rank == 0:
        print(f"val {scores['val']:.4f}", flush=True)


if __name__ == "__main__":
    main()
