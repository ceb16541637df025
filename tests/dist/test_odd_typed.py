"""Graphs in which types, relations or ranks have nothing: losses and gradients are those of one process."""

import numpy as np
import pytest
from odd_typed_programs import STRATEGIES, train_odd

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks

BOUND = 1e-9


@pytest.mark.filterwarnings("ignore:There exist node types")  # PyG's: they are sources of the first layer only
@pytest.mark.parametrize("replicas, splits", [(1, 3), (2, 2)])
def test_graphs_with_little_in_them_equal_one_process(replicas: int, splits: int) -> None:
    one = train_odd(solo_mesh(), 1, ("split",))
    for rank in run_ranks(train_odd, replicas * splits, 5, replicas=replicas):
        for case, values in rank.items():
            expected = one[f"{case.partition(', ')[0]}, split"]
            assert len(values) == len(expected) > 2
            for wanted, found in zip(expected, values, strict=True):
                assert np.abs(np.asarray(wanted) - found).max(initial=0.0) <= BOUND, case
        assert len(rank) == len(one) * len(STRATEGIES)
