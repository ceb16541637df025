"""``python -m gsplit_bench soak``: training under faults, on this host or on two imitated ones."""

import shlex
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json
from gsplit.errors import InputError, explain

if TYPE_CHECKING:
    from gsplit_bench.soak import SoakReport

__all__ = ["soak"]


def soak(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a directory made by gsplit import")],
    nproc: Annotated[int, typer.Option(min=1, metavar="INT", help="ranks, over all hosts")] = 4,
    train: Annotated[
        str, typer.Option(metavar="OPTIONS", help='of gsplit train, such as "--epochs 50 --hidden 64"')
    ] = "--epochs 20",
    save_every: Annotated[int, typer.Option(min=1, metavar="STEPS", help="steps between checkpoints")] = 20,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="of kill, stall, freeze, terminate, orphan; on two hosts kill, drop, cut [default: all]",
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=0, metavar="INT", help="faults to inflict")] = 20,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="mean time from a start to its fault")] = 30.0,
    seed: Annotated[int, typer.Option(metavar="INT", help="of the faults' order and moments")] = 0,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, metavar="INT", help="2: network namespaces with a cable (as root)")
    ] = 1,
    rate: Annotated[str, typer.Option(metavar="RATE", help="of the cable, as tc takes it")] = "1gbit",
    delay: Annotated[float, typer.Option(metavar="MS", help="of the cable, one way (netem)")] = 0.0,
    loss: Annotated[float, typer.Option(metavar="PERCENT", help="packets that the cable loses (netem)")] = 0.0,
    as_json: Json = False,
) -> None:
    """Train under faults; compare with an undisturbed run.

    Exit code 1 if a fault was not met as it should be, a loss differs, or memory, threads or descriptors grow.
    """
    with command(as_json):
        if find_spec("psutil") is None:
            raise InputError(explain("bench soak", "psutil", "no such package", "pip install 'gsplit[bench]'"))
        from gsplit.store.reader import open_store
        from gsplit_bench.soak import SoakPlan, run_soak
        from gsplit_bench.soak_faults import FAULTS, HOST_FAULTS

        open_store(store)
        names = tuple(faults.split(",")) if faults else tuple(FAULTS if hosts == 1 else HOST_FAULTS)
        options = tuple(shlex.split(train))
        plan = SoakPlan(store, nproc, options, save_every, names, count, every, seed, hosts, rate, delay, loss)
        with progress_bars(as_json) as progress:
            report = run_soak(plan, progress=progress)
        if as_json:
            emit_json(_document(report))
        else:
            _show(report, Console())
        if not report.passed:
            raise typer.Exit(1)


def _document(report: "SoakReport") -> dict[str, Any]:
    from gsplit_bench.provenance import current_commit, describe_machine, installed_versions

    return {
        "kind": "bench soak",
        "command": shlex.join(["gsplit", *sys.argv[1:]]),
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "passed": report.passed,
        **asdict(report),
    }


def _show(report: "SoakReport", console: Console) -> None:
    table = Table("fault", "until gone", "met", "what the run said", box=None, header_style="bold")
    for trial in report.trials:
        gone = "goes on" if trial.gone_s is None else f"{trial.gone_s:.1f} s"
        met = "yes" if trial.as_it_should else "[red]no[/]"
        table.add_row(trial.did, gone, met, " ".join((trial.message, *trial.left)))
    console.print(table)
    if len(report.trials) < report.num_planned:
        console.print(
            f"the run was over after {len(report.trials)} of {report.num_planned} faults; train for more epochs"
        )
    equal = "equal" if report.losses_equal else "[red]NOT equal[/]"
    console.print(
        f"{report.lives} lives, {report.seconds:.0f} s; losses of {report.num_losses} steps {equal} to those of an "
        f"undisturbed run ({report.uninterrupted_s:.0f} s)"
    )
    for name, slope in report.slopes.items():
        growth = f"{human(slope.mean)} {slope.per_hour:+.3g} ± {slope.error:.2g} per hour"
        console.print(f"{name.replace('_', ' ')}: {growth}" + ("" if slope.is_flat else " [red]grows[/]"))
