"""Gradients averaged over all ranks at the end of every backward.

What is wrapped on a mesh, models and the heads and parameters beside them, has one ``GradientAverage`` each, and the
mesh has one ``Averages`` of them all, in the order in which they were wrapped. A backward that reaches a loss of all
ranks (``minibatch.loss``), or the first of these parameters, starts it; it ends after everything else of the backward:

    begin --> gradients of parameters, collected --> end of backward --> which are used --> one all-reduce for each

The loss starts it and not the first gradient, because a head may have no gradient on some ranks, such as one without
targets; the others would wait. Which of the wrapped things have a gradient on any rank is summed over the ranks first,
unless there is only one. A parameter without a gradient on some ranks counts as zero there. One without a gradient on
any rank keeps its ``.grad``. So every rank starts the same all-reduces in the same order in every backward (law 5). The
gradients of a GNN are a few MB: there is one buffer for each type of element.

The average is of this backward's gradient, never of the accumulated ``.grad``, which is set aside while backward runs
and added afterwards.

Averaged gradients keep weights equal only if every rank starts from the same weights and changes them alike: with the
same learning rate, and with a state that was loaded on all ranks. In the first backwards and at every
``COMPARE_EVERY``-th one each buffer also carries the sum of the absolute weights of every rank, and ranks whose sums
differ are named. Sums are compared with a tolerance, because the CPUs of two hosts may round an optimizer's step
differently.

A buffer is always of the same length, with zeros in place of sums that are not compared. The order in which an
all-reduce adds the numbers of the ranks, and so the last digit of a gradient, depends on the length; backwards are
counted from the start of the process, and a resumed training must equal an uninterrupted one to the bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm.comm import Call, Comm, Work
from gsplit.distributed.comm.mesh import Mesh
from gsplit.distributed.watch.peers import join_differences
from gsplit.errors import CommError, InputError, RankFaultError, explain
from gsplit.minibatch.route import count_reduction
from gsplit.telemetry import StepTelemetry

__all__ = ["Averages", "GradientAverage", "averages_of", "compares_weights"]

_NUM_TAGS = 1 << 10
"""Tags are summed in the gradients' dtype: in float32 the sum over up to 2**14 ranks is exact."""
_TAGS_PER_MODULE = 37
COMPARE_EVERY = 16
"""Backwards between comparisons of the weights: summing them takes about as long as averaging their gradients."""
_ALWAYS_COMPARED = 4
"""First backwards, in which learning rates and loaded states that differ show."""
_ROUNDING = 64
"""Units of the last digit by which sums of the same weights may differ."""
_CHECKED = (torch.float32, torch.float64)  # other types do not hold a tag or a sum exactly enough


class _Buffer:
    """The gradients of the parameters of one type of element, reduced together.

    Gradients are followed by a flag per parameter (whether it has a gradient), a tag that must be the same on all
    ranks, and the sum of absolute weights of every rank, each added by that rank, or zeros.
    """

    def __init__(self, tag: int, parameters: list[Parameter]) -> None:
        self.tag = tag
        self.parameters = parameters
        self._tail: Tensor | None = None  # where every parameter has a gradient: copied to the device once
        self._flat: Tensor | None = None
        self._work: Work | None = None

    def start(self, comm: Comm, call: Call, grads: dict[int, Tensor], *, with_weights: bool) -> int:
        """Start the all-reduce; returns its bytes."""
        found = [grads.get(id(p)) for p in self.parameters]
        pieces = [
            p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in zip(self.parameters, found, strict=True)
        ]
        is_checked = pieces[0].dtype in _CHECKED
        num_zeros = comm.size if is_checked else 0
        self._flat = torch.cat([*pieces, self._flags_tag_and_zeros([g is not None for g in found], num_zeros)])
        if with_weights and is_checked:
            self._flat[comm.rank - comm.size] = self._sum_of_weights()
        self._work = comm.all_reduce(call, self._flat)
        return self._flat.nbytes

    def _sum_of_weights(self) -> Tensor:
        """Of their absolute values."""
        return torch.stack(
            [torch.linalg.vector_norm(p.detach(), 1, dtype=torch.float64) for p in self.parameters]
        ).sum()

    def _flags_tag_and_zeros(self, flags: list[bool], num_zeros: int) -> Tensor:
        if all(flags) and self._tail is not None and self._tail.device == self.parameters[0].device:
            return self._tail
        tail = self.parameters[0].new_tensor([*map(float, flags), float(self.tag), *([0.0] * num_zeros)])
        if all(flags):
            self._tail = tail
        return tail

    def finish(
        self, size: int, checks: DeferredChecks, backward: int, grads: dict[int, Tensor], factor: int
    ) -> list[tuple[Parameter, Tensor]]:
        """The sums over ``factor`` of all parameters that had a gradient on any rank. ``backward``: its number."""
        assert self._work is not None and self._flat is not None
        self._work.wait()
        sizes = [*(p.numel() for p in self.parameters), len(self.parameters)]
        *pieces, flags, checked = self._flat.split([*sizes, self._flat.numel() - sum(sizes)])
        if self._flat.dtype in _CHECKED:
            checks.add(checked, partial(self._check, size=size, backward=backward))
        # flags are read, and a device waited for, only on a rank where a gradient is missing
        is_complete = all(id(p) in grads for p in self.parameters)
        present = [True] * len(pieces) if is_complete else [count > 0 for count in flags.tolist()]
        self._flat = None
        self._work = None
        return [
            (p, piece.view_as(p).div_(factor))
            for p, piece, is_present in zip(self.parameters, pieces, present, strict=True)
            if is_present
        ]

    def _check(self, checked: Tensor, size: int, backward: int) -> None:
        tag_sum, *weights = checked.tolist()
        if tag_sum != size * self.tag:
            fix = "use the same parameters on every rank, and wrap models and heads in the same order"
            got = f"tags with a mean of {tag_sum / size:g}"
            raise CommError(explain("averaged gradients", f"tag {self.tag} on every rank", got, fix))
        differing = _differing(weights, _ROUNDING * torch.finfo(checked.dtype).eps)
        if differing:
            where = f"the weights before backward {backward}"
            got = f"sums of absolute values: {join_differences(differing)}"
            fix = "load weights on all ranks or on none, and train with the same learning rate on every rank"
            raise RankFaultError(explain(where, "the same on every rank", got, fix))


