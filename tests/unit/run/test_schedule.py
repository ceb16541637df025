"""When a run evaluates: by number, never, or by cost."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.inference.evaluate import count_evaluation_edges
from gsplit.run.training import EvaluationSchedule
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.training.train_state import TrainState

COST = 120


def _state(epoch: int, train_edges: int, evaluation_edges: int = 0) -> TrainState:
    found = SimpleNamespace(epoch=epoch, train_edges=train_edges, evaluation_edges=evaluation_edges)
    return cast(TrainState, found)


def _epochs(every: int | None, edges_per_epoch: int, num_epochs: int = 10) -> list[int]:
    """The epochs after which a run evaluates."""
    schedule, evaluated, cost = EvaluationSchedule(every, COST), [], 0
    for epoch in range(1, num_epochs + 1):
        if schedule.is_due(_state(epoch, epoch * edges_per_epoch, cost), last=epoch == num_epochs):
            evaluated.append(epoch)
            cost += COST
    return evaluated


@pytest.mark.parametrize(
    "every, edges, epochs",
    [
        (3, 1, [3, 6, 9, 10]),
        (0, 10**9, []),
        (None, COST, list(range(1, 11))),
        (None, 10 * COST, list(range(1, 11))),  # at most once per epoch
        (None, 50, [3, 5, 8, 10]),
        (None, 1, [10]),  # always after the last
    ],
)
def test_evaluation_costs_no_more_than_training_unless_told(every: int | None, edges: int, epochs: list[int]) -> None:
    assert _epochs(every, edges) == epochs


def test_what_was_chosen_is_explained() -> None:
    schedule = EvaluationSchedule(None, 120_000)
    assert schedule.describe(_state(1, 44_000)) == (
        "exact evaluation after about every 3 epochs, and after the last: one computes 120,000 edges, "
        "an epoch of training 44,000 (--evaluate-every N to choose)"
    )
    assert schedule.describe(_state(1, 120_000)).startswith("exact evaluation after every epoch: one computes")


def test_the_cost_of_an_evaluation_is_that_of_its_targets(tmp_path: Path) -> None:
    store = build_store(synthetic_source(PlantedGraph(100, 700)), tmp_path / "g.gsplit")
    degrees = store.graph.in_degrees()
    one_layer = int(degrees[store.stored_array("targets/val")].sum())
    assert count_evaluation_edges(store, ["val"], solo_mesh(), 1) == one_layer
    assert one_layer < count_evaluation_edges(store, ["val"], solo_mesh(), 3) <= 3 * 700
