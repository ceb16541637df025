"""A torch function mode that is active during a wrapped forward and intercepts dropout, batch norm and ReLU.

Every ``F.dropout`` and ``F.batch_norm`` goes to the forward pass, however deep inside the model it is called. Other
random functions would differ between ranks, and other norms would mix the rows of one rank only: both are refused. A
ReLU that a fused layer has applied already (``fused_layers.Activation``) is left out.

A mode costs a Python call per torch function, so it is suspended in gsplit's own code, and in layers that run PyG's
code only (``runs_pyg_code``), which neither drop nor draw.

A KeyboardInterrupt in a forward leaves the mode on, because torch calls no hooks then. Functions that are called
outside the forward's frame are therefore left alone, and the next forward of any wrapped model removes the mode. If
there is a ``with`` of another mode around the interrupted forward, torch takes this mode off in its place, and the
other stays.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from gsplit.errors import InputError, explain
from gsplit.features.in_place import METADATA
from gsplit.nn.forward_pass import ForwardPass

__all__ = ["ForwardPassMode", "push_below", "remove_interrupted"]


def _dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    """``F.dropout``'s arguments by name."""
    return x, p, training, inplace


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """``F.batch_norm``'s arguments by name."""
    return x, running_mean, running_var, weight, bias, training, momentum, eps


def _relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    """The argument of a ReLU that is not in place."""
    return None if inplace else input


_RANDOM = {
    *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm),
    *(
        torch.bernoulli,
        torch.normal,
        torch.multinomial,
        torch.poisson,
        torch.dropout,
        torch.alpha_dropout,
        torch.native_dropout,
    ),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_),
    *(Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_, Tensor.multinomial, F.gumbel_softmax),
    *(F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
}
_MIXING = {torch.batch_norm, torch.native_batch_norm, torch.instance_norm, F.instance_norm}
_RANDOM_AT = {F.scaled_dot_product_attention: (4, "dropout_p"), F.rrelu: (3, "training")}
"""Functions that draw depending on one argument: its position and name."""
_RELU = {F.relu, torch.relu, Tensor.relu}
_INTERCEPTED = {F.dropout, F.batch_norm, *_MIXING, *_RANDOM, *_RANDOM_AT}


class ForwardPassMode(TorchFunctionMode):
    """Sends dropout and batch norm to a forward pass.

    ``frame``: that which calls the model's forward. It holds the model's arguments until ``close``.
    """

    def __init__(self, forward_pass: ForwardPass, frame: FrameType) -> None:
        super().__init__()
        self._pass = forward_pass
        self._frame: FrameType | None = frame
        self._is_suspended = False

    def close(self) -> None:
        """End the interception."""
        _remove([self])
        self._frame = None

    @property
    def is_in_forward(self) -> bool:
        """Whether this thread is in the forward."""
        return any(frame is self._frame for frame in _frames())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the torch functions of a block alone, unless another mode was entered inside of this one."""
        if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call]
            yield
            return
        self.__exit__(None, None, None)
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False
            self.__enter__()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Intercept the torch functions of a block inside of ``suspended``."""
        if not self._is_suspended:
            yield
            return
        self._is_suspended = False
        self.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_suspended = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._pass.has_activations and function not in METADATA:
            applied = self._pass.relu(_relu(*args, **kwargs)) if function in _RELU else None
            if applied is not None:
                return applied
            self._pass.restore_outputs(tree_leaves((args, kwargs)))
        if function not in _INTERCEPTED or not self.is_in_forward:
            return function(*args, **kwargs)
        if function is F.dropout:
            x, p, training, inplace = _dropout(*args, **kwargs)
            if training and p > 0:
                _refuse_checkpointing("dropout")
            out = self._pass.dropout(x, p, training)
            return x.copy_(out) if inplace and out is not x else out
        if function is F.batch_norm:
            given = _batch_norm(*args, **kwargs)
            if given[5]:
                _refuse_checkpointing("batch norm")
            return self._pass.batch_norm(*given)
        if function in _MIXING:
            fix = "use torch.nn.BatchNorm1d, which is made exact here, or a row-wise norm"
            raise InputError(
                explain(
                    f"{function.__name__} in the model", "rows that are not mixed", "a norm over one rank's rows", fix
                )
            )
        draws = function in _RANDOM or _draws(*_RANDOM_AT[function], args, kwargs)
        if draws and not self._pass.allows_draws:
            fix = "use F.dropout or torch.nn.Dropout, whose masks are keyed here"
            raise InputError(
                explain(f"{function.__name__} in the model", "no randomness of its own", "a draw from a generator", fix)
            )
        return function(*args, **kwargs)


def remove_interrupted() -> None:
    """Remove the modes of forwards that were interrupted in this thread, and those that end at the next forward."""
    if modes := _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        _remove([mode for mode in modes if _is_over(mode)])


def _is_over(mode: TorchFunctionMode) -> bool:
    return not mode.is_in_forward if isinstance(mode, ForwardPassMode) else getattr(mode, "ends_at_forward", False)


def _remove(modes: Sequence[TorchFunctionMode]) -> None:
    """Take modes off this thread's stack; the others stay there in their order."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if not any(mode in modes for mode in stack):
        return
    for _ in stack:
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in stack:
        if mode not in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]


def push_below(mode: TorchFunctionMode) -> None:
    """Put a mode below the others of this thread: one of the user that ends takes off the top."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if mode in stack:
        return
    for _ in stack:
        _pop_mode()  # type: ignore[no-untyped-call]
    for each in (mode, *stack):
        _push_mode(each)  # type: ignore[no-untyped-call]


def _frames() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _refuse_checkpointing(what: str) -> None:
    """Refuse a call inside ``torch.utils.checkpoint``, which repeats it in backward, where nothing is intercepted."""
    if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return
    if any(frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__ for frame in _frames()):
        fix = "checkpoint modules without dropout and batch norm, or leave torch.utils.checkpoint out"
        raise InputError(explain(what, "a call that is not repeated in backward", "torch.utils.checkpoint", fix))


def _draws(place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get(name, False))
