"""Wrappers and hooks that other code puts around a model: which are refused, and which hooks are gsplit's own.

``torch.compile`` would trace the layers' forwards, which do collectives on rows whose number changes with every
mini-batch. DDP and FSDP would average gradients a second time. They are refused when a model is wrapped, and again when
it is called, because they may be added afterwards. A fused kernel must not skip user hooks on the modules it replaces.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as registry
from torch.nn.parallel import DistributedDataParallel
from torch_geometric import nn as pyg

from gsplit.errors import InputError, explain
from gsplit.nn.layers import has_message_hooks, has_own_methods, is_layer

__all__ = ["OwnHook", "check_callers", "check_wrappers", "has_user_hooks", "runs_own_code", "runs_pyg_code"]

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")
_SHARDED = "_is_fsdp_managed_module"
"""Set by FullyShardedDataParallel and by fully_shard on all modules whose parameters they shard."""
_NOT_COMPILED = (
    "compile row-wise submodules only, such as an MLP between the layers, or leave torch.compile out; "
    "a loss may be compiled"
)
_PLAIN = "give gsplit.parallelize the plain model and call what it returns: it averages gradients itself"
_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PARTS = (pyg.Linear, pyg.aggr.SumAggregation, pyg.aggr.MeanAggregation, pyg.aggr.MaxAggregation)
_GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(registry, f"_global{name}") for name in _HOOK_TABLES]
_frame_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""Dynamo's callback for functions called from now on; None without torch.compile. Not public in torch."""


def check_wrappers(model: Module) -> None:
    """Refuse a model with message-passing layers inside torch.compile, or inside a parallel wrapper of torch."""
    for name, module in model.named_modules():
        where = name or "the model"
        for kind in type(module).__mro__:
            if kind.__name__ in _PARALLEL and kind.__module__.startswith("torch."):
                raise InputError(explain(where, "a model that is not parallel yet", kind.__name__, _PLAIN))
        compiled = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        if compiled and any(map(is_layer, module.modules())):
            got = "torch.compile around them"
            raise InputError(explain(where, "message-passing layers that are not compiled", got, _NOT_COMPILED))


def check_callers(modules: Iterable[Module]) -> None:
    """Refuse a forward on a batch that was called by a compiled function, by DDP or by FSDP.

    ``modules``: all of the wrapped model.
    """
    if torch.compiler.is_compiling() or _frame_callback() not in (None, False):
        # Dynamo swallows what is raised while it traces and runs this function uncompiled, still with its callback.
        got = "torch.compile around it"
        raise InputError(explain("the wrapped model", "a call that is not compiled", got, _NOT_COMPILED))
    if DistributedDataParallel._active_ddp_module is not None:
        raise InputError(explain("the wrapped model", "no other wrapper", "DistributedDataParallel", _PLAIN))
    if any(_SHARDED in vars(module) for module in modules):
        raise InputError(explain("the wrapped model", "no other wrapper", "FSDP", _PLAIN))


class OwnHook:
    """Base of the hooks that gsplit registers."""


def has_user_hooks(module: Module) -> bool:
    """Whether a module has hooks that are not gsplit's, its own or global ones."""
    tables = [*(getattr(module, name) for name in _HOOK_TABLES), *_GLOBAL_HOOKS]
    return any(not isinstance(hook, OwnHook) for table in tables if table for hook in table.values())


def runs_own_code(module: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a module is one of some kinds, not a subclass, with its class's forward and without user hooks."""
    return type(module) in kinds and "forward" not in vars(module) and not has_user_hooks(module)


def runs_pyg_code(layer: Any, given: Any = None) -> bool:
    """Whether only PyG's code runs inside a layer of PyG: no user hooks, replaced methods or modules of other kinds.

    ``given``: a module that the layer was made with, which is not looked at.
    """
    if layer.explain or has_message_hooks(layer) or has_own_methods(layer):
        return False
    parts = layer._modules.values()
    return all(runs_own_code(part, _PARTS) for part in parts if part is not None and part is not given)
