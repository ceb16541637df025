"""Whatever a user hands over as the graph, as a ``GraphStore``."""

from typing import TYPE_CHECKING, Any

from gsplit.errors import InputError, explain
from gsplit.store.memory import MemoryStore
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_graph_store"]


def as_graph_store(graph: Any, partition: "Tensor | None" = None) -> GraphStore:
    """An opened store as it is; a PyG ``Data`` in memory, its vertices in the parts that ``partition`` gives them."""
    if isinstance(graph, Store | MemoryStore | GraphStore):
        if partition is not None:
            got = f"one for {graph!r}" if isinstance(graph, Store) else f"one for a {type(graph).__name__}"
            fix = "leave it out and run gsplit partition on the store"
            raise InputError(explain("partition", "none for a store, which has its own", got, fix))
        return graph
    if any(kind.__module__.startswith("torch_geometric.") for kind in type(graph).__mro__):
        from gsplit.store.importers.pyg import memory_store  # PyG, only when its data is given

        return memory_store(graph, partition)
    got = repr(graph) if isinstance(graph, str) else f"a {type(graph).__name__}"
    fix = "pass gsplit.open(path), or a torch_geometric.data.Data"
    raise InputError(explain("graph", "an opened store or a PyG Data", got, fix))
