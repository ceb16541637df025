"""Ranks on several hosts, which exchange in two levels: the answers of one process, whatever is trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_programs import MODELS, SPLITS, train_over_hosts, train_tasks
from small_graph import compare, train_cases
from typed_programs import largest_error

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.ranks import run_ranks

HOSTS = (2, 2)
ROW = 32  # bytes of a row of features
DEPTHS = [("split", 0, 1), ("split", 2, 2)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hosts")
    planted = PlantedGraph(1500, 15_000, num_communities=12, num_features=8, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    store = gsplit.partition(plain, folder / "p.gsplit", 5, [4, 4], batch_size=128, solver="restream", epochs=2)
    budgets = [0, 100 * ROW, 1500 * ROW]
    found: list[dict[str, Any]] = run_ranks(train_over_hosts, SPLITS, str(store.path), budgets, DEPTHS, hosts=HOSTS)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    return train_tasks(solo_mesh())


def test_models_equal_one_process(ran: list[dict[str, Any]], alone: dict[str, list[Any]]) -> None:
    for place, (case, one) in enumerate(zip(MODELS, alone["models"], strict=True)):
        worst = compare(one, [rank["models"][place] for rank in ran])
        assert worst.largest <= 1e-9, (case, worst)


def test_vertex_types_equal_one_process(ran: list[dict[str, Any]], alone: dict[str, list[Any]]) -> None:
    for place, one in enumerate(alone["typed"]):
        assert all(largest_error(one, rank["typed"][place]) <= 1e-9 for rank in ran), place


@pytest.mark.parametrize("task", ["links", "temporal"])
def test_other_tasks_equal_one_process(task: str, ran: list[dict[str, Any]], alone: dict[str, list[Any]]) -> None:
    for place, one in enumerate(alone[task]):
        for found in (rank[task][place] for rank in ran):
            assert found.losses == pytest.approx(one.losses, abs=1e-9)
            for got, want in zip(found.gradients, one.gradients, strict=True):
                assert np.abs(got - want).max() <= 1e-9


def test_neither_copies_nor_batches_made_ahead_change_a_bit(ran: list[dict[str, Any]]) -> None:
    for rank in ran:
        (losses, weights, without), few, many = rank["copies"]
        assert len(losses) > 2 and few[:2] == many[:2] == (losses, weights)
        assert without["rows_received"] > few[2]["rows_received"] > many[2]["rows_received"]
        at_once, ahead = rank["depths"]
        assert len(at_once[0]) > 6 and ahead == at_once


def test_what_is_sent_is_counted(ran: list[dict[str, Any]]) -> None:
    """Both levels: what all ranks send is what all ranks receive."""
    for of_strategy in zip(*(rank["counts"] for rank in ran), strict=True):
        counts = [found for found, _ in of_strategy]
        assert sum(count["bytes_sent"] for count in counts) == sum(count["bytes_received"] for count in counts) > 0
        assert sum(count["rows_sent"] for count in counts) == sum(count["rows_received"] for count in counts) > 0


@pytest.mark.parametrize("sample_device", [None, "sim:0"])
def test_devices_equal_the_host(sample_device: str | None, ran: list[dict[str, Any]], tmp_path: Path) -> None:
    there = run_ranks(train_cases, SPLITS, MODELS, SPLITS, 2, device="sim:0", sample_device=sample_device, hosts=HOSTS)
    for place, case in enumerate(MODELS):
        for rank in range(SPLITS):
            assert compare(ran[rank]["models"][place], [there[rank][place]]).largest <= 1e-9, (case, rank)


def test_another_start_gives_the_same_bits(ran: list[dict[str, Any]]) -> None:
    again = run_ranks(train_cases, SPLITS, MODELS, SPLITS, 2, hosts=HOSTS)
    for rank, found in enumerate(again):
        assert [case.losses for case in found] == [case.losses for case in ran[rank]["models"]]
