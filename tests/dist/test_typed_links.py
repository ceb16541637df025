"""Link prediction between types on real ranks: losses, gradients, negatives and exclusion are those of one process."""

from typing import Any

import numpy as np
import pytest
from typed_link_programs import (
    NEGATIVES,
    RATED_BY,
    RATES,
    STRATEGIES,
    VIEWS,
    TypedLinks,
    evaluate_typed_pairs,
    rated,
    train_typed_links,
)

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

BOUND = 1e-9


def _differ(one: TypedLinks, other: TypedLinks) -> float:
    losses = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    gradients = zip(one.gradients, other.gradients, strict=True)
    return max([*losses, *(float(np.abs(a - b).max(initial=0.0)) for a, b in gradients)])


# every change: 3 ranks and 2 x 2 with the same cases; the record exactness-tasks has all meshes
@pytest.mark.parametrize("replicas, splits", [pytest.param(1, 2, marks=pytest.mark.weekly), (1, 3), (2, 2)])
def test_pairs_of_types_equal_one_process(replicas: int, splits: int) -> None:
    cases = [(mode, strategy) for mode in NEGATIVES for strategy in STRATEGIES]
    one = train_typed_links(solo_mesh(), 1, [(mode, "split") for mode in NEGATIVES])
    ranks = run_ranks(train_typed_links, replicas * splits, 5, cases, replicas=replicas)
    listed = set(map(tuple, rated()[:, ::4].T.tolist()))
    for place, (mode, strategy) in enumerate(cases):
        wanted = one[list(NEGATIVES).index(mode)]
        runs = [rank[place] for rank in ranks]
        assert all(_differ(wanted, run) <= BOUND for run in runs), (mode, strategy)
        for step in range(2):
            pairs: list[Any] = [pair for run in runs for pair in run.pairs[step]]
            assert len(pairs) == 16 and set(pairs) == wanted.pairs[step] <= listed  # every pair is on one rank
            edges = set.union(*(run.edges[step] for run in runs))
            for user, item in wanted.pairs[step]:
                assert (RATES, user, item) not in edges and (RATED_BY, item, user) not in edges
            assert any((VIEWS, *pair) in edges for pair in pairs)  # another relation between the same vertices


@pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
def test_a_device_that_samples_draws_and_excludes_the_same() -> None:
    cases = [("binary", "split"), ("joint", "data")]
    one = train_typed_links(solo_mesh(), 1, [(mode, "split") for mode, _ in cases])
    for rank in run_ranks(train_typed_links, 2, 5, cases, device="sim:0", sample_device="sim:0"):
        assert all(_differ(wanted, run) <= BOUND for wanted, run in zip(one, rank, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_rankings_of_pairs_of_types_do_not_depend_on_ranks_and_parts(ranks: int) -> None:
    """The one process is compared with a loop over all pairs in tests/unit/inference."""
    (one,) = evaluate_typed_pairs(solo_mesh(), [1])
    assert len({tuple(scores.values()) for scores in one}) == len(one)  # lists, negatives and decoders matter
    for rank in run_ranks(evaluate_typed_pairs, ranks, [3, 4]):
        for found in rank:
            for scores, wanted in zip(found, one, strict=True):
                assert scores == pytest.approx(wanted, abs=1e-12)
