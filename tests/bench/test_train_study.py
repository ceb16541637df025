"""What a study consists of, and the paper's studies by name."""

from dataclasses import replace

import pytest

import gsplit
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit_bench.train_study import DEFAULT, PRESETS, Launch, Study, find_preset


def test_ranks_are_launched_once_per_number_threads_and_allocator() -> None:
    study = Study("t", models=("sage", "gat"), ranks=(2, 4), allocators=("tuned", "default"), hidden=(8, 16))
    assert study.launches() == [Launch(r, a) for r in (2, 4) for a in ("tuned", "default")]
    scenarios = study.scenarios(["a", "b"], Launch(4, "default"))
    assert len(scenarios) == len(set(scenarios)) == 2 * 2 * 2  # graphs, models, widths; systems take turns inside
    assert {(each.ranks, each.allocator) for each in scenarios} == {(4, "default")}
    assert all(each.systems == study.systems for each in scenarios)
    assert [each.graph for each in scenarios] == ["a"] * 4 + ["b"] * 4


def test_launches_with_several_threads_take_no_more_cores_than_the_others() -> None:
    def pairs(ranks: tuple[int, ...], threads: tuple[int, ...]) -> list[tuple[int, int]]:
        return [(each.ranks, each.threads) for each in Study("t", ranks=ranks, threads=threads).launches()]

    assert pairs((1, 2), (1, 2)) == [(1, 1), (1, 2), (2, 1)]
    assert pairs((1,), (1, 4)) == [(1, 1), (1, 4)]
    assert pairs((2, 4), (2,)) == [(2, 2), (4, 2)]
    assert str(Launch(1, "tuned", 2)) == "1 rank x 2 threads, tuned allocator"
    (scenario,) = Study("t", models=("sage",)).scenarios(["a"], Launch(1, "tuned", 2))
    assert (scenario.ranks, scenario.threads) == (1, 2)


def test_replicas_that_do_not_divide_the_ranks_are_left_out() -> None:
    study = Study("t", models=("sage",), replicas=(1, 2, 3))
    assert [each.replicas for each in study.scenarios(["a"], Launch(4, "tuned"))] == [1, 2]
    assert [each.replicas for each in study.scenarios(["a"], Launch(3, "tuned"))] == [1, 3]


@pytest.mark.parametrize(
    "field, message",
    [
        ({"models": ("sage", "mlp")}, "--models: expected one of sage, .* \\(got mlp\\)"),
        ({"features": ("tape",)}, "--features: expected one of memory, disk \\(got tape\\)"),
        ({"allocators": ("jemalloc",)}, "--allocator: expected one of tuned, default \\(got jemalloc\\)"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_started(field: dict[str, object], message: str) -> None:
    with pytest.raises(gsplit.InputError, match=message):
        replace(DEFAULT, **field)  # type: ignore[arg-type]


def test_every_study_of_the_paper_is_there_and_runs_something() -> None:
    assert list(PRESETS) == [
        "redundancy", "main", "partition", "ranks", "replicas", "hidden", "batch", "layers", "accuracy",
        "host", "threads", "crossover",
    ]  # fmt: skip
    for name, study in PRESETS.items():
        assert find_preset(name) is study
        assert study.launches() or study.counted_ranks
        for strategy in study.counted_strategies:
            assert parse_strategy(strategy, len(study.fanouts[0])).name == strategy
    assert PRESETS["redundancy"].launches() == []
    assert max(PRESETS["ranks"].counted_ranks) == 64
    with pytest.raises(gsplit.InputError, match="--preset: expected one of redundancy, .* \\(got table9\\)"):
        find_preset("table9")
