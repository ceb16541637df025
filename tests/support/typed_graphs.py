"""Small heterogeneous graphs for tests, and what a store must hold of them, by plain numpy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from gsplit.array_types import Array, Ids
from gsplit.graph.types import EdgeType
from gsplit.store.build import build_store
from gsplit.store.in_memory import MemoryStore
from gsplit.store.reader import Store
from gsplit.store.source import EdgeChunk, GraphSource, stream_rows

WRITES = ("author", "writes", "paper")
CITES = ("paper", "cites", "paper")


@dataclass
class TypedGraph:
    """Counts of the types, edges by ids in the types, and arrays of types by names such as ``features/paper/x``."""

    counts: dict[str, int]
    edges: dict[EdgeType, tuple[Ids, Ids]]
    arrays: dict[str, Array] = field(default_factory=dict)
    targets: dict[str, Ids] = field(default_factory=dict)

    def source(self, chunk: int = 17) -> GraphSource:
        """The graph in small pieces, of all relations in turn."""
        counts = list(self.counts.values())
        first = dict(zip(self.counts, np.cumsum([0, *counts]).tolist(), strict=False))

        def edges() -> Iterator[EdgeChunk]:
            longest = max([pair[0].size for pair in self.edges.values()], default=0)
            for start in range(0, longest, chunk):
                for number, (relation, (src, dst)) in enumerate(self.edges.items()):
                    piece = slice(start, start + chunk)
                    yield EdgeChunk(src[piece] + first[relation[0]], dst[piece] + first[relation[2]], relation=number)

        return GraphSource(
            "test",
            sum(counts),
            sum(pair[0].size for pair in self.edges.values()),
            edges,
            vertices={name: self._vertices(name) for name in self.counts},
            edge_types=tuple(self.edges),
        )

    def _vertices(self, name: str) -> GraphSource:
        streams = {full: stream_rows(array, array.dtype.name) for full, array in self.arrays.items()}
        prefix = f"features/{name}/"
        return GraphSource(
            "test",
            self.counts[name],
            0,
            lambda: iter(()),
            features={full.removeprefix(prefix): rows for full, rows in streams.items() if full.startswith(prefix)},
            y=streams.get(f"y/{name}"),
            targets={full.split("/")[1]: ids for full, ids in self.targets.items() if full.split("/")[0] == name},
        )

    def build(self, path: Path) -> Store:
        """The graph as a store on disk."""
        return build_store(self.source(), path)

    def edge_set(self) -> dict[EdgeType, list[tuple[int, int]]]:
        """All edges by type, in the ids of the types, sorted; parallel edges as often as they are there."""
        return {name: sorted(zip(src.tolist(), dst.tolist(), strict=True)) for name, (src, dst) in self.edges.items()}


def stored_edge_set(store: Store | MemoryStore) -> dict[EdgeType, list[tuple[int, int]]]:
    """As ``TypedGraph.edge_set``, from a store of any numbering. Checks the order of every column."""
    types = store.types
    assert types is not None
    original = np.asarray(store.original_ids())
    kinds = np.asarray(store.stored_array("edge_type"), np.int64)
    dst = original[np.repeat(np.arange(store.num_vertices), store.graph.in_degrees())]
    src = original[np.asarray(store.graph.indices)]
    column = np.repeat(np.arange(store.num_vertices), store.graph.in_degrees())
    assert np.array_equal(np.lexsort([src, kinds, column]), np.arange(kinds.size))
    found = {}
    for number, relation in enumerate(types.edge_types):
        first = [types.offsets[types.number(end)] for end in (relation[0], relation[2])]
        mine = kinds == number
        pairs = zip((src[mine] - first[0]).tolist(), (dst[mine] - first[1]).tolist(), strict=True)
        found[relation] = sorted(pairs)
    return found


def assert_holds(store: Store | MemoryStore, graph: TypedGraph) -> None:
    """Every edge, row, label and target, by original id."""
    types = store.types
    assert types is not None
    assert types.vertex_types == tuple(graph.counts) and types.edge_types == tuple(graph.edges)
    assert {name: types.count(name) for name in types.vertex_types} == graph.counts
    assert stored_edge_set(store) == graph.edge_set()
    for name, array in graph.arrays.items():
        np.testing.assert_array_equal(store.array(name), array)
        ids = np.arange(array.shape[0])[::-2]
        np.testing.assert_array_equal(store.rows(name, ids), array[ids])
    for name, ids in graph.targets.items():
        np.testing.assert_array_equal(store.array(f"targets/{name}"), np.sort(ids))


def academic(seed: int = 0, authors: int = 30, papers: int = 50, edges: int = 200) -> TypedGraph:
    """Authors without features, papers with features, labels and targets, venues without edges, an empty relation."""
    rng = np.random.default_rng(seed)
    counts = {"author": authors, "venue": 4, "paper": papers}
    written = rng.integers(0, authors, edges), rng.integers(0, papers, edges)
    return TypedGraph(
        counts,
        {
            WRITES: written,
            CITES: (rng.integers(0, papers, edges), rng.integers(0, papers, edges)),
            ("venue", "holds", "paper"): (np.empty(0, np.int64), np.empty(0, np.int64)),
            ("paper", "rev_writes", "author"): (written[1], written[0]),
        },
        {
            "features/paper/x": rng.random((papers, 5), np.float32),
            "features/paper/extra": rng.random((papers, 2)),
            "features/venue/x": rng.random((4, 3), np.float32),
            "y/paper": rng.integers(0, 4, papers),
        },
        {"paper/train": rng.permutation(papers)[: papers // 2], "paper/test": np.arange(1, papers, 4)},
    )


@st.composite
def typed_graphs(draw: st.DrawFn) -> TypedGraph:
    """Types without vertices, relations without edges, one type only, hubs and parallel edges are all likely."""
    names = [f"t{i}" for i in range(draw(st.integers(1, 4)))]
    counts: Mapping[str, int] = {name: draw(st.integers(0, 6)) for name in names}
    edges: dict[EdgeType, tuple[Ids, Ids]] = {}
    for number in range(draw(st.integers(0, 5))):
        src_type, dst_type = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        pairs: list[tuple[int, int]] = []
        if counts[src_type] and counts[dst_type]:
            ends = st.tuples(st.integers(0, counts[src_type] - 1), st.integers(0, counts[dst_type] - 1))
            pairs = draw(st.lists(ends, max_size=12))
        array = np.array(pairs, np.int64).reshape(-1, 2)
        edges[(src_type, f"r{number} of any name/", dst_type)] = array[:, 0].copy(), array[:, 1].copy()
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays: dict[str, Array] = {}
    targets: dict[str, Ids] = {}
    for name, count in counts.items():
        if draw(st.booleans()):
            arrays[f"features/{name}/x"] = rng.random((count, draw(st.integers(0, 3))), np.float32)
            arrays[f"y/{name}"] = rng.integers(-1, 3, count)
            targets[f"{name}/train"] = rng.permutation(count)[: count // 2]
    return TypedGraph(dict(counts), edges, arrays, targets)
