"""Convert the ``graph`` argument of the public functions to a ``GraphStore``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gsplit.errors import InputError, explain
from gsplit.store.in_memory import MemoryStore
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_graph_store"]


def as_graph_store(graph: Any, partition: "Tensor | Mapping[str, Tensor] | None" = None) -> GraphStore:
    """Return an opened store unchanged, or PyG's ``Data`` or ``HeteroData`` as a store in memory.

    ``partition``: the part of every vertex, for ``HeteroData`` by vertex type.
    """
    if isinstance(graph, Store | MemoryStore | GraphStore):
        if partition is not None:
            what = repr(graph) if isinstance(graph, Store) else f"a {type(graph).__name__}"
            got = f"{type(partition).__name__} for {what}"
            fix = "leave it out and run gsplit partition on the store"
            raise InputError(explain("partition", "None for a store, which has its own parts", got, fix))
        return graph
    if any(kind.__module__.startswith("torch_geometric.") for kind in type(graph).__mro__):
        from gsplit.store.importers.pyg import memory_store  # imports PyG

        return memory_store(graph, partition)
    got = repr(graph) if isinstance(graph, str) else f"a {type(graph).__name__}"
    fix = "pass gsplit.open(path), or a torch_geometric.data.Data or HeteroData"
    raise InputError(explain("graph", "an opened store or a PyG Data", got, fix))
