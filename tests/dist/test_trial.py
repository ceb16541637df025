"""Trial steps on real ranks: every setup is timed, all ranks choose the same, and the run is as with that strategy."""

from functools import partial
from pathlib import Path

from trial_programs import SETTINGS, SETUPS, time_all, train_auto

from gsplit.run.folder import load_run
from gsplit.run.trial import time_on_ranks
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks


def test_setups_are_timed_and_the_choice_changes_no_result(tmp_path: Path) -> None:
    path = tmp_path / "demo.gsplit"
    build_store(synthetic_source(PlantedGraph(300, 2000, num_features=4, target_share=0.4)), path)

    times, again = run_ranks(time_all, 2, str(path))
    assert times == again and list(times) == SETUPS
    *timed, refused, alone = (times[setup] for setup in SETUPS)
    assert refused == []  # the model has two layers
    for steps in (*timed, alone):
        assert len(steps) == 2 and all(wall > 0 and cpu > 0 for wall, cpu in steps)

    first, second = run_ranks(train_auto, 2, str(path), str(tmp_path / "auto"), "auto")
    assert first[:2] == second[:2] and first[0] != "auto"
    assert "the median of 2 timed steps" in first[2][0]
    assert load_run(tmp_path / "auto")[0].strategy == first[0]  # a resumed run has the same strategy
    named = run_ranks(train_auto, 2, str(path), str(tmp_path / "named"), first[0])[0]
    assert named[:2] == first[:2]

    # 4 steps, and a trial would have (2 + 1) x 3
    estimated = run_ranks(partial(train_auto, least_ratio=1), 2, str(path), str(tmp_path / "short"), "auto")[0]
    assert "is fastest" in estimated[2][0] and "timed steps" not in estimated[2][0]

    started = time_on_ranks(SETUPS[:2], SETTINGS, path, 2)
    assert [len(started[setup]) for setup in SETUPS[:2]] == [2, 2]
