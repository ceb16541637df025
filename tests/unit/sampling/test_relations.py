"""Draws by relation: each relation is drawn as in a graph of its own, by both versions, on any range of vertices."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, StoreError
from gsplit.graph.graph import Graph
from gsplit.graph.types import GraphTypes
from gsplit.keys import scalar
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.relations import (
    HostRelationSampler,
    TorchRelationSampler,
    relation_sampler,
    resolve_relation_fanouts,
)
from gsplit.store.in_memory import MemoryStore, typed_store

CPU = torch.device("cpu")
KEY = StepKey(1, 2, 3).layer(1)
COUNTS = {"paper": 60, "author": 30, "field": 0}
CITES = ("paper", "cites", "paper")
WRITES = ("author", "writes", "paper")
REV = ("paper", "rev_writes", "author")
NONE = ("paper", "none", "author")
ABOUT = ("field", "about", "paper")


def _store(seed: int, num_parts: int = 3) -> MemoryStore:
    """Hubs, columns without edges, a relation without edges and a type without vertices."""
    rng = np.random.default_rng(seed)
    edges = {}
    for relation in (CITES, NONE, WRITES, REV, ABOUT):
        size = 0 if relation in (NONE, ABOUT) else 400
        src = rng.integers(0, max(1, COUNTS[relation[0]]), size)
        edges[relation] = (src, (rng.random(size) ** 3 * COUNTS[relation[2]]).astype(np.int64))
    parts = {name: rng.integers(0, num_parts, count) for name, count in COUNTS.items()}
    return typed_store(COUNTS, edges, parts, {}, {})


def _part(store: MemoryStore, first: int = 0, stop: int | None = None) -> tuple[Graph, Ids, Array]:
    stop = store.num_vertices if stop is None else stop
    original = np.asarray(store.original_ids(first, stop))
    return store.graph.restrict(first, stop), original, store.stored_array("edge_type")


FANOUTS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 40, 200]), min_size=5, max_size=5).map(tuple)


@given(st.integers(0, 5), FANOUTS)
def test_each_relation_is_drawn_as_in_its_own_graph(seed: int, fanouts: tuple[int, ...]) -> None:
    store = _store(seed)
    kinds = store.stored_array("edge_type")
    every = torch.arange(store.num_vertices)
    drawn = HostRelationSampler(*_part(store)).start(every).sample_layer(KEY, fanouts)
    assert drawn.edge_ids is not None
    got = drawn.edge_ids.numpy()
    rows = np.repeat(np.arange(every.numel()), np.diff(drawn.indptr.numpy()))
    assert np.array_equal(np.lexsort([kinds[got], rows]), np.arange(got.size))  # vertex by vertex, relation by relation
    degrees = np.zeros((store.num_vertices, 5), np.int64)
    np.add.at(degrees, (np.repeat(np.arange(store.num_vertices), np.diff(store.graph.indptr)), kinds), 1)
    for relation, fanout in enumerate(fanouts):
        mine = kinds == relation
        if fanout == 0:
            assert not (kinds[got] == relation).any()
            continue
        indptr = np.concatenate([[0], np.cumsum(degrees[:, relation])])
        alone = Graph(indptr, store.graph.indices[mine], store.num_vertices)
        own = HostNeighborSampler(alone, np.asarray(store.original_ids()), edge_ids=True).start(every)
        wanted = own.sample_layer(scalar.mix(KEY, relation), fanout).edge_ids
        assert wanted is not None
        assert np.array_equal(got[kinds[got] == relation], np.flatnonzero(mine)[wanted.numpy()])


@given(st.integers(0, 5), FANOUTS, st.integers(0, 90), st.integers(0, 90))
def test_both_versions_draw_the_same_on_any_range(seed: int, fanouts: tuple[int, ...], one: int, other: int) -> None:
    store = _store(seed)
    first, stop = sorted((one, other))
    graph, original, edge_type = _part(store, first, stop)
    targets = torch.arange(first, stop)[::2]
    layers = []
    for sampler in (
        HostRelationSampler(graph, original, edge_type),
        TorchRelationSampler(graph, original, CPU, edge_type),
    ):
        frontier = sampler.start(targets)
        layers.append([frontier.sample_layer(KEY + hop, fanouts) for hop in range(2)])
    for ours, theirs in zip(*layers, strict=True):
        for name in ("indptr", "sources", "foreign_ids", "edge_ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_the_draw_does_not_depend_on_the_numbering() -> None:
    """Law 1: the same edges, as original ids, for a partitioned and an unpartitioned graph."""
    found = []
    for num_parts in (1, 4):
        store = _store(7, num_parts)
        original = np.asarray(store.original_ids())
        graph, original_ids, edge_type = _part(store)
        drawn = (
            relation_sampler(graph, original_ids, CPU, edge_type)
            .start(torch.arange(90))
            .sample_layer(KEY, (2, 2, 3, 1, 2))
        )
        assert drawn.edge_ids is not None
        dst = original[np.repeat(np.arange(90), np.diff(drawn.indptr.numpy()))]
        src = original[store.graph.indices[drawn.edge_ids.numpy()]]
        kind = store.stored_array("edge_type")[drawn.edge_ids.numpy()]
        found.append(sorted(zip(dst, kind, src, strict=True)))
    assert found[0] == found[1]


@pytest.mark.parametrize("fanout", [-1, 2, 5])
def test_a_single_relation_is_drawn_as_in_a_graph_without_types(fanout: int) -> None:
    rng = np.random.default_rng(3)
    edges = {CITES: (rng.integers(0, 60, 400), rng.integers(0, 60, 400))}
    store = typed_store({"paper": 60}, edges, {"paper": rng.integers(0, 3, 60)}, {}, {})
    graph, original, edge_type = _part(store)
    every = torch.arange(60)
    plain = HostNeighborSampler(graph, original, edge_ids=True).start(every).sample_layer(KEY, fanout)
    for sampler in (
        HostRelationSampler(graph, original, edge_type),
        TorchRelationSampler(graph, original, CPU, edge_type),
    ):
        drawn = sampler.start(every).sample_layer(KEY, (fanout,))
        for name in ("indptr", "sources", "edge_ids"):
            assert torch.equal(getattr(plain, name), getattr(drawn, name)), name


def test_a_damaged_type_is_refused() -> None:
    store = _store(0)
    store.stored_array("edge_type")[:] = 77
    with pytest.raises(StoreError, match="the graph"):
        HostRelationSampler(*_part(store)).start(torch.arange(90)).sample_layer(KEY, (1,) * 5)


TYPES = GraphTypes(("paper", "author"), (CITES, WRITES), (0, 60, 90), (0, 60, 90))


@pytest.mark.parametrize(
    "num_neighbors, expected",
    [
        ({CITES: [3, 2]}, "a list for each of"),
        ({CITES: [3, 2], WRITES: [1, 1], REV: [1, 1]}, "a list for each of"),
        ({CITES: [3, 2], WRITES: [1]}, "as many numbers"),
        ([], "as many numbers"),
        ([3, -2], "-1 to"),
        ([3, 1 << 17], "-1 to"),
        ([3, 1.5], "-1 to"),
    ],
)
def test_fanouts_that_do_not_fit_are_refused(num_neighbors: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        resolve_relation_fanouts(num_neighbors, TYPES)  # type: ignore[arg-type]


def test_a_list_counts_for_every_relation() -> None:
    assert resolve_relation_fanouts([3, 0], TYPES) == [(3, 3), (0, 0)]
    assert resolve_relation_fanouts({WRITES: [np.int64(1), 0], CITES: [2, -1]}, TYPES) == [(2, 1), (-1, 0)]  # type: ignore[list-item]
