"""What is trained beside a wrapped model: a head behind it, an encoder before it, a discriminator, a temperature.

``gsplit.parallelize`` takes such a module, or a single parameter, as it takes a model. Every rank starts from rank 0's
weights, and gradients are averaged in the same backward as the model's (``nn.gradients``), also on ranks on which the
module has no row. It is called with the rows of this rank, so each row of its output must depend on its own input row
only: modules that mix rows or draw masks are refused. They belong into the model, where they are exact.
"""

from typing import Any

import torch
from torch.nn import Module, Parameter

from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.nn.checks.modules import check_modules
from gsplit.nn.gradients import Averages, GradientAverage, averages_of
from gsplit.nn.wrappers_and_hooks import OwnHook

__all__ = ["follow_heads", "unwrap_head", "wrap_head"]

_AVERAGE = "_gsplit_average"
"""The attribute of a wrapped parameter that keeps its average."""


class _HeadHook(OwnHook):
    """Follows the trained parameters of a head, before its forward. A deep copy averages its own gradients."""

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._average = None if mesh is None else GradientAverage(averages_of(mesh), averages_of(mesh).checks)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_HeadHook":
        return _HeadHook(self._mesh)

    def __reduce__(self) -> tuple[Any, ...]:
        return _HeadHook, (None,)

    def __call__(self, head: Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not repeated by a checkpoint
            self.follow(head)

    def follow(self, head: Module) -> None:
        """Average the gradients of the parameters that are trained now."""
        if self._average is None:
            fix = "call gsplit.parallelize(head, mesh) again"
            raise InputError(explain("the head", "a head wrapped in this process", "one loaded from a file", fix))
        self._average.follow([parameter for parameter in head.parameters() if parameter.requires_grad])

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        if self._average is not None:
            self._average.detach()


def wrap_head(head: Module | Parameter, mesh: Mesh) -> None:
    """Average the gradients of a module without message passing, or of a parameter, with those of the mesh's models."""
    unwrap_head(head)
    averages = averages_of(mesh)
    parameters = [head] if isinstance(head, Parameter) else list(head.parameters())
    held = {id(parameter) for average in averages.wrapped for parameter in average.parameters}
    if any(id(parameter) in held for parameter in parameters):
        fix = "wrap the model that has it, and nothing else"
        raise InputError(explain("parallelize", "parameters that are not wrapped yet", "one of a wrapped model", fix))
    if isinstance(head, Parameter):
        average = GradientAverage(averages, averages.checks)
        average.follow([head])
        setattr(head, _AVERAGE, average)
        return
    _check_head(head)
    hook = _HeadHook(mesh)
    hook.follow(head)
    head.register_forward_pre_hook(hook)
    averages.add_head(head)


def follow_heads(averages: Averages) -> None:
    """Average the gradients of the parameters that the heads of a mesh have now: a rank may not call them."""
    for head in averages.heads:
        for hook in head._forward_pre_hooks.values():
            if isinstance(hook, _HeadHook):
                hook.follow(head)


def unwrap_head(head: Module | Parameter) -> None:
    """Undo an earlier wrapping, also that of a module loaded from a file."""
    if isinstance(head, Parameter):
        average = vars(head).pop(_AVERAGE, None)
        if average is not None:
            average.detach()
        return
    for number, hook in list(head._forward_pre_hooks.items()):
        if isinstance(hook, _HeadHook):
            hook.release()
            del head._forward_pre_hooks[number]


def _check_head(head: Module) -> None:
    """Refuse modules that mix the rows of one rank or draw masks that differ between ranks."""
    check_modules(head)
    for name, module in head.named_modules():
        got = ""
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            got = "a norm over the rows of one rank"
        elif isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            got = "masks that every rank draws for itself"
        if got:
            fix = "put the head into the model before gsplit.parallelize, where batch norm and dropout are exact"
            where = f"{name or 'the head'} ({type(module).__name__})"
            raise InputError(explain(where, "a head whose rows do not depend on the rank", got, fix))
