"""What a rank holds under a strategy, from the counts of a step: its own memory, and what it only maps.

Maps of the store's files are shared between the ranks of a host, and the kernel drops and reads them as it likes; on a
device they are what would have to lie in its memory or be read from the host. ``gsplit inspect --memory`` forecasts
split parallelism in more detail, without counting a step.
"""

from dataclasses import dataclass

from gsplit.graph.ownership import Ownership
from gsplit.kernels.buffers import SLACK
from gsplit.planner.counts import StrategyCounts
from gsplit.planner.shapes import PlannedModel

__all__ = ["GraphSize", "RankBytes", "rank_bytes"]

_HELD_BATCHES = 2  # the loop holds one while the next is made
_HIDDEN_COPIES = 6  # of every hidden row while a layer runs forward and backward
_ADAM_COPIES = 4  # weight, gradient and two moments


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A stored graph: ``edge_bytes`` of one entry of ``indices``, ``row_bytes`` of one vertex's stored features."""

    num_vertices: int
    num_edges: int
    edge_bytes: int
    row_bytes: int

    @property
    def graph_bytes(self) -> int:
        """Offsets and sources."""
        return 8 * (self.num_vertices + 1) + self.num_edges * self.edge_bytes


@dataclass(frozen=True, slots=True)
class RankBytes:
    """The largest rank's: ``own`` is its anonymous memory for the run, ``mapped`` what it reads of the store."""

    own: float
    mapped: float


def rank_bytes(
    counts: StrategyCounts, shape: PlannedModel, size: GraphSize, ownership: Ownership, *, cache_bytes: int = 0
) -> RankBytes:
    """The rank that holds the most. ``ownership`` is that of one replica."""
    spec = counts.spec
    largest = max(stop - first for first, stop in map(ownership.range_of, range(ownership.num_ranks)))
    owned = largest / max(1, size.num_vertices)
    edges_share = 1.0 if spec.needs_whole_graph else owned
    rows_share = owned if spec.reads_own_rows else 1.0
    mapped = edges_share * size.graph_bytes + rows_share * size.num_vertices * size.row_bytes
    tables = 4 * size.num_vertices * edges_share
    batches = max(
        rank.sources[0] * 4 * shape.num_features * SLACK
        + 8 * (sum(rank.edges) + sum(rank.destinations) + rank.rows_loaded)
        for rank in counts.ranks
    )
    hidden = max(sum(rank.destinations) for rank in counts.ranks) * 4 * shape.hidden * _HIDDEN_COPIES
    weights = _ADAM_COPIES * 4 * shape.num_parameters
    return RankBytes(tables + _HELD_BATCHES * batches + hidden + weights + cache_bytes, mapped)
