"""Presampling counts what the one-process mini-batches of training contain, edge by edge."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import csc_of, edge_lists
from hypothesis import given
from hypothesis import strategies as st
from link_programs import store_with_pairs

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError, StoreError
from gsplit.graph.graph import Graph
from gsplit.partitioning.presample import Counts, PresampleCounter, Workload, draw_epochs, presample
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.sharded.plan import check_shard_plan
from gsplit.sampling.minibatch import StepKey, epoch_positions, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.pairs import StoredPairs
from gsplit.store.reader import Store

NONE = np.empty(0, np.int64)


@pytest.mark.parametrize("mode", ["binary", "joint", "in_batch", "none"])
@pytest.mark.parametrize("numbering", ["original", "parted"])
def test_steps_of_pairs_are_counted_as_they_are_trained(tmp_path: Path, mode: str, numbering: str) -> None:
    """Against the mini-batches of the loader, without the edges of their pairs."""
    store = store_with_pairs(tmp_path / "links.gsplit", num_vertices=120, num_pairs=40)
    name = "labelled" if mode == "none" else "train"
    if numbering == "parted":
        parted = tmp_path / "parted.gsplit"
        store = gsplit.partition(store, parted, 2, [3, 2], pairs=name, batch_size=16, solver="restream", epochs=1)
        settings = store.manifest.provenance[-1].settings
        negatives = "none" if mode == "none" else "binary"  # what training draws if it is told nothing
        assert settings["targets"] == f"pairs {name}" and settings["neg_sampling"] == negatives
    pairs = StoredPairs.given(name, mode, 3)
    workload = Workload.of_store(store, None, [3, 2], 16, seed=4, pairs=pairs)
    assert workload.steps_per_epoch == 3
    found = presample(workload, epochs=2, threads=2)
    computed, drawn, loaded = (np.zeros(120, np.int64) for _ in range(3))
    loader = gsplit.LinkNeighborLoader(
        store, [3, 2], name, neg_sampling=pairs.negatives, batch_size=16, seed=4, mesh=solo_mesh()
    )
    for epoch in range(2):
        for step in range(3):
            batch = loader.make_batch(epoch, step)
            ids = batch.input_ids.numpy()
            np.add.at(loaded, ids, 1)
            for block in batch.blocks:
                np.add.at(computed, ids[: block.num_dst], 1)
                np.add.at(drawn, ids[: block.num_dst], block.indptr.diff().numpy())
    assert found.num_batches == 6
    for got, want in ((found.computed, computed), (found.edges_drawn, drawn), (found.loaded, loaded)):
        assert np.array_equal(got, want)
    assert workload.pairs is not None
    kept = presample(replace(workload, pairs=replace(workload.pairs, drawn=replace(pairs, exclude_seed_edges=False))))
    assert kept.edges_drawn.sum() / 10 > found.edges_drawn.sum() / 2  # ten epochs and two


def test_pairs_that_cannot_be_counted_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with_pairs(tmp_path / "links.gsplit")
    store = gsplit.add_pairs(store, "empty", np.empty((2, 0), np.int64))
    with pytest.raises(InputError, match="pairs/empty: expected at least one pair .got an empty list"):
        Workload.of_store(store, None, [2], 8, pairs=StoredPairs("empty"))
    with pytest.raises(InputError, match="pairs/val .got pairs/nothing"):
        gsplit.partition(store, tmp_path / "out.gsplit", 2, [2], pairs="nothing")
    held: Any = None  # refused before the shard is looked at
    with pytest.raises(InputError, match="pairs: expected targets, which shards can be partitioned for .got train"):
        check_shard_plan(held, PartitionSettings(parts=2, pairs="train"))
    monkeypatch.setattr(Store, "pairs", lambda *_: np.full((2, 2), 999))  # damage that opening does not find
    with pytest.raises(StoreError, match=r"pairs/val: expected ids in 0..299 .got 999..999"):
        Workload.of_store(store, None, [2], 8, pairs=StoredPairs("val"))


def _by_hand(graph: Graph, targets: Any, fanouts: list[int], batch_size: int, epochs: int, seed: int) -> Counts:
    """The same counts from the mini-batches that are the definition of sampling."""
    n = graph.num_vertices
    computed, drawn, loaded = (np.zeros(n, np.int64) for _ in range(3))
    pairs: dict[tuple[int, int], int] = {}
    sampler, batches = HostNeighborSampler(graph, NONE), 0
    for epoch in range(epochs):
        order = targets[np.argsort(epoch_positions(np.arange(targets.size), targets.size, seed, epoch, shuffle=True))]
        for step, first in enumerate(range(0, targets.size, batch_size)):
            batch = torch.from_numpy(order[first : first + batch_size])
            sample = sample_minibatch(sampler, batch, fanouts, StepKey(seed, epoch, step))
            batches += 1
            ids = sample.input_ids.numpy()
            np.add.at(loaded, ids, 1)
            for block in sample.blocks:
                np.add.at(computed, ids[: block.num_dst], 1)
                np.add.at(drawn, ids[: block.num_dst], block.indptr.diff().numpy())
                for s, d in block.edge_index().t().tolist():
                    pairs[ids[s], ids[d]] = pairs.get((ids[s], ids[d]), 0) + 1
    edges = np.zeros(graph.num_edges, np.int64)
    for v in range(n):
        column = slice(int(graph.indptr[v]), int(graph.indptr[v + 1]))
        for u in set(graph.indices[column].tolist()):
            edges[column][graph.indices[column] == u] = pairs.get((u, v), 0)  # parallel edges: their sum
    small = [a.astype(np.uint32) for a in (computed, loaded, edges)]
    return Counts(small[0], drawn.astype(np.uint64), small[1], small[2], batches)


@given(edge_lists(), st.data())
def test_counts_are_those_of_training(graph_of: tuple[int, Any, Any], data: Any) -> None:
    n, src, dst = graph_of
    graph, *_ = csc_of(n, src, dst)
    targets = np.sort(data.draw(st.permutations(range(n)))[: data.draw(st.integers(1, n))])
    fanouts = data.draw(st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3))
    batch_size, seed = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 5))
    got = presample(Workload(graph, NONE, targets, fanouts, batch_size, seed), epochs=2, threads=2)
    want = _by_hand(graph, targets, fanouts, batch_size, 2, seed)
    assert got.num_batches == want.num_batches
    for name in ("computed", "edges_drawn", "loaded"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name
    for v in range(n):
        column = slice(int(graph.indptr[v]), int(graph.indptr[v + 1]))
        for u in set(graph.indices[column].tolist()):
            same = graph.indices[column] == u
            assert int(got.edges[column][same].sum()) == int(want.edges[column][same][0])
    assert got.edges.sum() == got.edges_drawn.sum()


def test_threads_and_progress_do_not_change_the_counts() -> None:
    rng = np.random.default_rng(0)
    graph, *_ = csc_of(200, rng.integers(0, 200, 2000), rng.integers(0, 200, 2000))
    seen: list[tuple[str, int, int | None]] = []
    workload = Workload(graph, NONE, np.arange(0, 200, 2), [3, 3], 16)
    one = presample(workload, epochs=3, threads=1, progress=lambda *s: seen.append(s))
    serial = PresampleCounter(graph)
    for drawn in draw_epochs(workload, range(3), threads=1):
        serial.add(drawn)
    several = [presample(workload, epochs=3, threads=threads) for threads in (2, 3, 8, 300)]
    for name in ("computed", "edges_drawn", "loaded", "edges"):
        for found in (serial.counts(21), *several):
            assert np.array_equal(getattr(one, name), getattr(found, name))
    first, rest = (presample(workload, epochs=n, first_epoch=m, threads=n) for m, n in ((0, 1), (1, 2)))
    assert np.array_equal(one.edges, first.edges + rest.edges)
    assert seen[-1] == ("presample", 21, 21)
    assert one.edges.dtype == np.uint32  # four bytes per edge


def test_threads_that_count_at_once_lose_nothing() -> None:
    """One mini-batch, counted by eight threads that begin together, again and again."""
    rng = np.random.default_rng(0)
    graph, *_ = csc_of(300, rng.integers(0, 300, 9000), rng.integers(0, 300, 9000))
    workload = Workload(graph, NONE, np.arange(300), [-1, -1], 300)
    (drawn,) = draw_epochs(workload, range(1), threads=1)
    counter = PresampleCounter(graph, threads=8)
    together = threading.Barrier(8)

    def add_many() -> None:
        together.wait(60)
        for _ in range(50):
            counter.add(drawn)

    adding = [threading.Thread(target=add_many) for _ in range(8)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    found = counter.counts(400)
    assert (found.edges == 2 * 400).all() and (found.loaded == 400).all() and (found.computed == 2 * 400).all()


def test_what_cannot_be_drawn_is_refused() -> None:
    graph, *_ = csc_of(3, NONE, NONE)
    with pytest.raises(InputError, match="targets: expected at least one"):
        Workload(graph, NONE, NONE, [2], 4)
    with pytest.raises(InputError, match="batch_size: expected a positive number"):
        Workload(graph, NONE, np.arange(3), [2], 0)
    with pytest.raises(InputError, match="epochs: expected a positive number"):
        presample(Workload(graph, NONE, np.arange(3), [2], 4), epochs=0)
