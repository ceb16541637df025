"""``gsplit doctor``: a line per check, and what to fix."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gsplit.cli.console import command, emit_json, progress_bars
from gsplit.cli.options import Json

if TYPE_CHECKING:
    from gsplit.doctor import Diagnosis

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    store: Annotated[Path | None, typer.Argument(metavar="[STORE]", help="also look at a store")] = None,
    nproc: Annotated[int, typer.Option(min=1, metavar="INT", help="ranks to start and let exchange")] = 2,
    full: Annotated[bool, typer.Option("--full", help="read all of the store, and check its checksums")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine and a store, and say what to fix.

    Versions, backends, interfaces, memory, disk, limits, threads, and collectives between real ranks. Exit code 1 if
    anything stands in the way; warnings do not.
    """
    with command(as_json):
        from gsplit.doctor import examine

        with progress_bars(as_json) as progress:
            found = examine(store, nproc, full=full, progress=progress)
        if as_json:
            emit_json({"ok": found.is_fit, "lines": [asdict(line) for line in found.lines]})
        else:
            _show(found, Console())
        if not found.is_fit:
            raise typer.Exit(1)


def _show(found: "Diagnosis", console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len("warning"))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in found.lines:
        told = Text(line.found)
        if line.fix:
            told.append(f"\n{'fix' if line.verdict != 'ok' else 'note'}: {line.fix}", style="italic")
        table.add_row(Text(line.verdict, style=_STYLES[line.verdict]), Text(line.check), told)
    console.print(table, highlight=False)
