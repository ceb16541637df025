"""Heterogeneous graphs on disk: what is written is what was given, and damage is found."""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from rich.console import Console
from typed_graphs import CITES, WRITES, TypedGraph, academic, assert_holds, typed_graphs

from gsplit.array_types import Array
from gsplit.cli.store_view import describe, show
from gsplit.errors import InputError, StoreError
from gsplit.store import edge_sort
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.source import EdgeRules
from gsplit.store.verify import verify_store


@given(typed_graphs())
@settings(max_examples=40)
def test_a_store_holds_every_edge_row_and_target(tmp_path_factory: pytest.TempPathFactory, graph: TypedGraph) -> None:
    path = tmp_path_factory.mktemp("typed") / "g.gsplit"
    if sum(graph.counts.values()) == 0:
        return
    store = graph.build(path)
    verify_store(store)
    assert_holds(store, graph)
    assert store.manifest.version == 3
    shutil.rmtree(path)


def test_three_hundred_relations_have_two_bytes_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    edges = {("a", f"r{i}", "b"): (rng.integers(0, 5, 3), rng.integers(0, 7, 3)) for i in range(300)}
    graph = TypedGraph({"a": 5, "b": 7}, edges)
    store = graph.build(tmp_path / "g.gsplit")
    verify_store(store)
    assert_holds(store, graph)
    assert store.dtype("edge_type") == "int16" and int(store.stored_array("edge_type").max()) == 299


def test_many_buckets_and_cut_buckets_give_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = academic(authors=300, papers=500, edges=20_000)
    graph.edges[CITES] = graph.edges[CITES][0], np.where(graph.edges[CITES][1] < 400, 3, graph.edges[CITES][1])
    whole = graph.build(tmp_path / "whole.gsplit")
    monkeypatch.setattr(edge_sort.EdgeSorter.__init__, "__kwdefaults__", _small_budget())
    pieces = graph.build(tmp_path / "pieces.gsplit")
    assert pieces.manifest.arrays == whole.manifest.arrays
    assert_holds(pieces, graph)


def _small_budget() -> dict[str, Any]:
    return (edge_sort.EdgeSorter.__init__.__kwdefaults__ or {}) | {"budget_bytes": 8 << 10}


def test_the_order_in_which_edges_arrive_does_not_matter(tmp_path: Path) -> None:
    graph = academic()
    first = graph.build(tmp_path / "a.gsplit")
    order = np.random.default_rng(1).permutation(200)
    graph.edges = {name: (s[order] if s.size else s, d[order] if d.size else d) for name, (s, d) in graph.edges.items()}
    again = build_store(graph.source(chunk=7), tmp_path / "b.gsplit")
    assert again.manifest.arrays == first.manifest.arrays


def test_parallel_edges_count_within_a_relation(tmp_path: Path) -> None:
    both = np.array([0, 0, 1]), np.array([2, 2, 1])
    graph = TypedGraph({"a": 3}, {("a", "r", "a"): both, ("a", "s", "a"): both})
    store = graph.build(tmp_path / "g.gsplit")
    assert (store.manifest.statistics.num_duplicate_edges, store.manifest.statistics.num_self_loops) == (2, 2)
    verify_store(store)
    once = build_store(graph.source(), tmp_path / "once.gsplit", rules=EdgeRules(drop_duplicates=True))
    assert [entry.num_edges for entry in once.manifest.edge_types] == [2, 2]


def test_the_fingerprint_includes_the_types_of_edges(tmp_path: Path) -> None:
    pairs = np.array([0]), np.array([1])
    none = np.empty(0, np.int64), np.empty(0, np.int64)
    names = ("a", "r", "a"), ("a", "s", "a")
    found = {
        TypedGraph({"a": 2}, dict(zip(names, edges, strict=True))).build(tmp_path / f"{i}.gsplit").fingerprint
        for i, edges in enumerate([(pairs, none), (none, pairs)])
    }
    assert len(found) == 2


def test_metadata_is_that_of_pyg(tmp_path: Path) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    assert store.metadata()[0] == ["author", "venue", "paper"] and store.metadata()[1][:2] == [WRITES, CITES]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda graph: graph.counts.update({"a type": 3}), "vertex type: expected a word.*'a type'"),
        (lambda graph: graph.edges.update({("author", "x", "town"): graph.edges[WRITES]}), "two vertex types"),
        (
            lambda graph: graph.targets.update({"paper/train": np.array([50])}),
            r"paper: targets train: expected ids in 0\.\.49",
        ),
        (lambda graph: graph.arrays.update({"y/paper": np.zeros(3)}), "y/paper: expected 50 rows"),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, change: Callable[[TypedGraph], None], message: str) -> None:
    graph = academic()
    change(graph)
    with pytest.raises(InputError, match=message):
        graph.build(tmp_path / "g.gsplit")


def test_reverse_edges_are_relations_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names of their own"):
        build_store(academic().source(), tmp_path / "g.gsplit", rules=EdgeRules(symmetrise=True))


def _edit(store: Store, name: str, change: Callable[[Array], None]) -> None:
    """Change an array and its checksum, so that only the meaning is wrong."""
    path = store.path / f"{name}.npy"
    array = np.load(path)
    change(array)
    path.write_bytes(path.read_bytes()[:128] + array.tobytes())
    manifest = json.loads((store.path / "manifest.json").read_text())
    manifest["arrays"][name]["sha256"] = hashlib.sha256(array.tobytes()).hexdigest()
    (store.path / "manifest.json").write_text(json.dumps(manifest))


