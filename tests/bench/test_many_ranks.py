"""Ranks that are simulated in one process: replayed splits are the real ones, and counts are those of the splits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import sample_store

import gsplit
from gsplit.graph.ownership import own_parts
from gsplit.minibatch.split import split_in_one_process, split_minibatch
from gsplit.partitioning.presample import Workload
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.reader import Store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.many_ranks import ReplayedComm, asked_of, main

FANOUT = [4, 4]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder: Path = tmp_path_factory.mktemp("many")
    whole = sample_store(folder / "g.gsplit")
    return gsplit.partition(whole, folder / "p.gsplit", 16, FANOUT, batch_size=64, epochs=1)


def test_a_replayed_split_is_the_one_of_all_ranks(store: Store) -> None:
    workload = Workload.of_store(store, "train", FANOUT, 48)
    ownership = own_parts(store.part_boundaries, 6, store.part_loads)
    key = workload.key(0, 0)
    targets, _ = workload.step_targets(key)
    ranges = [ownership.range_of(rank) for rank in range(6)]
    samplers = [
        HostNeighborSampler(store.graph.restrict(*held), workload.original_ids[slice(*held)]) for held in ranges
    ]
    splits = split_in_one_process(samplers, targets, FANOUT, key, ownership)
    for rank in range(6):
        comm = ReplayedComm(rank, 6, asked_of(rank, splits))
        own = targets[ownership.owners(targets) == rank]
        again = split_minibatch(samplers[rank], own, FANOUT, key, ownership, comm, StepTelemetry())
        assert torch.equal(again.input_ids, splits[rank].input_ids)
        for layer, other in zip(again.layers, splits[rank].layers, strict=True):
            assert layer.route.send_counts == other.route.send_counts
            assert torch.equal(layer.route.send_rows, other.route.send_rows)
            assert torch.equal(layer.block.src_rows, other.block.src_rows)


def test_the_command_counts_every_number_of_ranks(store: Store, tmp_path: Path) -> None:
    words = ["--ranks", "1,7,16", "--per-rank", "4", "--fanout", "4,4", "--steps", "2"]
    main([str(store.path), *words, "--out", str(tmp_path / "many")])
    runs = json.loads((tmp_path / "many.json").read_text())["runs"]
    assert [run["ranks"] for run in runs] == [1, 7, 16]
    assert runs[0]["imbalance_of_work"] == 1 and runs[0]["rows_sent_per_input_row"] == 0
    assert runs[2]["rows_sent_per_input_row"] > runs[1]["rows_sent_per_input_row"] > 0
    assert all(run["split_ms"] > 0 and len(run["peers_per_rank_and_layer"]) == 2 for run in runs)
    assert all(peers <= 15 for peers in runs[2]["peers_per_rank_and_layer"])


@pytest.mark.weekly
def test_ranks_are_started_and_their_sockets_counted(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gsplit_bench", "start-ranks", "--ranks", "2,3", "--out", str(tmp_path / "start")]
    subprocess.run(words, check=True, timeout=300)
    two, three = json.loads((tmp_path / "start.json").read_text())["runs"]
    assert (two["ranks"], three["ranks"]) == (2, 3)
    assert three["sockets"] > two["sockets"] > 2 and two["init_cpu_s"] > 0
