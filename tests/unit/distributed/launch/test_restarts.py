"""A group of ranks that fails is started again, from what it had kept, and in the end with fewer ranks."""

import sys
from pathlib import Path

import pytest

from gsplit.distributed.launch.launcher import GroupFailedError, Restart, launch, restart_on_failure

PROGRAM = """
import os, pathlib, signal, sys
from gsplit.distributed.launch.launched_rank import fail
from gsplit.errors import InputError
rank, size, kept, how = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), pathlib.Path(sys.argv[1]), sys.argv[2]
done = int(kept.read_text()) if kept.exists() else 0
if how == "refuses":
    fail(InputError("lr: expected less (got 7). Fix: less."), 2)
if rank == size - 1 and (size > 2 if how == "needs few" else done < 2):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: Path, how: str, rank_numbers: list[int], max_restarts: int) -> tuple[int, list[Restart]]:
    restarts: list[Restart] = []
    kept = folder / "steps"

    def go_on(restart: Restart) -> None:
        restarts.append(restart)
        kept.write_text(str(restart.number))

    def run(num_ranks: int) -> int:
        return launch([sys.executable, "-c", PROGRAM, str(kept), how], num_ranks)

    return restart_on_failure(run, rank_numbers, max_restarts, go_on), restarts


def test_a_killed_rank_restarts_all(tmp_path: Path) -> None:
    code, restarts = _run(tmp_path, "two kills", [2], 3)
    assert code == 0
    assert [(each.number, each.max_number, each.num_ranks, each.cause.rank) for each in restarts] == [
        (1, 3, 2, 1),
        (2, 3, 2, 1),
    ]


def test_what_fails_too_often_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GroupFailedError, match=r"rank 1: expected to finish \(got signal 9"):
        _run(tmp_path, "two kills", [2], 1)


def test_fewer_ranks_go_on_when_all_of_them_fail(tmp_path: Path) -> None:
    code, restarts = _run(tmp_path, "needs few", [4, 3, 2], 0)
    assert code == 0
    assert [each.num_ranks for each in restarts] == [3, 2]


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(GroupFailedError, match="lr: expected less"):
        _run(tmp_path, "refuses", [2, 1], 3)
    assert not (tmp_path / "steps").exists()
