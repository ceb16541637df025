"""Averaged gradients without ranks: a comm of two equal ranks doubles every sum, so averages must equal plain ones."""

import copy
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from recorded_calls import record_calls
from torch import Tensor
from torch.autograd import Function
from torch.nn import Linear, Parameter
from torch.utils.checkpoint import checkpoint

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm.comm import Call, CompletedWork, SoloComm, Work
from gsplit.errors import CommError, InputError, RankFaultError
from gsplit.nn import gradients
from gsplit.nn.gradients import Averages, GradientAverage, compares_weights


class TwinComm(SoloComm):
    """Two ranks that do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        tensor *= 2
        if compares_weights(call.step):  # each rank has written one of the last two numbers
            tensor[-2:] = tensor[-2] / 2
        return super().all_reduce(call, tensor)


class TwinControl(SoloComm):
    """Two ranks that do the same, on the host."""

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        tensor *= 2
        return super().all_reduce(call, tensor)


def _average(parameters: Sequence[Parameter], comm: SoloComm | None = None, number: int = 0) -> GradientAverage:
    """The average of a mesh with ``number`` wrapped modules before it, which are gone."""
    averages = Averages(TwinComm() if comm is None else comm, TwinControl())
    averages._slots += [ref(GradientAverage(Averages(TwinComm(), TwinControl()), DeferredChecks()))] * number
    average = GradientAverage(averages, DeferredChecks())
    average.follow(list(parameters))
    return average


def _model() -> tuple[torch.nn.Sequential, TwinComm, GradientAverage]:
    torch.manual_seed(0)
    model, comm = torch.nn.Sequential(Linear(4, 8), Linear(8, 8), Linear(8, 2)).double(), TwinComm()
    return model, comm, _average(list(model.parameters()), comm)


def _plain(backwards: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(4, 8), Linear(8, 8), Linear(8, 2)).double()
    for number in range(backwards):
        model(_x(number)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _x(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@pytest.mark.parametrize("backwards", [1, 3])
def test_accumulated_gradients_are_averaged_once(backwards: int) -> None:
    model, comm, _kept = _model()
    recorded = record_calls(comm)
    for number in range(backwards):
        model(_x(number)).square().sum().backward()
    for parameter, want in zip(model.parameters(), _plain(backwards), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, want, atol=1e-14)
    calls = [(call.step, call.name) for call in recorded]
    assert calls == [(number, "average gradients of module 0, buffer 0") for number in range(backwards)]


def test_a_module_without_a_gradient_here_is_averaged_where_another_rank_has_one() -> None:
    """The other rank has used both modules, and this one the first: it joins both all-reduces, in their order."""
    torch.manual_seed(0)
    used, unused = Linear(4, 4).double(), Linear(4, 4).double()
    comm, control = SoloComm(), SoloComm()
    comm.size = 2
    averages = Averages(comm, control)
    kept = [GradientAverage(averages, DeferredChecks()) for _ in range(2)]
    for average, module in zip(kept, (used, unused), strict=True):
        average.follow(list(module.parameters()))

    def all_reduce(call: Call, tensor: Tensor) -> Work:
        calls.append(call.name)
        if call.name == "find what has gradients":
            tensor.add_(torch.tensor([1.0, 1.0, *tensor[2:]]))
        else:
            tensor.add_(tensor.new_tensor([1.0] * 20 + [1.0, 1.0] + tensor[22:].tolist()))
            tensor[-2:] = tensor[-2]
        return CompletedWork()

    calls: list[str] = []
    comm.all_reduce = control.all_reduce = all_reduce  # type: ignore[method-assign]
    used(_x(0)).sum().backward()
    assert calls[0] == "find what has gradients"
    assert calls[1:] == [f"average gradients of module {number}, buffer 0" for number in range(2)]
    for parameter in unused.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 0.5))


def test_modules_that_train_other_numbers_on_another_rank_are_refused() -> None:
    class Control(TwinControl):
        def all_reduce(self, call: Call, tensor: Tensor) -> Work:
            work = super().all_reduce(call, tensor)
            tensor[2] += 1  # the other rank trains one number more in the first module
            return work

    model, comm = Linear(2, 2), TwinComm()
    averages = Averages(comm, Control())
    average, _other = GradientAverage(averages, DeferredChecks()), GradientAverage(averages, DeferredChecks())
    average.follow(list(model.parameters()))
    with pytest.raises(
        RankFaultError, match="as many trained numbers in wrapped module 0 .*got 6 here, 6.5 on average"
    ):
        model(torch.ones(1, 2)).sum().backward()


def test_gradients_of_gradients_are_refused_on_several_ranks() -> None:
    """``backward(create_graph=True)`` gives the averages; a loss of them would miss what they depend on."""
    model, _, _kept = _model()
    with pytest.warns(UserWarning, match="create_graph=True"):
        model(_x(0)).square().sum().backward(create_graph=True)
    for parameter, want in zip(model.parameters(), _plain(1), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, want, atol=1e-14)
    grad = next(model.parameters()).grad
    assert grad is not None
    with pytest.raises(InputError, match="expected first derivatives on several ranks"):
        grad.square().sum().backward()


def test_a_parameter_that_no_rank_used_keeps_what_it_had() -> None:
    model: Any
    model, _, _kept = _model()
    model[2](_x(0).repeat(1, 2)).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    kept = model[2].weight.grad.clone()
    model[0](_x(0)).sum().backward()
    assert torch.equal(model[2].weight.grad, kept)
    assert model[0].weight.grad is not None


def test_autograd_grad_is_refused_and_leaves_accumulated_gradients_alone() -> None:
    model, comm, _kept = _model()
    model(_x(0)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    recorded = record_calls(comm)
    with pytest.raises(InputError, match="torch.autograd.grad: expected no parameters of a wrapped model"):
        torch.autograd.grad(model(_x(1)).sum(), list(model.parameters()))
    assert [
        torch.equal(a, b)
        for a, b in zip(before, [p.grad for p in model.parameters() if p.grad is not None], strict=True)
    ] == [True] * 6
    assert not recorded


def test_a_backward_that_fails_is_forgotten() -> None:
    model, _, average = _model()
    model(_x(0)).square().sum().backward()
    h = model[0](_x(1))
    h.register_hook(_fail)
    with pytest.raises(RuntimeError, match="half way"):
        model[2](model[1](h)).square().sum().backward()
    average._averages.recover()
    for parameter, want in zip(model.parameters(), _plain(1), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, want, atol=1e-14)
    model.zero_grad()
    model(_x(0)).square().sum().backward()
    first = next(model.parameters()).grad
    assert first is not None
    assert torch.allclose(first, _plain(1)[0], atol=1e-14)


def _fail(g: Tensor) -> None:
    raise RuntimeError("half way")


class _WithoutGradient(Function):
    """A function of two inputs whose backward gives the second one no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def test_a_parameter_without_a_gradient_has_none() -> None:
    torch.manual_seed(0)
    used, unused = Linear(4, 4).double(), Linear(4, 4).double()
    _kept = _average([*used.parameters(), *unused.parameters()])
    for number in range(2):
        _WithoutGradient.apply(used(_x(0)), unused(_x(1))).square().sum().backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for p in used.parameters())
        for parameter in unused.parameters():
            assert torch.equal(parameter.grad, torch.ones_like(parameter)) if number else parameter.grad is None  # type: ignore[arg-type]
            parameter.grad = torch.ones_like(parameter)  # of another backward


