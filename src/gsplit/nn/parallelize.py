"""``gsplit.parallelize``: an unmodified PyG model that runs on mini-batches of any strategy and number of ranks.

Nothing is wrapped or renamed: hooks on the model and on its message-passing layers do the work, so ``state_dict`` keys
stay, and a copy or a saved model stays what it was. The model's own hook opens a ``ForwardPass`` when it is called with
a batch's ``edge_index`` (or with a batch); each layer's hook puts the layer's rows and edges in place of the model's.
Called with plain tensors the model does what it always did. Gradients are averaged over all ranks during backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import JumpingKnowledge

from gsplit.batch import Batch, EdgeHandle, Handle
from gsplit.distributed.comm import Call, assert_same_on_all_ranks
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.nn.calls import call_model
from gsplit.nn.checks.dry_run import Recorder, example_input, explain_failure, forbid_random_draws, preserve_state
from gsplit.nn.checks.row_independence import check_row_independence
from gsplit.nn.checks.toy import toy_batch
from gsplit.nn.forward_pass import ForwardPass, ForwardPassMode, ForwardPlan
from gsplit.nn.gradients import GradientAverage
from gsplit.nn.layers import check_modules, is_single_input, layers_of

__all__ = ["parallelize", "forward_plan_of", "override_forward_pass"]

M = TypeVar("M", bound=Module)


class _Runtime:
    """What the hooks of one model share: its plan, the ranks, and the steps whose forward is running.

    A deep copy has the same plan and ranks, and averages its own gradients; a pickled one has lost its ranks.
    """

    def __init__(self, plan: ForwardPlan | None, mesh: Mesh | None) -> None:
        self.plan, self.mesh = plan, mesh
        self.override: ForwardPass | None = None
        self._open: list[tuple[ForwardPass, ForwardPassMode] | None] = []
        self._gradients: GradientAverage | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Runtime":
        return _Runtime(self.plan, self.mesh)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Runtime, (None, None)

    def open(self, model: Module, batch: Batch | None) -> None:
        """Begin a forward; with plain tensors it is the model's own."""
        while self._open:
            self.close()  # left by an interrupt
        self._open.append(None)  # what ``close`` takes away, whatever happens here
        if batch is None:
            return
        if self.override is not None:
            step: ForwardPass = self.override
        elif self.plan is None or self.mesh is None:
            fix = "call gsplit.parallelize(model, mesh) again"
            raise InputError(explain("the model", "to know its ranks", "a model loaded from a file", fix))
        else:
            step = ForwardPass(batch, self.plan)
            self._watch_gradients(model, self.mesh)
        mode = ForwardPassMode(step)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._open[-1] = (step, mode)

    def close(self) -> None:
        """End a forward, also one that failed."""
        opened = self._open.pop()
        if opened is not None:
            opened[1].__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def current(self) -> ForwardPass | None:
        """The step whose forward is running."""
        return self._open[-1][0] if self._open and self._open[-1] is not None else None

    def step_of(self, handle: Handle) -> ForwardPass:
        """The step a layer was called in."""
        step = self.current()
        if step is None or step.batch is not handle.batch:
            fix = "call the whole wrapped model; activation checkpointing of layers is not supported"
            raise InputError(explain("a layer", "a call from within the wrapped model's forward", "another", fix))
        return step

    def _watch_gradients(self, model: Module, mesh: Mesh) -> None:
        """Average the gradients of whatever parameters are being trained now."""
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
        self._gradients = GradientAverage(trained, mesh.gradients, next(mesh.numbers))

    def release(self) -> None:
        """Leave the parameters alone."""
        if self._gradients is not None:
            self._gradients.detach()


def _is(a: object, b: object) -> bool:
    return a is b


