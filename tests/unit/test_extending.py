"""The loader with a sampler and features of the program's own, on one process: what it takes and what it refuses."""

from functools import partial
from typing import Any

import pytest
import torch
from extending_programs import ComputedRows, DictSampler, by_range, keyed_sampler

import gsplit
from gsplit.loading.loader import NeighborLoader
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("extending")
    plain = build_store(synthetic_source(PlantedGraph(300, 2000, num_features=4)), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 4, [4, 4], batch_size=50, solver="restream", epochs=2)


def _loader(store: Any, **more: Any) -> NeighborLoader:
    return NeighborLoader(store, [4, 4], "train", batch_size=50, **more)


def test_rows_of_a_source_stand_beside_stored_ones_under_a_cache(store: Store) -> None:
    source = ComputedRows()
    loader = _loader(store, features=["x", source], cache=50 * 4 * (4 + 6))
    assert len(set(source.asked)) == len(source.asked) == 50  # the hottest rows, once
    batch = loader.make_batch(0, 0)
    assert torch.equal(batch.x[:, :4], torch.from_numpy(store.array("features/x")[batch.n_id.numpy()]))
    assert torch.equal(batch.x[:, 4:], source.rows(batch.n_id))
    assert batch.telemetry.counts["cache_hits"] == batch.n_id.numel() + 50 - len(source.asked) > 0


def test_inference_reads_the_source_too(store: Store) -> None:
    from torch_geometric.nn import GraphSAGE

    source = ComputedRows()
    model = gsplit.parallelize(GraphSAGE(6, 8, 1, 3), gsplit.init())
    out = gsplit.infer(model, store, features=source)
    assert out.shape == (300, 3) and set(source.asked) == set(range(300))


def test_what_is_compared_of_samplers_and_sources(store: Store) -> None:
    plain = _loader(store)
    assert "sampler" not in plain.description  # checkpoints of the built-in one stay what they are
    assert _loader(store, sampler=keyed_sampler).description["sampler"] == "keyed_sampler"
    assert _loader(store, sampler=partial(partial(by_range))).description["sampler"] == "by_range"

    class Weighted:
        fingerprint = "by price"

        def __call__(self, part: Any) -> Any:
            return keyed_sampler(part)

    assert _loader(store, sampler=Weighted()).description["sampler"].endswith("Weighted by price")
    own = _loader(store, features=["x", ComputedRows("v2")]).description
    assert own["arrays"].startswith("features x, ComputedRows [6] float32 v2, edge_attr")
    assert "store features/x" in own


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"sampler": 3},
            "sampler: expected 'uniform' or 'labor', which are built in, or a function that makes a sampler",
        ),
        ({"sampler": lambda part: None}, "a function that returns a DrawnSampler .got one that returns NoneType"),
        ({"sampler": DictSampler}, "a function that returns a DrawnSampler .got one that returns DictSampler"),
        ({"features": torch.ones(300, 2)}, "features: expected names of stored features, or sources .*got Tensor"),
        ({"features": ["x", 3]}, "or sources of rows: row_shape, dtype and read.ids, out. .got int"),
        ({"features": ComputedRows(), "features_on_disk": True}, "features_on_disk: expected stored features"),
        ({"features": ComputedRows(), "strategy": "auto"}, "planner can count .*user-defined features"),
        ({"sampler": keyed_sampler, "strategy": "auto"}, "planner can count .*user-defined sampler"),
    ],
)
def test_what_cannot_be_is_refused(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gsplit.InputError, match=message):
        _loader(store, **options)
