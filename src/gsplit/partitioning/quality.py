"""How good a partition is, on mini-batches that were not used for its weights; and what the weights expect (paper 4).

Every figure is of the mini-batches that training draws, per layer (0 is the lowest, next to the features) and overall:
edges whose ends lie in different parts, rows that must cross (a source wanted in another part, once per part), and
the largest part over the mean of edges, of vertices computed, of targets and of the weighted work.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.graph.graph import Graph
from gsplit.kernels.jit import kernel
from gsplit.partitioning.forecast import imbalance
from gsplit.partitioning.presample import Counts, Drawn
from gsplit.partitioning.quotient import count_links
from gsplit.partitioning.weights import vertex_work, work_scale

__all__ = ["Expectation", "Quality", "expect", "measure"]

Parts = npt.NDArray[np.int32]
Table = npt.NDArray[np.int64]
_TOTALS = 3  # edges, cross edges, rows shuffled
_DEVIATIONS = 1.96  # of a normal distribution, for 95 %


@dataclass(frozen=True)
class Expectation:
    """Expectation of one mini-batch from the counts of presampling: the theorem's side of the comparison."""

    edges: float
    cross_edges: float
    loads: npt.NDArray[np.float64]

    @property
    def cross_edge_share(self) -> float:
        """Edges between parts, of all."""
        return self.cross_edges / max(self.edges, 1e-300)


def expect(graph: Graph, counts: Counts, parts: Parts, num_parts: int, c_v: float, c_e: float) -> Expectation:
    """Means per mini-batch: k over the cut, and c_v k + c_e e over every part."""
    links = count_links(graph, counts.edges, parts, num_parts)
    loads = np.bincount(parts, weights=vertex_work(counts, c_v, c_e), minlength=num_parts) / work_scale(c_v, c_e)
    drawn = int(links.sum())
    return Expectation(
        drawn / counts.num_batches, (drawn - int(links.trace())) / counts.num_batches, loads / counts.num_batches
    )


