"""``gsplit doctor``: a line per check, and what to fix."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gsplit.cli.console import command, emit_json, progress_bars, to_json
from gsplit.cli.options import Json

if TYPE_CHECKING:
    from gsplit.doctor.finding import DoctorReport

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def doctor(
    store: Annotated[Path | None, typer.Argument(metavar="[STORE]", help="also check a store")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="ranks to start [default: 2, or the GPUs if fewer]")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="read all of the store, and check its checksums")] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="also check what cuda or cpu computes, against one process on the CPU"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="write the report into a file")] = None,
    as_json: Json = False,
) -> None:
    """Check this machine, a store and a device, and show what to fix.

    Versions, backends, interfaces, memory, disk, limits, threads, and collectives between real ranks. With --device,
    also data rates, and models, kernels, options and inference against the CPU, bf16, times of a step, waits, races and
    a killed rank: a few minutes. Exit code 1 if a check fails; warnings do not count.
    """
    with command(as_json):
        from gsplit.doctor.examination import examine

        if device is not None:
            from gsplit.device.devices import resolve_device

            resolve_device(device)
        if out is not None:
            from gsplit.run.preflight import check_new_file

            check_new_file(out, overwrite=True)
        with progress_bars(as_json) as progress:
            found = examine(store, nproc or _default_ranks(device), full=full, device=device, progress=progress)
        if as_json:
            emit_json(found.as_dict())
        else:
            _show(found, Console())
        if out is not None:
            out.write_text(to_json(found.as_dict()))
        if not found.ok:
            raise typer.Exit(1)


def _default_ranks(device: str | None) -> int:
    import torch

    return min(2, torch.cuda.device_count()) if device and device.startswith("cuda") else 2


def _show(report: "DoctorReport", console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len("warning"))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        text = Text(finding.found)
        if finding.fix:
            word = "fix" if finding.verdict in ("warning", "error") else "note"
            text.append(f"\n{word}: {finding.fix}", style="italic")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.check), text)
    console.print(table, highlight=False)