class _Hook:
    """A hook that can be copied and pickled with its model."""

    def __init__(self, runtime: _Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name


class _Enter(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.runtime.open(module, _find_batch([*args, *kwargs.values()]))


class _Leave(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        self.runtime.close()


class _EnterLayer(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle = next((a for a in [*args, *kwargs.values()] if isinstance(a, EdgeHandle)), None)
        return None if handle is None else self.runtime.step_of(handle).enter_layer(self.name, module, (args, kwargs))


class _LeaveLayer(_Hook):
    def __call__(self, module: Module, args: tuple[Any, ...], out: Any) -> Any:
        step = self.runtime.current()
        return out if step is None or step.inside != self.name else step.leave_layer(out)


class _Trim(_Hook):
    """Jumping knowledge joins the outputs of all layers: on blocks, their common prefix, the targets."""

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outs = args[0] if args else kwargs["xs"]
        fewest = min(out.size(0) for out in outs)
        return ([out[:fewest] for out in outs],), {}


def _find_batch(values: list[Any]) -> Batch | None:
    for value in values:
        if isinstance(value, Batch):
            return value
        if isinstance(value, Handle):
            return value.batch
    return None


def _remove_hooks(model: Module) -> None:
    """Undo an earlier wrapping, also that of a model loaded from a file."""
    for module in model.modules():
        ours = {n: h for hooks in _hook_tables(module)[:2] for n, h in hooks.items() if isinstance(h, _Hook)}
        for number, hook in ours.items():
            hook.runtime.release()
            for table in _hook_tables(module):
                table.pop(number, None)


def _hook_tables(module: Module) -> list[dict[int, Any]]:
    """Where torch keeps forward hooks: the hooks, then what was said about them."""
    names = ("hooks", "pre_hooks", "hooks_with_kwargs", "hooks_always_called", "pre_hooks_with_kwargs")
    return [getattr(module, f"_forward_{name}") for name in names]


def _install(model: Module, runtime: _Runtime) -> None:
    model.register_forward_pre_hook(_Enter(runtime, ""), with_kwargs=True)
    for name, layer in layers_of(model).items():
        layer.register_forward_pre_hook(_EnterLayer(runtime, name), with_kwargs=True)
        layer.register_forward_hook(_LeaveLayer(runtime, name))
    for module in model.modules():
        if isinstance(module, JumpingKnowledge):
            module.register_forward_pre_hook(_Trim(runtime, ""), with_kwargs=True)
    model.register_forward_hook(_Leave(runtime, ""), always_call=True)


def _learn(model: Module, runtime: _Runtime, num_features: int | None) -> ForwardPlan:
    """Run the model on toy batches: what its layers are, and whether it can be split at all."""
    layers, like = layers_of(model), example_input(model, num_features)
    single_input = frozenset(name for name, layer in layers.items() if is_single_input(layer))
    batch, meanings = toy_batch(max(len(layers), 1), like)
    with preserve_state(model):
        model.train()
        while True:
            recorder = runtime.override = Recorder(batch, meanings, single_input)
            try:
                with forbid_random_draws():
                    plan = recorder.plan(explain_failure(lambda: call_model(model, batch)))
                break
            except InputError as error:  # a layer we do not know may take one tensor of rows only
                unknown = recorder.inside
                if unknown is None or unknown in single_input or error.__cause__ is None:
                    raise
                single_input |= {unknown}
            finally:
                runtime.override = None
        runtime.plan = plan
        check_row_independence(model, plan, like, override_forward_pass)
    return plan


def _same_weights(model: Module, mesh: Mesh) -> None:
    """Give every rank rank 0's parameters and buffers. A collective."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert_same_on_all_ranks(
        mesh.world, "parallelize", {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    )
    with torch.no_grad():
        for name, tensor in tensors.items():
            whole = tensor.detach().contiguous()
            flat = whole.view(torch.uint8) if whole.dtype == torch.bool else whole
            mesh.world.broadcast(Call(f"broadcast {name}"), flat)  # all ranks: same names, compared above
            tensor.copy_(whole)


def _runtime_of(model: Module) -> _Runtime:
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _Enter) and hook.runtime.plan is not None:
            return hook.runtime
    raise InputError(explain("the model", "a wrapped model", "another", "call gsplit.parallelize(model, mesh) first"))


def forward_plan_of(model: Module) -> ForwardPlan:
    """What wrapping has learned about a model."""
    plan = _runtime_of(model).plan
    assert plan is not None
    return plan


@contextmanager
def override_forward_pass(model: Module, step: ForwardPass) -> Iterator[None]:
    """Let another step answer the layers of a wrapped model for a while."""
    runtime = _runtime_of(model)
    runtime.override = step
    try:
        yield
    finally:
        runtime.override = None


def parallelize(model: M, mesh: Mesh, *, num_features: int | None = None) -> M:
    """Make a PyG model run on mini-batches of ``mesh``; returns the model, changed in place. A collective.

    Every rank starts from rank 0's weights. The model is then called with ``(batch.x, batch.edge_index)``, with
    ``batch.edge_weight`` too for a GCN, or with ``(batch)``. ``num_features`` is needed only if no module of the
    model says how wide its input is. What cannot be exact on a split mini-batch is refused here, with the reason.
    """
    model.to(mesh.device)
    check_modules(model)
    _remove_hooks(model)
    if mesh.num_replicas > 1 and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        fix = "use replicas=1, or a row-wise norm such as LayerNorm"
        raise InputError(explain("batch norm", "one replica", mesh.num_replicas, fix))
    runtime = _Runtime(None, mesh)
    _install(model, runtime)
    try:
        _learn(model, runtime, num_features)
        _same_weights(model, mesh)
    except BaseException:
        _remove_hooks(model)
        raise
    return model
