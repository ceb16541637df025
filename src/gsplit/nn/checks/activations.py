"""Which layers' outputs are read by a ReLU and by nothing else, found in the dry run.

A layer applies such a ReLU itself (``fused_layers.Activation``). If it turns out in a later forward that something else
reads the output, the layer computes it again: that is right, and slower, so it must not be the rule.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OutputReaders"]

_RELU = torch.ops.aten.relu.default


class OutputReaders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that read the outputs of layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs: dict[str, ref[Tensor]] = {}
        self._readers: dict[str, list[Any]] = {}

    def watch(self, name: str, output: Any) -> None:
        """Record what reads a layer's output from now on."""
        if isinstance(output, Tensor):
            self._outputs[name] = ref(output)
            self._readers[name] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ids = {id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for name, output in self._outputs.items():
            tensor = output()
            if tensor is not None and id(tensor) in ids:
                self._readers[name].append(operator)
        return operator(*args, **(kwargs or {}))

    def activations(self) -> frozenset[str]:
        """The layers whose output a ReLU has read, nothing else has, and nothing keeps.

        Called when the forward is over and the model's output is still there.
        """
        return frozenset(
            name for name, readers in self._readers.items() if readers == [_RELU] and self._outputs[name]() is None
        )
