"""What the first steps of a loop say on one process, what they leave behind, and what heads and gathered rows are."""

import copy
import gc
import io
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nn_models import CLASSES, WIDTH, make_loader
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.overrides import _get_current_function_mode_stack
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.nn.checks.replay import half_of, program_difference
from gsplit.nn.gradients import averages_of


def _model(mesh: Mesh) -> Module:
    torch.manual_seed(0)
    model: Module = GraphSAGE(WIDTH, 8, 3, CLASSES).double()
    return parallelize(model, mesh)


def _train(mesh: Mesh, loss_of: Any, steps: int = 3) -> Module:
    model = _model(mesh)
    loader = make_loader()
    for number in range(steps):
        batch = loader.make_batch(number, 0)
        loss_of(model, batch).backward()
    return model


def _values(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out, batch.y, reduction="none")


def _right(model: Module, batch: Any) -> Any:
    return batch.mean(_values(model(batch.x, batch.edge_index), batch))


_HEAD = Linear(CLASSES, CLASSES).double()


def _with_head(model: Module, batch: Any) -> Any:
    return batch.mean(_values(_HEAD(model(batch.x, batch.edge_index)), batch))


def _beside(model: Module, batch: Any) -> Any:
    out = model(batch.x, batch.edge_index)
    return batch.mean(_values(out, batch)) + out.pow(2).mean()


def _centred(model: Module, batch: Any) -> Any:
    out = model(batch.x, batch.edge_index)
    return batch.mean(_values(out - out.mean(0), batch))


def _dropped(model: Module, batch: Any) -> Any:
    return batch.mean(_values(F.dropout(model(batch.x, batch.edge_index), 0.5), batch))


@pytest.mark.parametrize(
    "loss_of, wanted",
    [
        (_right, None),
        (_with_head, "parameters whose gradients are averaged over the ranks (got _HEAD."),
        (_beside, "a loss whose terms are from batch.mean"),
        (_centred, "values of targets that depend on no other target"),
        (_dropped, "a loss without random numbers of its own"),
    ],
)
def test_one_process_is_told_once_what_several_ranks_refuse(
    loss_of: Any, wanted: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gsplit"):
        _train(solo_mesh(), loss_of)
    told = [record.getMessage() for record in caplog.records if "on several ranks" in record.getMessage()]
    assert len(told) == (0 if wanted is None else 1)
    assert wanted is None or wanted in told[0]


def test_the_first_steps_leave_nothing_behind() -> None:
    mesh = solo_mesh()
    model = _train(mesh, _right, steps=3)
    assert averages_of(mesh).check is None
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


def test_an_interrupted_first_step_is_forgotten_with_its_batch() -> None:
    mesh = solo_mesh()
    model, loader = _model(mesh), make_loader()
    out = model(*((batch := loader.make_batch(0, 0)).x, batch.edge_index))
    assert averages_of(mesh).check is not None
    del batch, out
    gc.collect()
    assert averages_of(mesh).check is None


def test_the_users_own_modes_stay_in_their_order() -> None:
    model, loader = _model(solo_mesh()), make_loader()
    batch = loader.make_batch(0, 0)
    with torch.device("cpu"):
        out = model(batch.x, batch.edge_index)
    batch.mean(_values(out, batch)).backward()
    assert len(_get_current_function_mode_stack()) == 1  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model(batch.x, batch.edge_index)
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


def test_a_repeated_loss_writes_to_no_tensor_of_the_user() -> None:
    """Flags changed by operators, buffers by ``out=`` and lists, and statistics by a norm."""
    model, loader = _model(solo_mesh()), make_loader()
    batch = loader.make_batch(0, 0)
    out = model(batch.x, batch.edge_index)
    flags = torch.arange(batch.num_targets) % 2 == 0
    buffer, other, mean = (torch.zeros(size, dtype=torch.float64) for size in (batch.num_targets, 3, CLASSES))
    flags |= out.argmax(1) == batch.y
    torch.mul(out.detach()[:, 0], 3.0, out=buffer)
    torch._foreach_add_([other, mean], [out.detach()[0, :3], out.detach()[0]])
    F.batch_norm(out.detach(), mean, torch.ones(CLASSES, dtype=torch.float64), training=True)
    before = [each.clone() for each in (flags, buffer, other, mean)]
    batch.mean(_values(out, batch) * flags * buffer.abs() + other.sum() + mean.sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (flags, buffer, other, mean), strict=True))


def test_gathered_rows_have_one_order_and_their_gradients() -> None:
    loader = make_loader()
    batch = loader.make_batch(0, 0)
    rows = torch.randn(batch.num_targets, 3, dtype=torch.float64, requires_grad=True)
    gathered = batch.gather(rows)
    assert torch.equal(gathered[batch.positions], rows)
    assert sorted(batch.positions.tolist()) == list(range(batch.global_batch_size))
    numbers = torch.arange(3 * batch.num_targets).view(-1, 3)
    (gathered * numbers).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, numbers[batch.positions].double())
    assert batch.gather(batch.y > 1).dtype == torch.bool
    with pytest.raises(InputError, match=r"batch.gather: expected \[20, ...\] .got \[11, 3\]"):
        batch.gather(rows[:11])


def test_heads_are_followed_before_every_loss_and_copies_are_not_wrapped() -> None:
    mesh = solo_mesh()
    head, temperature = parallelize(Linear(3, 2), mesh), parallelize(Parameter(torch.ones(1)), mesh)
    copied = copy.deepcopy(head)
    stored = io.BytesIO()
    torch.save({"head": head, "temperature": temperature, "copied": copied}, stored)
    averages = averages_of(mesh)
    head.bias.requires_grad_(False)
    averages.before_loss()
    assert [[id(p) for p in average.parameters] for average in averages.wrapped] == [
        [id(head.weight)],
        [id(temperature)],
    ]
    assert averages.heads == [head]
    del head
    gc.collect()
    averages.before_loss()
    assert [len(average.parameters) for average in averages.wrapped] == [0, 1]
    assert averages.heads == []


def test_a_parameter_on_another_device_is_refused() -> None:
    with pytest.raises(InputError, match="expected a parameter on cpu .got meta"):
        parallelize(Parameter(torch.ones(1, device="meta")), solo_mesh())


def test_halves_have_some_and_not_all() -> None:
    for count in range(2, 200):
        assert 0 < int(half_of(count, torch.device("cpu")).sum()) < count


def test_programs_of_ranks_are_compared_where_they_are_the_same_functions() -> None:
    same = '[["mul", [2.0, null]], ["add", [[[], 1.0, 1.0]]]]'
    assert program_difference([same, same]) == ""
    assert "mul: 2.0 on rank 0, 3.0 on rank 1" in program_difference([same, same.replace("2.0", "3.0")])
    assert program_difference([same, '[["mul", [3.0, null]]]']) == ""  # a rank without targets takes another way
