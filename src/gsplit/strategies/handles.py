"""What a batch hands to a PyG model in place of an edge tensor: objects that carry the batch and are not tensors.

A model wrapped by ``gsplit.parallelize`` passes them on to its layers, whose hooks put the layer's own edges in their
place. Two batches can live at once, because each handle knows its own. Any tensor operation on one is refused, with
what to do instead: it would mean that the model does something to edges that blocks cannot do.
"""

from typing import TYPE_CHECKING, Any, NoReturn

from gsplit.errors import InputError, explain

if TYPE_CHECKING:
    from gsplit.strategies.batch import Batch

__all__ = ["EdgeHandle", "Handle", "WeightHandle"]

_FIX = (
    "hand it to a model wrapped by gsplit.parallelize, or use batch.blocks[l].edge_index() with batch.shuffle(l, h), "
    "one block per layer"
)


class Handle:
    """Refuses to be a tensor."""

    name = "batch.edge_index"

    def __init__(self, batch: "Batch") -> None:
        self.batch = batch

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        operation = getattr(function, "__name__", str(function))
        got = f"{cls.name}, which stands for one block per layer"
        raise InputError(explain(f"torch.{operation}", "a tensor of edges", got, _FIX))

    def _refuse(self, *args: object) -> NoReturn:
        raise InputError(explain(self.name, "no tensor operation", "one", _FIX))

    __iter__ = __getitem__ = __len__ = __add__ = __radd__ = __sub__ = __mul__ = __lt__ = __gt__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(explain(f"{self.name}.{name}", "no tensor operation", "one", _FIX))


class EdgeHandle(Handle):
    """Stands where PyG models expect ``edge_index``."""


class WeightHandle(Handle):
    """Stands where PyG models expect ``edge_weight``: GCN's normalisation by the degrees of the whole graph."""

    name = "batch.edge_weight"
