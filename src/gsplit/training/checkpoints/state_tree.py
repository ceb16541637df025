"""Splits a state of numbers, texts, lists, dictionaries and tensors into one JSON text and named tensors.

JSON has no tensors, tuples, integer keys or infinities. They become a dictionary with one key that begins with "$";
everything else is plain JSON.

    {"step": 3, "betas": (0.9, 0.99), "groups": {0: tensor}}
    {"step": 3, "betas": {"$tuple": [0.9, 0.99]}, "groups": {"$items": [[0, {"$tensor": "groups/0"}]]}}
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.training.checkpoints.tensor_file import STORED_DTYPES

__all__ = ["Snapshot", "rebuild_state", "take_snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state in the host's memory; ``tree`` is for JSON and names the tensors."""

    tree: object
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The tree as JSON."""
        return json.dumps(self.tree, allow_nan=False)


def take_snapshot(state: Mapping[str, Any], spare: Mapping[str, Tensor] | None = None) -> Snapshot:
    """Copy a state into host memory; training may continue when this returns.

    ``spare``: tensors of an older snapshot whose memory is reused. Allocating would take most of the time.
    """
    copies = _Copies(spare or {})
    return Snapshot(_pack(state, "", copies), copies.tensors)


class _Copies:
    """The tensors of a snapshot by name."""

    def __init__(self, spare: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._spare = spare

    def keep(self, value: Tensor, place: str) -> str:
        """Copy a tensor and return its name."""
        if value.dtype not in STORED_DTYPES or value.layout != torch.strided:
            got = f"{value.dtype}, {value.layout}"
            fix = "keep it out of the state: register_buffer(persistent=False)"
            raise InputError(explain(f"state: {place}", "a dense tensor of real numbers", got, fix))
        while place in self.tensors or place == "__metadata__":
            place += "'"
        copy = self._spare.get(place)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = torch.empty(value.shape, dtype=value.dtype)
        self.tensors[place] = copy.copy_(value.detach())
        return place


def _pack(value: Any, place: str, copies: _Copies) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": copies.keep(value, place)}
    if isinstance(value, Mapping):
        packed = [[key, _pack(item, f"{place}/{key}" if place else str(key), copies)] for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(packed)
        if all(isinstance(key, str | int) for key in value):
            return {"$items": packed}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{place}/{number}", copies) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    expected = "numbers, texts, lists, dictionaries and tensors"
    fix = "keep other objects out of the state of the model, the optimizer and the scheduler"
    raise InputError(explain(f"state: {place}", expected, type(value).__name__, fix))


def rebuild_state(text: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rebuild the state of a snapshot; raises ValueError or KeyError if text and tensors do not fit together."""
    state = _unpack(json.loads(text), tensors)
    if not isinstance(state, dict):
        raise ValueError("a state that is not a dictionary")
    return state


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _unpack(item, tensors) for key, item in value.items()}
    (kind, inner), *_ = value.items()
    match kind:
        case "$float":
            return float(inner)
        case "$tensor" | "$floats":  # the second: losses and seconds, as gsplit 0.1.0 wrote them
            return tensors[inner]
        case "$tuple":
            return tuple(_unpack(inner, tensors))
        case "$items":
            return {key: _unpack(item, tensors) for key, item in inner}
    raise ValueError(f"a state with {kind}")
