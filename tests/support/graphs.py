"""Small graphs for the store's tests, and the one-line oracle of what a store must hold."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gsplit.array_types import Array
from gsplit.graph.graph import Graph
from gsplit.store.build import build_store
from gsplit.store.reader import Store
from gsplit.store.source import EdgeChunk, EdgeRules, GraphSource, PairList, ValueType, stream_rows


@st.composite
def edge_lists(draw: st.DrawFn, max_vertices: int = 40, max_edges: int = 120) -> tuple[int, Array, Array]:
    """Vertices, sources, destinations: hubs, self-loops, duplicates and isolated vertices all likely."""
    n = draw(st.integers(1, max_vertices))
    hot = draw(st.integers(1, n))
    ids = st.one_of(st.integers(0, n - 1), st.integers(0, hot - 1), st.just(0))
    pairs = draw(st.lists(st.tuples(ids, ids), max_size=max_edges))
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return n, array[:, 0].copy(), array[:, 1].copy()


def csc_of(n: int, src: Array, dst: Array) -> tuple[Graph, Array, Array]:
    """The graph of an edge list in memory, and the list in the graph's order."""
    order = np.lexsort([src, dst])
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]).astype(np.int64)
    return Graph(indptr, src[order].astype(np.int32), n), src[order], dst[order]


def random_graph(num_vertices: int, num_edges: int, skew: float, seed: int) -> Graph:
    """The larger ``skew``, the more in-edges the first vertices have."""
    rng = np.random.default_rng(seed)
    dst = (num_vertices * rng.random(num_edges) ** skew).astype(np.int64)
    src = (num_vertices * rng.random(num_edges) ** 1.5).astype(np.int64)
    return csc_of(num_vertices, src, dst)[0]


def source_of(
    n: int, src: Array, dst: Array, values: Mapping[str, Array] | None = None, chunk: int = 17, **more: Any
) -> GraphSource:
    """Edges in memory as a graph source, in pieces of ``chunk``."""
    values = values or {}

    def edges() -> Iterator[EdgeChunk]:
        for first in range(0, src.size, chunk):
            piece = slice(first, first + chunk)
            yield EdgeChunk(src[piece], dst[piece], {name: v[piece] for name, v in values.items()})

    types = {name: ValueType(v.dtype.name, v.shape[1:]) for name, v in values.items()}
    return GraphSource("test", n, src.size, edges, edge_values=types, **more)


def expected_edges(src: Array, dst: Array, values: list[Array], rules: EdgeRules) -> tuple[Array, Array, list[Array]]:
    """What the store must hold, by numpy in one go: (src, dst, values) by destination, source, values."""
    if rules.drop_self_loops:
        keep = src != dst
        src, dst, values = src[keep], dst[keep], [v[keep] for v in values]
    if rules.symmetrise:
        once = src != dst
        values = [np.concatenate([v, v[once]]) for v in values]
        src, dst = np.concatenate([src, dst[once]]), np.concatenate([dst, src[once]])
    columns = [c for v in values for c in v.reshape(v.shape[0], prod(v.shape[1:])).T]
    order = np.lexsort([*reversed(columns), src, dst])
    src, dst, values = src[order], dst[order], [v[order] for v in values]
    if rules.symmetrise or rules.drop_duplicates:
        first = np.ones(src.size, bool)
        first[1:] = (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])
        src, dst, values = src[first], dst[first], [v[first] for v in values]
    return src, dst, values


def stored_edges(store: Store) -> tuple[Array, Array]:
    """Source and destination of every stored edge."""
    graph = store.graph
    dst = np.repeat(np.arange(graph.first_vertex, graph.stop_vertex), graph.in_degrees())
    return np.asarray(graph.indices, np.int64), dst


def _sample_pairs(n: int) -> PairList:
    rng = np.random.default_rng(n)
    pairs = rng.integers(0, n, (n // 4, 2))
    return PairList(pairs, labels=rng.random(n // 4, np.float32), negatives=rng.integers(0, n, (n // 4, 3)))


def sample_store(path: Path, n: int = 300, e: int = 3000, seed: int = 0) -> Store:
    """A small store that has one of everything."""
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, n, e), rng.integers(0, n, e)
    names = [f"vertex-{i:05d}".encode() for i in range(n)]
    source = source_of(
        n,
        src,
        dst,
        {"weight": rng.random(e, np.float32)},
        chunk=1000,
        features={"x": stream_rows(rng.random((n, 5), np.float32), "float32")},
        y=stream_rows(rng.integers(0, 4, n), "int64"),
        targets={"train": np.arange(0, n, 2), "test": np.arange(1, n, 4)},
        pairs={"links": _sample_pairs(n)},
        vertex_names=(np.cumsum([0, *map(len, names)]), np.frombuffer(b"".join(names), np.uint8)),
    )
    return build_store(source, path)