@dataclass(frozen=True)
class Quality:
    """What was counted in every mini-batch.

    Axes of totals, vertices and edges: mini-batch, layer (0 the lowest), then total or part; of targets and inputs:
    mini-batch, part.
    """

    totals: Table
    vertices: Table
    edges: Table
    targets: Table
    inputs: Table
    c_v: float
    c_e: float

    def cross_edge_share(self, layer: int | None = None) -> float:
        """Edges between parts, of all."""
        edges, crossing, _ = self._totals(layer)
        return crossing / max(1, edges)

    def rows_shuffled_per_input(self, layer: int | None = None) -> float:
        """Rows that cross between parts, for every input row of the mini-batch."""
        return self._totals(layer)[2] / max(1, int(self.inputs.sum()))

    def _totals(self, layer: int | None) -> tuple[int, int, int]:
        chosen = self.totals if layer is None else self.totals[:, layer : layer + 1]
        edges, crossing, rows = chosen.sum(axis=(0, 1)).tolist()
        return edges, crossing, rows

    def _work(self, vertices: Table, edges: Table) -> npt.NDArray[np.float64]:
        work: npt.NDArray[np.float64] = self.c_v * vertices + self.c_e * edges
        return work

    def imbalances(self, layer: int | None = None) -> dict[str, float]:
        """Mean over the mini-batches of largest over mean."""
        edges, vertices = (
            table.sum(axis=1) if layer is None else table[:, layer] for table in (self.edges, self.vertices)
        )
        found = {"edge": edges, "vertex": vertices, "work": self._work(vertices, edges)}
        if layer is None:
            found |= {"target": self.targets, "input": self.inputs}
        return {f"{name}_imbalance": float(imbalance(table).mean()) for name, table in found.items()}

    def cross_edges(self) -> tuple[float, float]:
        """Mean per mini-batch, and half the width of its 95 % confidence interval."""
        return _mean_and_interval(self.totals[:, :, 1].sum(axis=1))

    def mean_loads(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The same for the work of every part."""
        columns = [
            _mean_and_interval(column) for column in self._work(self.vertices.sum(axis=1), self.edges.sum(axis=1)).T
        ]
        return np.array([mean for mean, _ in columns]), np.array([half for _, half in columns])

    def as_dict(self) -> dict[str, Any]:
        """Figures overall and per layer."""
        layers = range(self.totals.shape[1])
        figures = [self._figures(layer) for layer in (None, *layers)]
        return {**figures[0], "num_batches": self.totals.shape[0], "layers": figures[1:]}

    def _figures(self, layer: int | None) -> dict[str, float]:
        return {
            "cross_edge_share": self.cross_edge_share(layer),
            "rows_shuffled_per_input": self.rows_shuffled_per_input(layer),
            **self.imbalances(layer),
        }


def _mean_and_interval(values: npt.NDArray[Any]) -> tuple[float, float]:
    spread = float(values.std(ddof=1)) if values.size > 1 else float("inf")
    return float(values.mean()), _DEVIATIONS * spread / sqrt(values.size)


def measure(
    graph: Graph, batches: Iterable[Drawn], partitions: list[tuple[Parts, int]], c_v: float, c_e: float
) -> list[Quality]:
    """Count the same mini-batches for several partitions, each given with its number of parts."""
    counters = [_Counter(graph, parts, num_parts) for parts, num_parts in partitions]
    with ThreadPoolExecutor() as pool:
        for drawn in batches:
            for done in [pool.submit(counter.count, drawn) for counter in counters]:
                done.result()
    return [counter.quality(c_v, c_e) for counter in counters]


class _Counter:
    def __init__(self, graph: Graph, parts: Parts, num_parts: int) -> None:
        self._graph = graph
        self._parts = np.asarray(parts, np.int32)
        self._num_parts = num_parts
        self._seen = np.zeros((graph.num_vertices, -(-num_parts // 64)), np.uint64)
        self._batches: list[tuple[Table, Table, Table, Table, Table]] = []

    def count(self, drawn: Drawn) -> None:
        layers = len(drawn.frontiers)
        totals = np.zeros((layers, _TOTALS), np.int64)
        vertices, edges = (np.zeros((layers, self._num_parts), np.int64) for _ in range(2))
        for hop in range(layers):
            at = layers - 1 - hop
            _count_layer(
                self._graph.indices,
                drawn.frontiers[hop],
                drawn.counts[hop],
                drawn.places[hop],
                self._parts,
                self._seen,
                totals[at],
                vertices[at],
                edges[at],
            )
        targets, inputs = (
            np.bincount(self._parts[ids], minlength=self._num_parts) for ids in (drawn.frontiers[0], drawn.input_ids)
        )
        self._batches.append((totals, vertices, edges, targets, inputs))

    def quality(self, c_v: float, c_e: float) -> Quality:
        totals, vertices, edges, targets, inputs = (np.stack(tables) for tables in zip(*self._batches, strict=True))
        return Quality(totals, vertices, edges, targets, inputs, c_v, c_e)


@kernel
def _count_layer(
    indices: npt.NDArray[Any],
    frontier: npt.NDArray[Any],
    counts: npt.NDArray[Any],
    places: npt.NDArray[Any],
    parts: npt.NDArray[Any],
    seen: npt.NDArray[Any],
    totals: npt.NDArray[Any],
    vertices: npt.NDArray[Any],
    edges: npt.NDArray[Any],
) -> None:
    """``seen`` has a bit for every vertex and part that reads it; it is empty before and after."""
    at, crossing, rows = 0, 0, 0
    for i in range(frontier.size):
        part = parts[frontier[i]]
        word, bit = part // 64, np.uint64(1) << np.uint64(part % 64)
        vertices[part] += 1
        edges[part] += counts[i]
        for _ in range(counts[i]):
            source = indices[places[at]]
            at += 1
            if parts[source] != part:
                crossing += 1
                if not seen[source, word] & bit:
                    seen[source, word] |= bit
                    rows += 1
    for place in places:
        for word in range(seen.shape[1]):
            seen[indices[place], word] = 0
    totals[0], totals[1], totals[2] = places.size, crossing, rows
