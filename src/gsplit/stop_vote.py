"""Ranks that stop together: any of them may have been told to, all leave after the same step.

A signal reaches ranks at different moments, and a rank that left alone would leave the others waiting (law 5). So every
step begins with a sum over all ranks of who wants to stop, which is there when the step is over.
"""

import torch

from gsplit.devices import AsyncHostCopy
from gsplit.distributed.comm import Call, Comm, Work

__all__ = ["StopVote"]


class StopVote:
    """The vote of one step, under way. A collective, joined at the beginning of the step."""

    def __init__(self, comm: Comm, wants_to_stop: bool) -> None:
        votes = torch.full((1,), int(wants_to_stop), dtype=torch.int32, device=comm.device)
        self._work: Work | None = comm.all_reduce(Call("vote to stop"), votes)
        if votes.device.type != "cpu":  # in the device's queue: the host waits for nothing
            self._work.wait()
            self._work = None
        self._votes = AsyncHostCopy(votes)

    def count(self) -> bool:
        """Whether some rank wants to stop; the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return float(self._votes) > 0
