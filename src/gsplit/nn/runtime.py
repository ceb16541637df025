"""Hooks on a wrapped model and its layers, and what they share: the plan, the mesh, the forward pass that is running.

The model's own hook opens a ``ForwardPass`` when it is called with a batch's ``edge_index`` (or with a batch); each
layer's hook puts the layer's rows and edges in place of the model's. When the forward is over, a hook on its output
sees to it that the loss goes through ``batch.mean`` or ``batch.sum``.
"""

from typing import Any

import torch
from torch.nn import Module
from torch_geometric.nn import JumpingKnowledge

from gsplit.batch import Batch
from gsplit.devices import DeferredChecks
from gsplit.distributed.mesh import Mesh
from gsplit.edge_handles import EdgeHandle, Handle
from gsplit.errors import InputError, explain
from gsplit.nn.calls import CallTemplate, template_of, tensors_of
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan, check_batch
from gsplit.nn.function_mode import ForwardPassMode
from gsplit.nn.gradients import GradientAverage
from gsplit.nn.hooks import Hook
from gsplit.nn.layers import layers_of
from gsplit.nn.model_mode import ModelMode
from gsplit.nn.wrappers import check_callers

__all__ = ["Runtime", "install_hooks", "last_template", "remove_hooks", "runtime_of"]


class Runtime:
    """State shared by the hooks of one model: its plan, its mesh, and the forward pass that is running.

    A deep copy has the same plan and mesh, and averages its own gradients; a pickled one has lost both.
    """

    def __init__(self, plan: ForwardPlan | None, mesh: Mesh | None) -> None:
        self.plan, self.mesh = plan, mesh
        self.override: ForwardPass | None = None
        self.template: CallTemplate | None = None
        """How training called the model last."""
        self._open: list[tuple[ForwardPass, ForwardPassMode] | None] = []
        self._gradients: GradientAverage | None = None
        self._mode = ModelMode()
        self.checks = DeferredChecks()
        """Of values on a device, which come later than the forward or backward that makes them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runtime":
        copied = Runtime(self.plan, self.mesh)
        copied.template = self.template
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Runtime, (None, None)

    def open(self, model: Module, batch: Batch | None) -> None:
        """Begin a forward; with plain tensors the model runs as if it were not wrapped."""
        while self._open:
            self.close()  # left by an interrupt
        self._open.append(None)  # what ``close`` takes away, whatever happens here
        if batch is None:
            return
        check_callers()
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
            self._watch_gradients(model, self.mesh)
            self._note_mode(model, batch, self.mesh)
        mode = ForwardPassMode(forward_pass)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._open[-1] = (forward_pass, mode)

    def _note_mode(self, model: Module, batch: Batch, mesh: Mesh) -> None:
        """Have it compared between the ranks, with the loss, how the model stands."""
        if mesh.size > 1:
            batch.context.guard.model = self._mode.describe(model)
            mesh.record_model(batch.context.guard.model)

    def _check_mesh(self, other: Mesh, mesh: Mesh) -> None:
        """Refuse a batch of other ranks: gradients would be averaged over ranks that do not share it."""
        if other.world is not mesh.world and max(other.size, mesh.size) > 1:
            expected = f"a batch of the model's mesh of {mesh.size} ranks"
            got = f"one of another mesh, of {other.size}"
            fix = "give the same mesh to gsplit.parallelize and to the loader"
            raise InputError(explain("the model", expected, got, fix))

    def close(self) -> None:
        """End a forward, also one that failed."""
        opened = self._open.pop()
        if opened is not None:
            opened[0].close()
            opened[1].__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def current(self) -> ForwardPass | None:
        """The forward pass that is running on a batch."""
        return self._open[-1][0] if self._open and self._open[-1] is not None else None

    def forward_pass_of(self, handle: Handle[Batch]) -> ForwardPass:
        """The forward pass in which a layer is called."""
        forward_pass = self.current()
        if forward_pass is None or forward_pass.batch is not handle.batch:
            fix = "call the whole wrapped model; activation checkpointing of layers is not supported"
            got = "a call outside of it" if forward_pass is None else "the edges of another batch"
            raise InputError(explain("a layer", "a call from within the wrapped model's forward", got, fix))
        return forward_pass

    def _watch_gradients(self, model: Module, mesh: Mesh) -> None:
        """Average gradients of the parameters that require them now; which these are may change between steps."""
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:
            fix = "leave the wrapped model out of torch.utils.checkpoint"
            raise InputError(explain("the model", "a forward outside of backward", "activation checkpointing", fix))
        if mesh.size == 1:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        watched = self._gradients
        if watched is not None:
            watched.recover()
            if len(trained) == len(watched.parameters) and all(map(_is, trained, watched.parameters)):
                watched.refuse_other_hooks()
                return
            watched.detach()
        self._gradients = GradientAverage(trained, mesh.gradients, self.checks, next(mesh.model_numbers))

    def release(self) -> None:
        """Take the hooks off the parameters."""
        if self._gradients is not None:
            self._gradients.detach()


def _is(a: object, b: object) -> bool:
    return a is b


class _Hook(Hook):
    """A hook that can be copied and pickled with its model."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name


