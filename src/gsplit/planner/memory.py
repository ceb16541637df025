"""Memory of a rank: the parts that both forecasts share, and the forecast for a strategy from the counts of a step.

``gsplit inspect --memory`` (``run.memory``) forecasts split parallelism in more detail, without counting a step. Memory
that only maps the store's files is separate: the ranks of a host share it, and the kernel drops and reads it again as
needed. On a device the mapped bytes must be in its memory or be read from the host.
"""

from dataclasses import dataclass
from operator import mul

from gsplit.graph.ownership import Ownership
from gsplit.kernels.buffers import SLACK
from gsplit.planner.counts import StrategyCounts
from gsplit.planner.placement import GraphSize, Placement
from gsplit.planner.shapes import PlannedModel

__all__ = ["HELD_BATCHES", "RankBytes", "batch_bytes", "hidden_bytes", "rank_bytes"]

HELD_BATCHES = 2
"""Mini-batches in memory without prefetching: the training loop holds one while the next is made."""
_HIDDEN_COPIES = 6  # of every hidden row while a layer runs forward and backward
_ADAM_COPIES = 4  # weight, gradient and two moments


def batch_bytes(input_bytes: float, rows_loaded: float, edges: float, computed: float) -> float:
    """Bytes of a mini-batch on one rank: features, ids of loaded rows, sources of edges, offsets of destinations.

    ``computed`` are the vertices computed over all layers; ``input_bytes`` are features, of received rows too.
    """
    return input_bytes * SLACK + 8 * (rows_loaded + edges + computed)


def hidden_bytes(computed: float, hidden: int) -> float:
    """Bytes of hidden rows in float32, forward and backward."""
    return _HIDDEN_COPIES * computed * 4 * hidden


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Memory of the largest rank: ``own`` is its anonymous memory, ``mapped`` what it reads of the store."""

    own: float
    mapped: float


def rank_bytes(
    counts: StrategyCounts, shape: PlannedModel, size: GraphSize, ownership: Ownership, placement: Placement
) -> RankBytes:
    """Memory of the rank that needs the most. ``ownership`` is that of one replica.

    Of a rank on a device, ``own`` is the memory of the device. If the host samples, its tables are not there.
    """
    spec = counts.spec
    owned = size.share_of(ownership)
    edges_share = 1.0 if spec.needs_whole_graph else owned
    rows_share = owned if spec.reads_own_rows else 1.0
    mapped = edges_share * size.graph_bytes + rows_share * size.feature_bytes
    tables = 0.0 if placement.host_samples else 4 * size.num_vertices * edges_share
    batches = max(
        batch_bytes(
            input_bytes=4 * sum(map(mul, rank.inputs.mixed, shape.input_widths)),
            rows_loaded=rank.rows_loaded,
            edges=sum(rank.edges),
            computed=sum(rank.destinations),
        )
        for rank in counts.ranks
    )
    hidden = max(hidden_bytes(sum(rank.destinations), shape.hidden) for rank in counts.ranks)
    weights = _ADAM_COPIES * 4 * shape.num_parameters
    held = HELD_BATCHES + placement.prefetch
    on_device = placement.host_samples or placement.near_graph
    caches = placement.device_bytes if on_device else placement.cache_bytes
    return RankBytes(own=tables + held * batches + hidden + weights + caches, mapped=mapped)
