"""What goes wrong between real ranks is named: who is missing and what it does, who does something else and what."""

import re

import pytest
from fault_programs import HANGS, LATE, MISMATCHES, hang, mismatch

from gsplit_bench.ranks import run_ranks


def test_the_rank_that_is_missing_is_named_with_its_stage_and_stack() -> None:
    zero, one, two = run_ranks(hang, 3, list(HANGS), True)
    for name, call in (("counts", "count ids of step 9, layer 1"), ("sum", "mean of step 9")):
        for told in (zero[f"away, {name}"], two[f"away, {name}"]):
            assert told.startswith("RankFaultError: rank ")
            assert f": {call}: expected all ranks to join within 2 s (got rank 1 (process " in told
            assert f"has not come; its last collective here: {call} (" in told
            assert "its last stage: sample of epoch 2, step 9, " in told
            assert "\nrank 1, main thread, innermost call first:\n  support/fault_programs.py:" in told
            assert " in _stay_away\n" in told
        told = zero[f"stopped, {name}"]
        assert "rank 1 (process " in told and "is stopped (SIGSTOP or a debugger)" in told
        assert "its last stage: forward of epoch 2, step 9, " in told and "kill -CONT" in told
        assert "innermost call" not in told  # it cannot answer
    assert {one[name] for name in HANGS if name[:4] in ("away", "stop")} == {"passed: None"}
    assert "(got rank 1 (process " in zero["chain"] and "rank 2 (" not in zero["chain"]
    assert {told["long wait"] for told in (zero, one, two)} == {"passed: ['0', '1', '2']"}
    assert zero["straggler"] == one["straggler"] == two["straggler"]
    assert zero["straggler"].startswith("passed: rank 1 keeps the others waiting: they wait ")


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_ranks_that_do_not_do_the_same_are_named_and_nothing_is_aborted(shared_memory: bool) -> None:
    names = [name for name in MISMATCHES if shared_memory or name != LATE]
    ranks = run_ranks(mismatch, 2, names, shared_memory, shared_memory=shared_memory)
    parts = {
        "mean against sum": ("rank 0: mean of step 0", "rank 1: sum of step 0"),
        "frozen": ("6 of 6 parameters trained", "rank 1: ", "5 of 6 parameters trained, not convs.0.lin_l.weight"),
        "eval": ("model: training", "model: evaluating"),
        LATE: ("rank 0: training", "rank 1: evaluating"),
        "loader": ("epoch 0 of loader 0", "epoch 0 of loader 1"),
        "weights": ("the weights before backward 0: expected the same on every rank", "rank 0: ", "rank 1: "),
        "learning rate": ("the weights before backward 3: expected the same on every rank", "the same learning rate"),
        "order": ("rank 0: count (all-reduce of torch.float32 [3])", "rank 1: count (all-reduce of torch.float32 [5])"),
        "kind": ("rank 0: count (all-reduce of", "rank 1: count (broadcast of"),
    }
    for name, expected in parts.items():
        if name not in names:
            continue
        for told in (rank[name] for rank in ranks):
            assert told.startswith(("RankFaultError: rank ", "RankFaultError: the weights "))
            assert all(part in told for part in expected), told
    for rank, other in ((0, 5), (1, 4)):
        assert f"(epoch {other}, seed 0)" in ranks[rank]["epoch"] or f"; epoch {other}, seed 0)" in ranks[rank]["epoch"]
    for told in (rank["two threads"] for rank in ranks):
        assert "Error: " in told and ("from one thread" in told or "one thread that uses the mesh" in told)


def test_the_odd_one_of_three_is_named() -> None:
    for told in run_ranks(mismatch, 3, ["order", "mean against sum", "weights"], True):
        assert re.search(r"sums of absolute values: rank 2: [\d.]+; the others: [\d.]+\)", told["weights"])
        assert "(got rank 2: count (all-reduce of torch.float32 [5]); the others: count (all-reduce of" in told["order"]
        assert "(got rank 2: sum of step 0 (" in told["mean against sum"]
        assert "; the others: mean of step 0 (" in told["mean against sum"]
