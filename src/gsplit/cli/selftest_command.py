"""``gsplit selftest``: a table with a fix per line, and one JSON file to send back."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gsplit.cli.console import command, emit_json, progress_bars
from gsplit.cli.options import Json

__all__ = ["selftest"]

_STYLES = {"ok": "green", "wrong": "bold red", "not tried": "dim"}


def selftest(
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cuda or cpu [default: cuda where there is one, else cpu]")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="ranks to start on this host [default: 2, or the GPUs]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="write the whole report")] = None,
    as_json: Json = False,
) -> None:
    """Check what this machine computes, and how fast it moves data.

    Versions, links, ten models against the host, waits, races, a killed rank. Exit code 3 if anything is wrong.
    """
    with command(as_json):
        import torch

        from gsplit.selftest import run_selftest

        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        with progress_bars(as_json) as progress:
            most = torch.cuda.device_count() if chosen.startswith("cuda") else 2
            report = run_selftest(chosen, nproc or max(1, min(2, most)), progress)
        document = asdict(report) | {"ok": report.is_right}
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n")
        if as_json:
            emit_json(document)
        else:
            console = Console()
            versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
            console.print(f"{report.nproc} rank(s) on {report.device}: {versions}\n", style="dim")
            table = Table(box=None, pad_edge=False)
            for title in ("check", "", "found", "fix", "s"):
                table.add_column(title, justify="right" if title == "s" else "left", overflow="fold")
            for line in report.findings:
                verdict = Text(line.verdict, style=_STYLES[line.verdict])
                table.add_row(line.check, verdict, line.found, line.fix, f"{line.seconds:.1f}")
            console.print(table)
        if not report.is_right:
            raise typer.Exit(3)
