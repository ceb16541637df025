"""What the hooks and layers of one wrapped model share: the plan, the mesh, and the forward pass that is running.

A pre-forward hook on the model opens a ``ForwardPass`` when the model is called with a batch or with its handles; the
layers' forwards (``nn.split_forward``) run in it. A forward hook closes it and registers a check on the outputs that
the loss goes through ``batch.mean`` or ``batch.sum``. For a batch of pairs it also exchanges the output, so that its
rows are the endpoints of the rank's pairs, unless the model has called ``batch.endpoints`` itself.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch_geometric.nn import JumpingKnowledge

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.edge_handles import Handle
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.typed_batch import TypedLinkBatch
from gsplit.nn.calls import CallTemplate, LayerCall, template_of, tensors_of
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan, check_batch
from gsplit.nn.function_mode import ForwardPassMode, remove_interrupted
from gsplit.nn.gradients import GradientAverage, averages_of
from gsplit.nn.layers import layers_of
from gsplit.nn.split_forward import SplitForward, install_forward, remove_forward
from gsplit.nn.wrappers_and_hooks import OwnHook, check_callers

__all__ = ["ModelStatus", "Runtime", "StepCheck", "install_runtime", "last_template", "remove_runtime", "runtime_of"]

_MAX_NAMES = 3


class ModelParts:
    """The modules and the parameters of one model, walked again only if one was added, removed or replaced.

    A walk over a model takes longer than a small layer, and a step needs several. Every ``refresh`` compares what the
    modules hold with what they held.
    """

    def __init__(self) -> None:
        self.modules: list[Module] = []
        self.parameters: list[Parameter] = []
        self._children: list[Module | None] = []
        self._held: list[Parameter | None] = []

    def refresh(self, model: Module) -> "ModelParts":
        """The parts of the model as it is now."""
        if not self.modules or not _are_same(self._children, _children(self.modules)):
            self.modules = list(model.modules())
            self._children = _children(self.modules)
        held = [parameter for module in self.modules for parameter in module._parameters.values()]
        if not _are_same(self._held, held):
            self._held = held
            self.parameters = list(model.parameters())
        return self


def _children(modules: list[Module]) -> list[Module | None]:
    return [child for module in modules for child in module._modules.values()]


def _are_same(before: Sequence[object], now: Sequence[object]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


class ModelStatus:
    """Train/eval mode and frozen parameters of one model, as a text that must be the same on every rank.

    ``model.eval()`` on one rank only, or a parameter frozen there only, would go unnoticed or hang in backward. The
    text is part of the collective of every loss (``batch.mean``, ``batch.sum``), which is compared between ranks. Every
    forward reads every flag; the text is made again if one has changed.
    """

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._text = ""

    def describe(self, model: Module, parts: ModelParts) -> str:
        """Such as ``training, 4 of 6 parameters trained, not convs.0.lin_l.weight, convs.0.lin_l.bias``."""
        training = [module.training for module in parts.modules]
        trained = [parameter.requires_grad for parameter in parts.parameters]
        seen = (training, trained, torch.is_grad_enabled())
        if seen != self._seen:
            self._seen = seen
            self._text = _describe_status(model, training, trained)
        return self._text


def _describe_status(model: Module, training: list[bool], trained: list[bool]) -> str:
    mode = "training" if all(training) else "evaluating"
    if any(training) and not all(training):
        names = [name or "the model" for name, module in model.named_modules() if not module.training]
        mode = f"training but for {_some(names)}"
    text = f"{mode}, {sum(trained)} of {len(trained)} parameters trained"
    if not all(trained):
        text += f", not {_some([name for name, p in model.named_parameters() if not p.requires_grad])}"
    return text if torch.is_grad_enabled() else f"{text}, without gradients"


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


class StepCheck(Protocol):
    """Compares steps with one process before they are taken (``nn.checks.one_process``)."""

    def use_loss(self, loss_of: Callable[[Module, Batch], Tensor], loss_fn: object) -> None:
        """The loss of training from a model and a batch, and what it calls, if they are known."""

    def set_interval(self, every: int | None) -> None:
        """Compare also before every so many mini-batches; 0: never."""

    def compare(self, model: Module, batch: Batch, loss_of: Callable[[Module, Batch], Tensor] | None) -> str:
        """Compare now; returns the reason if that is not possible."""

    def before_forward(
        self, model: Module, runtime: "Runtime", batch: Batch, call: LayerCall, template: CallTemplate | None
    ) -> None:
        """Called before every forward on a batch with gradients."""

    def after_forward(self, batch: Batch, out: Any) -> None:
        """Called after every forward on a batch with gradients."""

    def count_evaluation(self) -> None:
        """Called when the model is evaluated."""

    def copy(self) -> Self:
        """For a copy of the model."""


class Runtime:
    """Shared by the hooks and layers of one model.

    A deep copy has the same plan and mesh and averages its own gradients. An unpickled one has neither.
    """

    def __init__(self, plan: ForwardPlan | None, mesh: Mesh | None) -> None:
        self.plan = plan
        self.mesh = mesh
        self.override: ForwardPass | None = None
        self.template: CallTemplate | None = None
        """How training called the model last; None before its first call."""
        self.step_check: StepCheck | None = None
        self.status = ""
        """``ModelStatus`` of the last forward with gradients on several ranks."""
        self._open: list[tuple[ForwardPass, ForwardPassMode] | None] = []
        self._status = ModelStatus()
        self._parts = ModelParts()
        self.checks = DeferredChecks()
        """Checks of values on a device, which arrive after the forward or backward that makes them."""
        self._own_mesh = mesh
        self._gradients: GradientAverage | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runtime":
        copied = Runtime(self.plan, self.mesh)
        copied.template = self.template
        copied.step_check = None if self.step_check is None else self.step_check.copy()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Runtime, (None, None)

    def open(self, model: Module, batch: Batch | None) -> None:
        """Begin a forward; with plain tensors (no batch) the model runs as if it were not wrapped."""
        remove_interrupted()
        while self._open:
            self.close()  # of an interrupted forward
        self._open.append(None)  # popped by ``close``, also if the rest of this function fails
        if batch is None:
            return
        check_callers(self._parts.refresh(model).modules)
        batch.context.guard.has_endpoints = False
        if self.override is not None:
            forward_pass: ForwardPass = self.override
        elif self.plan is None or self.mesh is None:
            fix = "call gsplit.parallelize(model, mesh) again"
            raise InputError(explain("the model", "a model wrapped in this process", "one loaded from a file", fix))
        else:
            self._check_mesh(batch.context.mesh, self.mesh)
            check_batch(batch, self.plan)
            self.checks.begin_forward()
            forward_pass = ForwardPass(batch, self.plan, self.checks)
            self._average_gradients(model, batch, self.mesh)
            if self._gradients is not None:
                self._gradients.telemetry = batch.telemetry
            self._attach_status(model, batch, self.mesh)
        mode = ForwardPassMode(forward_pass, sys._getframe(2))  # which calls the hook, then the forward
        forward_pass.interception = mode.resumed
        self._open[-1] = (forward_pass, mode)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def _attach_status(self, model: Module, batch: Batch, mesh: Mesh) -> None:
        """Attach train/eval state to the loss collective, where ranks compare it."""
        if mesh.size > 1:
            status = self.describe_status(model)
            if torch.is_grad_enabled():
                self.status = status
            batch.context.guard.model_mode = status
            mesh.record_model(status)

    def describe_status(self, model: Module) -> str:
        """``ModelStatus`` of the model as it is now."""
        return self._status.describe(model, self._parts.refresh(model))

    @contextmanager
    def on_mesh(self, mesh: Mesh) -> Iterator[None]:
        """Run the model on the batches of another mesh inside this context."""
        before = self.mesh
        self.mesh = mesh
        try:
            yield
        finally:
            self.mesh = before

    def _check_mesh(self, other: Mesh, mesh: Mesh) -> None:
        """Refuse a batch of other ranks: gradients would be averaged over ranks that do not share it."""
        if other.world is not mesh.world and max(other.size, mesh.size) > 1:
            expected = f"a batch of the model's mesh of {mesh.size} ranks"
            got = f"one of another mesh, of {other.size}"
            fix = "give the same mesh to gsplit.parallelize and to the loader"
            raise InputError(explain("the model", expected, got, fix))

    def parameters(self, model: Module) -> list[Parameter]:
        """The parameters of the model as it is now, without a walk over it if nothing was replaced."""
        return self._parts.refresh(model).parameters

    def close(self) -> None:
        """End a forward, also one that failed, or that was refused before it began."""
        opened = self._open.pop() if self._open else None
        if opened is not None:
            opened[1].close()
            opened[0].close()

    def current(self) -> ForwardPass | None:
        """The forward pass that is running on a batch."""
        return self._open[-1][0] if self._open and self._open[-1] is not None else None

    def run_layer(self, split: SplitForward, handle: Handle[Batch], call: LayerCall) -> Any:
        """Run a layer in the current forward pass, which must be on the handle's batch."""
        opened = self._open[-1] if self._open else None
        if opened is None or opened[0].batch is not handle.batch:
            fix = "call the whole wrapped model; activation checkpointing of layers is not supported"
            got = "a call outside of it" if opened is None else "the edges of another batch"
            raise InputError(explain("a layer", "a call from within the wrapped model's forward", got, fix))
        forward_pass, mode = opened
        with mode.suspended():
            return forward_pass.run_layer(split, call)

    def _average_gradients(self, model: Module, batch: Batch, mesh: Mesh) -> None:
        """Average the gradients of the parameters that require them now; the set may change between steps."""
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:
            fix = "leave the wrapped model out of torch.utils.checkpoint"
            raise InputError(explain("the model", "a forward outside of backward", "activation checkpointing", fix))
        averages = averages_of(mesh)
        averages.recover()
        batch.context.guard.averages = averages
        self.follow(model)

    def follow(self, model: Module) -> None:
        """Average the gradients of the parameters that are trained now."""
        if self._gradients is None and self._own_mesh is not None:  # all ranks: a deep copy's first forward
            self._gradients = GradientAverage(averages_of(self._own_mesh), self.checks)
        assert self._gradients is not None
        self._gradients.follow([p for p in self.parameters(model) if p.requires_grad])

    def release(self) -> None:
        """Remove the hooks on the parameters."""
        if self._gradients is not None:
            self._gradients.detach()


