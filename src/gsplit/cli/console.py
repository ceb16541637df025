"""What every command shares: progress bars, errors as messages, one JSON document on demand.

A command runs inside ``command``. Errors of ours become one line and exit code 2; Ctrl-C and SIGTERM unwind
the work, so that temporary files go, and exit with 130 and 143.
"""

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Protocol, runtime_checkable

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from gsplit.errors import CommError, GSplitError, Terminated, explain
from gsplit.progress import Progress as ProgressFunction
from gsplit.progress import silent

__all__ = ["Lost", "command", "emit_json", "human", "progress_bars"]


@runtime_checkable
class Lost(Protocol):
    """What a user should know of work that was ended, and the exit code that a scheduler should see after SIGTERM."""

    @property
    def exit_code(self) -> int:
        """143, or that of work that can be resumed."""


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


@contextmanager
def command(
    as_json: bool, *, rank: int | None = None, launched: bool = False, lost: str | Lost = "nothing was written"
) -> Iterator[None]:
    """Run the body of a command; turn what can go wrong into a message and an exit code.

    ``lost`` is what a user should know after Ctrl-C, and after ranks have failed if that can be gone on with. A rank
    leaves all of that to whoever started it; ``launched`` if that is a command of ours, which says why the rank failed.
    """
    if rank is not None:
        with _as_rank(rank, launched):
            yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except CommError as error:  # ranks have failed, perhaps in the middle of their work
        can_go_on = isinstance(lost, Lost) and lost.exit_code == os.EX_TEMPFAIL
        _fail(f"{error}\n{lost}" if can_go_on else str(error), 2, as_json)
    except GSplitError as error:
        _fail(str(error), 2, as_json)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(0) from None
    except OSError as error:
        where = error.filename or "input or output"
        fix = (
            "free space, or choose another place"
            if error.errno == errno.ENOSPC
            else "check the path and its permissions"
        )
        _fail(explain(where, "a working file", error.strerror or error, fix), 2, as_json)
    except MemoryError:
        _fail(f"out of memory; {lost}", 2, as_json)
    except KeyboardInterrupt:
        _fail(f"interrupted; {lost}", 130, as_json)
    except Terminated:
        _fail(f"terminated; {lost}", lost.exit_code if isinstance(lost, Lost) else 143, as_json)


@contextmanager
def _as_rank(rank: int, launched: bool) -> Iterator[None]:
    """A rank's part of a command: signals end it at once, errors go to whoever started it."""
    from gsplit.distributed.launched_rank import fail

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not unwound: it may be deep in a collective
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except typer.Exit:
        raise
    except (GSplitError, OSError, MemoryError) as error:
        if not launched:
            said = str(error) or type(error).__name__
            message = said if said.startswith(f"rank {rank}: ") else f"rank {rank}: {said}"
            Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
        fail(error, 2)
    except Exception as error:  # a bug: whoever mends it wants to see where
        traceback.print_exception(error)
        fail(error, 1)


def _fail(message: str, code: int, as_json: bool) -> NoReturn:
    if as_json:
        with suppress(OSError, AttributeError):  # standard output may be what failed
            emit_json({"error": message})
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
    raise typer.Exit(code)


def emit_json(document: dict[str, Any]) -> None:
    """The one document of ``--json``."""
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


def human(count: float) -> str:
    """A count in three digits.

    >>> human(999), human(1234), human(5_600_000), human(2.5e9)
    ('999', '1.23 k', '5.60 M', '2.50 G')
    >>> human(123_400), human(12_340)
    ('123 k', '12.3 k')
    """
    for unit in ("", " k", " M", " G", " T"):
        if count < 999.5 or unit == " T":
            break
        count /= 1000
    digits = 0 if not unit or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f}{unit}"


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        total = f" / {human(task.total)}" if task.total is not None else ""
        rate = f"  {human(task.speed)}/s" if task.speed else ""
        return Text(f"{human(task.completed)}{total}{rate}")


@contextmanager
def progress_bars(as_json: bool) -> Iterator[ProgressFunction]:
    """A bar per stage on stderr: amount, rate and remaining time. Nothing with ``--json``."""
    if as_json:
        yield silent
        return
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        _Amount(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                for earlier in tasks.values():  # a forecast may have been high: what is over is complete
                    completed = bars.tasks[earlier].completed
                    bars.update(earlier, total=completed or 1, completed=completed or 1)
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
