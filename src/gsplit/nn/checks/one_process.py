"""Compares the loss and the gradients of all ranks with those of one process, on the model as it trains.

A model can compute something else on several ranks without failing: code that depends on the number or the order of a
rank's rows, a backward pass that mixes rows, state that is kept between calls, a loss of one rank's rows. So the first
step of a training is preceded by two steps on small mini-batches of its graph (``SmallBatches``), with the model itself
in its mode: rank 0 takes them alone, then all ranks take them together. The second mini-batch has other targets, twice
as many, and sees what the model has kept from the first. If a loss or a gradient differs, every rank raises, with the
layer where the difference begins.

Everything is left as it was: weights and buffers are replaced by copies meanwhile, in float64 if the model runs in it,
and attributes of modules and of the loss function, and random generators, are restored. One process has nothing to
compare.
"""

import json
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gsplit.device.devices import fork_random_states
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch, BatchContext
from gsplit.nn.calls import CallTemplate, LayerCall, dtype_of, tensors_of
from gsplit.nn.checks.first_backward import FirstBackward
from gsplit.nn.checks.output_loss import OutputLoss
from gsplit.nn.gradients import averages_of
from gsplit.nn.layers import layers_of
from gsplit.nn.runtime import Runtime, runtime_of
from gsplit.nn.wrappers_and_hooks import OwnHook

__all__ = ["LossOfBatch", "OneProcessCheck", "TrainedSteps", "run_steps"]

