"""The batches of an epoch, one after the other, made ahead as far as they may be.

On the host a batch is finished when it is taken. For a device the batch of step t + 1 is launched on a stream of its
own before step t is handed out, so that its copy, its gathering and its exchange run while step t trains. All ranks do
that at the same point of every step: the collectives of a device are issued by one thread in one order.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gsplit.batch import Batch
from gsplit.devices import SideStream
from gsplit.pipeline import Pipeline
from gsplit.strategies.loading import LoadedStep

__all__ = ["BatchStream"]


class BatchStream:
    """Takes loaded steps out of a pipeline and finishes them; ``side``: launch the next batch there, ahead."""

    def __init__(
        self,
        pipeline: Pipeline[LoadedStep],
        num_steps: int,
        finish: Callable[[LoadedStep], Batch],
        side: SideStream | None,
    ) -> None:
        self._pipeline, self._num_left, self._finish, self._side = pipeline, num_steps, finish, side
        self._launched: tuple[Batch, Any] | None = None
        self._failed: Exception | None = None

    def take(self) -> Batch:
        """The next batch."""
        if self._side is None:
            return self._finish(self._next())
        if self._failed is not None:
            raise self._failed
        batch, mark = self._launch(self._side) if self._launched is None else self._launched
        self._launched = self._launch_ahead(self._side)
        self._side.join(mark, _memory(batch))
        return batch

    def _launch_ahead(self, side: SideStream) -> tuple[Batch, Any] | None:
        """The batch behind the one that is handed out; what goes wrong with it is raised in its own turn."""
        try:
            return self._launch(side) if self._num_left else None
        except Exception as error:
            self._failed = error
            return None

    def _next(self) -> LoadedStep:
        self._num_left -= 1
        return self._pipeline.take()

    def _launch(self, side: SideStream) -> tuple[Batch, Any]:
        loaded = self._next()
        with side.launching():
            batch = self._finish(loaded)
        return batch, side.mark()


def _memory(batch: Batch) -> list[Tensor]:
    """One tensor of every piece of device memory that a batch is made of, for the allocator.

    As long as the next launch waits for the current stream before it allocates, it need not know; this keeps it right
    for a batch that is dropped earlier.
    """
    return [batch.x, batch.blocks[0].indptr]
