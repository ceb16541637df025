"""States are taken apart into JSON and tensors and put together again, bit for bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsplit.errors import InputError
from gsplit.training.checkpoints.state_tree import rebuild_state, take_snapshot

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("$tensor"), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.text(), TREES, max_size=4))
def test_any_state_comes_back(state: dict[str, Any]) -> None:
    snapshot = take_snapshot(state)
    assert repr(rebuild_state(snapshot.text, snapshot.tensors)) == repr(state)


def test_tensors_are_copied_and_floats_keep_every_bit() -> None:
    weight, losses = torch.ones(2, requires_grad=True), [1 / (n + 3) for n in range(40)]
    snapshot = take_snapshot({"state": {0: {"step": torch.tensor(3.0)}}, "w": weight, "losses": losses, "lr": math.inf})
    with torch.no_grad():
        weight.zero_()
    losses.append(0.0)
    back = rebuild_state(snapshot.text, snapshot.tensors)
    assert back["w"].tolist() == [1.0, 1.0] and not back["w"].requires_grad
    assert back["losses"] == losses[:-1] and back["lr"] == math.inf
    assert back["state"][0]["step"].item() == 3.0


def test_losses_of_an_older_version_are_a_tensor() -> None:
    losses = torch.ones(20, dtype=torch.float64)
    assert rebuild_state('{"losses": {"$floats": "losses"}}', {"losses": losses})["losses"] is losses


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(InputError, match="state: lr_scheduler/fn: expected numbers, texts.*got function"):
        take_snapshot({"lr_scheduler": {"fn": lambda: None}})
    with pytest.raises(InputError, match="state: a: expected numbers"):
        take_snapshot({"a": {(1, 2): 3}})
    for text in ("[1]", '{"a": {"$pickle": "x"}}'):
        with pytest.raises(ValueError, match="a state"):
            rebuild_state(text, {})
    with pytest.raises(KeyError):
        rebuild_state('{"a": {"$tensor": "b"}}', {})
    for tensor in (torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        with pytest.raises(InputError, match="state: model/c: expected a dense tensor of real numbers"):
            take_snapshot({"model": {"c": tensor}})
