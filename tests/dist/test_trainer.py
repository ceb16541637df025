"""The trainer on real ranks: training goes on from a state as if it had not stopped."""

import pytest
from trainer_programs import train_and_resume

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks


def test_ranks_go_on_from_a_state_bit_for_bit() -> None:
    want, _, edges, _ = train_and_resume(solo_mesh())
    for whole, resumed, whole_edges, resumed_edges in run_ranks(train_and_resume, 2):
        assert whole == resumed
        assert whole == pytest.approx(want, abs=1e-9)
        assert whole_edges == resumed_edges == edges > 0  # the same sample, counted over both ranks
