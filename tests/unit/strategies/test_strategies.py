"""Strategies: two stages that can run apart, what they declare, and that nobody needs their names."""

import pytest
import torch

from gsplit import InputError, NeighborLoader
from gsplit.bench.exactness import small_store
from gsplit.distributed.comm import SoloComm
from gsplit.distributed.mesh import Mesh, solo_mesh
from gsplit.exchange import IdentityExchange, PremixedExchange, ShuffleExchange
from gsplit.sampling.minibatch import StepKey
from gsplit.strategies.registry import STRATEGIES, strategy_class
from gsplit.telemetry import StepTelemetry


def _loader(strategy: str) -> NeighborLoader:
    return NeighborLoader(small_store("random", 1)[0], [3, 2], "train", batch_size=10, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_sampled_ahead_load_into_the_batches_they_were_sampled_for(strategy: str) -> None:
    loader = _loader(strategy)
    made = loader._strategy
    keys = [StepKey(0, 1, step) for step in range(3)]
    ahead = [made.sample(key, StepTelemetry(key.epoch, key.step)) for key in keys]
    batches = [made.finish(loaded) for loaded in [made.load(sampled) for sampled in ahead]]
    for key, batch in zip(keys, batches, strict=True):
        straight = loader.make_batch(key.epoch, key.step)
        assert torch.equal(batch.x, straight.x) and torch.equal(batch.n_id, straight.n_id)
        assert torch.equal(batch.y, straight.y)
        assert (batch.telemetry.epoch, batch.telemetry.step) == (1, key.step)
        assert batch.telemetry.counts == straight.telemetry.counts  # a step's numbers are its own


def test_the_exchanges_a_strategy_makes() -> None:
    split, data = _loader("split").make_batch(0, 0), _loader("data").make_batch(0, 0)
    assert [type(layer.exchange) for layer in split.layers] == [PremixedExchange, ShuffleExchange]
    assert [type(layer.exchange) for layer in data.layers] == [IdentityExchange, IdentityExchange]
    for one, other in zip(split.blocks, data.blocks, strict=True):  # one process: the same mini-batch
        assert torch.equal(one.src_rows, other.src_rows)


def _mesh(size: int, replicas: int) -> Mesh:
    world, inner = SoloComm(), SoloComm()
    world.size, inner.size = size, size // replicas
    return Mesh(torch.device("cpu"), inner, inner, inner, world, world, 0, replicas)


def test_what_strategies_declare() -> None:
    split, data = strategy_class("split"), strategy_class("data")
    assert (split.needs_whole_graph, data.needs_whole_graph) == (False, True)
    assert split.computes_each_vertex_once(_mesh(4, 1)) and not split.computes_each_vertex_once(_mesh(4, 2))
    assert data.computes_each_vertex_once(solo_mesh()) and not data.computes_each_vertex_once(_mesh(2, 1))


@pytest.mark.parametrize("name, planned", [("push_pull", True), ("nothing", False)])
def test_other_names_are_refused(name: str, planned: bool) -> None:
    with pytest.raises(InputError, match=f"strategy: expected 'split' or 'data' .got '{name}'") as error:
        strategy_class(name)
    assert ("this one is planned" in str(error.value)) == planned
