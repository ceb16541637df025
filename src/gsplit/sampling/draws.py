"""Draws: which in-edges of a vertex a built-in sampler takes. All that the built-in samplers differ in.

For vertex v with d in-edges from sources t_0 .. t_{d-1} and weights w_j, fanout k and layer key K:

    uniform          slot i of k: Floyd's method with hashes mix(mix(K, v), i)
    replace          slot i of k: any of the d, by bounded(mix(mix(K, v), i), d)
    labor            the k positions with the smallest mix(K, t_j)
    weighted         the k positions with the smallest L(mix(mix(K, v), j)) / w_j
    labor, weighted  the k positions with the smallest L(mix(K, t_j)) / w_j

L is ``keys.scalar.neg_log2``; v and t_j are original ids. So a draw depends on the key, the vertex and its in-edges
alone (law 1). It is LABOR-0 (Balin and Catalyurek, NeurIPS 2023) as sequential Poisson sampling, and exact successive
sampling by weight (Efraimidis and Spirakis, 2006). A frontier asks its draw for counts first, then for places.
Samplers that look at all vertices of a layer are refused: under ``data`` every rank has other ones.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.graph.graph import Graph
from gsplit.keys.kernels_numba import log2_table
from gsplit.sampling import kernels_numba as host
from gsplit.sampling import kernels_select as select
from gsplit.sampling import kernels_torch as device
from gsplit.sampling.checks import OwnEdges, raise_status
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store.protocol import GraphStore

__all__ = ["UNIFORM", "Draw", "TorchDraw", "open_draw"]

_NONE: npt.NDArray[Any] = np.empty(0, np.int64)


@dataclass(frozen=True)
class Draw:
    """Options with the arrays that they need. ``open_draw`` makes one for a range of vertices, or for a graph.

    ``source_ids``: the original id of every vertex of the WHOLE graph, mapped and never copied; empty where ids are
    original. ``weights``: one per in-edge of the range, whose first is edge ``first_edge``; empty without weights.
    """

    options: DrawOptions = field(default_factory=DrawOptions)
    source_ids: npt.NDArray[Any] = field(default_factory=lambda: _NONE)
    weights: npt.NDArray[Any] = field(default_factory=lambda: _NONE)
    first_edge: int = 0

    @property
    def by_source(self) -> bool:
        """Whether numbers belong to sources, as in LABOR."""
        return self.options.sampler == "labor"

    @property
    def is_weighted(self) -> bool:
        return self.options.weight_attr is not None

    def count(self, graph: Graph, frontier: Ids, fanout: int, out_indptr: Ids) -> None:
        """Fill ``out_indptr`` with offsets of the in-edges that every row will draw; fanout -1 takes them all."""
        first = graph.first_vertex
        if self.is_weighted:
            status = select.count_weighted(
                graph.indptr, first, self.weights, self.first_edge, frontier, fanout, out_indptr
            )
        elif self.options.replace and fanout > 0:
            status = select.count_replace(graph.indptr, graph.indices.size, first, frontier, fanout, out_indptr)
        else:
            status = host.count_layer(graph.indptr, graph.indices.size, first, frontier, fanout, out_indptr)
        raise_status(status, graph)

    def write_places(
        self, graph: Graph, original: Ids, key: int, frontier: Ids, fanout: int, out_indptr: Ids, places: Ids
    ) -> None:
        """Write where in the graph every row's drawn in-edges stand. ``count`` has checked the same columns."""
        first = graph.first_vertex
        word = np.uint64(key)
        if self.is_weighted:
            status = select.draw_weighted(
                graph.indptr,
                graph.indices,
                first,
                original,
                self.source_ids,
                self.by_source,
                self.weights,
                self.first_edge,
                log2_table(),
                word,
                frontier,
                fanout,
                out_indptr,
                places,
            )
            raise_status(status, graph)
        elif self.by_source:
            status = select.draw_labor(
                graph.indptr, graph.indices, first, self.source_ids, word, frontier, out_indptr, places
            )
            raise_status(status, graph)
        elif self.options.replace and fanout > 0:
            select.draw_replace(graph.indptr, first, original, word, frontier, out_indptr, places)
        else:
            host.draw_places(graph.indptr, first, original, word, frontier, out_indptr, places)

    def copy_to(self, own: OwnEdges, torch_device: torch.device) -> "TorchDraw":
        """The same draw for the edges that a device holds. Original ids of sources and weights are copied by edge."""
        names, weights = _NONE, _NONE
        if self.by_source:
            names = self.source_ids[own.indices] if self.source_ids.size else own.indices
        if self.is_weighted:
            begin = own.first_edge - self.first_edge
            weights = self.weights[begin : begin + own.indices.size]
        return TorchDraw(
            replace=self.options.replace,
            source_ids=torch.from_numpy(names.astype(np.int64)).to(torch_device) if self.by_source else None,
            weights=torch.from_numpy(weights.astype(np.float64)).to(torch_device) if self.is_weighted else None,
        )


