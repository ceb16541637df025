"""What every command shares: progress bars, errors as messages, notes of the library, one JSON document on demand.

A command runs inside ``command``. A ``GSplitError`` becomes one line and exit code 2; Ctrl-C and SIGTERM unwind the
work, so that temporary files are removed, and exit with 130 and 143.
"""

import errno
import json
import logging
import math
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

__all__ = ["Lost", "command", "emit_json", "human", "library_notes", "progress_bars", "to_json"]


@runtime_checkable
class Lost(Protocol):
    """A text about work that was ended, and the exit code after SIGTERM: 143, or 75 for work that can be resumed."""

    @property
    def exit_code(self) -> int: ...


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


@contextmanager
def command(
    as_json: bool, *, rank: int | None = None, launched: bool = False, lost: str | Lost = "nothing was written"
) -> Iterator[None]:
    """Run the body of a command; turn what can go wrong into a message and an exit code.

    ``lost`` is printed after Ctrl-C, and after ranks have failed if the work can be resumed. A rank reports its errors
    to its launcher; ``launched``: that is a command of ours, which prints them.
    """
    if rank is not None:
        with _as_rank(rank, launched):
            yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except CommError as error:  # ranks have failed, perhaps in the middle of their work
        can_resume = isinstance(lost, Lost) and lost.exit_code == os.EX_TEMPFAIL
        _fail(f"{error}\n{lost}" if can_resume else str(error), 2, as_json)
    except GSplitError as error:
        _fail(str(error), 2, as_json)
    except BrokenPipeError:  # the reader of our output has ended
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
    """A rank's part of a command: signals end it at once, errors go to its launcher."""
    from gsplit.distributed.launch.launched_rank import fail

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not unwound: it may be deep in a collective
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except typer.Exit:
        raise
    except (GSplitError, OSError, MemoryError) as error:
        if not launched:
            text = str(error) or type(error).__name__
            message = text if text.startswith(f"rank {rank}: ") else f"rank {rank}: {text}"
            Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
        fail(error, 2)
    except Exception as error:  # unexpected: print the traceback
        traceback.print_exception(error)
        fail(error, 1)


def _fail(message: str, code: int, as_json: bool) -> NoReturn:
    if as_json:
        with suppress(OSError, AttributeError):  # standard output may be what failed
            emit_json({"error": message})
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
    raise typer.Exit(code)


def emit_json(document: dict[str, Any]) -> None:
    """Print the one document of ``--json``."""
    sys.stdout.write(to_json(document))
    sys.stdout.flush()


def to_json(document: dict[str, Any]) -> str:
    """The text of a document; null for numbers that are not finite, which JSON does not have.

    >>> to_json({"error": float("nan"), "errors": [1.0, float("inf")]})
    '{\\n "error": null,\\n "errors": [\\n  1.0,\\n  null\\n ]\\n}\\n'
    """
    return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
                for earlier in tasks.values():  # a total may have been an estimate: earlier stages are complete
                    completed = bars.tasks[earlier].completed
                    bars.update(earlier, total=completed or 1, completed=completed or 1)
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


class _Notes(logging.Handler):
    """Prints each text once, above a progress bar if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.ERROR:
            text = f"note: {text}"
        if text not in self._printed:
            self._printed.add(text)
            Console(stderr=True, soft_wrap=True).print(Text(text))


def _should_show(record: logging.LogRecord) -> bool:
    """All but the loader's notes about its options, which the command has announced."""
    return record.levelno >= logging.ERROR or record.module != "loader"


@contextmanager
def library_notes(rank: int) -> Iterator[None]:
    """Print what the library logs: warnings of rank 0 as notes, each once; errors of every rank."""
    logger = logging.getLogger("gsplit")
    notes = _Notes()
    notes.addFilter(_should_show)
    before = logger.level
    logger.setLevel(logging.ERROR if rank else logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)
        logger.setLevel(before)
