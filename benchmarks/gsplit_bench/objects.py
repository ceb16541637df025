"""Train from a store on an S3 server of this host, with a small local cache and injected faults, against the local store.

`python -m gsplit_bench objects STORE --ranks 4 --steps 10`. The losses and weights of all cases must be bit-identical.
The server (moto) is one Python process that copies the whole object for every range: its seconds are not those of S3.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.store.upload import upload_store
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.ranks import run_ranks
from gsplit_bench.s3_server import BUCKET, FaultyProxy, s3_environment, start_s3_server

__all__ = ["FAULTS", "RankResult", "main", "train_from"]

FAULTS = {"slow down": 0.05, "error": 0.05, "cut": 0.05}
"""The share of requests that fail, by kind."""


@dataclass(frozen=True)
class RankResult:
    """What a rank has computed, loaded and asked of object storage. ``weights`` is a checksum.

    ``open_s``: to fetch the graph and the hottest rows. ``step_s``: the median of the steps. ``seconds``: of everything.
    """

    losses: list[float]
    weights: str
    rows: int
    hits: int
    open_s: float
    step_s: float
    seconds: float
    cpu_s: float
    requests: int
    failures: int
    num_bytes: int


def train_from(
    mesh: Mesh,
    place: str,
    cache_dir: str | None,
    cache_bytes: int | None,
    fanout: list[int],
    batch_size: int,
    steps: int,
) -> RankResult:
    """Open a store and train some steps on it; the seconds are those of both."""
    start, start_cpu = time.perf_counter(), time.process_time()
    options = {} if cache_dir is None else {"cache_dir": cache_dir, "cache_bytes": cache_bytes}
    store = gsplit.open(place, **options)  # type: ignore[arg-type]
    loader = gsplit.NeighborLoader(store, fanout, "train", batch_size=batch_size, mesh=mesh, seed=5)
    open_s = time.perf_counter() - start
    torch.manual_seed(0)
    model = gsplit.parallelize(GraphSAGE(store.num_features, 32, len(fanout), store.num_classes, dropout=0.3), mesh)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
    losses = trainer.train_epoch(steps)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    counts = [record.counts for record in loader.telemetry.records]
    traffic = None if store.mirror is None else store.mirror.objects.traffic
    return RankResult(
        losses=losses,
        weights=digest.hexdigest(),
        rows=sum(count["rows_loaded"] for count in counts),
        hits=sum(count["cache_hits"] for count in counts),
        open_s=open_s,
        step_s=median(trainer.state.history.step_seconds),
        seconds=time.perf_counter() - start,
        cpu_s=time.process_time() - start_cpu,
        requests=traffic.requests if traffic else 0,
        failures=traffic.failures if traffic else 0,
        num_bytes=traffic.num_bytes if traffic else 0,
    )


def main(arguments: Sequence[str]) -> int:
    """Run the cases, print and perhaps write a record; exit code 1 if losses differ."""
    parser = argparse.ArgumentParser(prog="python -m gsplit_bench objects", description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--cache-share", type=float, default=0.1, help="of the features, on the local disk")
    parser.add_argument("--work", type=Path, default=None, help="folder for the cache of the host")
    parser.add_argument("--out", type=Path, default=None, help="write a record")
    given = parser.parse_args(arguments)
    fanout = [int(number) for number in given.fanout.split(",")]
    store = gsplit.open(given.store)
    features = store.stored_array("features/x").nbytes
    cache_bytes = int(features * given.cache_share / given.ranks)
    url = f"s3://{BUCKET}/{given.store.name}.gsplit"
    cases: list[dict[str, Any]] = []
    with start_s3_server() as port, tempfile.TemporaryDirectory(dir=given.work) as work:
        with patch.dict(os.environ, s3_environment(port)):
            start = time.perf_counter()
            upload_store(store, url)
            upload_s = time.perf_counter() - start
        for name, place, faults in (("local", str(given.store), {}), ("S3", url, {}), ("S3, faults", url, FAULTS)):
            with FaultyProxy(port, shares=faults).serve() as proxy, patch.dict(os.environ, s3_environment(proxy.port)):
                folder = None if name == "local" else f"{work}/{len(cases)}"
                plan = (place, folder, cache_bytes, fanout, given.batch_size, given.steps)
                ranks: list[RankResult] = run_ranks(train_from, given.ranks, *plan, timeout_s=1800.0)
            cases.append({"case": name, "injected": proxy.counts, "requests_at_server": proxy.requests, "ranks": ranks})
            _show(name, ranks, proxy)
    reference: list[RankResult] = cases[0]["ranks"]
    found = {(tuple(rank.losses), rank.weights) for case in cases for rank in case["ranks"]}
    is_same = found == {(tuple(reference[0].losses), reference[0].weights)}
    print(f"losses and weights of all cases are {'bit-identical' if is_same else 'DIFFERENT'}")
    if given.out is not None:
        record = {
            "command": f"python -m gsplit_bench objects {' '.join(arguments)}",
            "commit": current_commit(),
            "versions": installed_versions(),
            "machine": describe_machine(),
            "feature_bytes": features,
            "cache_bytes_per_rank": cache_bytes,
            "upload_s": upload_s,
            "bit_identical": is_same,
            "cases": [{**case, "ranks": [asdict(rank) for rank in case["ranks"]]} for case in cases],
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if is_same else 1


def _show(name: str, ranks: list[RankResult], proxy: FaultyProxy) -> None:
    rows = max(1, sum(rank.rows for rank in ranks))  # none are counted where ranks read in place
    print(
        f"{name}: {max(rank.seconds for rank in ranks):.1f} s, opened in {max(rank.open_s for rank in ranks):.1f} s, "
        f"a step {max(rank.step_s for rank in ranks):.2f} s, CPU {sum(rank.cpu_s for rank in ranks):.1f} s, "
        f"{rows} rows, {sum(rank.hits for rank in ranks) / rows:.1%} from the cache, "
        f"{sum(rank.requests for rank in ranks)} requests, {sum(rank.num_bytes for rank in ranks) / 1e6:.1f} MB, "
        f"{sum(rank.failures for rank in ranks)} failed attempts, injected {proxy.counts}",
        flush=True,
    )
