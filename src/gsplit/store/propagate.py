"""``gsplit propagate``: features averaged over neighbours, once and for all, for SGC and SIGN.

Hop k writes ``features/NAMEk`` = S ... S x, k times, where S is the matrix of PyG's ``gcn_norm``: the edge u -> v of
weight w counts ``deg_inv_sqrt[u] * w * deg_inv_sqrt[v]``. With self-loops this is what SGConv computes before its
linear layer, without them what PyG's SIGN transform adds as x1, x2, .. . A model of these features has no layers on
the graph: any data loader can train it.

Rows are read and written through memory maps, one destination at a time. Memory is 16 bytes per vertex. Sums are in
float64 and in the order of the edges, which is that of original ids, so a partition does not change them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.graph.degrees import gcn_degrees
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress, silent
from gsplit.store.manifest import new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter

__all__ = ["write_propagated"]

_ROWS_AT_ONCE = 1 << 16


def write_propagated(
    store: Store,
    path: str | Path,
    hops: int,
    *,
    features: str = "x",
    self_loops: bool = True,
    edge_weight: str | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Write a store with the features of every hop from 1 to ``hops``, and open the result."""
    full = f"features/{features}"
    added = [f"{full}{hop}" for hop in range(1, hops + 1)]
    rows, weights = _check(store, full, added, edge_weight)
    with StoreWriter(Path(path), overwrite=overwrite) as writer:
        verify_store(store, progress)  # ids are used as indices, and damage would get new checksums
        for name in store.names:
            writer.copy(name, store.dtype(name), store.stored_array(name), progress)
        graph = store.graph
        norm = gcn_degrees(graph, weights, add_self_loops=self_loops, fill_value=1.0)
        loops = np.ones(graph.num_vertices) if norm.loop_weight is None else norm.loop_weight
        for name in added:
            out = writer.place(name, store.dtype(full), rows.shape)
            for first in range(0, graph.num_vertices, _ROWS_AT_ONCE):
                stop = min(first + _ROWS_AT_ONCE, graph.num_vertices)
                ends = graph.indptr[first : stop + 1]
                _propagate(
                    ends, graph.indices, weights, norm.deg_inv_sqrt, loops, self_loops, rows, first, out[first:stop]
                )
                progress(f"write {name}", stop, graph.num_vertices)
            rows = out
        settings = {"hops": hops, "features": features, "self_loops": self_loops, "edge_weight": edge_weight}
        progress("flush to disk", 0, None)
        steps = [*store.manifest.provenance, new_step("propagate", settings, {})]
        writer.commit(store.manifest.model_copy(update={"arrays": writer.finish_arrays(), "provenance": steps}))
    return open_store(path)


def _check(store: Store, full: str, added: list[str], edge_weight: str | None) -> tuple[Array, Array | None]:
    """The features and weights to propagate; refuses what cannot be."""
    if not added:
        raise InputError(explain("hops", "a number from 1", len(added), "give the number of layers of the model"))
    if store.types is not None or store.manifest.shard is not None:
        got = "a shard" if store.types is None else f"one with the types {', '.join(store.types.vertex_types)}"
        fix = "give the whole store of a graph without types"
        raise InputError(explain(store.where, "a whole store of a graph without types", got, fix))
    rows = store.stored_array(full)
    taken = [name for name in added if name in store.names]
    if store.dtype(full) not in ("float32", "float64"):
        fix = "run gsplit convert --features float32 first"
        raise InputError(explain(f"{store.where}: {full}", "float32 or float64", store.dtype(full), fix))
    if taken:
        got = f"one with {', '.join(taken)}"
        raise InputError(explain(store.where, f"a store without {added[0]} and later hops", got, "use it as it is"))
    if edge_weight is None:
        return rows, None
    weights = store.stored_array(f"edges/{edge_weight}")
    if weights.ndim != 1 or store.dtype(f"edges/{edge_weight}") not in ("float32", "float64"):
        got = f"{store.dtype(f'edges/{edge_weight}')} {list(weights.shape)}"
        fix = "import the weights as one column of floats"
        raise InputError(explain(f"edges/{edge_weight}", "one float32 or float64 per edge", got, fix))
    return rows, weights


@kernel
def _propagate(
    indptr: Ids,
    indices: npt.NDArray[Any],
    weights: npt.NDArray[Any] | None,
    inv_sqrt: npt.NDArray[np.float64],
    loops: npt.NDArray[np.float64],
    self_loops: bool,
    rows: npt.NDArray[Any],
    first: int,
    out: npt.NDArray[Any],
) -> None:
    """out[i] = sum over in-edges u -> v of inv_sqrt[u] w inv_sqrt[v] rows[u], for v = first + i. Ids were verified."""
    total = np.empty(rows.shape[1])
    for i in range(indptr.size - 1):
        v = first + i
        total[:] = 0
        for edge in range(indptr[i], indptr[i + 1]):
            u = indices[edge]
            if self_loops and u == v:
                continue
            weight = inv_sqrt[u] * (1.0 if weights is None else weights[edge])
            for column in range(total.size):
                total[column] += weight * rows[u, column]
        if self_loops:
            for column in range(total.size):
                total[column] += inv_sqrt[v] * loops[v] * rows[v, column]
        for column in range(total.size):
            out[i, column] = inv_sqrt[v] * total[column]
