"""Tier, cache and stored type never change a step: losses and weights are the same on any number of ranks.

On the same number of ranks, bit for bit.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_programs import Found, train_with

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.store.source import stream_rows
from gsplit_bench.ranks import run_ranks

CASES: list[dict[str, Any]] = [
    {"cache": cache, "features_on_disk": on_disk} for cache in (0, 6000, "1GB") for on_disk in (False, True)
]
TWO: list[dict[str, Any]] = [
    {"features": ["x", "z"], "cache": cache, "features_on_disk": on_disk}
    for cache, on_disk in ((0, False), (9000, True))
]
DATA: list[dict[str, Any]] = [{"strategy": "data", **case} for case in (CASES[0], CASES[3])]


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Seven parts, two feature arrays of different types."""
    folder = tmp_path_factory.mktemp("tiers")
    source = synthetic_source(PlantedGraph(1200, 9000, num_communities=12, num_features=8, num_classes=4))
    z = np.random.default_rng(0).normal(size=(1200, 3))
    source.features["z"] = stream_rows(z, "float64")  # type: ignore[index]
    plain = build_store(source, folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 7, [4, 4], batch_size=200, epochs=2)


def _check(found: list[list[Found]], cases: list[dict[str, Any]], want: Found) -> None:
    for rank in found:
        assert len(rank) == len(cases)
        for case, (losses, weights, rows, hits) in zip(cases, rank, strict=True):
            same = (losses, weights) == rank[0][:2] or case.get("strategy") == "data"
            assert same, case  # bit for bit, whatever the tier
            assert losses == pytest.approx(want[0], abs=1e-12)
            assert weights == pytest.approx(want[1], abs=1e-9)
            full = {0: 0, "1GB": rows}.get(case["cache"])
            assert hits == full if full is not None else 0 < hits < rows, case


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tiers_change_nothing(num_ranks: int, parted: Store) -> None:
    path, cases = str(parted.path), [*CASES, *DATA]
    found = run_ranks(train_with, num_ranks, path, cases)
    _check(found, cases, train_with(solo_mesh(), path, CASES[:1])[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_stored_types_are_the_features_everywhere(num_ranks: int, dtype: str, parted: Store, tmp_path: Path) -> None:
    """The reference holds the same values as float32: rounding happened once, when the store was written."""
    made = write_with_features(parted, tmp_path / "c.gsplit", dtype)
    plain = write_with_features(made, tmp_path / "f.gsplit", "float32")
    cases = [CASES[0], {"cache": 1000, "features_on_disk": True}, DATA[0]]
    found = run_ranks(train_with, num_ranks, str(made.path), cases)
    _check(found, cases, train_with(solo_mesh(), str(plain.path), CASES[:1])[0])


def test_several_arrays_on_two_ranks(parted: Store) -> None:
    found = run_ranks(train_with, 2, str(parted.path), TWO)
    _check(found, TWO, train_with(solo_mesh(), str(parted.path), TWO[:1])[0])
