"""``SplitForward``: what ``parallelize`` installs as the ``forward`` of a message-passing layer.

Called with a batch's edge handle, it runs the layer on the layer's own rows and edges (``nn.forward_pass``). Called
with ordinary tensors, it runs the stock forward. It is an attribute of the layer instance: ``Module.__call__`` runs
user hooks around it, and ``state_dict`` keys do not change. It refers to its layer, so a deep copy or an unpickled
layer has a ``SplitForward`` that refers to the copy.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

from torch.nn import Module

from gsplit.minibatch.batch import Batch
from gsplit.minibatch.edge_handles import Handle
from gsplit.nn.calls import LayerCall, find_handle

__all__ = ["LayerRunner", "SplitForward", "install_forward", "remove_forward"]


class LayerRunner(Protocol):
    """Runs a layer in the forward pass of the batch that ``handle`` belongs to."""

    def run_layer(self, split: "SplitForward", handle: Handle[Batch], call: LayerCall) -> Any: ...


class SplitForward:
    """Replaces the forward of the layer called ``name``. ``patched``: a forward the user had set on the instance."""

    def __init__(self, layer: Module, name: str, runner: LayerRunner) -> None:
        self.layer = layer
        self.name = name
        self.patched: Callable[..., Any] | None = vars(layer).get("forward")
        self._runner = runner

    @property
    def stock(self) -> Callable[..., Any]:
        """The forward without gsplit: the user's own, or that of the layer's class."""
        return MethodType(type(self.layer).forward, self.layer) if self.patched is None else self.patched

    @property
    def __signature__(self) -> inspect.Signature:
        return _without_self(type(self.layer).forward) if self.patched is None else inspect.signature(self.patched)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = find_handle((args, kwargs))
        if handle is None:
            return self.stock(*args, **kwargs)
        return self._runner.run_layer(self, handle, (args, kwargs))


@functools.cache
def _without_self(method: Callable[..., Any]) -> inspect.Signature:
    """The signature of a bound method. Making it takes longer than a small layer, so it is made once."""
    whole = inspect.signature(method)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def install_forward(layer: Module, name: str, runner: LayerRunner) -> None:
    """Replace a layer's forward."""
    layer.forward = SplitForward(layer, name, runner)


def remove_forward(module: Module) -> None:
    """Undo ``install_forward``; other modules are left alone."""
    installed = vars(module).get("forward")
    if not isinstance(installed, SplitForward):
        return
    del module.forward
    if installed.patched is not None:
        module.forward = installed.patched