class GradientAverage:
    """Collects the gradients of some parameters in backward, and averages them when ``Averages`` ends, while it exists.

    Nothing is collected on one process, whose gradients are the averages.
    """

    def __init__(self, averages: "Averages", checks: DeferredChecks) -> None:
        self.parameters: list[Parameter] = []
        """The parameters that are trained now."""
        self.telemetry = StepTelemetry()
        """Of the batch of the newest forward, in which the averaging is counted."""
        self._averages = averages
        self._number = averages.add(self)
        self._checks = checks
        self._dtypes: list[torch.dtype] = []
        self._buffers: list[_Buffer] = []
        self._grads: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor | None] = {}
        self._backwards = 0
        self._handles: list[RemovableHandle] = []

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Average these parameters from now on: the trained ones may be frozen, replaced or converted between steps."""
        if self._follows(parameters):
            self._refuse_other_hooks()
            return
        for parameter in parameters:
            if parameter.is_complex():
                raise InputError(explain("parameters", "real numbers", str(parameter.dtype), "split them into two"))
        self.detach()
        self.parameters = list(parameters)
        self._dtypes = [parameter.dtype for parameter in parameters]
        if self._averages.size == 1:
            return
        of_types: dict[object, list[Parameter]] = {}
        for parameter in reversed(self.parameters):
            of_types.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._buffers = [
            _Buffer((_TAGS_PER_MODULE * self._number + number) % _NUM_TAGS, part)
            for number, part in enumerate(of_types.values())
        ]
        self._refuse_other_hooks()
        for parameter in self.parameters:
            self._handles += [
                parameter.register_hook(partial(_weakly(self._before), ref(parameter))),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(_weakly(self._after)),  # type: ignore[no-untyped-call]
            ]

    def _follows(self, parameters: Sequence[Parameter]) -> bool:
        same = len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters))
        return same and self._dtypes == [parameter.dtype for parameter in parameters]

    def _refuse_other_hooks(self) -> None:
        """Refuse user hooks on the parameters: they would get this rank's gradients, before they are averaged."""
        if self._averages.size == 1:
            return
        ours = 1 if self._handles else 0
        for parameter in self.parameters:
            tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
            if any(len(table or ()) > ours for table in tables):
                fix = "work on p.grad after backward; a parameter belongs to one wrapped model"
                got = "user hooks, which would get one rank's gradient"
                raise InputError(explain("parameters", "no hooks but the average's", got, fix))

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.parameters = []

    def recover(self) -> None:
        """Discard the gradients of a backward that failed, and restore the accumulated ones."""
        if self._aside:
            for parameter in self.parameters:
                if id(parameter) in self._aside:
                    parameter.grad = self._aside[id(parameter)]
        self._grads = {}
        self._aside = {}

    def _before(self, parameter: "ref[Parameter]", grad: Tensor | None) -> None:
        """Called with the gradient of a parameter, before it is added to the accumulated one, which is put aside.

        It is None if a function has none for its input, and then nothing is added.
        """
        if self._averages.is_paused:
            return
        if grad is not None and grad.layout != torch.strided:
            fix = "use dense gradients (sparse=False)"
            raise InputError(explain("gradient", "a dense tensor", str(grad.layout), fix))
        self._averages.begin()
        found = parameter()
        assert found is not None
        self._aside.setdefault(id(found), found.grad)  # a backward inside of another may have been here
        found.grad = None

    def _after(self, parameter: Tensor) -> None:
        """Called when a parameter's gradient of this backward is complete."""
        if parameter.grad is None or self._averages.is_paused:
            return
        part = self._grads.get(id(parameter))
        self._grads[id(parameter)] = parameter.grad if part is None else part + parameter.grad
        parameter.grad = None

    @property
    def is_used(self) -> bool:
        """Whether a parameter has a gradient in this backward, on this rank."""
        return bool(self._grads)

    @property
    def was_only_read(self) -> bool:
        """Whether gradients were computed for ``torch.autograd.grad``, and not for ``.grad``."""
        return bool(self._aside) and not self._grads

    def start(self, comm: Comm) -> None:
        """Start to average the gradients of this backward."""
        with_weights = compares_weights(self._backwards)
        for number, buffer in enumerate(self._buffers):
            call = Call(f"average gradients of module {self._number}, buffer {number}", self._backwards)
            num_bytes = buffer.start(comm, call, self._grads, with_weights=with_weights)
            count_reduction(num_bytes, comm.size, self.telemetry)

    def finish(self, size: int, factor: int) -> None:
        """Add the averages to the accumulated gradients."""
        try:
            for buffer in self._buffers:
                for parameter, average in buffer.finish(size, self._checks, self._backwards, self._grads, factor):
                    before = self._aside.pop(id(parameter), parameter.grad)
                    grad = self._grads.get(id(parameter))
                    if grad is not None and grad.requires_grad:  # backward(create_graph=True)
                        with torch.enable_grad():
                            average = _FirstOrder.apply(average, grad)  # type: ignore[no-untyped-call]
                            parameter.grad = average if before is None else before + average
                    else:
                        parameter.grad = average if before is None else before.add_(average)
        finally:
            self._backwards += 1


