"""Hooks that others have put on a module: a kernel that takes a module's place must not pass them by."""

from torch.nn import Module
from torch.nn.modules import module as registry

__all__ = ["Hook", "is_hooked_by_others"]

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Hook:
    """A hook of ours."""


def is_hooked_by_others(module: Module) -> bool:
    """Whether anybody but us has a hook on a module, or on all modules."""
    tables = [getattr(module, name) for name in _TABLES] + [getattr(registry, f"_global{name}") for name in _TABLES]
    return not all(isinstance(hook, Hook) for table in tables for hook in table.values())
