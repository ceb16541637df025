"""The simulated device as torch sees it; private API of torch that the simulation needs is here and in ``autocast``.

torch's PrivateUse1 backend is set up for Python; its tensors are a wrapper subclass, ``SimTensor``, over a host tensor.
Operations come in by ``__torch_dispatch__``: from the subclass where a tensor of the device is among the arguments,
from a dispatch mode for factories, and from three registered kernels for ``torch.tensor(list, device=...)``, which goes
around modes. What is done with each is in ``execution``.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import return_and_correct_aliasing as correct_aliasing

from gsplit_bench.simulated.autocast import register_casts
from gsplit_bench.simulated.log import is_called_by_torch
from gsplit_bench.simulated.state import active, moved

__all__ = [
    "DEVICE_TYPE",
    "SimMode",
    "SimTensor",
    "correct_aliasing",
    "install",
    "sim_device",
    "why_not_supported",
    "without_modes",
]

DEVICE_TYPE = "sim"
_LAST_TRIED = (2, 13)

_execute: Callable[[Any, Any, Any], Any]
_library: Any = None
_casts: list[Any] = []


@functools.cache
def sim_device() -> torch.device:
    """The device's name for torch; known once it is installed."""
    return torch.device(DEVICE_TYPE, 0)


def why_not_supported() -> str | None:
    """Why the installed torch cannot simulate a device; None if it can."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} has no Python backends; they came with 2.9"
    if version > _LAST_TRIED:
        return f"torch {torch.__version__} is newer than {_LAST_TRIED[0]}.{_LAST_TRIED[1]}, the last one tried"
    return None


class SimTensor(Tensor):
    """A tensor of the simulated device; ``host`` is the host tensor behind it."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "SimTensor":
        active().allocate(inner)
        options: dict[str, Any] = {"dispatch_layout": True}
        if inner.layout is torch.strided:
            options = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "layout": torch.strided}
        out: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=sim_device(), requires_grad=requires_grad, **options
        )
        out.host = inner
        return out

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimTensor({self.host!r})"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True to PyG, so that its layers take the branches that they take on a GPU."""
        return "torch_geometric" in sys._getframe(1).f_code.co_filename

    def tolist(self) -> Any:
        """A list on the host, which waits for the values."""
        moved(self.host.nbytes, "host", None, non_blocking=False, reason="tolist")
        return self.host.detach().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused unless forced, as on every device."""
        if not force:
            raise TypeError(
                f"can't convert {sim_device()} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self.detach().cpu().numpy()

    def data_ptr(self) -> int:
        """Refused to host kernels, which would crash; 0 to torch itself, which then copies element by element."""
        if is_called_by_torch():
            return 0
        raise RuntimeError(f"a tensor on {sim_device()} has no address on the host")

    def pin_memory(self, device: Any = None) -> Tensor:
        """Refused, as on every device."""
        raise RuntimeError(f"cannot pin a tensor on {sim_device()}, only dense CPU tensors can be pinned")

    def record_stream(self, s: Any) -> None:
        """Tell the allocator that a stream uses this memory."""
        active().tracker.record(self.host, s.name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _execute(func, args, kwargs or {})


class SimMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operations that have no tensor of the device among their arguments."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing compiles here, and the guard around every operation would cost as much as some of them."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(func, args, kwargs or {})


def install(
    module: Any, execute: Callable[[Any, Any, Any], Any], copy: Callable[[Tensor, Tensor, bool], Tensor]
) -> None:
    """Register the device with torch, once per process.

    ``module`` becomes ``torch.sim``, ``execute(func, args, kwargs)`` does operations, ``copy(target, source,
    non_blocking)`` copies.
    """
    global _library, _casts, _execute
    _execute = execute
    if _library is not None:
        return
    backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=module)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return SimTensor(torch.empty_strided(size, stride, dtype=dtype))

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return SimTensor(torch.empty(size, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return copy(target, source, non_blocking)

    _casts = register_casts()
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _library.impl("empty_strided", empty_strided, "PrivateUse1")
    _library.impl("empty.memory_format", empty, "PrivateUse1")
    _library.impl("_copy_from", copy_from, "PrivateUse1")
