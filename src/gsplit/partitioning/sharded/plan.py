"""From shards to parts by ranks: presample, weigh, restream, and order the parts so that neighbours are close.

Presampling: mini-batches are drawn together, as in split training, and each rank counts what it owns. A mini-batch does
not depend on the number of ranks (law 1), and a rank draws the in-edges of its own vertices. So the counts of a rank
are those that one process would have for the vertices of its range.

Restreaming (``solvers.restream``): each rank places the vertices that it holds. A pass has up to 256 rounds. In a round
every rank places one block of its vertices against the parts and loads of the last exchange, then all exchange where
theirs went and by how much loads have changed. Ranks that place at the same time must not fill a part together, so each
may use its share of the room that was left: with W ranks a W-th. So the result is the same every time for the same
number of ranks, and differs between numbers of ranks. Memory: the part of every vertex of the whole graph on every
rank, 2 bytes each; the rest is of the size of what is held. A round is one exchange, of 2 bytes per vertex placed and 8
per part and constraint, to all ranks.
"""

import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import Call
from gsplit.errors import InputError, explain
from gsplit.minibatch.split import split_minibatch
from gsplit.partitioning.plan import check_settings, find_idle, renumber_parts, spread_unreached
from gsplit.partitioning.presample import Counts, PresampleCounter, check_batches, check_epochs, drawn_by, stage_of
from gsplit.partitioning.quotient import bisection_order, count_links
from gsplit.partitioning.settings import EPOCHS, PartitionSettings
from gsplit.partitioning.sharded.held_shard import HeldShard, add_up, gather_all, send_to_all
from gsplit.partitioning.sharded.weigh import weigh_shard
from gsplit.partitioning.solvers.restream import LAST_PASSES, PASSES, find_caps, order_blocks, stream_blocks
from gsplit.partitioning.weighted_graph import WeightedGraph
from gsplit.partitioning.weights import check_total_work, vertex_work
from gsplit.progress import Progress, silent
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import UNIFORM, Draw, open_draw
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import HostNeighborSampler, check_fanouts
from gsplit.sampling.targets import LocalTargets
from gsplit.telemetry import StepTelemetry

__all__ = [
    "ShardWorkload",
    "check_shard_plan",
    "find_parts_by_ranks",
    "presample_shard",
    "restream_shards",
]

Parts = npt.NDArray[np.int16]
Weights = npt.NDArray[np.int64]
_ROUNDS = 256
_LEAST_BLOCK = 16


@dataclass(frozen=True)
class ShardWorkload:
    """What will be trained on, as one rank sees it: its shard, its targets and how mini-batches are drawn."""

    held: HeldShard
    targets: LocalTargets
    num_neighbors: list[int]
    batch_size: int
    seed: int = 0
    draw: Draw = UNIFORM

    def __post_init__(self) -> None:
        check_batches(self.num_neighbors, self.batch_size, self.seed, self.targets.num_targets)

    @classmethod
    def of_shard(
        cls,
        held: HeldShard,
        input_nodes: str | None,
        num_neighbors: list[int],
        batch_size: int,
        seed: int = 0,
        options: DrawOptions | None = None,
    ) -> Self:
        """``input_nodes``: the name of stored targets, or None for every vertex."""
        check_fanouts(num_neighbors)
        fanouts = [operator.index(fanout) for fanout in num_neighbors]
        draw = open_draw(options or DrawOptions(), held.store, held.graph)
        return cls(held, held.targets(input_nodes), fanouts, batch_size, seed, draw)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.targets.num_targets // self.batch_size)


def presample_shard(
    workload: ShardWorkload, *, epochs: int = EPOCHS, first_epoch: int = 0, progress: Progress = silent
) -> Counts:
    """Count for the vertices held and their in-edges over the mini-batches of ``epochs`` epochs. A collective."""
    check_epochs(epochs)
    held, size, seed = workload.held, workload.batch_size, workload.seed
    sampler = HostNeighborSampler(held.graph, held.store.original_ids()[:0], edge_ids=True, draw=workload.draw)
    counter = PresampleCounter(held.graph)
    steps = workload.steps_per_epoch
    for epoch in range(first_epoch, first_epoch + epochs):
        for step in range(steps):
            targets = workload.targets.for_step(seed, epoch, step, size, shuffle=True)
            key = StepKey(seed, epoch, step, workload.draw.options.layer_dependency)
            telemetry = StepTelemetry(epoch, step)
            split = split_minibatch(sampler, targets, workload.num_neighbors, key, held.ownership, held.comm, telemetry)
            counter.add(drawn_by([layer.block for layer in split.layers], split.input_ids.numpy()))
            progress(stage_of(first_epoch), (epoch - first_epoch) * steps + step + 1, epochs * steps)
    return counter.counts(epochs * steps)


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
            before = loads.copy()
            mine = orders[comm.rank][turn : turn + 1]
            stream_blocks(graph, mine, block_size, held.first, caps, limits, loads, result, strict=number >= PASSES)
            changed = _exchange_placed(
                held, Call("parts of a block", number * rounds + turn), blocks, result, loads - before
            )
            loads = before + changed
        progress("restream", number + 1, PASSES + LAST_PASSES)
    return result


