"""A renumbered store holds the same graph, and draws the same mini-batches in original ids (law 1)."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from graphs import edge_lists, sample_store, source_of, stored_edges
from hypothesis import given
from hypothesis import strategies as st

import gsplit
from gsplit.partitioning import relabel
from gsplit.partitioning.relabel import write_renumbered
from gsplit.store.build import build_store
from gsplit.store.manifest import PartStatistics, new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.source import stream_rows
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter


def _renumber(store: Store, path: Path, parts: Any, hotness: Any) -> Store:
    num_parts = int(parts.max()) + 1
    links = np.zeros((num_parts, num_parts), int).tolist()
    statistics = PartStatistics(num_batches=1, loads=[1] * num_parts, links=links)
    with StoreWriter(path) as writer:
        write_renumbered(writer, store, parts, hotness, statistics, new_step("partition", {}, {}))
    return open_store(path)


def _edges_in_original_ids(store: Store, name: str) -> list[tuple[Any, ...]]:
    original = store.original_ids()
    src, dst = stored_edges(store)
    return sorted(zip(original[src].tolist(), original[dst].tolist(), store.stored_array(name).tolist(), strict=True))


def test_everything_is_moved_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relabel, "_PIECE_BYTES", 1000)  # many pieces
    store = sample_store(tmp_path / "g.gsplit")
    rng = np.random.default_rng(0)
    parts, hotness = rng.integers(0, 5, 300).astype(np.int32), rng.integers(0, 9, 300).astype(np.uint32)
    made = _renumber(store, tmp_path / "p.gsplit", parts, hotness)
    verify_store(made)
    original = np.asarray(made.original_ids())
    assert np.array_equal(np.sort(original), np.arange(300))
    assert made.part_boundaries == [0, *np.cumsum(np.bincount(parts)).tolist()]
    for part, (first, stop) in enumerate(zip(made.part_boundaries[:-1], made.part_boundaries[1:], strict=True)):
        assert (parts[original[first:stop]] == part).all()
        heat = hotness[original[first:stop]].astype(int)
        assert (np.diff(heat) <= 0).all()  # hottest first
        assert np.array_equal(made.stored_array("hotness")[first:stop], heat)
    for name in ("features/x", "y"):
        assert np.array_equal(made.stored_array(name), store.stored_array(name)[original])
    assert made.vertex_names() == store.vertex_names()
    for name in ("train", "test"):
        assert np.array_equal(original[made.stored_array(f"targets/{name}")], store.stored_array(f"targets/{name}"))
    assert _edges_in_original_ids(made, "edges/weight") == _edges_in_original_ids(store, "edges/weight")
    assert [step.step for step in made.manifest.provenance] == ["import test", "partition"]
    assert made.manifest.statistics == store.manifest.statistics


def _drawn(store: Store, fanouts: list[int], seed: int) -> list[Any]:
    """Every layer's edges in original ids, in the order of the blocks, and the input ids."""
    loader = gsplit.NeighborLoader(store, fanouts, "train", batch_size=7, seed=seed)
    batches = []
    for batch in [*loader, *loader]:  # two epochs
        ids = batch.n_id
        layers = [ids[block.edge_index()].tolist() for block in batch.blocks]
        batches.append((layers, ids.tolist(), batch.x.tolist(), batch.y.tolist(), batch.batch_size))
    return batches


@given(
    edge_lists(), st.integers(1, 6), st.integers(0, 9), st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3)
)
def test_sampling_is_the_same_before_and_after(
    graph_of: tuple[int, Any, Any], num_parts: int, seed: int, fanouts: list[int]
) -> None:
    n, src, dst = graph_of
    rng = np.random.default_rng(seed)
    source = source_of(
        n,
        src,
        dst,
        features={"x": stream_rows(rng.random((n, 2), np.float32), "float32")},
        y=stream_rows(rng.integers(0, 3, n), "int64"),
        targets={"train": np.flatnonzero(rng.random(n) < 0.6) if n > 1 else np.array([0])},
    )
    with TemporaryDirectory() as folder:
        store = build_store(source, Path(folder) / "g.gsplit")
        parts, hotness = rng.integers(0, num_parts, n).astype(np.int32), rng.integers(0, 4, n).astype(np.uint32)
        made = _renumber(store, Path(folder) / "p.gsplit", parts, hotness)
        if store.stored_array("targets/train").size:
            assert _drawn(store, fanouts, seed) == _drawn(made, fanouts, seed)  # the very order of rows and edges


def test_a_loader_by_ids_or_for_all_vertices_does_not_notice(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "g.gsplit")
    rng = np.random.default_rng(1)
    parts, hotness = rng.integers(0, 3, 300).astype(np.int32), rng.integers(0, 9, 300).astype(np.uint32)
    made = _renumber(store, tmp_path / "p.gsplit", parts, hotness)
    for nodes in (None, torch.arange(5, 60, 3)):
        one, other = (
            [(b.n_id.tolist(), b.y.tolist()) for b in gsplit.NeighborLoader(s, [2, 2], nodes, batch_size=32)]
            for s in (store, made)
        )
        assert one == other
    data, again = gsplit.to_pyg(store), gsplit.to_pyg(made)
    assert torch.equal(data.x, again.x) and torch.equal(data.y, again.y)