UNIFORM = Draw()


@dataclass(frozen=True)
class TorchDraw:
    """See ``Draw``: by torch operations, equal in every pick. Tensors have a row for every edge on the device."""

    replace: bool
    source_ids: Tensor | None
    weights: Tensor | None

    @property
    def is_uniform(self) -> bool:
        return not self.replace and self.source_ids is None and self.weights is None

    @property
    def num_bytes(self) -> int:
        return sum(held.nbytes for held in (self.source_ids, self.weights) if held is not None)

    def draw(self, indptr: Tensor, rows: Tensor, original_ids: Tensor, key: int, fanout: int) -> tuple[Tensor, Tensor]:
        """Offsets of the drawn in-edges of some rows, and their places. ``original_ids`` are those of the rows."""
        if self.replace and fanout > 0:
            return device.draw_replace(indptr, rows, original_ids, key, fanout)
        if self.source_ids is not None or self.weights is not None:
            return device.draw_smallest(indptr, rows, original_ids, key, fanout, self.source_ids, self.weights)
        out_indptr = device.count_layer(indptr, rows, fanout)
        return out_indptr, device.draw_places(indptr, rows, original_ids, key, out_indptr)


def open_draw(options: DrawOptions, store: GraphStore, graph: Graph) -> Draw:
    """The draw for a graph, or for a range of vertices of it. Weights are checked: one pass over those of the range."""
    source_ids, weights = _NONE, _NONE
    first_edge = max(0, int(graph.indptr[0]))
    if options.sampler == "labor" and store.is_renumbered:
        source_ids = _all_original_ids(store)
    if options.weight_attr is not None:
        stop_edge = max(first_edge, int(graph.indptr[-1]))
        weights = _read_weights(store, options.weight_attr, first_edge, stop_edge)
    return Draw(options, source_ids, weights, first_edge)


def _all_original_ids(store: GraphStore) -> Array:
    first, stop = store.vertex_range
    if (first, stop) != (0, store.num_vertices):
        expected = "a store with the original ids of all vertices, because draws depend on those of the sources"
        got = f"a shard of a partitioned store, with vertices {first}..{stop - 1} of {store.num_vertices}"
        raise InputError(explain("sampler='labor'", expected, got, "open the whole store, or use sampler='uniform'"))
    return store.original_ids()


def _read_weights(store: GraphStore, name: str, first_edge: int, stop_edge: int) -> Array:
    """Stored weights of some edges, in a type that kernels read: mapped if they are float32 or float64."""
    if name not in store.edge_names:
        got = f"{name!r}; stored are {', '.join(store.edge_names) or 'none'}"
        fix = "import the graph with per-edge values, or leave weight_attr out"
        raise InputError(explain("weight_attr", "the name of a stored per-edge array", got, fix))
    full = f"edges/{name}"
    array = store.stored_array(full)
    dtype = store.dtype(full)
    if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1) or array.dtype.kind not in "fiub":
        got = f"{dtype} {list(array.shape)}"
        raise InputError(explain(full, "one number per edge", got, "name an array of one column as weight_attr"))
    weights = array.reshape(-1)[first_edge:stop_edge]
    if dtype == "bfloat16":
        weights = torch.from_numpy(np.array(weights)).view(torch.bfloat16).to(torch.float64).numpy()
    elif dtype not in ("float32", "float64"):
        weights = weights.astype(np.float64)
    bad = select.find_bad_weight(weights)
    if bad >= 0:
        got = f"{weights[bad]} of edge {first_edge + bad}"
        expected = f"finite weights, each 0 or at least {select.LEAST_WEIGHT}"
        raise InputError(explain(full, expected, got, "import other weights: only their proportions matter"))
    return weights
