"""What a step does on the host: once per model instead of per step, and only where a model needs it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, make_batch
from torch.nn import Module, Parameter
from torch_geometric.nn import GCN, GraphSAGE

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.nn.runtime import ModelParts
from gsplit_bench.step_overhead import count_calls


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_a_step_walks_over_no_modules_and_intercepts_only_the_models_own_functions(kind: str) -> None:
    """Between its three layers a model of PyG calls two activations and two dropouts."""
    calls = count_calls(solo_mesh(), kind)
    assert calls["torch_function_calls"] == 4 and calls["module_visits"] == 0
    assert calls["python_calls"] < 2100  # measured: 1862 to 2013


def _draw(*_: Any) -> None:
    torch.rand(1)


def _hook_part(model: Any) -> None:
    model.convs[1].lin_l.register_forward_hook(_draw)


def _replace_forward(model: Any) -> None:
    part = model.convs[1].lin_l
    part.forward = lambda x: F.linear(x, part.weight) + torch.rand(1)


def _replace_method(model: Any) -> None:
    layer = model.convs[1]
    layer.update = lambda out: out + torch.rand(1)
    layer.fuse = False


def _hook_messages(model: Any) -> None:
    model.convs[1].register_propagate_forward_hook(_draw)


def _replace_part(model: Any) -> None:
    model.convs[1].lin_l = torch.nn.Sequential(model.convs[1].lin_l, torch.nn.AlphaDropout())


@pytest.mark.parametrize("change", [_hook_part, _replace_forward, _replace_method, _hook_messages, _replace_part])
def test_what_users_put_into_a_layer_after_wrapping_is_intercepted(change: Callable[[Any], None]) -> None:
    """Although the function mode is suspended in layers that run PyG's code only."""
    model = parallelize(GraphSAGE(WIDTH, 8, 3, CLASSES).double(), solo_mesh())
    batch = make_batch()
    out = model(batch.x, batch.edge_index)
    change(model)
    with pytest.raises(InputError, match="no randomness of its own"):
        model(batch.x, batch.edge_index)
    assert out.shape == (batch.num_targets, CLASSES)
    assert torch.rand(3).shape == (3,)  # and nothing is intercepted afterwards


def test_functions_in_a_mode_of_the_model_are_intercepted_too() -> None:
    model = parallelize(GraphSAGE(WIDTH, 8, 3, CLASSES, dropout=0.5).double(), solo_mesh())
    batch = make_batch()
    wanted = model(batch.x, batch.edge_index)
    stock = model.forward

    def forward(*args: Any) -> Any:
        with torch.device("cpu"):  # a function mode inside of ours
            return stock(*args)

    model.forward = forward
    assert torch.equal(model(batch.x, batch.edge_index), wanted)


def test_parts_are_those_of_the_model_as_it_is() -> None:
    model = GCN(WIDTH, 8, 2, CLASSES)
    parts = ModelParts()

    def check() -> None:
        found = parts.refresh(model)
        for ours, theirs in ((found.modules, model.modules()), (found.parameters, model.parameters())):
            assert list(map(id, ours)) == list(map(id, theirs))

    changes: list[Callable[[], Any]] = [
        lambda: setattr(model.convs[0], "bias", Parameter(torch.ones(8))),
        lambda: setattr(model.convs[1], "bias", None),
        lambda: model.convs.append(torch.nn.Linear(2, 2)),
        lambda: setattr(model.convs[2], "weight", model.convs[0].bias),  # shared
        lambda: model.convs.pop(2),
        lambda: setattr(model, "act", Module()),
        model.double,
    ]
    check()
    for change in changes:
        change()
        check()
