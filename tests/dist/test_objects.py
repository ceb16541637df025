"""Ranks that train from object storage under faults compute what they compute from the disk, bit for bit."""

from pathlib import Path

import gsplit
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.upload import upload_store
from gsplit_bench.objects import FAULTS, RankResult, train_from
from gsplit_bench.ranks import run_ranks
from gsplit_bench.s3_server import BUCKET, FaultyProxy


def test_ranks_train_from_object_storage_as_from_the_disk(s3_proxy: FaultyProxy, tmp_path: Path) -> None:
    graph = PlantedGraph(4000, 20000, num_communities=10, num_features=128, num_classes=4)
    plain = build_store(synthetic_source(graph), tmp_path / "g.gsplit")
    store = gsplit.partition(plain, tmp_path / "p.gsplit", 4, [4, 4], batch_size=200, epochs=2)
    url = f"s3://{BUCKET}/ranks.gsplit"
    upload_store(store, url)
    s3_proxy.shares = FAULTS
    train = ([4, 4], 200, 4)
    local: list[RankResult] = run_ranks(train_from, 2, str(store.path), None, None, *train)
    remote: list[RankResult] = run_ranks(train_from, 2, url, str(tmp_path / "cache"), 100_000, *train)
    for rank, want in zip(remote, local, strict=True):
        assert (rank.losses, rank.weights) == (want.losses, want.weights)
        assert 0 < rank.hits < rank.rows
        assert rank.requests > 0 and rank.num_bytes > 0
    assert sum(s3_proxy.counts.values()) > 0
    fetched = sum(rank.num_bytes for rank in remote)
    whole = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("indices.npy"))
    assert whole == (store.path / "indices.npy").stat().st_size  # one copy on the host
    assert fetched > whole