class _Enter(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = _find_batch([*args, *kwargs.values()])
        self.runtime.open(module, batch)
        if batch is not None and self.runtime.override is None and torch.is_grad_enabled():
            self.runtime.template = template_of((args, kwargs), batch)


class _Leave(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        forward_pass = self.runtime.current()
        self.runtime.close()
        if forward_pass is not None and torch.is_grad_enabled():
            guard = forward_pass.batch.context.guard
            for tensor in tensors_of(out):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(guard.check)


class _EnterLayer(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle = next((a for a in [*args, *kwargs.values()] if isinstance(a, EdgeHandle)), None)
        if handle is None:
            return None
        return self.runtime.forward_pass_of(handle).enter_layer(self.name, module, (args, kwargs))


class _LeaveLayer(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], out: Any) -> Any:
        forward_pass = self.runtime.current()
        return out if forward_pass is None or forward_pass.inside != self.name else forward_pass.leave_layer(out)


class _TrimToTargets(_Hook):
    """Jumping knowledge joins the outputs of all layers: on blocks, the rows they have in common, the targets."""

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outs = args[0] if args else kwargs["xs"]
        fewest = min(out.size(0) for out in outs)
        return ([out[:fewest] for out in outs],), {}


def _find_batch(values: list[Any]) -> Batch | None:
    for value in values:
        if isinstance(value, Batch):
            return value
        if isinstance(value, Handle):
            batch: Batch = value.batch
            return batch
    return None


def remove_hooks(model: Module) -> None:
    """Undo an earlier wrapping, also that of a model loaded from a file."""
    for module in model.modules():
        ours = {n: h for hooks in _hook_tables(module)[:2] for n, h in hooks.items() if isinstance(h, _Hook)}
        for number, hook in ours.items():
            hook.runtime.release()
            for table in _hook_tables(module):
                table.pop(number, None)


def _hook_tables(module: Module) -> list[dict[int, Any]]:
    """Where torch keeps forward hooks: two tables of hooks, then tables of their options by the same ids."""
    names = ("hooks", "pre_hooks", "hooks_with_kwargs", "hooks_always_called", "pre_hooks_with_kwargs")
    return [getattr(module, f"_forward_{name}") for name in names]


def install_hooks(model: Module, runtime: Runtime) -> None:
    """Hook the model, its message-passing layers and its jumping knowledge."""
    model.register_forward_pre_hook(_Enter(runtime, ""), with_kwargs=True)
    for name, layer in layers_of(model).items():
        layer.register_forward_pre_hook(_EnterLayer(runtime, name), with_kwargs=True)
        layer.register_forward_hook(_LeaveLayer(runtime, name))
    for module in model.modules():
        if isinstance(module, JumpingKnowledge):
            module.register_forward_pre_hook(_TrimToTargets(runtime, ""), with_kwargs=True)
    model.register_forward_hook(_Leave(runtime, ""), always_call=True)


def last_template(model: Module) -> CallTemplate | None:
    """How a model that was wrapped before was called last."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Enter):
            return hook.runtime.template
    return None


def runtime_of(model: Module) -> Runtime:
    """What the hooks of a wrapped model share."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Enter) and hook.runtime.plan is not None:
            return hook.runtime
    got, fix = f"a plain {type(model).__name__}", "call gsplit.parallelize(model, mesh) first"
    raise InputError(explain("the model", "a wrapped model", got, fix))
