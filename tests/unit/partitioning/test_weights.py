"""The weighted graph against a dictionary: both directions summed, self-loops and parallel edges merged."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from graphs import csc_of, edge_lists
from hypothesis import given
from hypothesis import strategies as st

from gsplit.errors import InputError, StoreError
from gsplit.graph.graph import Graph
from gsplit.partitioning import weights
from gsplit.partitioning.presample import Counts
from gsplit.partitioning.weighted_graph import open_weighted
from gsplit.partitioning.weights import vertex_work, weigh


@given(edge_lists(), st.sampled_from(["gsplit", "node", "edge"]), st.integers(0, 5), st.sampled_from([1, 3, 1 << 27]))
def test_it_is_the_undirected_graph(graph_of: tuple[int, Any, Any], objective: str, seed: int, window: int) -> None:
    """Whatever the number of out-edges that are written in one pass over the graph."""
    n, (graph, src, dst) = graph_of[0], csc_of(*graph_of)
    rng = np.random.default_rng(seed)
    draws = [rng.integers(0, 4, k).astype(np.uint32) for k in (n, n, n, src.size)]
    counts = Counts(draws[0], draws[1].astype(np.uint64), draws[2], draws[3], 3)
    targets = np.flatnonzero(rng.random(n) < 0.5)
    want: Counter[tuple[int, int]] = Counter()
    for s, d, k in zip(src.tolist(), dst.tolist(), counts.edges.tolist(), strict=True):
        if s != d:
            want[s, d] += k
            want[d, s] += k
    kept = {pair: weight for pair, weight in want.items() if weight > 0 or objective != "gsplit"}
    with TemporaryDirectory() as folder, patch.object(weights, "_WINDOW_EDGES", window):
        weigh(objective, graph, counts, targets, Path(folder), 2, 1)
        got = open_weighted(Path(folder))
        pairs = [(v, int(u)) for v in range(n) for u in got.adjncy[got.xadj[v] : got.xadj[v + 1]]]
        assert pairs == sorted(kept)  # each once, both ways, ascending
        if objective == "gsplit":
            assert got.edge_weights.tolist() == [kept[pair] for pair in pairs]
        else:
            assert got.edge_weights.size == 0
        if objective == "edge":
            assert got.vertex_weights[:, 0].tolist() == graph.in_degrees().tolist()
            assert np.flatnonzero(got.vertex_weights[:, 1]).tolist() == targets.tolist()
        else:
            assert got.vertex_weights[:, 0].tolist() == (2 * draws[0].astype(int) + draws[1]).tolist()
        assert sorted(p.name for p in Path(folder).iterdir()) == [
            "adjncy.npy",
            "edge_weights.npy",
            "vertex_weights.npy",
            "xadj.npy",
        ]


def test_fractions_are_kept_and_nothing_overflows() -> None:
    many = np.full(3, (1 << 32) - 1, np.uint32)
    counts = Counts(many, many.astype(np.uint64), many, many, 1)
    assert vertex_work(counts, 1, 1).tolist() == [2 * ((1 << 32) - 1)] * 3
    assert vertex_work(counts, 0.5, 0).tolist() == [512 * ((1 << 32) - 1)] * 3
    for wrong in ((0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1), (1e17, 0), (1e-9, 0)):
        with pytest.raises(InputError, match="c_v, c_e: expected two numbers, 0 or 0.01 to 1000000, not both 0"):
            vertex_work(counts, *wrong)
    huge = Counts(many, np.full(3, 1 << 50, np.uint64), many, many, 1)
    with pytest.raises(InputError, match="c_v, c_e: expected work that sums to less than"):
        vertex_work(huge, 0, 1e6)


def test_columns_that_do_not_ascend_or_leave_the_graph_are_refused(tmp_path: Path) -> None:
    three = np.ones(3, np.uint32)
    counts = Counts(three, three.astype(np.uint64), three, three[:2], 1)
    for indptr, indices, got in (
        ([0, 2, 2, 2], [2, 1], "a column out of order"),
        ([0, 2, 2, 2], [1, 3], "ids 1..3, of 3 vertices"),
        ([0, 2, 2, 2], [-1, 1], "ids -1..1, of 3 vertices"),
        ([0, 2, 1, 2], [0, 1], "offsets 2..1 at vertex 1, of 2 edges"),
    ):
        graph = Graph(np.array(indptr), np.array(indices), 3)
        with pytest.raises(
            StoreError, match=f"the store: expected edges between its vertices, columns ascending .got {got}"
        ):
            weigh("gsplit", graph, counts, np.array([0]), tmp_path, 1, 1)
