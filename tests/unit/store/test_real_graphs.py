"""Every real graph at hand imports, verifies, and has the counts its README states."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import stored_edges

from gsplit.store.build import build_store
from gsplit.store.importers.npz import npz_source
from gsplit.store.source import EdgeRules
from gsplit.store.verify import verify_store

#       name                    vertices  edges      features  classes  train, val, test
GRAPHS = [
    ("debian_packages", 136_621, 1_119_786, 4096, 58, (69_529, 13_604, 8_571)),
    ("ogbn_arxiv_nofeat", 169_343, 1_166_243, 0, 40, (90_941, 29_799, 48_603)),
    ("ego_twitter_topology", 81_306, 2_684_606, 0, 0, ()),
    ("coauthor_physics", 34_493, 495_924, 8415, 5, ()),
    ("amazon_computers", 13_752, 491_722, 767, 10, ()),
    ("tolokers", 11_758, 1_038_000, 10, 2, (5_879, 2_939, 2_940)),
    ("wordnet30", 117_659, 361_638, 4096, 45, ()),
    ("pubmed", 19_717, 88_648, 500, 3, (60, 500, 1000)),
    ("cora", 2_708, 10_556, 1433, 7, (140, 500, 1000)),
]


DENSE_IS_LARGE = ("debian_packages", "wordnet30", "coauthor_physics")
"""Sparse features of 1.2 to 2.2 GB when dense; those of the other graphs go the same way to the disk."""


@pytest.mark.data
@pytest.mark.parametrize("name, vertices, edges, features, classes, splits", GRAPHS, ids=[g[0] for g in GRAPHS])
def test_counts(
    data_folder: Path,
    tmp_path: Path,
    name: str,
    vertices: int,
    edges: int,
    features: int,
    classes: int,
    splits: tuple[int, ...],
) -> None:
    source = npz_source(data_folder / f"{name}.npz")
    assert [stream.type.row_shape for stream in source.features.values()] == ([(features,)] if features else [])
    if name in DENSE_IS_LARGE:
        source, features = replace(source, features={}), 0
    store = build_store(source, tmp_path / "g.gsplit")
    assert (store.num_vertices, store.num_edges) == (vertices, edges)
    assert (store.num_features, store.num_classes) == (features, classes)
    names = ("train", "val", "test")
    assert tuple(store.stored_array(f"targets/{n}").size for n in names if f"targets/{n}" in store.names) == splits
    verify_store(store)
    with np.load(data_folder / f"{name}.npz") as arrays:
        src, dst = arrays["edge_index"].astype(np.int64)
    order = np.lexsort([src, dst])
    assert np.array_equal(stored_edges(store), [src[order], dst[order]])


@pytest.mark.data
@pytest.mark.parametrize(
    "name, directed, both", [("debian_packages", 1_119_786, 2_208_478), ("ogbn_arxiv_nofeat", 1_166_243, 2_315_598)]
)
def test_symmetrised_counts(data_folder: Path, tmp_path: Path, name: str, directed: int, both: int) -> None:
    source = replace(npz_source(data_folder / f"{name}.npz"), features={})  # 2 GB that test_counts imports
    store = build_store(source, tmp_path / "g.gsplit", rules=EdgeRules(symmetrise=True))
    assert (store.num_edges, store.manifest.provenance[0].counts["edges_read"]) == (both, directed)
    if name == "debian_packages":
        assert store.manifest.statistics.max_in_degree == 45_004
