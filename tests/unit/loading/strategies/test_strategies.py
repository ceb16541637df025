"""Strategies: stages that can run apart, what they declare, how they are named, and what they refuse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graph import small_store
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from gsplit import InputError, NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.minibatch.strategy_names import all_strategies, parse_strategy
from gsplit.sampling.minibatch import StepKey
from gsplit.telemetry import StepTelemetry

ALL = ("split", "data", "data(owner)", "data_cached", "data_cached(strided)", "hybrid(1)")


def _loader(strategy: str, *, fanouts: tuple[int, ...] = (3, 2), **options: Any) -> NeighborLoader:
    store, how = small_store("random", 1)[0], {"batch_size": 10, "strategy": strategy, **options}
    return NeighborLoader(store, list(fanouts), "train", **how)


@pytest.mark.parametrize("strategy", ALL)
def test_steps_sampled_ahead_load_into_the_batches_they_were_sampled_for(strategy: str) -> None:
    loader = _loader(strategy)
    maker = loader._makers[0]
    keys = [StepKey(0, 1, step) for step in range(3)]
    ahead = [loader._sample(maker.strategy, key, StepTelemetry(key.epoch, key.step)) for key in keys]
    batches = [loaded.to("cpu") for loaded in [maker.step_loader.load(sampled) for sampled in ahead]]
    for key, batch in zip(keys, batches, strict=True):
        straight = loader.make_batch(key.epoch, key.step)
        assert torch.equal(batch.x, straight.x) and torch.equal(batch.n_id, straight.n_id)
        assert torch.equal(batch.y, straight.y)
        assert (batch.telemetry.epoch, batch.telemetry.step) == (1, key.step)
        assert batch.telemetry.counts == straight.telemetry.counts  # a step's numbers are its own


@pytest.mark.parametrize("strategy", ALL)
def test_one_process_computes_the_same_mini_batch_whatever_the_strategy(strategy: str) -> None:
    split, other = _loader("split").make_batch(0, 0), _loader(strategy).make_batch(0, 0)
    assert torch.equal(split.n_id[:10], other.n_id[:10])  # targets come first
    assert sorted(split.n_id.tolist()) == sorted(other.n_id.tolist())
    assert [block.num_edges for block in split.blocks] == [block.num_edges for block in other.blocks]
    assert other.context.strategy == strategy


def test_the_routes_a_strategy_makes() -> None:
    """Appended rows below the boundary, places at it, nothing above."""
    made: dict[str, list[bool | None]] = {
        "split": [True, True, True],
        "hybrid(2)": [True, True, False],
        "hybrid(1)": [True, False, None],
        "data_cached": [None, None, None],
        "data": [None, None, None],
    }
    for strategy, expected in made.items():
        batch = _loader(strategy, fanouts=(3, 2, 2)).make_batch(0, 0)
        assert [None if layer.route is None else layer.route.appends for layer in batch.layers] == expected
        assert len(batch.frontiers) == (2 if strategy.startswith("hybrid") else 1)


def test_what_strategies_declare() -> None:
    assert {
        spec.name: (spec.split_layers, spec.needs_whole_graph, spec.reads_own_rows) for spec in all_strategies(2)
    } == {
        "split": (2, False, True),
        "hybrid(1)": (1, True, True),
        "data_cached": (0, True, True),
        "data_cached(strided)": (0, True, True),
        "data": (None, True, False),
        "data(owner)": (None, True, False),
    }
    for spec in all_strategies(2):
        assert spec.computes_each_vertex_once(num_ranks=1, num_replicas=1)
        assert spec.computes_each_vertex_once(num_ranks=4, num_replicas=1) == (spec.name == "split")
        assert not spec.computes_each_vertex_once(num_ranks=4, num_replicas=2)
        assert spec.shuffles_input == (spec.name in ("split", "hybrid(1)"))


def test_names() -> None:
    assert parse_strategy("hybrid(0)", 3) == parse_strategy("data_cached", 3) == parse_strategy("data_cached(owner)", 3)
    assert parse_strategy("hybrid(3)", 3) == parse_strategy("split", 3) == parse_strategy("split(owner)", 3)
    assert parse_strategy("data(strided)", 3) == parse_strategy("data", 3)
    assert parse_strategy("hybrid(2)", 3).split_layers == 2


@pytest.mark.parametrize("name", ["nothing", "push_pull", "split(strided)", "data(mine)", "hybrid(1) ", "", 3])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"strategy: expected split, data, data_cached or hybrid\(k\)"):
        parse_strategy(name, 2)


@pytest.mark.parametrize("name", ["hybrid", "hybrid(4)", "hybrid(k)"])
def test_a_hybrid_needs_a_number_of_layers(name: str) -> None:
    with pytest.raises(InputError, match=r"strategy: expected hybrid\(k\).*from 0 to 3"):
        parse_strategy(name, 3)


class Residual(nn.Module):
    """Adds the input of the middle layer to its output, or the input rows to the output of the bottom layer."""

    def __init__(self, *, of_input: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = SAGEConv(6, 6), SAGEConv(6, 6), SAGEConv(6, 6)
        self.of_input = of_input

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x, edge_index).relu()
        h = x[: h.size(0)] + h if self.of_input else h
        out = self.second(h, edge_index).relu()
        out = out if self.of_input else h[: out.size(0)] + out
        return self.third(out, edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy, of_input, refused", [
    ("hybrid(1)", False, r"strategy='hybrid\(1\)': expected a model that joins no rows from below layer 1"),
    ("hybrid(2)", False, None),
    ("hybrid(1)", True, None),
    ("data_cached", False, None),
    ("data_cached", True, None),
])  # fmt: skip
def test_residuals_run_where_their_rows_stand_for_the_same_vertices(
    strategy: str, of_input: bool, refused: str | None
) -> None:
    torch.manual_seed(0)
    model = parallelize(Residual(of_input=of_input).double(), solo_mesh())
    batch = _loader(strategy, fanouts=(3, 2, 2)).make_batch(0, 1)
    if refused is not None:
        with pytest.raises(InputError, match=refused):
            model(batch.x, batch.edge_index)
        return
    plain = _loader("split", fanouts=(3, 2, 2)).make_batch(0, 1)
    assert torch.allclose(model(batch.x, batch.edge_index), model(plain.x, plain.edge_index), atol=1e-12)


def test_switching_the_strategy_between_steps_changes_nothing() -> None:
    def train(strategies: list[str]) -> list[float]:
        torch.manual_seed(0)
        model = parallelize(Residual().double(), solo_mesh())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for step, strategy in enumerate(strategies):
            batch = _loader(strategy, fanouts=(3, 2, 2)).make_batch(0, step)
            loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    mixed = train(["split", "data(owner)", "data", "data_cached", "hybrid(2)"])
    assert mixed == pytest.approx(train(["split"] * 5), abs=1e-12)
