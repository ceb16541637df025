"""The verifier tells the truth, also when it is unwelcome. Real ranks: tests/dist/test_train_command.py."""

from dataclasses import astuple
from typing import Any

import pytest
import torch
from small_graph import CLASSES, WIDTH, Differences, TrainedCase, compare, small_store
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, Verification, verify
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.nn.checks import one_process
from gsplit.training import verification

NAN = float("nan")


@pytest.mark.parametrize(
    "errors, ok",
    [
        ((0.0, 0.0, 0.0, 1.0), True),
        ((1e-10, 1e-10, 1e-10, 1.0), True),
        ((1e-8, 0.0, 0.0, 1.0), False),
        ((0.0, 1e-8, 0.0, 1.0), False),
        ((0.0, 0.0, 1e-8, 1.0), False),
        ((NAN, 0.0, 0.0, 1.0), False),
        ((0.0, NAN, 0.0, 1.0), False),
        ((0.0, 0.0, NAN, 1.0), False),
        ((0.0, 1e-10, 0.0, 1e-3), False),  # gradients agree relative to the largest
        ((0.0, 1e-8, 0.0, 100.0), True),
        ((0.0, 0.0, 0.0, 0.0), True),
    ],
)
def test_what_counts_as_equal(errors: tuple[float, float, float, float], ok: bool) -> None:
    found = Verification(*errors, tolerance=1e-9, steps=1, ranks=2, strategy="split")
    assert found.ok is ok
    assert found.as_dict()["ok"] is ok


def test_large_losses_and_statistics_are_compared_relatively() -> None:
    def is_ok(loss_error: float, buffer_error: float, largest_loss: float, largest_buffer: float) -> bool:
        errors = {"max_loss_error": loss_error, "max_grad_error": 0.0, "max_buffer_error": buffer_error}
        others = {"tolerance": 1e-9, "steps": 1, "ranks": 2, "strategy": "split", "largest_gradient": 1.0}
        largest = {"largest_loss": largest_loss, "largest_buffer": largest_buffer}
        return Verification(**errors, **others, **largest).ok  # type: ignore[arg-type]

    assert is_ok(5e-7, 5e-5, largest_loss=1e3, largest_buffer=1e5)
    assert not is_ok(5e-6, 0.0, largest_loss=1e3, largest_buffer=1e5)
    assert not is_ok(0.0, 5e-4, largest_loss=1e3, largest_buffer=1e5)
    assert not is_ok(2e-9, 0.0, largest_loss=1e-3, largest_buffer=0.0)  # small ones absolutely


def test_the_largest_loss_and_statistic_are_found() -> None:
    found = _verify(steps=2)
    assert found.largest_loss > 1.0 and found.largest_buffer >= 2.0  # two batches in BatchNorm's count


def _verify(**options: Any) -> Verification:
    store, _ = small_store("random", 1)
    torch.manual_seed(0)
    model = GraphSAGE(WIDTH, 8, 2, CLASSES, dropout=0.5, norm="batch_norm")
    return verify(model, store, [3, 3], options.pop("nodes", "train"), batch_size=12, mesh=solo_mesh(), **options)


def test_one_process_equals_itself_and_the_model_is_left_alone() -> None:
    found = _verify(steps=7)  # into the second epoch
    assert (found.max_loss_error, found.max_grad_error, found.max_buffer_error) == (0, 0, 0)
    assert found.ok and found.largest_gradient > 0


@pytest.mark.parametrize("what", ["loss", "gradient", "buffer"])
def test_a_difference_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = verification._train, []

    def wrong_once(*args: Any) -> Any:
        found = train(*args)
        calls.append(1)
        if len(calls) == 2:
            wrong = {"loss": found.losses, "gradient": found.gradients[-1], "buffer": found.buffers[0]}[what]
            wrong.view(-1)[0] += 1e-6
        return found

    monkeypatch.setattr(verification, "_train", wrong_once)
    found = _verify()
    assert not found.ok
    errors = {"loss": found.max_loss_error, "gradient": found.max_grad_error, "buffer": found.max_buffer_error}
    assert errors.pop(what) == pytest.approx(1e-6, rel=1e-3)
    assert set(errors.values()) == {0.0}


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(InputError, match="input_nodes: expected at least one target"):
        _verify(nodes=torch.empty(0, dtype=torch.int64))


def test_negatives_without_pairs_are_refused() -> None:
    with pytest.raises(InputError, match="edge_label_index: expected pairs, for .* and neg_sampling .got None"):
        _verify(neg_sampling="binary")


def test_the_matrix_does_not_overlook_what_is_no_number() -> None:
    one = TrainedCase([{1: [0.0]}], [0.0], [[[0.0]]], {"w": [0.0]})
    bad = TrainedCase([{1: [NAN]}], [NAN], [[[NAN]]], {"w": [NAN]})
    assert set(astuple(compare(one, [bad]))) == {float("inf")}
    assert compare(one, [one]) == Differences()
    nothing = TrainedCase([{}], [0.0], [[[0.0]]], {"w": [0.0]})
    assert compare(one, [one, nothing]) == Differences()
    for ranks in ([one, one], [nothing, nothing]):  # a target computed twice, and by nobody
        assert compare(one, ranks) == Differences(output=float("inf"))


def test_rounding_of_a_tiny_gradient_does_not_become_a_step() -> None:
    """As it would with Adam, where 1e-13 moves a weight by 1e-8, and so features that are not scaled are refused."""
    weights = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), torch.nn.Parameter(torch.zeros(1))]
    weights[0].grad = torch.tensor([-200.0, 1e-13], dtype=torch.float64)
    one_process._descend(weights, 1e-3)
    assert weights[0].tolist() == pytest.approx([1e-3, -5e-19], rel=1e-12)
    assert weights[1].tolist() == [0.0]
