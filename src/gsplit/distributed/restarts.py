"""Going on after a rank has failed: all ranks are started again, and in the end fewer of them.

A step is a function of its number and a checkpoint does not know how many ranks wrote it, so any number of ranks that
the store can be divided among goes on where the others stopped. As with torchrun a failed rank ends the group, and the
number of restarts is fixed beforehand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gsplit.distributed.failures import Cause
from gsplit.distributed.launch import GroupFailedError

__all__ = ["Restart", "restart_on_failure"]


@dataclass(frozen=True)
class Restart:
    """What comes after a failure: which restart it is, of how many at most, and on how many ranks."""

    cause: Cause
    number: int
    max_number: int
    num_ranks: int


def restart_on_failure(
    run: Callable[[int], int],
    rank_numbers: Sequence[int],
    max_restarts: int,
    on_restart: Callable[[Restart], None] = lambda restart: None,
) -> int:
    """Run a group of ranks until it does not fail; what it returned.

    ``run(num_ranks)`` calls ``launch``. Each of ``rank_numbers`` is tried once and then ``max_restarts`` times more;
    after that comes the next one. What would fail in the same way again, as a refused input does, is not repeated.
    """
    attempts = [num_ranks for num_ranks in rank_numbers for _ in range(max_restarts + 1)]
    for number, num_ranks in enumerate(attempts, start=1):
        try:
            return run(num_ranks)
        except GroupFailedError as error:
            if error.cause.lasting or number == len(attempts):
                raise
            on_restart(Restart(error.cause, number, len(attempts) - 1, attempts[number]))
    raise AssertionError("no number of ranks was given")
