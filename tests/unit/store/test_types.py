"""Types of vertices by ranges, against a plain list of every vertex."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsplit.errors import InputError
from gsplit.graph.types import GraphTypes, order_by_part_and_type
from gsplit.store.in_memory import typed_store

WRITES = ("author", "writes", "paper")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40))
def test_types_and_rows_are_those_of_a_plain_list(vertices: list[tuple[int, int]]) -> None:
    types = np.sort(np.array([of_type for _, of_type in vertices]))  # original ids are fused: type by type
    parts = np.array([part for part, _ in vertices])
    original, boundaries = order_by_part_and_type(parts, types, 4, 3)
    offsets = tuple(np.searchsorted(types, range(4)).tolist())
    table = GraphTypes(("a", "b", "c"), (), offsets, boundaries)
    ids = torch.arange(types.size)
    assert table.of(ids).tolist() == types[original].tolist()
    seen = [0, 0, 0]
    for vertex, row in zip(original, table.rows(ids).tolist(), strict=True):
        assert row == seen[types[vertex]]
        seen[types[vertex]] += 1
    cuts = np.concatenate([[0], np.cumsum(np.bincount(parts, minlength=4))]).tolist()
    for number, name in enumerate(table.vertex_types):
        held = [table.row_range(name, first, stop) for first, stop in itertools.pairwise(cuts)]
        of_part = [int(np.sum(types[original[a:b]] == number)) for a, b in itertools.pairwise(cuts)]
        assert [stop - first for first, stop in held] == of_part


@pytest.mark.parametrize(
    "offsets, boundaries",
    [((0, 3, 7), (0, 2, 3, 4, 6)), ((0, 3, 7), (0, 3, 2, 4, 7)), ((0, 3), (0, 3)), ((0, 3, 7), (0, 3, 4, 7))],
)
def test_ranges_that_do_not_fit_are_refused(offsets: tuple[int, ...], boundaries: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="ranges that contain every vertex once"):
        GraphTypes(("author", "paper"), (WRITES,), offsets, boundaries)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(InputError, match="two vertex types of the graph"):
        GraphTypes(("author",), (WRITES,), (0, 3), (0, 3))
    with pytest.raises(InputError, match="one of author, paper"):
        GraphTypes(("author", "paper"), (WRITES,), (0, 3, 7), (0, 3, 7)).number("venue")


def test_a_store_keeps_edges_rows_and_targets_by_original_id() -> None:
    rng = np.random.default_rng(0)
    counts = {"author": 5, "paper": 8}
    cites = ("paper", "cites", "paper")
    edges = {WRITES: (rng.integers(0, 5, 30), rng.integers(0, 8, 30)), cites: (rng.integers(0, 8, 20),) * 2}
    x = rng.normal(size=(8, 3))
    parts = {name: rng.integers(0, 3, count) for name, count in counts.items()}
    store = typed_store(counts, edges, parts, {"features/paper/x": (x, "float64")}, {"paper/train": np.array([1, 6])})
    assert store.types is not None
    original = store.original_ids()
    found = set()
    for v in range(store.num_vertices):
        run = slice(store.graph.indptr[v], store.graph.indptr[v + 1])
        kinds = store.stored_array("edge_type")[run]
        sources = original[store.graph.indices[run]]
        assert np.array_equal(np.lexsort([sources, kinds]), np.arange(kinds.size))
        found |= {(int(kind), int(source), int(original[v])) for kind, source in zip(kinds, sources, strict=True)}
    first = (0, 5)
    wanted = {
        (number, int(s) + first[store.types.number(name[0])], int(d) + first[store.types.number(name[2])])
        for number, (name, pair) in enumerate(edges.items())
        for s, d in zip(*pair, strict=True)
    }
    assert found == wanted
    papers = np.flatnonzero(store.types.of(torch.arange(13)).numpy() == 1)
    rows = store.types.rows(torch.from_numpy(papers)).numpy()
    np.testing.assert_array_equal(store.stored_array("features/paper/x")[rows], x[original[papers] - 5])
    assert original[store.stored_targets("paper/train")[0]].tolist() == [6, 11]
