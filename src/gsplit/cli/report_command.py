"""``gsplit report``: runs as one page, pictures and a trace file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gsplit.cli.console import command, emit_json
from gsplit.cli.options import Json

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of gsplit train --out")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="page to write")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(metavar="FOLDER", help="folder for the pictures, one file each")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="trace of the runs, for Perfetto or chrome://tracing")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace files of the same names")] = False,
    as_json: Json = False,
) -> None:
    """Write a page with pictures of runs.

    One HTML file that needs nothing else. Pictures need matplotlib.
    """
    with command(as_json):
        from gsplit.report.page import write_report

        written = write_report(runs, out, png=png, trace=trace, overwrite=overwrite)
        if as_json:
            emit_json(written.as_dict())
            return
        console = Console()
        for path in written.files:
            console.print(str(path), highlight=False, soft_wrap=True)
