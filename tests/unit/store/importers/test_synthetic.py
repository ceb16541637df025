"""The generator: the graph it promises, the same in any pieces."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import stored_edges

from gsplit.errors import InputError
from gsplit.store.build import build_store
from gsplit.store.importers import synthetic
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

GRAPH = PlantedGraph(20_000, 400_000, seed=3, num_communities=40, num_classes=8, num_features=16)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    source = synthetic_source(GRAPH)
    chunks = list(source.edges())
    assert source.y is not None
    return {
        "src": np.concatenate([c.src for c in chunks]),
        "dst": np.concatenate([c.dst for c in chunks]),
        "y": np.concatenate([c.rows for c in source.y.chunks()]),
        "x": np.concatenate([c.rows for c in source.features["x"].chunks()]),
        "targets": source.targets,
        "community": synthetic._communities(GRAPH, np.arange(GRAPH.num_vertices)),
    }


def test_pieces_do_not_matter_and_seeds_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(GRAPH, num_vertices=1000, num_edges=9_999, num_communities=10)
    one = build_store(synthetic_source(small), tmp_path / "one.gsplit")
    other = build_store(synthetic_source(dataclasses.replace(small, seed=4)), tmp_path / "other.gsplit")
    monkeypatch.setattr(synthetic, "CHUNK_EDGES", 617)
    monkeypatch.setattr("gsplit.store.source.CHUNK_BYTES", 5000)
    two = build_store(synthetic_source(small), tmp_path / "two.gsplit")
    assert one.manifest.arrays == two.manifest.arrays
    assert one.num_edges == 9_999
    different = [n for n in one.names if one.manifest.arrays[n].sha256 != other.manifest.arrays[n].sha256]
    assert different == one.names


def test_communities_hold_their_share_of_edges(drawn: dict[str, Any]) -> None:
    same = drawn["community"][drawn["src"]] == drawn["community"][drawn["dst"]]
    chance = np.bincount(drawn["community"]).max() / GRAPH.num_vertices
    assert GRAPH.inside - 0.01 < same.mean() < GRAPH.inside + 2 * chance
    sizes = np.bincount(drawn["community"], minlength=40)
    assert sizes.max() - sizes.min() <= 1


def test_degrees_follow_a_power_law(drawn: dict[str, Any]) -> None:
    """Skew 2 means degree ~ rank**-1/2, so 1/4 of the edges go to the first 1/16 of the vertices."""
    degrees = np.sort(np.bincount(drawn["dst"], minlength=GRAPH.num_vertices))[::-1]
    assert degrees[: GRAPH.num_vertices // 16].sum() / degrees.sum() == pytest.approx(0.25, abs=0.01)
    ranks = np.array([20, 2000])
    slope = np.diff(np.log([degrees[r - 5 : r + 5].mean() for r in ranks])) / np.diff(np.log(ranks))
    assert slope[0] == pytest.approx(-0.5, abs=0.05)
    assert (drawn["src"] != drawn["dst"]).all()


def test_ids_do_not_give_hubs_or_communities_away(drawn: dict[str, Any]) -> None:
    ids = np.arange(GRAPH.num_vertices)
    degrees = np.bincount(drawn["dst"], minlength=GRAPH.num_vertices)
    assert abs(np.corrcoef(ids, np.argsort(np.argsort(degrees)))[0, 1]) < 0.03
    assert (drawn["community"][1:] == drawn["community"][:-1]).mean() < 0.05


def test_labels_follow_communities_and_features_follow_labels(drawn: dict[str, Any]) -> None:
    follows = (drawn["y"] == drawn["community"] % GRAPH.num_classes).mean()
    assert follows == pytest.approx(1 - GRAPH.label_noise * 7 / 8, abs=0.01)
    half = GRAPH.num_vertices // 2
    centres = np.stack([drawn["x"][:half][drawn["y"][:half] == c].mean(0) for c in range(GRAPH.num_classes)])
    guess = ((drawn["x"][half:, None, :] - centres[None]) ** 2).sum(2).argmin(1)
    accuracy = (guess == drawn["y"][half:]).mean()
    assert 0.2 < accuracy < 0.8  # learnable (chance is 0.125), not given away: neighbours are worth asking


def test_targets_can_be_concentrated(drawn: dict[str, Any]) -> None:
    sizes = {name: ids.size / GRAPH.num_vertices for name, ids in drawn["targets"].items()}
    assert sizes == pytest.approx({"train": 0.4, "val": 0.05, "test": 0.05}, abs=0.01)
    assert np.unique(np.concatenate(list(drawn["targets"].values()))).size == sum(
        t.size for t in drawn["targets"].values()
    )
    few = synthetic_source(dataclasses.replace(GRAPH, target_communities=0.1)).targets["train"]
    assert set(drawn["community"][few]) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "name, value", [("num_vertices", 1), ("num_edges", -1), ("inside", 1.5), ("skew", 0), ("num_communities", 10**6)]
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(InputError, match=f"{name}: expected .* to .* .got {value}.. Fix: "):
        dataclasses.replace(GRAPH, **wrong)


def test_tiny_graphs(tmp_path: Path) -> None:
    graph = PlantedGraph(2, 50, num_features=0, num_classes=1)
    store = build_store(synthetic_source(graph), tmp_path / "g.gsplit")
    src, dst = stored_edges(store)
    assert store.num_edges == 50
    assert (src != dst).all()
    assert store.names == ["indices", "indptr", "targets/test", "targets/train", "targets/val", "y"]
