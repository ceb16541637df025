"""Every built-in sampler under every strategy: two ranks compute what one process computes."""

from pathlib import Path

import pytest
from sampler_programs import SAMPLERS, STRATEGIES, in_memory, input_vertices, run_all

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Partitioned by what a weighted LABOR sampler draws."""
    folder: Path = tmp_path_factory.mktemp("samplers")
    made = gsplit.partition(
        in_memory(),
        folder / "p.gsplit",
        4,
        [4, 3],
        batch_size=50,
        solver="restream",
        epochs=2,
        sampler="labor",
        weight_attr="w",
    )
    settings = made.manifest.provenance[-1].settings
    assert settings["sampler"] == "labor" and settings["weight_attr"] == "w"
    return str(made.path)


def test_two_ranks_compute_what_one_process_does(path: str) -> None:
    alone = [set(vertices) for vertices in input_vertices(solo_mesh(), path)]
    assert len({frozenset(vertices) for vertices in alone}) == len(alone)  # every sampler draws other edges
    assert len(alone[1]) < len(alone[0])  # LABOR fewer vertices
    found = run_ranks(run_all, 2, path)
    for stored, held, _, message in found:
        assert len(stored) == len(SAMPLERS) * len(STRATEGIES) and len(held) == len(SAMPLERS)
        for options, strategy, loss_error, grad_error in stored + held:
            assert loss_error < 1e-9 and grad_error < 1e-9, (options, strategy, loss_error, grad_error)
        assert "NeighborLoader: sampler: expected the same on every rank" in message and "labor" in message
    for place, vertices in enumerate(alone):
        of_ranks = [vertex for rank in found for vertex in rank[2][place]]
        assert len(of_ranks) == len(vertices) and set(of_ranks) == vertices


@pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
def test_devices_draw_what_the_host_draws(path: str) -> None:
    host = input_vertices(solo_mesh(), path)
    ranks = run_ranks(input_vertices, 2, path, device="sim:0", sample_device="sim:0")
    for place, vertices in enumerate(host):
        assert sorted(ranks[0][place] + ranks[1][place]) == sorted(vertices)
