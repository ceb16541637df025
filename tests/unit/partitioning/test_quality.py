"""Quality against a plain count, and the theorem: what the weights expect is what mini-batches show."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import csc_of, edge_lists, source_of
from hypothesis import given
from hypothesis import strategies as st

from gsplit.graph.graph import Graph
from gsplit.partitioning.forecast import imbalance
from gsplit.partitioning.plan import find_parts
from gsplit.partitioning.presample import Drawn, Workload, draw_epochs, presample
from gsplit.partitioning.quality import expect, measure
from gsplit.partitioning.settings import PartitionSettings
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

NONE = np.empty(0, np.int64)


def _workload(n: int, src: Any, dst: Any, seed: int) -> Workload:
    return Workload(csc_of(n, src, dst)[0], NONE, np.arange(0, n, 2), [2, 3], 5, seed)


def _by_hand(graph: Graph, drawn: Drawn, parts: Any) -> dict[str, Any]:
    """Cross edges and rows of every layer, from sets."""
    layers = []
    for frontier, counts, places in zip(drawn.frontiers, drawn.counts, drawn.places, strict=True):
        dst = np.repeat(frontier, counts)
        pairs = list(zip(graph.indices[places].tolist(), dst.tolist(), strict=True))
        crossing = [(s, d) for s, d in pairs if parts[s] != parts[d]]
        layers.append((len(pairs), len(crossing), len({(s, int(parts[d])) for s, d in crossing})))
    return {"layers": layers[::-1], "edges": [len(p) for p in drawn.places]}


@given(edge_lists(), st.integers(1, 130), st.integers(0, 5))
def test_it_is_what_a_plain_count_finds(graph_of: tuple[int, Any, Any], num_parts: int, seed: int) -> None:
    workload = _workload(*graph_of, seed)
    rng = np.random.default_rng(seed)
    one, other = (rng.integers(0, num_parts, graph_of[0]).astype(np.int32) for _ in range(2))
    batches = list(draw_epochs(workload, range(2), threads=1))
    found = measure(workload.graph, batches, [(one, num_parts), (other, num_parts)], 2.0, 1.0)
    for parts, quality in ((one, found[0]), (other, found[1])):
        for number, drawn in enumerate(batches):
            want = _by_hand(workload.graph, drawn, parts)
            assert quality.totals[number].tolist() == [list(layer) for layer in want["layers"]]
            for hop, frontier in enumerate(drawn.frontiers):
                layer = len(drawn.frontiers) - 1 - hop
                assert np.array_equal(
                    quality.vertices[number, layer], np.bincount(parts[frontier], minlength=num_parts)
                )
                work = np.bincount(parts[frontier], weights=drawn.counts[hop], minlength=num_parts)
                assert np.array_equal(quality.edges[number, layer], work)
            assert np.array_equal(quality.inputs[number], np.bincount(parts[drawn.input_ids], minlength=num_parts))
        totals = quality.totals.sum(axis=(0, 1))
        assert quality.cross_edge_share() == pytest.approx(totals[1] / max(1, totals[0]))
        assert quality.rows_shuffled_per_input() == pytest.approx(totals[2] / quality.inputs.sum())


@given(edge_lists(), st.integers(1, 8), st.integers(0, 5), st.sampled_from([(1.0, 1.0), (0.5, 1.0), (8.0, 1.0)]))
def test_the_expectation_is_the_mean_of_the_mini_batches_counted(
    graph_of: tuple[int, Any, Any], num_parts: int, seed: int, costs: tuple[float, float]
) -> None:
    workload = _workload(*graph_of, seed)
    parts = np.random.default_rng(seed).integers(0, num_parts, graph_of[0]).astype(np.int32)
    counts = presample(workload, epochs=2, threads=1)
    expected = expect(workload.graph, counts, parts, num_parts, *costs)
    quality = measure(workload.graph, draw_epochs(workload, range(2), threads=1), [(parts, num_parts)], *costs)[0]
    assert quality.cross_edges()[0] == pytest.approx(expected.cross_edges)
    assert quality.mean_loads()[0] == pytest.approx(expected.loads)
    assert quality.totals[:, :, 0].sum() / counts.num_batches == pytest.approx(expected.edges)


@pytest.mark.parametrize("communities, concentrated", [(20, 1.0), (20, 0.2)])
def test_later_mini_batches_are_as_expected(tmp_path: Path, communities: int, concentrated: float) -> None:
    """The paper's theorem on held-out mini-batches: within 3 % and within the confidence interval's reach."""
    planted = PlantedGraph(4000, 40000, num_communities=communities, num_features=0, target_communities=concentrated)
    store = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    workload = Workload.of_store(store, "train", [5, 5], 64, seed=3)
    epochs = 2400 // workload.steps_per_epoch  # with few draws per edge, a solver finds cuts that only look cheap
    counts = presample(workload, epochs=epochs)
    plan = find_parts(workload, counts, PartitionSettings(4), tmp_path / "work")
    later = range(epochs, epochs + 600 // workload.steps_per_epoch)
    quality = measure(workload.graph, draw_epochs(workload, later), [(plan.parts, 4)], 8.0, 1.0)[0]
    expected = expect(workload.graph, counts, plan.parts, 4, 8.0, 1.0)
    (crossing, half), (loads, _) = quality.cross_edges(), quality.mean_loads()
    assert crossing == pytest.approx(expected.cross_edges, rel=0.03)
    assert loads == pytest.approx(expected.loads, rel=0.03)
    assert half < 0.03 * crossing  # the interval is narrow enough for the comparison to mean something
    assert imbalance(expected.loads) < 1.06
    document = quality.as_dict()
    assert document["cross_edge_share"] < 0.5 and len(document["layers"]) == 2
    assert document["num_batches"] == len(later) * workload.steps_per_epoch


def test_one_vertex_and_one_edge_are_no_reason_to_fail(tmp_path: Path) -> None:
    store = build_store(source_of(1, NONE, NONE, targets={"train": np.array([0])}), tmp_path / "g.gsplit")
    workload = Workload.of_store(store, "train", [3], 4)
    quality = measure(workload.graph, draw_epochs(workload, range(1)), [(np.zeros(1, np.int32), 1)], 1.0, 1.0)[0]
    assert (quality.cross_edge_share(), quality.rows_shuffled_per_input()) == (0.0, 0.0)
    assert set(quality.imbalances().values()) == {1.0}
