"""Which layers' outputs are read by a ReLU and by nothing else, found in the dry run.

A layer may then compute the ReLU itself, over its own output (``fused_layers.Activation``). A dispatch mode sees every
operator of the model, those inside of custom autograd functions too, so no other operator has read the output. That
nothing else keeps it, such as an attribute of the model or its return value, follows from its being gone at the end.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OutputReaders"]

_RELU = torch.ops.aten.relu.default
_DROPOUT = "dropout"


class _Watched:
    """A tensor, and what has read it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = ref(tensor)
        self.readers: list[Any] = []

    def is_in(self, ids: set[int]) -> bool:
        tensor = self._tensor()
        return tensor is not None and id(tensor) in ids

    def was_read_by(self, reader: Any) -> bool:
        """Whether nothing else has read it, or keeps it."""
        return self.readers == [reader] and self._tensor() is None


class OutputReaders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what reads the outputs of layers, and what reads the ReLUs of these."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs: dict[str, _Watched] = {}
        self._relus: dict[str, _Watched] = {}
        self._is_dropping = False

    def watch(self, name: str, output: Any) -> None:
        """Record what reads a layer's output from now on."""
        if isinstance(output, Tensor):
            self._outputs[name] = _Watched(output)

    def drop(self, x: Tensor) -> Tensor:
        """Record a dropout, which is not an operator here. What it gives is another tensor."""
        self._record(_DROPOUT, (x,), None)
        self._is_dropping = True
        try:
            return x.clone()
        finally:
            self._is_dropping = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if not self._is_dropping:
            self._record(operator, (args, kwargs), out)
        return out

    def _record(self, operator: Any, given: Any, out: Any) -> None:
        ids = {id(value) for value in tree_leaves(given) if isinstance(value, Tensor)}
        for watched in self._relus.values():
            if watched.is_in(ids):
                watched.readers.append(operator)
        for name, watched in self._outputs.items():
            if watched.is_in(ids):
                watched.readers.append(operator)
                if operator is _RELU:
                    self._relus[name] = _Watched(out)

    def activations(self) -> dict[str, bool]:
        """The layers whose output only a ReLU has read, and whether only a dropout has read what this gave.

        Called when the forward is over and the model's output is still there.
        """
        return {
            name: self._relus[name].was_read_by(_DROPOUT)
            for name, output in self._outputs.items()
            if output.was_read_by(_RELU)
        }
