"""What a strategy is: the way in which one mini-batch becomes one batch per rank."""

from typing import Protocol

from gsplit.batch import Batch
from gsplit.sampling.minibatch import StepKey

__all__ = ["Strategy"]


class Strategy(Protocol):
    """Makes this rank's share of a step. All ranks call it for the same steps in the same order."""

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""

    def make_batch(self, key: StepKey) -> Batch:
        """Sample, exchange and load one step."""
