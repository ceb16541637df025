"""How a command runs on ranks: in this process, in those that a launcher started, or in ones that it starts itself.

The process that the user starts resolves everything into one task, checks what can be checked without ranks, and
starts ranks that read exactly that task, as JSON, from their environment. Ranks are copies of this process where that
is possible, because it has imported what they need, or ``python -m gsplit.cli.ranks``. Under torchrun every rank
resolves the same command line.
"""

import os
import sys

import typer
from rich.console import Console

from gsplit.cli.console import command, library_notes
from gsplit.cli.tasks import Task, parse_task
from gsplit.distributed.launch.launched_rank import end_with_launcher, torchrun_start_s
from gsplit.errors import InputError, explain

__all__ = ["default_ranks", "rank_of_environment", "run_task"]

_TASK = "GSPLIT_TASK"


def rank_of_environment() -> int | None:
    """This process's rank if a launcher has started it."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and "WORLD_SIZE" in os.environ else None


def default_ranks(number: int) -> int:
    """The number of ranks where --nproc was not given: the launcher's, or ``number``."""
    return number if rank_of_environment() is None else 1


def run_task(task: Task, nproc: int, *, max_restarts: int = 0, min_ranks: int | None = None) -> None:
    """Run a task in this process, on the ranks of a torchrun, or on ``nproc`` ranks that are started for it.

    With ``max_restarts``, or with fewer ranks down to ``min_ranks``, ranks that fail are started again.
    """
    from gsplit.distributed.launch.forked_rank import stay_with_one_thread

    rank = rank_of_environment()
    restarts = max_restarts > 0 or min_ranks is not None
    if rank is not None and restarts:
        fix = "use torchrun's --max-restarts, and --resume RUN to continue a run"
        raise InputError(explain("--max-restarts", "ranks that this command starts", f"rank {rank} of a launcher", fix))
    numbers = _rank_numbers(task, nproc, min_ranks)
    if rank is None:
        task.check_settings(nproc)
    if not task.as_json and not rank:
        task.announce(int(os.environ["WORLD_SIZE"]) if rank == 0 else nproc)
    if rank is not None or (nproc == 1 and not restarts):
        _run_here(task, nproc if rank is not None else 1)
        return
    stay_with_one_thread()
    task.check(nproc)
    code = _launch(task, numbers, max_restarts)
    if code:
        raise typer.Exit(code)


def _rank_numbers(task: Task, nproc: int, min_ranks: int | None) -> list[int]:
    """The numbers of ranks that may run a task, from all to the least; each is a multiple of the replicas."""
    least = nproc if min_ranks is None else min_ranks
    if least > nproc:
        raise InputError(explain("--min-ranks", f"at most the {nproc} of --nproc", least, "change one of them"))
    return [nproc, *(number for number in range(nproc - 1, least - 1, -1) if number % task.replicas == 0)]


def _launch(task: Task, numbers: list[int], max_restarts: int) -> int:
    from gsplit.distributed.launch.forked_rank import can_fork
    from gsplit.distributed.launch.launcher import Restart, launch, restart_on_failure

    before = task.latest()
    current = task

    def run(num_ranks: int) -> int:
        program = _main if can_fork(task.device) else [sys.executable, "-P", "-m", "gsplit.cli.ranks"]
        return launch(program, num_ranks, variables={_TASK: current.model_dump_json()}, grace_s=task.grace_s)

    def resume(restart: Restart) -> None:
        nonlocal current
        current = task.resumed(before)
        number = f"restart {restart.number} of at most {restart.max_number}"
        text = f"{number}, {restart.num_ranks} rank(s), from {current.origin}"
        Console(stderr=True, soft_wrap=True).print(f"{restart.cause.message}\n{text}", highlight=False, markup=False)

    return restart_on_failure(run, numbers, max_restarts, resume)


def _run_here(task: Task, nproc: int) -> None:
    from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks
    from gsplit.distributed.comm.mesh import init

    mesh = init(task.device, task.sample_device, replicas=task.replicas, tuned_allocator=True)
    if nproc not in (1, mesh.size):
        raise InputError(explain("--nproc", f"the launcher's {mesh.size}", nproc, "leave it out under torchrun"))
    assert_same_on_all_ranks(mesh.control, "command", task.agreement())  # ranks may have been started by hand
    if (count := os.environ.get("TORCHELASTIC_RESTART_COUNT")) is not None:  # of the torchrun of this host only
        goes_on = mesh.rank == 0 and task.goes_on(torchrun_start_s())  # rank 0 knows whose checkpoints are there
        told = mesh.control.gather_text(Call("restarts of every host"), f"{count} {goes_on}")
        if told[0].endswith(str(True)) and any(not each.startswith("0 ") for each in told):
            task = task.model_copy(update={"resume": True})
    with library_notes(mesh.rank):
        code = task.run(mesh)
    mesh.close()
    if code:
        raise typer.Exit(code)


def _main() -> int:
    """A rank that ``run_task`` has started."""
    end_with_launcher()
    task = parse_task(os.environ[_TASK])
    try:
        with command(task.as_json, rank=rank_of_environment(), launched=True):
            _run_here(task, 1)
    except typer.Exit as end:
        return end.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