LossOfBatch = Callable[[Module, Batch], Tensor]
"""The loss of a mini-batch, equal on all ranks, from a wrapped model and the batch."""
_MOST_BYTES = 1 << 28
"""Size of the parameters up to which their copies are in float64."""
_MOST_CHARACTERS = 500
_NUM_WATCHED = 2
"""Forwards of a loop whose backward is looked at: the second one sees what the loop has kept from the first."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedSteps:
    """The losses of some steps, the gradients of all parameters in all of them, and the last buffers, on the host.

    ``names``: of the parameters. ``lowest``: the floating type with the fewest digits that a step has computed in.
    """

    losses: Tensor
    gradients: list[Tensor]
    buffers: list[Tensor]
    names: list[str]
    lowest: torch.dtype

    def distances(self, other: "TrainedSteps") -> tuple[float, float, float]:
        """The largest absolute differences of losses, gradients and buffers."""
        return (
            _distance([self.losses], [other.losses]),
            _distance(self.gradients, other.gradients),
            _distance(self.buffers, other.buffers),
        )

    @property
    def largest(self) -> tuple[float, float, float]:
        """The largest absolute loss, gradient and buffer."""
        return (_largest([self.losses]), _largest(self.gradients), _largest(self.buffers))

    def differences(self, other: "TrainedSteps", tolerance: float) -> str:
        """What differs from another run by more than a tolerance, which is relative; empty if nothing does."""
        largest = _largest(self.gradients) or 1.0
        found = []
        of_loss = _distance([self.losses], [other.losses]) / max(1.0, float(self.losses.abs().max()))
        if not of_loss <= tolerance:  # or NaN
            found.append(f"a loss that differs by {of_loss:.1e}")
        for place, (ours, theirs) in enumerate(zip(other.gradients, self.gradients, strict=True)):
            of_gradient = _distance([ours], [theirs]) / largest
            if not of_gradient <= tolerance:
                name = self.names[place % len(self.names)]
                found.append(f"a gradient of {name} that differs by {of_gradient:.1e} of the largest")
                break
        return " and ".join(found)


def _distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest absolute difference; NaN if any difference is NaN."""
    pairs = [(a - b).abs().max() for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return float(torch.stack(pairs).max()) if pairs else 0.0


def _largest(tensors: list[Tensor]) -> float:
    """The largest absolute value."""
    return _distance(tensors, [torch.zeros_like(tensor) for tensor in tensors])


def run_steps(
    model: Module, batches: Iterable[Batch], loss_of: LossOfBatch, lr: float = 0.0, *, beside: Sequence[Module] = ()
) -> TrainedSteps:
    """Forward and backward of every mini-batch, then gradient descent whose largest change is ``lr``.

    ``beside``: modules that are trained with the model. A collective on several ranks.
    """
    losses: list[float] = []
    gradients: list[Tensor] = []
    named = dict(model.named_parameters())
    for number, head in enumerate(beside):
        named |= {f"{name} of head {number}": parameter for name, parameter in head.named_parameters()}
    lowest = torch.float64
    for batch in batches:
        value = loss_of(model, batch)
        lowest = _lowest_type([lowest, *_types_of(value)])
        value.backward()
        losses.append(float(value.detach()))
        for parameter in named.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(gradient.detach().to("cpu", torch.float64, copy=True))
        if lr:
            _descend(list(named.values()), lr)
        for module in (model, *beside):
            module.zero_grad()
    buffers = [buffer.detach().to("cpu", torch.float64, copy=True) for buffer in model.buffers()]
    return TrainedSteps(torch.tensor(losses, dtype=torch.float64), gradients, buffers, list(named), lowest)


def _types_of(value: Tensor) -> set[torch.dtype]:
    """The types of all tensors that a value was computed from, by autograd. Not public in torch."""
    found: set[torch.dtype] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.update(each.dtype for each in node._input_metadata if each is not None)
            waiting += [below for below, _ in node.next_functions]
    return found


def _lowest_type(types: Iterable[torch.dtype]) -> torch.dtype:
    return max((each for each in types if each.is_floating_point), key=lambda each: torch.finfo(each).eps)


@torch.no_grad()
def _descend(parameters: list[Parameter], lr: float) -> None:
    """Move against the gradient, by ``lr`` where it is largest."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    largest = _largest(gradients)
    for parameter in parameters:
        if parameter.grad is not None and largest > 0:
            parameter.sub_(parameter.grad, alpha=lr / largest)


class OneProcessCheck:
    """When the steps of a wrapped model are compared with one process, and the comparison.

    Before the first step, also with another loss, after the first evaluation, when other parameters are trained or the
    mode is another than before, and before every ``every`` mini-batches. ``every=0``: never. All ranks decide the same:
    mode and trained parameters are part of the collective of every loss, so the comparison comes one step after they
    have changed.
    """

    def __init__(self, every: int | None) -> None:
        self.set_interval(every)
        self._loss_of: LossOfBatch | None = None
        self._loss_fn: object = None
        self._num_batches = 0
        self._last: ref[BatchContext] | None = None
        self._compared: set[str] = set()
        self._evaluations = 0
        self._is_running = False
        self._has_warned = False
        self._watches = True  # the steps that are compared, because they have the loss of training

    def set_interval(self, every: int | None) -> None:
        if every is not None and every < 0:
            fix = "leave it out to compare the first step, or give 0 to compare none"
            raise InputError(explain("verify_every", "a number of mini-batches", every, fix))
        self._every = every

    def use_loss(self, loss_of: LossOfBatch, loss_fn: object) -> None:
        """The loss of the steps that follow, and what it calls, whose state is restored."""
        if loss_of != self._loss_of:
            self._loss_of = loss_of
            self._loss_fn = loss_fn
            self._compared.clear()

    def copy(self) -> "OneProcessCheck":
        """For a copy of the model, which is compared by itself."""
        return OneProcessCheck(self._every)

    def count_evaluation(self) -> None:
        """After the first evaluation the next step is compared again."""
        self._evaluations += 1
        if self._evaluations == 1:
            self._compared.clear()

    def before_forward(
        self, model: Module, runtime: Runtime, batch: Batch, call: LayerCall, template: CallTemplate | None
    ) -> None:
        """Called before every forward on a batch with gradients. A collective if a check is due."""
        mesh = runtime.mesh
        if self._every == 0 or mesh is None:
            return
        if self._is_running:
            is_due = self._watches and mesh.size > 1
        else:
            is_other = self._last is None or self._last() is not batch.context
            self._last = ref(batch.context)
            number = self._num_batches
            self._num_batches += is_other
            is_due = is_other and mesh.size > 1 and self._compare_if_due(model, runtime, batch, template, number)
            is_due = (is_due or (is_other and number < _NUM_WATCHED)) and (self._loss_of is None or mesh.size == 1)
        current = averages_of(mesh).check
        is_of_batch = template is not None
        if isinstance(current, FirstBackward) and current.before_forward(batch, call, is_of_batch=is_of_batch):
            return  # of another model in the same step
        if is_due:
            FirstBackward(mesh).before_forward(batch, call, is_of_batch=is_of_batch)

    def _compare_if_due(
        self, model: Module, runtime: Runtime, batch: Batch, template: CallTemplate | None, number: int
    ) -> bool:
        """Compare the step that follows with one process if that is due; whether it is. A collective."""
        mesh = runtime.mesh
        assert mesh is not None
        status = runtime.status  # of the forward before, which ranks have compared
        if number == 0:  # all ranks: their first forward
            status = runtime.describe_status(model)
            text = f"{status}, {batch.key}, loader {batch.context.loader}"
            if len(set(mesh.control.gather_text(Call("compare ranks before the first step"), text))) > 1:
                return False  # the next collectives tell in what they differ
        if status in self._compared and not (self._every is not None and number % self._every == 0):
            return False
        self._compared.add(status)
        self._watches = self._loss_of is not None
        try:
            reason = self.compare(model, batch, self._loss_of or (None if template is None else OutputLoss(template)))
        finally:
            self._watches = True
        if reason and mesh.rank == 0 and not self._has_warned:
            _LOG.warning(
                "the first step was not compared with one process: %s. To compare it: "
                "gsplit.verify_step(model, loss_of, batch)",
                " ".join(reason.split()).rstrip("."),
            )
            self._has_warned = True
        return True

    def after_forward(self, batch: Batch, out: Any) -> None:
        """Called after every forward on a batch with gradients."""
        check = batch.context.guard.check
        if isinstance(check, FirstBackward):
            check.after_forward(batch, out)

    def compare(self, model: Module, batch: Batch, loss_of: LossOfBatch | None) -> str:
        """Compare; every rank raises if there is a difference. ``batch``: one of the loader's. A collective.

        Returns the reason if it was not possible, the same on every rank.
        """
        runtime = runtime_of(model)
        mesh = runtime.mesh
        if mesh is None or mesh.size == 1:
            return ""
        make = None if batch.context.small_batches is None else batch.context.small_batches()
        if make is None:
            return "the loader of its mini-batch does not exist any more"
        if loss_of is None:
            return "the model was called with tensors that are not the mini-batch's, such as a changed batch.x"
        loss_fn = self._loss_fn if loss_of == self._loss_of else loss_of
        averages = averages_of(mesh)
        before = averages.replace_check(None)  # of another model in this step
        self._is_running = True
        try:
            return _Comparison(model, runtime, mesh, lambda alone: make(alone=alone), loss_of, loss_fn).run()
        finally:
            self._is_running = False
            last = averages.replace_check(before)
            if isinstance(last, FirstBackward):
                last.end()


@dataclass(frozen=True)
class _Comparison:
    """One comparison; see the module."""

    model: Module
    runtime: Runtime
    mesh: Mesh
    batches: Callable[[bool], Iterator[Batch]]
    loss_of: LossOfBatch
    loss_fn: object

    def run(self) -> str:
        """Take the steps alone and together, and compare; the reason if that is not possible. A collective."""
        self.runtime.checks.finish()  # of training, on all ranks: those of rank 0 must not be run in its steps alone
        own = dtype_of(self.model.parameters())
        size = 8 * sum(parameter.numel() for parameter in self.model.parameters())
        dtypes = [own] if size > _MOST_BYTES else list(dict.fromkeys([torch.float64, own]))
        if size > _MOST_BYTES << 4:
            return f"its parameters would take {size:,} bytes in float64"
        alone: TrainedSteps | None = None
        reason = ""
        dtype = own
        outputs = self.loss_of if isinstance(self.loss_of, OutputLoss) else None
        if self.mesh.rank == 0:
            for dtype in dtypes:
                try:
                    alone = self._steps(dtype, alone=True)
                    if outputs is not None and outputs.is_undecided:
                        outputs.used.clear()
                        alone = self._steps(dtype, alone=True)
                    reason = "" if bool(alone.losses.isfinite().all()) else f"its loss is {alone.losses.tolist()}"
                    break
                except Exception as error:  # of the model, or no whole graph here: training itself will tell
                    reason = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
        choice = [[], []] if outputs is None else [list(outputs.left_out), list(outputs.used)]
        told = json.dumps([reason, str(dtype), *choice])
        # all ranks wait for rank 0
        told = self.mesh.control.gather_text(Call("take small steps on one process", long_wait=True), told)[0]
        reason, name, left_out, used = json.loads(told)
        if reason:
            return str(reason)
        dtype = getattr(torch, name.removeprefix("torch."))
        if outputs is not None:
            outputs.left_out.update(left_out)
            outputs.used.update(used)
        together = self._steps(dtype, alone=False)
        tolerance = _tolerance(dtype, dtype if alone is None else alone.lowest)
        found = "" if alone is None else alone.differences(together, tolerance)
        told = json.dumps([found, outputs is not None and outputs.is_undecided])
        of_ranks = self.mesh.control.gather_text(Call("compare small steps", long_wait=True), told)
        if any(is_undecided for _, is_undecided in map(json.loads, of_ranks)):
            return "an output has a row per target in some of its mini-batches only"
        found = json.loads(of_ranks[0])[0]
        if found:
            raise InputError(self._explain(found, self._first_layer(dtype, tolerance)))
        return ""

    def _explain(self, found: str, where: str) -> str:
        fix = (
            "let a row depend on no other row of its rank, nor on their number or order, nor on the rank, in forward, "
            "backward and loss (docs/verify.md); verify_every=0 leaves this comparison out"
        )
        expected = "the loss and the gradients of one process"
        return explain(f"the step of {self.mesh.size} ranks", expected, f"{found}{where}", fix)

    def _steps(self, dtype: torch.dtype, *, alone: bool) -> TrainedSteps:
        """The steps with copies of weights and buffers, on the ranks or on one process."""
        mesh = solo_mesh(self.mesh.device) if alone else self.mesh
        averages = averages_of(self.mesh)
        heads = averages.heads
        wrapped = [parameter for average in averages.wrapped for parameter in average.parameters]
        copied = _copied_state(_owners([self.model, *heads], self.loss_fn), wrapped, dtype, self.mesh.device)
        waiting = averages.paused() if alone else nullcontext()
        try:
            with waiting, copied, self.runtime.on_mesh(mesh), torch.enable_grad():
                steps = run_steps(self.model, self._small_batches(dtype, alone=alone), self.loss_of, beside=heads)
        finally:
            averages.factor = self.mesh.size
            averages.follow_heads()
        self.runtime.checks.finish()  # on a device a rank is told later what all of them must raise here
        return steps

    def _small_batches(self, dtype: torch.dtype, *, alone: bool) -> Iterator[Batch]:
        for batch in self.batches(alone):
            averages_of(self.mesh).factor = self._factor
            yield batch.cast(dtype)

    @property
    def _factor(self) -> int:
        """Of gradients in place of the number of ranks: a power of two, since others are rounded in a lower type.

        It is not 1, because a backward that clamps depends on it.
        """
        return 1 << (self.mesh.size - 1).bit_length()

    def _first_layer(self, dtype: torch.dtype, tolerance: float) -> str:
        """Where the difference begins: the steps are repeated, with sums over the outputs of every layer."""
        alone = _LayerSums(1)
        if self.mesh.rank == 0:
            with alone.recording(self.model):
                self._steps(dtype, alone=True)
        ranks = _LayerSums(self._factor)
        with ranks.recording(self.model):
            self._steps(dtype, alone=False)
        texts = self.mesh.control.gather_text(Call("compare layers", long_wait=True), json.dumps(ranks.sums))
        found = "" if self.mesh.rank else alone.first_difference([json.loads(text) for text in texts], tolerance)
        return self.mesh.control.gather_text(Call("name the layer", long_wait=True), found)[0]


def _tolerance(dtype: torch.dtype, lowest: torch.dtype) -> float:
    """The largest difference of a loss, relative to it or to 1, and of a gradient, relative to the largest.

    ``dtype``: of the weights; ``lowest``: of all that was computed, in pieces that convert rows or by autocast.
    """
    if dtype == torch.float64:
        return {torch.float64: 1e-9, torch.float32: 1e-6}.get(lowest, 1e-2)
    return 1e-3 if lowest == torch.float32 else 5e-2


class _LayerSums:
    """Sums of squares of the outputs of message-passing layers and of their gradients, in the order of the calls."""

    def __init__(self, factor: int) -> None:
        self._factor = factor
        self.sums: dict[str, float] = {}

    @contextmanager
    def recording(self, model: Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, layer in layers_of(model).items():
                hooks.callback(layer.register_forward_hook(_SumOutputs(name, self)).remove)
            yield

    def add(self, what: str, rows: Tensor) -> None:
        self.sums[f"{what} {len(self.sums)}"] = float(rows.detach().double().square().sum())

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        self.add(f"gradients of the outputs of {name}", gradient / self._factor)

    def first_difference(self, of_ranks: list[dict[str, float]], tolerance: float) -> str:
        """What is the first to differ from the sums over all ranks, which have each row once.

        Empty if sums agree, or if ranks compute the same rows (``data``).
        """
        for what, value in self.sums.items():
            total = sum(sums.get(what, 0.0) for sums in of_ranks)
            if not abs(total - value) <= 10 * tolerance * abs(value):
                return f"; the {what.rpartition(' ')[0]} are the first to differ"
        return ""


class _SumOutputs(OwnHook):
    def __init__(self, name: str, sums: _LayerSums) -> None:
        self._name = name
        self._sums = sums

    def __call__(self, layer: Module, args: Any, out: Any) -> None:
        for rows in tensors_of(out):
            self._sums.add(f"outputs of {self._name}", rows)
            if rows.requires_grad:
                rows.register_hook(partial(self._sums.add_gradient, self._name))


def _owners(models: list[Module], loss_fn: object) -> list[Any]:
    """What a step may change: the modules of models, and the loss function if it is an object or a method of one."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    more = list(owner.modules()) if isinstance(owner, Module) else [owner]
    distinct = {
        id(each): each for each in [*(module for model in models for module in model.modules()), *more]
    }.values()
    return [each for each in distinct if hasattr(each, "__dict__") and not isinstance(each, _WITHOUT_STATE)]


@contextmanager
def _copied_state(
    owners: list[Any], wrapped: list[Parameter], dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """Replace the parameters, buffers and attributes of objects by copies; restore them and the generators.

    The tables of modules are changed and not their attributes: an LSTM also has a list of its parameters, which it
    changes when an attribute is set. Meanwhile the parameters themselves, and others that are ``wrapped``, require no
    gradient: a loss may hold them.
    """
    modules = [each for each in owners if isinstance(each, Module)]
    tables = [(table, dict(table)) for each in modules for table in (each._parameters, each._buffers)]
    states = [(vars(each), dict(vars(each))) for each in owners]
    tensors = [tensor for _, table in tables for tensor in table.values() if tensor is not None]
    found = {id(each): each for each in (*tensors, *wrapped) if isinstance(each, Parameter) and each.requires_grad}
    trained = list(found.values())
    copies: dict[int, Any] = {id(each): each for each in owners}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with fork_random_states(device):
            copies |= {id(tensor): _copy(tensor, dtype) for tensor in tensors}
            for parameter in trained:
                parameter.requires_grad_(False)
            for table, saved in tables:
                table.update({name: copies[id(tensor)] for name, tensor in saved.items() if tensor is not None})
            for state, saved in states:
                for name in saved.keys() - _MODULE_ATTRIBUTES:
                    state[name] = _copy_attribute(saved[name], dtype, copies)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for parameter in trained:
            parameter.requires_grad_(True)
        for table, saved in [*tables, *states]:
            table.clear()
            table.update(saved)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    copied = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
    return Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied


def _copy_attribute(value: Any, dtype: torch.dtype, copies: dict[int, Any]) -> Any:
    """A copy of what a call may change; ``copies``: what it may refer to by id, with its copies."""
    if isinstance(value, Tensor):
        return _copy(value, dtype)
    if type(value) is tuple:
        return tuple(copies.get(id(each), each) for each in value)
    if not isinstance(value, _CHANGED_IN_PLACE):
        return value
    try:
        return deepcopy(value, dict(copies))
    except Exception:  # of what it holds, such as tensors of a graph of autograd
        return copy(value)


_MODULE_ATTRIBUTES = frozenset(vars(Module()))
_CHANGED_IN_PLACE = (list, dict, set, deque, random.Random, np.random.Generator, np.random.RandomState)
"""Attributes that are copied; those of other types are not expected to change in a call."""
_WITHOUT_STATE = (FunctionType, ModuleType, type)
