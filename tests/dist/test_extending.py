"""A sampler and a source of rows of the program's own: the same losses and weights on any number of ranks."""

from typing import Any

import pytest
from extending_programs import find_mistakes, train_extended

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks

OWN_ROWS = ("split", "data_cached", "hybrid(1)")
CASES: list[dict[str, Any]] = [
    *({"strategy": name} for name in (*OWN_ROWS, "data")),
    {"strategy": "split", "prefetch": 2},
    {"strategy": "split", "cache": 2400, "copies": 1200},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("extending")
    planted = PlantedGraph(400, 3000, num_communities=8, num_features=4, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    made = gsplit.partition(plain, folder / "p.gsplit", 6, [4, 3], batch_size=60, solver="restream", epochs=2)
    return str(made.path)


@pytest.mark.parametrize("ranks, cases", [(2, CASES[::2]), (3, CASES[1::2])])
def test_ranks_train_as_one_process_does(ranks: int, cases: list[dict[str, Any]], path: str) -> None:
    want = train_extended(solo_mesh(), path, [{}])[0]
    uniform = train_extended(solo_mesh(), path, [{"sampler": "uniform"}])[0]
    assert len(want[0]) > 2 and want[0] != pytest.approx(uniform[0], abs=1e-3)  # it is another mini-batch
    for found in run_ranks(train_extended, ranks, path, cases):
        for case, (losses, weights, score, asked, owned) in zip(cases, found, strict=True):
            assert losses == pytest.approx(want[0], abs=1e-9), case
            assert weights == pytest.approx(want[1], abs=1e-9), case
            assert score == pytest.approx(want[2], abs=1e-12), case
            assert asked and (asked <= set(owned.tolist())) == (case["strategy"] in OWN_ROWS), case


def test_what_depends_on_the_rank_is_found(path: str) -> None:
    """By ``verify``, which takes samplers and sources as well, or by the loader."""
    for (lawful, other), (sampler, features) in run_ranks(find_mistakes, 2, path):
        assert lawful.ok
        assert not other.ok and other.max_loss_error > 1e-4
        assert "NeighborLoader: sampler: expected the same on every rank" in sampler
        assert "keyed_sampler" in sampler and "by_range" in sampler
        assert "ComputedRows [6] float32 version 0" in features
