"""``torch.autocast("sim")``: the casts that CUDA does, by the tables of torch's own header.

torch gives a backend in Python no casts. Their lists are macros of C++, so they are read from ``autocast_mode.h``,
which every build of torch contains. Operations that are in no list run in the types that they are given. CUDA keeps
the cast copy of a parameter for the other uses of a step; here each use casts, so launches are an upper bound.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["register_casts"]

_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_KEY = "AutocastPrivateUse1"
_Cast = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _listed(table: str) -> list[Any]:
    """The overloads of a table, such as ``_(pow, Tensor_Scalar)``."""
    found = re.search(rf"#define {table}\(_\)(.*?)\n\n", _HEADER.read_text(), re.DOTALL)
    assert found is not None, f"{_HEADER} has no {table}"
    names = re.findall(r"_\((\w+)(?:, (\w+))?\)", found[1])
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, overload in names]


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _to(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_to(dtype, inner) for inner in value)
    return value.to(dtype) if _is_cast(value) else value


def _in_lower_precision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = torch.get_autocast_dtype("sim")
    return func(*_to(dtype, args), **{name: _to(dtype, value) for name, value in kwargs.items()})


def _in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*_to(torch.float32, args), **{name: _to(torch.float32, value) for name, value in kwargs.items()})


def _to_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result in float32, unless a type is asked for."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if _is_cast(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    return func(**given)


def _in_widest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = any(_is_cast(value) and value.dtype is torch.float32 for value in (*args, *kwargs.values()))
    return (_in_float32 if wide else _in_lower_precision)(func, args, kwargs)


_TABLES: dict[str, _Cast] = {
    "AT_FORALL_LOWER_PRECISION_FP": _in_lower_precision,
    "AT_FORALL_FP32": _in_float32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": _to_float32,
    "AT_FORALL_PROMOTE": _in_widest,
}


def register_casts() -> list[Any]:
    """Register the casts with torch; they last as long as the returned libraries."""
    others = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    listed = [(func, cast) for table, cast in _TABLES.items() for func in _listed(table)]
    sparse = torch.ops.aten._sparse_addmm.default  # torch.sparse.mm; calls addmm where casts cannot be seen
    for func, cast in [*listed, (sparse, _in_lower_precision)]:
        library.impl(func, _casting(func, cast), _KEY)  # type: ignore[no-untyped-call]
    return [others, library]


def _casting(func: Any, cast: _Cast) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return cast(func, args, kwargs)

    return run
