"""The weighted graph of ``weights`` by ranks: each has the rows of the vertices it holds, as one process would.

A rank holds the in-edges of its vertices. Their out-edges are in-edges of other ranks, which send them: columns piece
after piece, in messages of bounded size, each edge to the owner of its source. What one rank sent goes into one file,
where destinations ascend; so the files in the order of the ranks are in the order of destinations.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.distributed.comm.comm import Call
from gsplit.kernels.jit import kernel
from gsplit.partitioning.presample import Counts
from gsplit.partitioning.sharded.held_shard import HeldShard, largest_of, owners_of, send_rows
from gsplit.partitioning.weighted_graph import WeightedGraph, place_array
from gsplit.partitioning.weights import check_columns, check_objective, merge_directions, weigh_vertices

__all__ = ["weigh_shard"]

_EDGES_AT_ONCE = 1 << 20


def weigh_shard(
    objective: str,
    held: HeldShard,
    counts: Counts,
    targets: Ids,
    folder: Path,
    c_v: float,
    c_e: float,
) -> WeightedGraph:
    """Write the rows of the vertices held into a folder of this rank and open them; neighbours are of all ranks.

    A collective. ``targets`` are those held.
    """
    check_objective(objective)
    check_columns(held.graph)
    folder.mkdir(parents=True, exist_ok=True)
    vertex_weights = weigh_vertices(objective, held.graph, counts, targets, folder, c_v, c_e)
    edge_counts = counts.edges if objective == "gsplit" else np.empty(0, np.uint32)
    files = _receive_out_edges(held, edge_counts, folder)
    starts = np.zeros(held.num_held + 1, np.int64)
    for edges in _pieces(files):
        _count_rows(edges, held.first, starts)
    np.cumsum(starts, out=starts)
    id_type = np.int32 if held.graph.num_vertices < 1 << 31 else np.int64
    ids = place_array(folder, "out_ids", (int(starts[-1]),), id_type)
    weights = place_array(folder, "out_weights", (int(starts[-1]) if edge_counts.size else 0,), np.uint32)
    cursor = starts.copy()
    for edges in _pieces(files):
        _scatter_rows(edges, held.first, cursor, ids, weights)
    for file in files:
        file.unlink()
    xadj, adjncy, edge_weights = merge_directions(held.graph, edge_counts, starts, ids, weights, folder)
    return WeightedGraph(xadj, adjncy, edge_weights, vertex_weights)


def _receive_out_edges(held: HeldShard, edge_counts: npt.NDArray[np.uint32], folder: Path) -> list[Path]:
    """A file for every rank with the edges it sent: source, destination and draws, 24 bytes each."""
    comm, graph = held.comm, held.graph
    files = [folder / f"from-{peer}.bin" for peer in range(comm.size)]
    cuts = _cut_columns(graph.indptr)
    rounds = largest_of(comm, Call("rounds of out-edges"), len(cuts) - 1)
    streams = [file.open("wb") for file in files]
    try:
        for turn in range(rounds):  # all ranks: as many as the one with the most columns needs
            first = cuts[min(turn, len(cuts) - 1)]
            stop = cuts[min(turn + 1, len(cuts) - 1)]
            rows = _edges_of(graph.indptr, graph.indices, edge_counts, first, stop)
            rows[:, 1] += held.first
            owners = owners_of(held.ownership, rows[:, 0])
            for stream, sent in zip(streams, send_rows(comm, Call("out-edges", turn), rows, owners), strict=True):
                sent.tofile(stream)
    finally:
        for stream in streams:
            stream.close()
    return files


def _cut_columns(indptr: Ids) -> list[int]:
    """Where pieces of columns begin, each of a bounded number of edges or a single column."""
    cuts, last = [0], indptr.size - 1
    while cuts[-1] < last:
        stop = int(np.searchsorted(indptr, indptr[cuts[-1]] + _EDGES_AT_ONCE, side="right")) - 1
        cuts.append(min(last, max(cuts[-1] + 1, stop)))
    return cuts


def _edges_of(indptr: Array, indices: Array, edge_counts: Array, first: int, stop: int) -> Ids:
    """Source, row and draws of the edges of some columns, without those that were never drawn."""
    edges = slice(int(indptr[first]), int(indptr[stop]))
    drawn = edge_counts[edges] if edge_counts.size else np.ones(edges.stop - edges.start, np.uint32)
    rows = np.repeat(np.arange(first, stop), np.diff(indptr[first : stop + 1]))
    return np.stack([indices[edges].astype(np.int64), rows, drawn.astype(np.int64)], axis=1)[drawn > 0]


def _pieces(files: list[Path]) -> Iterator[Ids]:
    for file in files:
        with file.open("rb") as stream:
            while (edges := np.fromfile(stream, np.int64, 3 * _EDGES_AT_ONCE)).size:
                yield edges.reshape(-1, 3)


@kernel
def _count_rows(edges: Array, first: int, starts: Array) -> None:
    """Sources are vertices of this rank: senders have checked the ids."""
    for i in range(edges.shape[0]):
        starts[edges[i, 0] - first + 1] += 1


@kernel
def _scatter_rows(edges: Array, first: int, cursor: Array, ids: Array, weights: Array) -> None:
    for i in range(edges.shape[0]):
        row = edges[i, 0] - first
        ids[cursor[row]] = edges[i, 1]
        if weights.size:
            weights[cursor[row]] = edges[i, 2]
        cursor[row] += 1
