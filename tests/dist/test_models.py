"""Unmodified PyG models on real ranks: a part of the exactness matrix with every model, strategy, ownership and option.

The whole matrix: ``python -m gsplit_bench exactness``.
"""

from typing import Any

import pytest

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.run.models import MODELS
from gsplit_bench.exactness import OTHER_STRATEGIES, TOLERANCE, Case, all_cases, compare, train_cases
from gsplit_bench.ranks import run_ranks

STEPS = 2  # the second from weights that the first has changed; the golden record has five


def _covering(replicas: int, splits: int) -> list[Case]:
    """Every model, and beside it options that turn with the mesh; some models with every other strategy.

    Two ranks run every model with split and with data; more ranks, which are dear, with one of them in turn.
    The golden record (test_golden.py) has every model on 1, 2 and 3 ranks beside this.
    """
    everything = list(all_cases(replicas, splits))
    cases = [case for case in everything if case.strategy not in OTHER_STRATEGIES]
    models, few = sorted(MODELS), replicas * splits > 2
    wanted: dict[tuple[Any, ...], Case] = {}
    for number, case in enumerate(cases):
        turn = (number + splits + 2 * replicas) % 3 == 0
        if few and case.strategy != ("split", "data")[(models.index(case.model) + splits + replicas) % 2]:
            continue
        if turn and (case.dropout > 0 or case.jk is not None or case.norm is not None):
            kind = case.norm is not None or case.edge_values
            wanted.setdefault((case.model, case.strategy, None if few else kind), case)
    for place, strategy in enumerate(OTHER_STRATEGIES):
        others = [case for case in everything if case.strategy == strategy and case.dropout > 0]
        parts = 1 if few else 2
        for part in range(parts):  # the models, ownerships and edge values turn with the mesh and the strategy
            number = len(others) * part // parts + (7 * place + 3 * splits + replicas) % max(1, len(others) // parts)
            wanted[strategy, part] = others[number]
    for ownership in ("random", "all on rank 0", "no targets on rank 1"):
        for model in ("sage", "transformer"):
            wanted.setdefault((model, ownership), Case(model, "split", ownership, 0.5, None, None))
    return list(wanted.values())


@pytest.mark.parametrize("replicas, splits", [(1, 2), (1, 4), (2, 2)])
def test_models_equal_one_process(replicas: int, splits: int) -> None:
    cases = _covering(replicas, splits)
    assert {case.model for case in cases} == set(MODELS)
    ranks = run_ranks(train_cases, replicas * splits, cases, splits, STEPS, replicas=replicas)
    for place, (case, one) in enumerate(zip(cases, train_cases(solo_mesh(), cases, splits, STEPS), strict=True)):
        worst = compare(one, [rank[place] for rank in ranks])
        assert worst.largest <= TOLERANCE, (case, worst)
        assert max(abs(a - b) for a, b in zip(one.losses, one.losses[1:], strict=False)) > 0
