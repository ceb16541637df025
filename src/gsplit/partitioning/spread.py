"""Moving vertices that no mini-batch reached out of parts with too many vertices.

They weigh nothing, so a solver may put them all into one part; but they have rows and edges on disk, and inference
computes them. Moving them changes nothing that was counted.
"""

import numpy as np
import numpy.typing as npt

from gsplit.distributed.comm.comm import Call, Comm
from gsplit.partitioning.sharded.exchange import give_everybody

__all__ = ["spread_unreached"]


def spread_unreached(
    parts: npt.NDArray[np.int32], unreached: npt.NDArray[np.bool_], num_parts: int, tolerance: float, comm: Comm
) -> npt.NDArray[np.int32]:
    """The parts of the vertices that a rank holds, anew. A collective: the ranks move what one process would.

    The last unreached ones of a part that is too large go to the first parts with room.

    >>> from gsplit.distributed.comm.comm import SoloComm
    >>> unreached = np.array([False, True, True, True, True, True])
    >>> spread_unreached(np.zeros(6, np.int32), unreached, 2, 1.01, SoloComm()).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    counted = [np.bincount(held, minlength=num_parts) for held in (parts, parts[unreached])]
    by_rank = np.concatenate(give_everybody(comm, Call("sizes of parts"), np.stack(counted)[None], (1,) * comm.size))
    sizes, idle = by_rank[:, 0].sum(axis=0), by_rank[:, 1]
    cap = max(-(-int(sizes.sum()) // num_parts), int(tolerance * int(sizes.sum()) / num_parts))
    moved = np.minimum(np.maximum(sizes - cap, 0), idle.sum(axis=0))
    by_later = np.minimum(moved, idle[comm.rank + 1 :].sum(axis=0))
    mine = np.minimum(moved - by_later, idle[comm.rank])
    begins = np.cumsum(moved) - by_later - mine  # of this rank's, in the row of all that are moved, part after part
    ends_of_room = np.cumsum(np.maximum(cap - sizes, 0))
    spread = parts.copy()
    for part in np.flatnonzero(mine):
        ids = np.flatnonzero(unreached & (parts == part))[-mine[part] :]
        spread[ids] = np.searchsorted(ends_of_room, begins[part] + np.arange(ids.size), side="right")
    return spread
