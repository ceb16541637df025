"""The profile of a step: what is counted, how seconds are divided, and a run on two ranks."""

import json
from pathlib import Path

import pytest
import torch

from gsplit.errors import InputError
from gsplit.graph.blocks import Block
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.profile_rank import CATEGORIES, category_of, divide
from gsplit_bench.profile_step import main
from gsplit_bench.step_limit import Product, count_layer, measure_limit

BLOCK = Block(torch.tensor([0, 2, 5]), torch.tensor([0, 2, 1, 3, 3]), num_src=4)  # D = 2, S = 4, E = 5


def test_a_layer_is_counted_as_it_is_written_down() -> None:
    first = count_layer("sage", BLOCK, 3, 7, first=True, last=False, heads=4)
    assert first.products == (Product(2, 6, 7), Product(6, 2, 7))  # forward, weights; input rows have no gradient
    assert (first.gathered_bytes, first.written_bytes) == (4 * 5 * 3, 4 * 2 * 7)
    above = count_layer("sage", BLOCK, 3, 7, first=False, last=True, heads=4)
    assert above.products == (*first.products, Product(2, 7, 6))
    assert (above.gathered_bytes, above.written_bytes) == (2 * 4 * 5 * 3, 4 * (2 * 7 + 4 * 3))
    assert sum(product.flops for product in above.products) == 3 * 2 * 2 * 6 * 7
    gin = count_layer("gin", BLOCK, 3, 7, first=True, last=False, heads=4)
    assert gin.products == (Product(2, 3, 7), Product(2, 7, 7), Product(3, 2, 7), Product(7, 2, 7), Product(2, 7, 7))
    wide = count_layer("gat", BLOCK, 64, 8, first=True, last=False, heads=4)
    assert wide.products == (Product(4, 64, 8), Product(64, 4, 8))  # projected first: 4 heads of 2 numbers
    assert (wide.gathered_bytes, wide.written_bytes) == (2 * 4 * 7 * 8, 4 * (2 * 8 + 4 * 8))  # with two self-loops
    with pytest.raises(InputError, match="--model: expected one of sage, gcn, gin, gat"):
        measure_limit("pna", [BLOCK], (3, 7), 4)


def test_the_limit_has_measured_rates() -> None:
    limit = measure_limit("sage", [BLOCK, BLOCK], (3, 7, 2), 4)
    assert limit.flops == 2 * 2 * 2 * 6 * 7 + 3 * 2 * 2 * 14 * 2
    assert min(limit.products_s, limit.gathered_s, limit.written_s) > 0
    assert limit.gathered_bytes == 4 * 5 * 3 + 2 * 4 * 5 * 7


def test_seconds_are_divided_without_a_rest() -> None:
    assert category_of(["aten::copy_", "aten::clone"]) == "copies"
    assert category_of(["aten::sort"]) == "other"
    stages = {"sample": 1.0, "exchange_ids": 0.5, "load_features": 2.0, "forward": 4.0, "backward": 4.0}
    twice = {"forward": 8.0, "backward": 8.0}  # the profiler takes as long again
    found = divide(13.0, stages, twice, {"exchange": 2.0}, {"dense products": 6.0, "copies": 4.0})
    assert found.keys() == set(CATEGORIES) and sum(found.values()) == pytest.approx(13.0)
    assert (found["sampling"], found["gather of rows"], found["exchange"]) == (1.0, 2.0, 0.5 + 1.0)
    assert (found["dense products"], found["copies"]) == (3.0, 2.0)
    waited = divide(13.0, stages, twice, {"exchange": 2.0}, {"dense products": 28.0})
    assert waited["dense products"] == 7.0  # wall time of operators that waited for a core


@pytest.mark.parametrize("model", ["sage", pytest.param("gat", marks=pytest.mark.weekly)])
def test_two_ranks_are_profiled(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = build_store(synthetic_source(PlantedGraph(600, 5000, num_features=8, num_classes=4)), tmp_path / "g.gsplit")
    sizes = ["--batch-size", "64", "--fanout", "3", "3", "--hidden", "8", "--steps", "2"]
    out = tmp_path / "profile"
    main(
        [str(store.path), "--model", model, "--ranks", "2", "--strategies", "split", "data", *sizes, "--out", str(out)]
    )
    records = json.loads(out.with_suffix(".json").read_text())["records"]
    assert [(record["strategy"], len(record["per_rank"])) for record in records] == [("split", 2), ("data", 2)]
    for record in records:
        for profile in record["per_rank"]:
            categories = profile["categories"]
            assert sum(categories.values()) == pytest.approx(profile["cpu_s"])
            assert min(categories[name] for name in ("sampling", "gather of rows", "dense products", "optimizer")) > 0
            assert (categories["attention"] > 0) == (model == "gat")
            assert min(profile["limit"][name] for name in ("products_s", "gathered_s", "written_s")) > 0
    losses = {profile["loss"] for record in records for profile in record["per_rank"]}
    assert max(losses) - min(losses) < 1e-5
    table = capsys.readouterr().out
    assert out.with_suffix(".md").read_text() == table
    assert table.count(f"| g | {model} | 2 | split | ") == 1 + 3  # the limit, and categories of two ranks and of both
