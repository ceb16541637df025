"""What ``gsplit inspect --memory`` foresees is what ranks take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_programs import peak_memory

import gsplit
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks

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