@pytest.mark.parametrize("before", [False, True])
def test_a_backward_inside_of_backward_adds_to_its_gradients(before: bool) -> None:
    """Reentrant checkpoints of one module reach its weights once for each."""

    def backward(bottom: Linear, inner: Linear, top: Linear) -> None:
        for number in range(1 + before):
            h = bottom(_x(number))
            for _ in range(2):
                h = checkpoint(inner, h, use_reentrant=True)
            top(h).square().sum().backward()

    torch.manual_seed(0)
    models = [Linear(4, 4).double(), Linear(4, 4).double(), Linear(4, 2).double()]
    plain = [copy.deepcopy(model) for model in models]
    backward(*plain)
    parameters = [p for model in models for p in model.parameters()]
    _kept = _average(parameters)
    backward(*models)
    for found, want in zip(parameters, (p for model in plain for p in model.parameters()), strict=True):
        assert found.grad is not None and want.grad is not None
        assert torch.allclose(found.grad, want.grad, atol=1e-13)


def test_parameters_of_another_type_get_other_buffers() -> None:
    model, _, average = _model()
    before = average._buffers
    average.follow(list(model.parameters()))
    assert average._buffers is before
    model.bfloat16()  # the same parameters
    average.follow(list(model.parameters()))
    assert average._buffers is not before


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(InputError, match="parameters: expected real numbers .got torch.complex64"):
        _average([Parameter(torch.ones(2, dtype=torch.complex64))])
    table = torch.nn.Embedding(4, 2, sparse=True)
    _kept = _average(list(table.parameters()))
    with pytest.raises(InputError, match="gradient: expected a dense tensor"):
        table(torch.tensor([1])).sum().backward()


