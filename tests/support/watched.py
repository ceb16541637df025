"""Two ranks that watch each other's collectives, in one process."""

from gsplit.distributed.watch.collective_watch import CollectiveWatch
from gsplit.distributed.watch.peers import Peers

__all__ = ["connect_peers", "watch_pair"]


def connect_peers(num_ranks: int = 2) -> list[Peers]:
    """Ranks that know each other, of one group."""
    ranks = [Peers(rank) for rank in range(num_ranks)]
    infos = [rank.describe_self() for rank in ranks]
    for rank in ranks:
        rank.connect(infos)
        rank.groups.append((num_ranks, 1))
    return ranks


def watch_pair(timeout_s: float = 30.0, num_ranks: int = 2) -> list[CollectiveWatch]:
    """What watches the one group of each rank."""
    return [CollectiveWatch(peers, 0, timeout_s, timeout_s) for peers in connect_peers(num_ranks)]