class _FirstOrder(torch.autograd.Function):
    """An averaged gradient in ``backward(create_graph=True)``; second derivatives are not computed over the ranks."""

    @staticmethod
    def forward(ctx: Any, average: Tensor, grad: Tensor) -> Tensor:
        return average.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        fix = "leave the term with p.grad out of the loss, or train on one process"
        raise InputError(explain("backward", "first derivatives on several ranks", "a gradient of a gradient", fix))


class BackwardCheck(Protocol):
    """Looks at the first backwards of a loop (``nn.checks.first_backward``)."""

    def in_backward(self) -> None:
        """Called once in every backward, when it begins. A collective."""


class Averages:
    """The averages of all that is wrapped on a mesh; see the module."""

    def __init__(self, comm: Comm, control: Comm) -> None:
        self.size = comm.size
        self.factor = comm.size
        """Of gradients in backward, by which their sums are divided: the number of ranks, but in a comparison with one
        process, where a power of two rounds nothing."""
        self.check: BackwardCheck | None = None
        """In the first steps of a loop."""
        self.warned: set[str] = set()
        """What a user was told once."""
        self.checks = DeferredChecks()
        """Of the heads and parameters beside the models."""
        self._heads: list[tuple[ref[Module | Parameter], GradientAverage]] = []
        self.is_paused = False
        """Whether gradients are left as they are: while one rank computes alone."""
        self._comm = comm
        self._control = control
        self._slots: list[ref[GradientAverage]] = []
        self._is_running = False

    def add(self, average: GradientAverage) -> int:
        """Give an average its number, the same on every rank: all of them wrap the same in the same order."""
        self._slots.append(ref(average))
        return len(self._slots) - 1

    def replace_check(self, check: BackwardCheck | None) -> BackwardCheck | None:
        """Look at backwards with another check; returns the one before."""
        before = self.check
        self.check = check
        return before

    def add_head(self, head: Module | Parameter) -> None:
        """Average the gradients of a module beside the models, or of a parameter, while it exists."""
        self._heads.append((ref(head), GradientAverage(self, self.checks)))
        self.follow_heads()

    def remove_head(self, head: Module | Parameter) -> None:
        """Undo ``add_head``."""
        for known, average in self._heads:
            if known() is head:
                average.detach()
        self._heads = [each for each in self._heads if each[0]() is not head]

    def follow_heads(self) -> None:
        """Average what heads train now, on ranks that do not call them, too; called before every loss."""
        for known, average in self._heads:
            head = known()
            parameters = [] if head is None else [head] if isinstance(head, Parameter) else list(head.parameters())
            average.follow([parameter for parameter in parameters if parameter.requires_grad])

    @property
    def heads(self) -> list[Module]:
        """The modules beside the models that exist."""
        return [head for known, _ in self._heads if isinstance(head := known(), Module)]

    @property
    def wrapped(self) -> Iterator[GradientAverage]:
        """Those that exist."""
        return (average for slot in self._slots if (average := slot()) is not None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients as they are inside this context, in which this rank computes alone."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before

    def before_loss(self) -> None:
        """Called by every sum over the ranks, outside of backward."""
        if self._heads and torch._C._current_graph_task_id() == -1:
            self.recover()
            self.follow_heads()

    def begin(self) -> None:
        """Called in backward by losses of all ranks and by the parameters; the first call queues the end."""
        if self._is_running or self.is_paused:
            return
        if self.check is not None:
            self.check.in_backward()
        self._is_running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def recover(self) -> None:
        """Forget a backward that failed: called by forwards, of which some are inside of backward (checkpoints)."""
        if self._is_running and torch._C._current_graph_task_id() == -1:
            self._is_running = False
            for average in self.wrapped:
                average.recover()

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of backward, on every rank."""
        self._is_running = False
        if self.size == 1:
            return
        self.checks.begin_forward()
        try:
            if any(average.was_only_read for average in self.wrapped):
                got = "some, whose gradients would be this rank's own"
                fix = "call loss.backward() and read p.grad"
                raise InputError(explain("torch.autograd.grad", "no parameters of a wrapped model", got, fix))
            used = self._used()
            for average in used:
                average.start(self._comm)
            for average in used:
                average.finish(self.size, self.factor)
        finally:
            for average in self.wrapped:
                average.recover()

    def _used(self) -> list[GradientAverage]:
        """Those whose parameters have a gradient on any rank. A collective if there are several."""
        slots = [slot() for slot in self._slots]
        sizes = [0 if each is None else sum(p.numel() for p in each.parameters) for each in slots]
        counts = [float(each is not None and each.is_used) for each in slots]
        if len(slots) > 1:
            summed = torch.tensor([*counts, *map(float, sizes)], dtype=torch.float64)
            self._control.all_reduce(Call("find what has gradients"), summed).wait()  # all ranks: every backward
            counts, sums = summed.view(2, -1).tolist()
            for number, (count, mine, total) in enumerate(zip(counts, sizes, sums, strict=True)):
                if count and total != mine * self.size:
                    fix = "wrap the same models and heads on every rank, and freeze their parameters on all ranks"
                    got = f"{mine} here, {total / self.size:g} on average"
                    expected = f"as many trained numbers in wrapped module {number} on every rank"
                    raise RankFaultError(explain("averaged gradients", expected, got, fix))
            return [each for each, count in zip(slots, counts, strict=True) if each is not None and count]
        return [each for each in slots if each is not None]


def compares_weights(backward: int) -> bool:
    """Whether ranks compare their weights in a backward, by its number."""
    return backward < _ALWAYS_COMPARED or backward % COMPARE_EVERY == 0


def averages_of(mesh: Mesh) -> Averages:
    """The averages of all that is wrapped on a mesh."""
    if not mesh.averages:
        mesh.averages.append(Averages(mesh.gradients, mesh.control))
    found = mesh.averages[0]
    assert isinstance(found, Averages)
    return found


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method while its object exists: hooks of a parameter that refer to it would keep it forever."""
    weak = WeakMethod(method)

    def call(*args: Any) -> None:
        found = weak()
        if found is not None:
            found(*args)

    return call


def _differing(sums: list[float], tolerance: float) -> dict[int, str]:
    """The sums of all ranks as texts, the same for sums within a relative tolerance; empty if all are.

    >>> _differing([2.0, 2.0000001, 2.5], 1e-6)
    {0: '2', 1: '2', 2: '2.5'}
    >>> _differing([2.0, 2.0000001], 1e-6), _differing([float("nan")] * 2, 1e-6)
    ({}, {})
    """
    texts: dict[int, str] = {}
    for rank, value in enumerate(sums):
        same = (texts[other] for other in texts if abs(value - sums[other]) <= tolerance * abs(value))
        texts[rank] = next(same, f"{value:.9g}")
    return texts if len(set(texts.values())) > 1 else {}