class _RuntimeHook(OwnHook):
    """A hook that can be copied and pickled with its model."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime


class _EnterModel(_RuntimeHook):
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = _find_batch([*args, *kwargs.values()])
        template = self.runtime.template
        if batch is not None and self.runtime.override is None and torch.is_grad_enabled():
            template = template_of((args, kwargs), batch)  # before torch functions are intercepted
            if self.runtime.step_check is not None:
                of_batch = template if template.is_of_batch else None
                self.runtime.step_check.before_forward(module, self.runtime, batch, (args, kwargs), of_batch)
        self.runtime.open(module, batch)
        self.runtime.template = template


class _LeaveModel(_RuntimeHook):
    def __call__(self, module: Module, args: tuple[Any, ...], out: Any) -> Any:
        forward_pass = self.runtime.current()
        self.runtime.close()
        if forward_pass is None or out is None:  # plain tensors, or a forward that failed
            return None
        batch = forward_pass.batch
        if isinstance(batch, LinkBatch) and not batch.context.guard.has_endpoints:
            out = _exchange_output(batch, out)
            batch.context.guard.has_endpoints = False  # the model has not called for them
        if torch.is_grad_enabled():
            for tensor in tensors_of(out):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(batch.context.guard.require_reached)
            if self.runtime.step_check is not None:
                self.runtime.step_check.after_forward(batch, out)
        return out


def _exchange_output(batch: LinkBatch, out: Any) -> Any:
    """The endpoints' rows from the output of a model that does not decode pairs itself. A collective."""
    if isinstance(batch, TypedLinkBatch):
        return batch.endpoints(out)
    if not isinstance(out, Tensor) or out.dim() == 0 or out.size(0) != batch.num_targets:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        fix = "return the rows of the last layer, or call batch.endpoints(h) in forward before decoding pairs"
        raise InputError(explain("the model's output", f"a tensor [{batch.num_targets}, ...]", got, fix))
    return batch.endpoints(out)


