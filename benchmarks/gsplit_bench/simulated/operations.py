"""What CUDA does with torch's operations, as far as the host notices: which make it wait, which launch nothing.

Names are those of torch's operator schemas, without ``aten::`` and overload. A kernel of torch may launch several CUDA
kernels; each operation counts as one, so launches are a lower bound.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["INDEXING", "Operation", "operation_of", "why_host_waits"]

INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Operations that take index tensors of the host as well, and copy them."""

_ALWAYS_WAIT = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
    "is_nonzero": "bool",
}

_LAUNCHES_NOTHING = frozenset(
    {
        "_local_scalar_dense",
        "_reshape_alias",
        "_sparse_compressed_tensor_unsafe",
        "_sparse_csr_tensor_unsafe",
        "_unsafe_view",
        "alias",
        "as_strided",
        "ccol_indices",
        "col_indices",
        "crow_indices",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_pinned",
        "is_same_size",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "permute",
        "record_stream",
        "reshape",
        "resize_",
        "row_indices",
        "select",
        "set_",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "sym_size",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "values",
        "view",
        "view_as",
    }
)
"""Views, and memory that is only reserved."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What is the same for every call of an operation.

    ``name`` is that of its schema, ``short`` without the namespace, ``full`` with the overload. ``draws``: it takes random numbers. ``aliases``:
    something it returns may be, or share memory with, one of its arguments.
    """

    name: str
    short: str
    full: str
    is_collective: bool
    launches: bool
    draws: bool
    aliases: bool


@functools.cache
def operation_of(func: Any) -> Operation:
    """What torch's overload of an operation is; looked up once, as a step has thousands of calls."""
    schema = func._schema
    namespace, short = schema.name.split("::")
    return Operation(
        schema.name,
        short,
        f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name,
        is_collective=namespace == "c10d",
        launches=short not in _LAUNCHES_NOTHING,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        aliases=any(value.alias_info is not None for value in (*schema.arguments, *schema.returns)),
    )


def why_host_waits(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why CUDA makes the host wait for the device in this operation; None if it does not."""
    if name in _ALWAYS_WAIT:
        return _ALWAYS_WAIT[name]
    if name in ("mm", "addmm") and any(isinstance(arg, Tensor) and arg.layout is torch.sparse_csc for arg in args):
        return "CSC converted to CSR"
    by_tensor = name == "repeat_interleave" and func._overloadname in ("Tensor", "self_Tensor")
    if by_tensor and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    if name in INDEXING and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        return "mask"
    return None
