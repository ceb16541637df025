"""Calls of a model with a batch, and of its layers with tensors in place of the batch's handles."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeTypeHandle, EdgeWeightHandle, Handle
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.layers import edge_features_of, layers_of, takes_edge_weight

__all__ = [
    "CallTemplate",
    "LayerCall",
    "call_model",
    "dtype_of",
    "find_handle",
    "input_rows",
    "is_plain_call",
    "substitute",
    "template_of",
    "tensors_of",
]

LayerCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_EDGES = ("edge_index", "adj", "adj_t")


class Slot(Enum):
    """An argument that the batch provides."""

    X = "x"
    EDGE_INDEX = "edge_index"
    EDGE_WEIGHT = "edge_weight"
    EDGE_ATTR = "edge_attr"
    BATCH = "batch"
    X_DICT = "x_dict"
    EDGE_INDEX_DICT = "edge_index_dict"
    EDGE_ATTR_DICT = "edge_attr_dict"
    EDGE_WEIGHT_DICT = "edge_weight_dict"
    FUSED_X = "fused_x"
    EDGE_TYPE = "edge_type"


_HANDLES = {
    EdgeHandle: Slot.EDGE_INDEX,
    EdgeWeightHandle: Slot.EDGE_WEIGHT,
    EdgeAttrHandle: Slot.EDGE_ATTR,
    EdgeTypeHandle: Slot.EDGE_TYPE,
}


@dataclass(frozen=True)
class CallTemplate:
    """How a model was called with a batch: its arguments, with a ``Slot`` for each that came from the batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, model: Module, batch: Batch) -> Any:
        """Call a model in the same way with another batch, which refuses what it does not carry."""

        def fill(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            return batch if value is Slot.BATCH else getattr(batch, value.value)

        return model(*map(fill, self.args), **{name: fill(value) for name, value in self.kwargs.items()})


def template_of(call: LayerCall, batch: Batch) -> CallTemplate | None:
    """The template of a model's call; None if an argument is a tensor that is not the batch's."""
    slots: list[Slot] = []
    typed = isinstance(batch, TypedBatch)
    of_rows = Slot.FUSED_X if typed else Slot.X
    num_rows = batch.blocks[0].num_src if typed else batch.x.size(0)

    def slot(value: Any) -> Any:
        found = Slot.BATCH if value is batch else _HANDLES.get(type(value))
        if isinstance(value, Tensor):  # the input rows, perhaps cast
            found = of_rows if of_rows not in slots and value.dim() and value.size(0) == num_rows else None
            if found is None:
                raise LookupError
        kinds = {type(each) for each in value.values()} if isinstance(value, dict) else set()
        if isinstance(value, dict) and find_handle(((value,), {})) is not None:
            found = Slot.EDGE_INDEX_DICT
        elif kinds & {EdgeAttrHandle, EdgeWeightHandle}:
            found = Slot.EDGE_ATTR_DICT if EdgeAttrHandle in kinds else Slot.EDGE_WEIGHT_DICT
        elif isinstance(value, dict) and any(isinstance(each, Tensor) for each in value.values()):
            found = Slot.X_DICT
        if found is not None:
            slots.append(found)
        return value if found is None else found

    try:
        return CallTemplate(tuple(map(slot, call[0])), {name: slot(value) for name, value in call[1].items()})
    except LookupError:
        return None


def _edge_values(model: Module, batch: Batch, required: set[str], takes_edge_attr: bool) -> dict[str, Handle[Batch]]:
    """The edge values that the batch carries and the model takes, under the names of PyG's arguments."""
    layers = layers_of(model).values()
    values: dict[str, Handle[Batch]] = {}
    takes_weight = "edge_weight" in required or any(takes_edge_weight(layer) for layer in layers)
    takes_attr = takes_edge_attr or "edge_attr" in required
    if batch.has_edge_weight and takes_weight:
        values["edge_weight"] = batch.edge_weight
    if batch.has_edge_attr and (takes_attr or any(edge_features_of(layer) is not None for layer in layers)):
        values["edge_attr"] = batch.edge_attr
    return values


def call_model(model: Module, batch: Batch, *, takes_edge_attr: bool = False) -> Any:
    """Call a model as a training loop does.

    A forward with one argument, of any name, gets the batch. Any other gets ``(x, edge_index)``, and by name those of
    ``edge_weight`` and ``edge_attr`` that it has, that the batch carries, and that some layer of the model takes.
    ``takes_edge_attr``: the model takes edge features, although none of its layers declares them.
    """
    signature = inspect.signature(model.forward)
    first, second, others = _arguments(signature)
    required = {argument.name for argument in others if argument.default is Parameter.empty}
    if first is not None and not required and (second is None or _is_optional(second)):
        return model(batch)
    if isinstance(batch, TypedBatch):
        return _call_typed(model, batch, signature, required)
    values = {
        name: value
        for name, value in _edge_values(model, batch, required, takes_edge_attr).items()
        if name in signature.parameters
    }
    if second is not None and required - values.keys() == {"edge_attr"}:
        fix = "give it, gsplit.parallelize(model, mesh, num_edge_features=...), and a graph with edge features"
        raise InputError(explain("the model's edge_attr", "edge features of a known width", "no width", fix))
    if second is None or required - values.keys():
        expected = "(x, edge_index), with edge_weight or edge_attr if the batch has them, or (batch)"
        fix = "give other arguments a default, or take the batch and read from it what the model needs"
        raise InputError(explain("the model's forward", expected, signature, fix))
    return model(batch.x, EdgeHandle(batch), **values)


def _call_typed(model: Module, batch: TypedBatch, signature: inspect.Signature, required: set[str]) -> Any:
    """Call a model with the dicts of a heterogeneous batch, or with fused rows if it takes ``edge_type``."""
    if "edge_type" in signature.parameters and required <= {"edge_type"}:
        return model(batch.fused_x, batch.edge_index, edge_type=batch.edge_type)
    values: dict[str, Any] = {}
    if batch.has_edge_attr and "edge_attr_dict" in signature.parameters:
        values["edge_attr_dict"] = batch.edge_attr_dict
    if batch.has_edge_weight and "edge_weight_dict" in signature.parameters:
        values["edge_weight_dict"] = batch.edge_weight_dict
    if required - values.keys():
        expected = (
            "(x_dict, edge_index_dict), with edge_attr_dict or edge_weight_dict, (x, edge_index, edge_type) or (batch)"
        )
        fix = "give other arguments a default, or take the batch and read from it what the model needs"
        raise InputError(explain("the model's forward", expected, signature, fix))
    return model(batch.x_dict, batch.edge_index_dict, **values)


def _arguments(signature: inspect.Signature) -> tuple[Parameter | None, Parameter | None, list[Parameter]]:
    """The first and the second positional argument, which may be ``*args``, and all others but ``**kwargs``."""
    arguments = [argument for argument in signature.parameters.values() if argument.kind != Parameter.VAR_KEYWORD]
    positional = [argument for argument in arguments if argument.kind in _POSITIONAL]
    variable = next((argument for argument in arguments if argument.kind == Parameter.VAR_POSITIONAL), None)
    first, second, *_ = [*positional, variable, variable]
    return first, second, [argument for argument in arguments if argument not in (first, second, variable)]


def _is_optional(argument: Parameter) -> bool:
    """Whether the second argument is optional: it has a default, and is not the edges."""
    return argument.default is not Parameter.empty and argument.name not in _EDGES


def dtype_of(parameters: Iterable[Tensor]) -> torch.dtype:
    """The dtype of a model's rows: that of its first floating-point parameter."""
    floats = (p.dtype for p in parameters if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def input_rows(call: LayerCall) -> Any:
    """The rows a layer was called with: its first argument, ``x`` or ``x_dict``."""
    args, kwargs = call
    return args[0] if args else kwargs.get("x", kwargs.get("x_dict"))


def find_handle(call: LayerCall) -> "EdgeHandle[Batch] | None":
    """A placeholder for edges among the arguments of a call, or in a dict of them, by relation."""
    for value in (*call[0], *call[1].values()):
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, EdgeHandle):
                return each
    return None


def is_plain_call(signature: inspect.Signature, call: LayerCall) -> bool:
    """Whether a layer is called with rows, edges and perhaps the batch's values of edges, and no other options."""
    arguments = signature.bind(*call[0], **call[1]).arguments
    given = {name: value for name, value in arguments.items() if value is not None}
    is_plain = isinstance(given.pop("edge_index", None), EdgeHandle) and given.pop("x", None) is input_rows(call)
    kinds = {"edge_attr": EdgeAttrHandle, "edge_weight": EdgeWeightHandle}
    return is_plain and all(type(value) is kinds.get(name) for name, value in given.items())


def substitute(call: LayerCall, rows: Any, edges: Any, weights: Any, attr: Any, kinds: Any = None) -> LayerCall:
    """A layer's call with other rows, and with edges, their weights, features and types in place of the handles."""
    given = input_rows(call)

    def swap(value: Any) -> Any:
        if value is given:
            return rows
        if isinstance(value, EdgeHandle):
            return edges
        if isinstance(value, dict) and find_handle(((value,), {})) is not None:
            return edges
        if isinstance(value, EdgeTypeHandle):
            return kinds
        if isinstance(value, EdgeWeightHandle):
            return weights
        return attr if isinstance(value, EdgeAttrHandle) else value

    return tuple(map(swap, call[0])), {name: swap(value) for name, value in call[1].items()}


def tensors_of(out: Any) -> Iterator[Tensor]:
    """All tensors of a model's output: a tensor, or a tree of dicts, tuples, lists and dataclasses."""
    if isinstance(out, Tensor):
        yield out
        return
    values: Iterable[Any] = ()
    if isinstance(out, dict):
        values = out.values()
    elif isinstance(out, tuple | list):
        values = out
    elif is_dataclass(out) and not isinstance(out, type):
        values = [getattr(out, each.name) for each in fields(out)]
    yield from (tensor for value in values for tensor in tensors_of(value))