def _caps(held: HeldShard, graph: WeightedGraph, parts: int, tolerance: float) -> Weights:
    weights = np.asarray(graph.vertex_weights)
    comm = held.comm
    totals = add_up(comm, Call("weights"), weights.sum(axis=0))
    largest = send_to_all(comm, Call("weights"), weights.max(axis=0, initial=0)[None], (1,) * comm.size)
    return find_caps(totals, np.concatenate(largest).max(axis=0), parts, tolerance)


def _block(held: tuple[int, int], order: Ids, turn: int, block_size: int) -> slice:
    """The vertices that a rank places in a round; none if it has no block left."""
    if turn >= order.size:
        return slice(held[0], held[0])
    first = held[0] + int(order[turn]) * block_size
    return slice(first, min(first + block_size, held[1]))


def _exchange_placed(held: HeldShard, call: Call, blocks: list[slice], result: Parts, changed: Weights) -> Weights:
    """Exchange where the vertices of the blocks went, into ``result``; returns the change of loads by all ranks."""
    comm = held.comm
    mine = np.concatenate([result[blocks[comm.rank]].view(np.uint8), changed.reshape(-1).view(np.uint8)])
    lengths = [2 * (block.stop - block.start) for block in blocks]
    total = np.zeros(changed.size, np.int64)
    messages = send_to_all(comm, call, mine, tuple(length + changed.nbytes for length in lengths))
    for block, length, message in zip(blocks, lengths, messages, strict=True):
        result[block] = message[:length].view(np.int16)
        total += np.frombuffer(message[length:].tobytes(), np.int64)
    return total.reshape(changed.shape)


def check_shard_plan(held: HeldShard, settings: PartitionSettings) -> None:
    """Refuse what ranks cannot solve together, before anything long begins."""
    settings = settings.with_solver("restream")
    if settings.pairs is not None:
        fix = "partition the whole store in one process, or name targets"
        raise InputError(explain("pairs", "targets, which shards can be partitioned for", settings.pairs, fix))
    check_settings(settings, held.store.num_vertices, is_renumbered=held.store.is_renumbered)
    if settings.solver != "restream":
        fix = "leave the solver out, or partition the whole store in one process"
        raise InputError(explain("solver", "restream, the one that ranks can run together", settings.solver, fix))
    if settings.parts < held.ownership.num_ranks:
        expected = f"at least one for each of {held.ownership.num_ranks} ranks"
        raise InputError(explain("parts", expected, settings.parts, "choose more parts"))


def find_parts_by_ranks(
    workload: ShardWorkload,
    counts: Counts,
    settings: PartitionSettings,
    folder: Path,
    progress: Progress = silent,
) -> Parts:
    """Weigh the vertices held into ``folder``, restream and order the parts; return those of all. A collective."""
    held, parts = workload.held, settings.parts
    check_shard_plan(held, settings)
    c_v, c_e = settings.c_v, settings.c_e
    work = vertex_work(counts, c_v, c_e)
    total = add_up(held.comm, Call("work"), work.sum()[None] >> 10)[0]  # in units of 1024: the sum may not fit
    check_total_work(float(total) * 1024, c_v, c_e)
    weighted = weigh_shard(settings.objective, held, counts, workload.targets.ids, folder, c_v, c_e)
    everywhere = restream_shards(held, weighted, parts, settings.tolerance, settings.seed, progress)
    links = add_up(held.comm, Call("links"), count_links(held.graph, counts.edges, everywhere, parts))
    mine = everywhere[held.first : held.first + held.num_held].astype(np.int32)
    mine = spread_unreached(mine, find_idle(counts, weighted), parts, settings.tolerance, held.comm)
    mine = renumber_parts(mine, bisection_order(links, settings.seed))  # the same on all ranks
    gather_all(held, "parts", mine.astype(np.int16), everywhere, progress)
    return everywhere
