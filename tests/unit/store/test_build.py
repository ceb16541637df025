"""Any order of edges in, the one right CSC out, in memory that does not grow with the edges."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import edge_lists, expected_edges, source_of, stored_edges
from hypothesis import given
from hypothesis import strategies as st

from gsplit.errors import InputError, StoreError
from gsplit.store import edge_sort, spill
from gsplit.store.build import build_store
from gsplit.store.edge_sort import EdgeSorter
from gsplit.store.files import write_all
from gsplit.store.source import EdgeChunk, EdgeRules, RowChunk, RowStream, ValueType, stream_rows
from gsplit.store.verify import verify_store

RULES = st.builds(EdgeRules, st.booleans(), st.booleans(), st.booleans())
_number = itertools.count()


def _fresh(folder: Path) -> Path:
    return folder / f"graph{next(_number)}.gsplit"


@given(edge_lists(), RULES, st.booleans(), st.integers(1, 50))
def test_store_holds_exactly_the_edges_in_order(
    tmp_path: Path, graph: tuple[int, Any, Any], rules: EdgeRules, weighted: bool, chunk: int
) -> None:
    n, src, dst = graph
    values = {"w": (src * 7 + dst * 3 + np.arange(src.size)) % 5 - 2.5} if weighted else {}
    store = build_store(source_of(n, src, dst, values, chunk), _fresh(tmp_path), rules=rules)
    want_src, want_dst, want_values = expected_edges(src, dst, list(values.values()), rules)
    got_src, got_dst = stored_edges(store)
    assert np.array_equal(got_src, want_src)
    assert np.array_equal(got_dst, want_dst)
    if weighted:
        assert np.array_equal(store.stored_array("edges/w"), want_values[0])
    counts = store.manifest.provenance[0].counts
    assert counts["edges_read"] == src.size
    assert counts["self_loops_dropped"] == (int((src == dst).sum()) if rules.drop_self_loops else 0)
    assert counts["edges_stored"] == want_src.size
    assert (
        counts["edges_read"] - counts["self_loops_dropped"] + counts["reverse_edges_added"]
        == counts["edges_stored"] + counts["duplicates_dropped"]
    )
    verify_store(store)  # recounts the statistics as well


@given(edge_lists(), st.randoms(use_true_random=False))
def test_order_of_input_leaves_no_trace(tmp_path: Path, graph: tuple[int, Any, Any], random: Any) -> None:
    n, src, dst = graph
    weight = np.array([random.randrange(3) for _ in range(src.size)], np.int16)
    order = np.array(random.sample(range(src.size), src.size), np.int64)
    one = build_store(source_of(n, src, dst, {"w": weight}), _fresh(tmp_path))
    two = build_store(source_of(n, src[order], dst[order], {"w": weight[order]}, chunk=5), _fresh(tmp_path))
    assert one.manifest.arrays == two.manifest.arrays  # types, shapes and checksums


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["hub", "one edge", "hot ids", "spread"])
def test_oversize_buckets_are_cut_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, weighted: bool
) -> None:
    monkeypatch.setattr(edge_sort, "BUFFERED_BYTES", 16_000)
    rng = np.random.default_rng(1)
    n, e, budget = 5000, 60_000, 2048
    src = rng.integers(0, n, e)
    dst = {
        "hub": np.where(rng.random(e) < 0.9, 77, rng.integers(0, n, e)),
        "one edge": np.where(rng.random(e) < 0.7, 9, rng.integers(0, n, e)),
        "hot ids": (n * rng.random(e) ** 4).astype(np.int64),
        "spread": rng.integers(0, n, e),
    }[kind]
    if kind == "one edge":
        src = np.where(dst == 9, 3, src)
    weight = rng.integers(0, 100, e).astype(np.float32)
    values = {"w": weight} if weighted else {}
    types = {"w": ValueType("float32")} if weighted else {}
    sorter = EdgeSorter(
        tmp_path, n, 100, types, budget_bytes=budget * (12 if weighted else 8)
    )  # a forecast that is far too low
    for first in range(0, e, 700):
        piece = slice(first, first + 700)
        sorter.add(EdgeChunk(src[piece], dst[piece], {name: v[piece] for name, v in values.items()}))
    got_src, got_dst, got_weight, largest = [], [], [], 0
    for bucket in sorter.buckets():
        for run in bucket.runs():
            largest = max(largest, run.keys.size)
            got_src.append(run.keys & np.uint64((1 << sorter.source_bits) - 1))
            got_dst.append((run.keys >> np.uint64(sorter.source_bits)) + np.uint64(bucket.first_vertex))
            got_weight.append(run.values.get("w", np.empty(0)))
    want_src, want_dst, want_weight = expected_edges(src, dst, list(values.values()), EdgeRules())
    assert np.array_equal(np.concatenate(got_src), want_src)
    assert np.array_equal(np.concatenate(got_dst), want_dst)
    if weighted:
        assert np.array_equal(np.concatenate(got_weight), want_weight[0])
    if kind != "one edge":  # copies of one edge stay together
        assert largest <= 2 * budget
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n, forecast", [(1, 0), (2, 10), (1 << 31, 10), (1 << 35, 10), (1 << 35, 1 << 40)])
def test_keys_fit_sixty_three_bits(tmp_path: Path, n: int, forecast: int) -> None:
    sorter = EdgeSorter(tmp_path, n, forecast, {})
    assert sorter.shift + sorter.source_bits <= 63
    assert n <= (len(sorter._spills) << sorter.shift)
    if n > 1 << 31:
        sorter.add(EdgeChunk(np.array([n - 1, 0]), np.array([n - 1, n - 2])))
        last = list(sorter.buckets())[-1]
        (run,) = last.runs()
        assert (run.keys & np.uint64((1 << sorter.source_bits) - 1)).tolist() == [0, n - 1]
        assert (run.keys >> np.uint64(sorter.source_bits)).tolist() == [
            n - 2 - last.first_vertex,
            n - 1 - last.first_vertex,
        ]


@pytest.mark.parametrize("src, dst", [([0, 5], [0, 1]), ([0, 1], [0, 5]), ([-1, 0], [0, 0]), ([0, 0], [0, -7])])
def test_ids_out_of_range_are_refused_by_name(tmp_path: Path, src: list[int], dst: list[int]) -> None:
    with pytest.raises(InputError, match=r"edges: expected ids in 0..4 .got the edge -?\d -> -?\d.*Fix: "):
        build_store(source_of(5, np.array(src), np.array(dst)), tmp_path / "g.gsplit")
    assert list(tmp_path.iterdir()) == []


def _rows(array: np.ndarray, rows: int) -> RowStream:
    def chunks() -> Iterator[RowChunk]:
        yield RowChunk(slice(0, rows), array[:rows])

    return RowStream(ValueType("float32", array.shape[1:]), chunks)


def test_wrong_vertex_data_is_refused(tmp_path: Path) -> None:
    none = np.empty(0, np.int64)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"targets": {"train": np.array([0, 9])}}, "targets train: expected ids in 0..3"),
        ({"targets": {"train": np.array([1, 1])}}, "targets train: expected every id once .got 1 repeated, such as 1"),
        ({"targets": {"a/b": np.array([1])}}, "array name 'targets/a/b' is not one of"),
        ({"features": {"..": stream_rows(np.zeros((4, 1)), "float64")}}, "is not one of"),
        ({"features": {"x": _rows(np.zeros((4, 2)), 3)}}, "features/x: expected 4 rows, one per vertex"),
    ]
    for more, message in cases:
        with pytest.raises(InputError, match=message):
            build_store(source_of(4, none, none, **more), tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="num_vertices: expected 0 to"):
        build_store(source_of(1 << 36, none, none), tmp_path / "g.gsplit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [0, 1])
def test_graphs_without_edges(tmp_path: Path, n: int) -> None:
    store = build_store(source_of(n, np.empty(0, np.int64), np.empty(0, np.int64)), tmp_path / "g.gsplit")
    assert (store.num_vertices, store.num_edges) == (n, 0)
    assert store.manifest.statistics.num_isolated_vertices == n
    verify_store(store)


def test_statistics_are_the_graphs(tmp_path: Path) -> None:
    src, dst = np.array([0, 0, 1, 2, 2, 2]), np.array([1, 1, 1, 0, 0, 3])
    store = build_store(source_of(6, src, dst), tmp_path / "g.gsplit")
    found = store.manifest.statistics
    assert (found.num_self_loops, found.num_duplicate_edges, found.num_isolated_vertices) == (1, 2, 2)
    assert (found.max_in_degree, found.in_degree_histogram) == (3, [3, 1, 2])
    assert store.graph.sources(1).tolist() == [0, 0, 1]
    with pytest.raises(IndexError, match=r"vertex: expected 0..5 \(got 6\)"):
        store.graph.sources(6)


@pytest.mark.parametrize(
    "values",
    [
        np.array([0.0, -0.0]),
        np.array([0x7FC00001, 0x7FC00002, 0xFFC00000, 0x3F800000], np.uint32).view(np.float32),  # several NaNs
        np.array([1.0, -2.0], np.float16),
    ],
)
def test_equal_looking_values_leave_no_trace_either(tmp_path: Path, values: np.ndarray) -> None:
    ends = np.zeros(values.size, np.int64)
    stores = [
        build_store(source_of(1, ends, ends, {"w": column}), _fresh(tmp_path))
        for column in (values, values[::-1].copy())
    ]
    assert stores[0].manifest.arrays == stores[1].manifest.arrays


def test_the_smallest_value_of_a_duplicate_stays_in_any_type(tmp_path: Path) -> None:
    ends, bits = np.zeros(2, np.int64), np.array([0x3F80, 0xC000], np.uint16)  # 1.0 and -2.0 in bfloat16
    source = source_of(1, ends, ends, {"w": bits})
    source = dataclasses.replace(source, edge_values={"w": ValueType("bfloat16")})
    store = build_store(source, _fresh(tmp_path), rules=EdgeRules(drop_duplicates=True))
    assert store.stored_array("edges/w").tolist() == [0xC000]


def test_wide_values_get_smaller_buckets(tmp_path: Path) -> None:
    narrow = EdgeSorter(tmp_path, 1000, 0, {})
    wide = EdgeSorter(tmp_path, 1000, 0, {"w": ValueType("float32", (126,))})
    assert narrow._budget == 64 * wide._budget
    assert narrow._buffer_edges > 30 * wide._buffer_edges


def test_lost_temporary_data_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk can cut a file short without an error: what comes back is counted."""
    monkeypatch.setattr(spill, "write_all", lambda path, array: write_all(path, array[:-1]))
    with pytest.raises(StoreError, match=r"bucket0.keys: expected 4 elements .got 3.*free disk space"):
        build_store(source_of(4, np.arange(4), np.arange(4)), tmp_path / "g.gsplit")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_width_are_refused(tmp_path: Path) -> None:
    def chunks() -> Iterator[RowChunk]:
        yield RowChunk(slice(0, 2), np.zeros((2, 2)))
        yield RowChunk(slice(2, 4), np.zeros((2, 1)))

    def too_many() -> Iterator[RowChunk]:
        yield RowChunk(slice(0, 5), np.zeros((5, 2)))

    for make, message in ((chunks, r"every row of shape \[2\]"), (too_many, "4 rows, one per vertex .got 5 rows")):
        source = source_of(
            4, np.empty(0, np.int64), np.empty(0, np.int64), features={"x": RowStream(ValueType("float32", (2,)), make)}
        )
        with pytest.raises(InputError, match=message):
            build_store(source, tmp_path / "g.gsplit")