def test_hooks_of_others_are_refused() -> None:
    model, _, average = _model()
    next(model.parameters()).register_hook(lambda g: g.clamp(-1, 1))  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="parameters: expected no hooks but the average's"):
        average.follow(list(model.parameters()))
    fresh = Linear(2, 2)
    fresh.bias.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="a parameter belongs to one wrapped model"):
        _average(list(fresh.parameters()))


class LostComm(TwinComm):
    """The other rank is at another buffer."""

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        tensor[-3] += 1
        return super().all_reduce(call, tensor)


def test_buffers_that_pair_wrongly_are_found_out() -> None:
    model = Linear(2, 2)
    _kept = _average(list(model.parameters()), LostComm())
    with pytest.raises(CommError, match="expected tag 0 on every rank .got tags with a mean of 1"):
        model(torch.ones(1, 2)).sum().backward()


def test_detached_parameters_are_left_alone() -> None:
    model, comm, average = _model()
    average.detach()
    recorded = record_calls(comm)
    model(_x(0)).sum().backward()
    assert not recorded


@pytest.mark.parametrize("number", [0, 1, 4096, 100_000])
def test_many_modules_may_be_wrapped(number: int) -> None:
    """The number of a module must not be lost in float32 sums."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(4, 8), Linear(8, 2))
    _kept = _average(list(model.parameters()), number=number)
    model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_averages_that_follow_each_other_have_other_tags() -> None:
    averages = [_average([Parameter(torch.ones(1))], number=number) for number in range(20)]
    assert len({average._buffers[0].tag for average in averages}) == 20


class DriftingComm(TwinComm):
    """The absolute weights of the other rank sum to ``other``, from its third backward on."""

    other: float

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        work = super().all_reduce(call, tensor)
        if call.step >= 2 and compares_weights(call.step):
            tensor[-1] = self.other
        return work


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 7.6e-6), (torch.float64, 1.4e-14)])
def test_weights_that_differ_are_named_within_a_few_backwards(dtype: torch.dtype, tolerance: float) -> None:
    model = Linear(3, 2).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-0.5)  # sum of absolute values: 4
    comm = DriftingComm()
    _kept = _average(list(model.parameters()), comm)
    comm.other = 4 * (1 + tolerance / 2)
    for _ in range(2 * gradients.COMPARE_EVERY):
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    comm.other = 5.0
    want = "before backward 32: expected the same on every rank .got sums of absolute values: rank 0: 4; rank 1: 5"
    with pytest.raises(RankFaultError, match=want):
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()


class BuffersComm(SoloComm):
    """Two ranks that do the same, and what is reduced behind gradients, flags and tag."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.behind: list[list[float]] = []

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        self.behind.append(tensor[8 + 2 + 1 :].tolist())
        tensor[: 8 + 2 + 1] *= 2
        tensor[8 + 2 + 2 :] = tensor[8 + 2 + 1 : 8 + 2 + 2]
        return super().all_reduce(call, tensor)


@pytest.mark.parametrize("dtype, usual, compared", [(torch.float32, [0.0, 0.0], [4.0, 0.0]), (torch.bfloat16, [], [])])
def test_every_sixteenth_buffer_has_the_sum_of_weights_and_all_are_as_long(
    dtype: torch.dtype, usual: list[float], compared: list[float]
) -> None:
    """The length decides in which order ranks are added: it must not depend on when a process was started."""
    model = Linear(3, 2).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-0.5)
    comm = BuffersComm()
    _kept = _average(list(model.parameters()), comm)
    for _ in range(18):
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    assert comm.behind == [*[compared] * 4, *[usual] * 12, compared, usual]
