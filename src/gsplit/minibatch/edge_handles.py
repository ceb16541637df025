"""Placeholders for edge tensors: objects that refer to a batch and are passed to a PyG model as its edges.

A model wrapped by ``gsplit.parallelize`` passes them to its layers, whose forwards replace them by the layer's own
edges (``nn.split_forward``). Two batches can exist at once, because each handle refers to its own. Tensor operations on
a handle are refused, because blocks do not support them.
"""

from typing import Any, Generic, NoReturn, TypeVar

from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType

__all__ = ["EdgeAttrHandle", "EdgeHandle", "EdgeTypeHandle", "EdgeWeightHandle", "Handle"]

B = TypeVar("B")

_FIX = (
    "hand it to a model wrapped by gsplit.parallelize, or use batch.blocks[l].edge_index() with batch.shuffle(l, h), "
    "one block per layer"
)


def _refusing(operation: str) -> Any:
    def refuse(self: "Handle[Any]", *args: object) -> NoReturn:
        raise InputError(explain(self.name, "no tensor operation", operation, _FIX))

    return refuse


class Handle(Generic[B]):
    """Refuses all tensor operations."""

    name = "batch.edge_index"

    def __init__(self, batch: B, relation: EdgeType | None = None) -> None:
        """``relation``: the edge type of the edges; None for all edges of the graph."""
        self.batch = batch
        self.relation = relation

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        operation = getattr(function, "__name__", str(function))
        got = f"{cls.name}, a placeholder for one block per layer"
        raise InputError(explain(f"torch.{operation}", "a tensor of edges", got, _FIX))

    __iter__ = _refusing("iteration")
    __getitem__ = _refusing("indexing")
    __len__ = _refusing("len()")
    __add__ = __radd__ = __sub__ = __mul__ = _refusing("arithmetic")
    __lt__ = __gt__ = _refusing("a comparison")
    __bool__ = _refusing("a truth value")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(explain(self.name, "no tensor operation", f".{name}", _FIX))


class EdgeHandle(Handle[B]):
    """In place of ``edge_index``."""


class EdgeTypeHandle(Handle[B]):
    """In place of ``edge_type``: the relation of every sampled edge."""

    name = "batch.edge_type"


class EdgeAttrHandle(Handle[B]):
    """In place of ``edge_attr``: the stored features of the sampled edges."""

    name = "batch.edge_attr"


class EdgeWeightHandle(Handle[B]):
    """In place of ``edge_weight``: the stored weights of the sampled edges."""

    name = "batch.edge_weight"
