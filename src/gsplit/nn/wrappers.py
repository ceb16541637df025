"""Wrappers of others around a model that ``parallelize`` cannot work with: torch.compile, DDP and its relatives.

``torch.compile`` would trace the hooks of the layers, which do collectives on rows whose number changes with every
mini-batch. DDP would average gradients that are averaged already, before they are there. Both are found when a model is
wrapped, and again when it is called, because they may be put around it afterwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gsplit.errors import InputError, explain
from gsplit.nn.layers import is_layer

__all__ = ["check_callers", "check_wrappers"]

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")
_NOT_COMPILED = (
    "compile row-wise submodules only, such as an MLP between the layers, or leave torch.compile out; "
    "a loss may be compiled"
)
_PLAIN = "give gsplit.parallelize the plain model and call what it returns: it averages gradients itself"
_frame_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""What dynamo does with functions called from now on; None without torch.compile around. Not public in torch."""


def check_wrappers(model: Module) -> None:
    """Refuse a model with message-passing layers inside torch.compile, or with a parallel wrapper of torch's."""
    for name, module in model.named_modules():
        where = name or "the model"
        for kind in type(module).__mro__:
            if kind.__name__ in _PARALLEL and kind.__module__.startswith("torch."):
                raise InputError(explain(where, "a model that is not parallel yet", kind.__name__, _PLAIN))
        compiled = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        if compiled and any(map(is_layer, module.modules())):
            got = "torch.compile around them"
            raise InputError(explain(where, "message-passing layers that are not compiled", got, _NOT_COMPILED))


def check_callers() -> None:
    """Refuse a forward on a batch that was called by a compiled function or by DDP."""
    if torch.compiler.is_compiling() or _frame_callback() not in (None, False):
        # Dynamo swallows what is raised while it traces and runs this function uncompiled, still with its callback.
        got = "torch.compile around it"
        raise InputError(explain("the wrapped model", "a call that is not compiled", got, _NOT_COMPILED))
    if DistributedDataParallel._active_ddp_module is not None:
        raise InputError(explain("the wrapped model", "no other wrapper", "DistributedDataParallel", _PLAIN))