class _TrimToTargets(_RuntimeHook):
    """Jumping knowledge joins the outputs of all layers: on blocks, the rows they have in common, the targets."""

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outs = args[0] if args else kwargs["xs"]
        fewest = min(out.size(0) for out in outs)
        return ([out[:fewest] for out in outs],), {}


def _find_batch(values: list[Any]) -> Batch | None:
    for value in values:
        if isinstance(value, Batch):
            return value
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, Handle):
                batch: Batch = each.batch
                return batch
    return None


def remove_runtime(model: Module) -> None:
    """Undo an earlier wrapping, also that of a model loaded from a file."""
    for module in model.modules():
        remove_forward(module)
        ours = {n: h for hooks in _hook_tables(module)[:2] for n, h in hooks.items() if isinstance(h, _RuntimeHook)}
        for number, hook in ours.items():
            hook.runtime.release()
            for table in _hook_tables(module):
                table.pop(number, None)


def _hook_tables(module: Module) -> list[dict[int, Any]]:
    """Where torch keeps forward hooks: two tables of hooks, then tables of their options by the same ids."""
    names = ("hooks", "pre_hooks", "hooks_with_kwargs", "hooks_always_called", "pre_hooks_with_kwargs")
    return [getattr(module, f"_forward_{name}") for name in names]


def install_runtime(model: Module, runtime: Runtime) -> None:
    """Hook the model and its jumping knowledge, and replace the forwards of its message-passing layers."""
    # first, so that other hooks, which may change the arguments, are part of the model
    model.register_forward_pre_hook(_EnterModel(runtime), with_kwargs=True, prepend=True)
    for name, layer in layers_of(model).items():
        install_forward(layer, name, runtime)
    for module in model.modules():
        if isinstance(module, JumpingKnowledge):
            module.register_forward_pre_hook(_TrimToTargets(runtime), with_kwargs=True)
    model.register_forward_hook(_LeaveModel(runtime), always_call=True)


def last_template(model: Module) -> CallTemplate | None:
    """How a model that was wrapped before was called last."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _EnterModel):
            return hook.runtime.template
    return None


def runtime_of(model: Module) -> Runtime:
    """The runtime of a wrapped model."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _EnterModel) and hook.runtime.plan is not None:
            return hook.runtime
    fix = "call gsplit.parallelize(model, mesh) first"
    raise InputError(explain("the model", "a wrapped model", f"a plain {type(model).__name__}", fix))
