"""Every option of every task on real ranks: a part of the matrix in which strategies and other options turn.

The whole matrix: ``python -m gsplit_bench exactness-tasks``.
"""

from functools import cache
from itertools import chain

import pytest

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.exactness import TOLERANCE
from gsplit_bench.exactness_tasks import TASKS, TaskCase, TaskRun, all_task_cases, compare_tasks, train_tasks
from gsplit_bench.ranks import run_ranks

HOMOGENEOUS = [task for task in TASKS if "types" not in task]
"""tests/dist/test_typed.py and test_typed_links.py have the others, whose models take long to wrap."""


def _part(turn: int) -> list[TaskCase]:
    """One case of every option and model, of another strategy, dropout and prefetching each."""
    cases: dict[tuple[str, str, str], list[TaskCase]] = {}
    for case in all_task_cases(1, 3, HOMOGENEOUS):
        cases.setdefault((case.task, case.option, case.model), []).append(case)
    return [found[(turn + 5 * number) % len(found)] for number, found in enumerate(cases.values())]


@cache
def _one_process(task: str, option: str, model: str, dropout: bool) -> TaskRun:
    return train_tasks(solo_mesh(), [TaskCase(task, option, model, "split", dropout, 0)], is_reference=True)[0]


@pytest.mark.parametrize("replicas, splits", [(1, 3), (2, 2)])
def test_every_option_of_every_task_equals_one_process(replicas: int, splits: int) -> None:
    cases = _part(replicas)
    assert len({case.strategy for case in cases}) == 7 and {case.option for case in cases} >= set(
        chain(*(TASKS[task] for task in HOMOGENEOUS))
    )
    ranks = run_ranks(train_tasks, replicas * splits, cases, replicas=replicas)
    for place, case in enumerate(cases):
        one = _one_process(case.task, case.option, case.model, case.dropout)
        is_split = case.strategy == "split" and replicas == 1
        found = compare_tasks(one, [rank[place] for rank in ranks], is_split=is_split)
        assert found.largest <= TOLERANCE, (case, found)


def test_another_sample_is_found_out() -> None:
    """Even where results are close: a case compared with the same case of another option."""
    labor, weighted, once = train_tasks(
        solo_mesh(),
        [TaskCase("samplers", option, "sage", "split", False, 0) for option in ("labor", "weighted labor", "labor")],
        is_reference=True,
    )
    assert compare_tasks(labor, [once], is_split=True).largest == 0.0
    assert compare_tasks(labor, [weighted], is_split=True).draws > 0
    assert compare_tasks(labor, [once, once], is_split=True).draws > 0  # every destination on two ranks
    half = TaskRun(once.trained, [[(ids[1:], words[1:]) for ids, words in step] for step in once.drawn])
    assert compare_tasks(labor, [half], is_split=False).draws == sum(len(step) for step in labor.drawn)
