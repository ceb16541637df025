"""What is trained beside a wrapped model: a head behind it, an encoder before it, a discriminator, a temperature.

``gsplit.parallelize`` takes such a module, or a single parameter, as it takes a model. Every rank starts from rank 0's
weights, and gradients are averaged in the same backward as the model's (``nn.gradients``), also on ranks on which the
module has no row. It is called with the rows of this rank, so each row of its output must depend on its own input row
only: modules that mix rows or draw masks are refused. They belong into the model, where they are exact. A deep copy of
a head is not wrapped.
"""

import torch
from torch.nn import Module, Parameter

from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.nn.checks.modules import check_modules
from gsplit.nn.gradients import Averages, averages_of

__all__ = ["refuse_wrapped", "wrap_head"]


def wrap_head(head: Module | Parameter, mesh: Mesh) -> None:
    """Average the gradients of a module without message passing, or of a parameter, with those of the mesh's models."""
    averages = averages_of(mesh)
    averages.remove_head(head)
    refuse_wrapped(averages, [head] if isinstance(head, Parameter) else list(head.parameters()))
    if isinstance(head, Module):
        _check_head(head)
    averages.add_head(head)


def refuse_wrapped(averages: Averages, parameters: list[Parameter]) -> None:
    """Refuse parameters that something wrapped on the mesh has already."""
    held = {id(parameter) for average in averages.wrapped for parameter in average.parameters}
    if any(id(parameter) in held for parameter in parameters):
        fix = "wrap the module that has all of them, once, and nothing inside of it"
        raise InputError(explain("parallelize", "parameters that are not wrapped yet", "one of a wrapped module", fix))


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