def _swap_types(kinds: Array) -> None:
    """The first edge of CITES becomes one of WRITES."""
    kinds[int(np.flatnonzero(kinds == 1)[0])] = 0


def _swap_order(kinds: Array) -> None:
    at = int(np.flatnonzero(np.diff(kinds.astype(int)) > 0)[0])
    kinds[at], kinds[at + 1] = kinds[at + 1], kinds[at]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("edge_type", lambda kinds: kinds.__setitem__(5, 9), "edge types in 0..3"),
        ("edge_type", _swap_types, "a source of type|ordered by type|ends of the types"),
        ("edge_type", _swap_order, "a source of type|ordered by type|ends of the types"),
        ("targets/paper/train", lambda ids: ids.__setitem__(0, 2), "vertices of type paper"),
        ("y/paper", lambda y: y.__setitem__(0, 7), "num_classes = 8, from the labels y/paper"),
    ],
)
def test_damage_with_a_fitting_checksum_is_found(
    tmp_path: Path, name: str, change: Callable[[Array], None], message: str
) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    _edit(store, name, change)
    with pytest.raises(StoreError, match=message):
        verify_store(open_store(store.path))


def test_wrong_types_between_the_sampled_places_are_found_by_verify(tmp_path: Path) -> None:
    store = academic(authors=200, papers=300, edges=20_000).build(tmp_path / "g.gsplit")

    def change(kinds: Array) -> None:
        kinds[500] = 255

    _edit(store, "edge_type", change)
    opened = open_store(store.path)
    with pytest.raises(StoreError, match=r"types in 0\.\.3|ordered by type"):
        verify_store(opened)


def _manifest_edit(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        *parents, last = key.split(".")
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("vertex_types.0.count", 31, "ranges that contain every vertex once"),
        ("vertex_types.0.name", "../x", "vertex_types.0.name"),
        ("vertex_types.1.name", "author", "different names"),
        ("edge_types.0.src", "town", "two vertex types"),
        ("edge_types.0.num_edges", 7, "do not add up"),
        ("type_boundaries.1", 29, "ranges that contain every vertex once"),
        ("type_boundaries", [], "ranges that contain every vertex once"),
        ("part_boundaries", [0, 5, 84], "type_boundaries do not fit part_boundaries"),
        ("version", 2, "vertex types, version 3 does"),
        ("vertex_types", [], "go with vertex_types|has no vertex type"),
        ("vertex_types.2.class_names", ["a"], "class_names of paper"),
        ("vertex_types.2.feature_columns", ["a"], "columns of features/paper/x"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    manifest = json.loads((store.path / "manifest.json").read_text())
    _manifest_edit(key, value)(manifest)
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=message):
        open_store(store.path)


def test_recorded_counts_of_relations_are_verified(tmp_path: Path) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    manifest = json.loads((store.path / "manifest.json").read_text())
    manifest["edge_types"][0]["num_edges"] += 1
    manifest["edge_types"][1]["num_edges"] -= 1
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="num_edges = 200 of edge type author, writes, paper"):
        verify_store(open_store(store.path))


def test_missing_arrays_name_those_of_other_types(tmp_path: Path) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="one of the targets it has, targets/paper/test, targets/paper/train"):
        store.stored_array("targets/train")
    with pytest.raises(InputError, match="one of the labels it has, y/paper"):
        store.stored_array("y/author")


def test_features_of_every_type_can_be_converted(tmp_path: Path) -> None:
    graph = academic()
    half = write_with_features(graph.build(tmp_path / "g.gsplit"), tmp_path / "half.gsplit", "float16")
    verify_store(half)
    graph.arrays = {name: a.astype(np.float16) if "features" in name else a for name, a in graph.arrays.items()}
    assert_holds(half, graph)
    scaled = write_with_features(half, tmp_path / "scaled.gsplit", "int8")
    verify_store(scaled)
    assert scaled.stored_array("scales/venue/x").shape == (4,)


def test_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a homogeneous graph.*vertex types author, venue, paper"):
        write_shard(academic().build(tmp_path / "g.gsplit"), tmp_path / "s.gsplit", 0, 40)


def test_inspect_shows_types_and_relations(tmp_path: Path) -> None:
    store = academic().build(tmp_path / "g.gsplit")
    document = describe(store)
    assert document["vertex_types"][2] | {"name": "paper", "count": 50, "num_classes": 4} == document["vertex_types"][2]
    holds = {"src": "venue", "name": "holds", "dst": "paper", "num_edges": 0, "values": []}
    assert document["edge_types"][2] == holds
    console = Console(file=io.StringIO(), width=100)
    show(document, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"vertex type paper +50, classes: 4, ids 0 \.\. n-1", text)
    assert re.search(r"edge type author writes paper +200", text)
    assert re.search(r"features venue/x +float32 4 x 3", text)


def test_inspect_shortens_a_long_list_of_relations(tmp_path: Path) -> None:
    none = np.empty(0, np.int64), np.empty(0, np.int64)
    store = TypedGraph({"a": 2}, {("a", f"r{i}", "a"): none for i in range(300)}).build(tmp_path / "g.gsplit")
    console = Console(file=io.StringIO(), width=100)
    show(describe(store), console)
    assert re.search(r"more types +261 \(--json lists them\)", console.file.getvalue())  # type: ignore[attr-defined]
