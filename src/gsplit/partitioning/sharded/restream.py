"""The restreaming of ``solvers.restream`` by ranks, each placing the vertices that it holds.

A pass has up to 256 rounds. In a round every rank places one block of its vertices against the parts and loads of the
last exchange, then all tell each other where theirs went and by how much loads have changed. Ranks that place at the
same time must not fill a part together, so each may use its share of the room that was left: with W ranks a W-th. So
the result is the same every time for the same number of ranks, and another one for another number.

Memory: the part of every vertex of the whole graph on every rank, 2 bytes each; the rest is of the size of what is
held. A round is one exchange, of 2 bytes per vertex placed and 8 per part and constraint, to all ranks.
"""

import numpy as np
import numpy.typing as npt

from gsplit.distributed.comm.comm import Call
from gsplit.partitioning.sharded.exchange import add_up, give_everybody
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.solvers.restream import LAST_PASSES, PASSES, find_caps, order_blocks, stream_blocks
from gsplit.partitioning.weighted_graph import WeightedGraph
from gsplit.progress import Progress, silent

__all__ = ["restream_shards"]

Parts = npt.NDArray[np.int16]
Weights = npt.NDArray[np.int64]
_ROUNDS, _LEAST_BLOCK = 256, 16


def restream_shards(
    held: HeldShard, graph: WeightedGraph, parts: int, tolerance: float, seed: int, progress: Progress = silent
) -> Parts:
    """The part of every vertex of all ranks. A collective; ``graph`` has the rows of the vertices held."""
    ranges, comm = held.ownership, held.comm
    sizes = np.diff(ranges.boundaries)
    block_size = max(_LEAST_BLOCK, -(-int(sizes.max()) // _ROUNDS))
    result = np.full(ranges.num_vertices, -1, np.int16)
    caps = _caps(held, graph, parts, tolerance)
    loads = np.zeros((parts, caps.size), np.int64)
    for number in range(PASSES + LAST_PASSES):
        orders = [order_blocks(-(-int(size) // block_size), seed + number) for size in sizes]
        rounds = max(order.size for order in orders)
        for turn in range(rounds):  # all ranks: those without a block left send what has not changed
            blocks = [_block(ranges.range_of(rank), order, turn, block_size) for rank, order in enumerate(orders)]
            limits = np.where(loads < caps, loads + (caps - loads) // comm.size, caps)
            before, mine = loads.copy(), orders[comm.rank][turn : turn + 1]
            stream_blocks(graph, mine, block_size, held.first, caps, limits, loads, result, strict=number >= PASSES)
            changed = _tell(held, Call("parts of a block", number * rounds + turn), blocks, result, loads - before)
            loads = before + changed
        progress("restream", number + 1, PASSES + LAST_PASSES)
    return result


def _caps(held: HeldShard, graph: WeightedGraph, parts: int, tolerance: float) -> Weights:
    weights, comm = np.asarray(graph.vertex_weights), held.comm
    totals = add_up(comm, Call("weights"), weights.sum(axis=0))
    largest = give_everybody(comm, Call("weights"), weights.max(axis=0, initial=0)[None], (1,) * comm.size)
    return find_caps(totals, np.concatenate(largest).max(axis=0), parts, tolerance)


def _block(held: tuple[int, int], order: npt.NDArray[np.int64], turn: int, block_size: int) -> slice:
    """The vertices that a rank places in a round; none if it has no block left."""
    if turn >= order.size:
        return slice(held[0], held[0])
    first = held[0] + int(order[turn]) * block_size
    return slice(first, min(first + block_size, held[1]))


def _tell(held: HeldShard, call: Call, blocks: list[slice], result: Parts, changed: Weights) -> Weights:
    """Exchange where the vertices of the blocks went, into ``result``; returns the change of loads by all ranks."""
    comm = held.comm
    mine = np.concatenate([result[blocks[comm.rank]].view(np.uint8), changed.reshape(-1).view(np.uint8)])
    lengths = [2 * (block.stop - block.start) for block in blocks]
    total = np.zeros(changed.size, np.int64)
    messages = give_everybody(comm, call, mine, tuple(length + changed.nbytes for length in lengths))
    for block, length, message in zip(blocks, lengths, messages, strict=True):
        result[block] = message[:length].view(np.int16)
        total += np.frombuffer(message[length:].tobytes(), np.int64)
    return total.reshape(changed.shape)
