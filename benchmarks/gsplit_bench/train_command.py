"""``python -m gsplit_bench train``: its options, and what it shows: a table per scenario with a line per system."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json, parse_fanout
from gsplit.errors import InputError, explain
from gsplit.files.atomic import write_atomic

if TYPE_CHECKING:
    from gsplit_bench.train import TrainReport
    from gsplit_bench.train_records import TrainRecord

__all__ = ["show_report", "train", "write_document"]


def train(
    graphs: Annotated[list[Path], typer.Argument(metavar="GRAPH", help="partitioned stores")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="a study of the paper: redundancy, main, partition, ranks, replicas, hidden, batch, layers or accuracy; "
            "or host, threads or crossover"
        ),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help="strategies, split+labor, dgl, pyg, pyg_our_sampler and p3 [default: split,data and all of the peers]"
        ),
    ] = None,
    models: Annotated[str | None, typer.Option(help="sage and gat, or other stock models [default: sage,gat]")] = None,
    ranks: Annotated[str | None, typer.Option(help="numbers of ranks, such as 1,2,4 [default: 2]")] = None,
    replicas: Annotated[str | None, typer.Option(help="numbers of replicas [default: 1]")] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="targets of the GLOBAL mini-batch; several: 256,1024 [default: 1024]")
    ] = None,
    hidden: Annotated[str | None, typer.Option(help="widths of hidden layers [default: 256]")] = None,
    layers: Annotated[str | None, typer.Option(help="numbers of layers, with 15 neighbours each [default: 3]")] = None,
    fanout: Annotated[str | None, typer.Option(help="neighbours per hop, such as 15,10,5, instead of --layers")] = None,
    features: Annotated[
        str | None, typer.Option(help="where features lie: memory, disk or both [default: memory]")
    ] = None,
    cache: Annotated[
        float | None, typer.Option(min=0, max=1, help="each rank's cache of features on disk, of all [default: 0.1]")
    ] = None,
    allocator: Annotated[str | None, typer.Option(help="of the ranks: tuned, default or both [default: tuned]")] = None,
    threads: Annotated[
        str | None, typer.Option(help="numbers of threads of each rank, such as 1,2 [default: 1]")
    ] = None,
    warm_up: Annotated[int | None, typer.Option(min=1, help="steps before, not measured [default: 1]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="steps of a system's turn [default: 2]")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="turns of every system [default: 3]")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=0, help="train and evaluate so many epochs instead of turns")
    ] = None,
    count: Annotated[
        str | None, typer.Option(help="numbers of ranks to count for, in one process, such as 8,64")
    ] = None,
    targets: Annotated[str | None, typer.Option(help="targets of the mini-batches [default: train]")] = None,
    device: Annotated[
        str | None, typer.Option(help="of the models: cpu, cuda, or sim, which is simulated [default: cpu]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of mini-batches and weights [default: 1]")] = None,
    out: Annotated[Path | None, typer.Option(help="file for the JSON document, written after every launch")] = None,
    as_json: Json = False,
) -> None:
    """Measure training: strategies and peers on the same ranks.

    They take turns. All start from the same weights; all strategies train the same steps, so their losses must be
    equal. Times are per step, medians of the turns. Ranks that this machine does not have are counted (--count).
    """
    with command(as_json, lost="what --out has is complete so far" if out else "nothing was written"):
        from gsplit_bench.train import run_study
        from gsplit_bench.train_study import DEFAULT, find_preset

        given: dict[str, Any] = {
            "systems": _names(systems),
            "models": _names(models),
            "ranks": _numbers("--ranks", ranks),
            "replicas": _numbers("--replicas", replicas),
            "batch_sizes": _numbers("--batch-size", batch_size),
            "hidden": _numbers("--hidden", hidden),
            "fanouts": _fanouts(layers, fanout),
            "features": _both(features, ("memory", "disk")),
            "cache": cache,
            "allocators": _both(allocator, ("tuned", "default")),
            "threads": _numbers("--threads", threads),
            "warm_up": warm_up,
            "steps": steps,
            "repeats": repeats,
            "epochs": epochs,
            "counted_ranks": _numbers("--count", count),
            "counted_strategies": _strategies(systems),
            "targets": targets,
            "device": device,
            "seed": seed,
        }
        study = replace(
            find_preset(preset) if preset else DEFAULT,
            **{name: value for name, value in given.items() if value is not None},
        )
        _check_out(out)
        with progress_bars(as_json) as progress:
            report = run_study(
                study,
                graphs,
                preset=preset,
                command=shlex.join(["gsplit", *sys.argv[1:]]),
                progress=progress,
                keep=lambda so_far: None if out is None else write_document(out, so_far),
            )
        if as_json:
            emit_json(report.as_dict())
        else:
            show_report(report, Console())
        if report.failures or not report.losses_equal:
            raise typer.Exit(1)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part for part in text.split(",") if part)


def _strategies(systems: str | None) -> tuple[str, ...] | None:
    """Those of the systems that are ours: they are counted, too."""
    from gsplit_bench.train_study import PEERS

    return tuple(name for name in _names(systems) or () if name not in PEERS) or None


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise InputError(explain(option, "positive numbers like 1,2,4", text, "separate them by commas"))
    return numbers


def _fanouts(layers: str | None, fanout: str | None) -> tuple[tuple[int, ...], ...] | None:
    if fanout is not None:
        return (tuple(parse_fanout(fanout)),)
    numbers = _numbers("--layers", layers)
    return None if numbers is None else tuple((15,) * number for number in numbers)


def _both(text: str | None, values: tuple[str, ...]) -> tuple[str, ...] | None:
    return values if text == "both" else _names(text)


def _check_out(out: Path | None) -> None:
    """Refuse before anything is measured, not after hours of it."""
    if out is not None and out.exists():
        raise InputError(explain(out, "a new file", "one that exists", "choose another --out, or remove it"))
    if out is not None and not out.parent.is_dir():
        raise InputError(explain(out, "a file in a folder that exists", "no such folder", "make it first"))


def write_document(out: Path, report: "TrainReport") -> None:
    """Put the document into its place in one go."""
    write_atomic(out, [json.dumps(report.as_dict(), indent=1, allow_nan=False).encode(), b"\n"])


_LEGEND = """ms per step: wall time of the slowest rank, the median of the turns and how far
they are from it; CPU time of all ranks; blocked (wait) and by stages, means of
the ranks. Edges computed, rows loaded or read in place, bytes sent: of all ranks."""


def show_report(report: "TrainReport", console: Console) -> None:
    """All tables, then what has to be known beside them."""
    groups: dict[tuple[Any, ...], list[TrainRecord]] = {}
    for record in report.records:
        groups.setdefault(_scenario_of(record), []).append(record)
    for scenario, records in groups.items():
        console.print(_title(scenario), style="bold", highlight=False)
        console.print(_epochs_table(records) if records[0].epochs else _records_table(records))
        console.print()
    if any(not record.epochs for record in report.records):
        console.print(_LEGEND, style="dim", highlight=False)
    _show_losses(report, console)
    if report.counts:
        console.print(_counts_table(report))
    for note in report.notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", highlight=False, soft_wrap=True)


def _scenario_of(record: "TrainRecord") -> tuple[Any, ...]:
    return (
        record.graph,
        record.model,
        record.hidden,
        tuple(record.fanout),
        record.batch_size,
        record.ranks,
        record.threads,
        record.replicas,
        record.features,
        record.allocator,
    )


def _title(scenario: tuple[Any, ...]) -> str:
    graph, model, hidden, fanout, batch_size, ranks, threads, replicas, features, allocator = scenario
    hops = ",".join(map(str, fanout))
    grouped = f" as {replicas} replicas" if replicas > 1 else ""
    launch = f"{ranks} rank{'s' * (ranks > 1)}{f' x {threads} threads' * (threads > 1)}"
    how = f"{launch}{grouped}, {features}, {allocator} allocator"
    return f"{graph}: {model} {hidden}, fanout {hops}, batch {batch_size}; {how}"


def _records_table(records: list["TrainRecord"]) -> Table:
    from gsplit_bench.train_records import group_stages

    table = _table("", "ms", "+-", "CPU", "wait", "sample", "load", "fwd", "bwd", "edges", "rows", "sent")
    fastest = min(record.wall_s.median for record in records)
    for record in records:
        wall = record.wall_s
        spread = max(wall.high - wall.median, wall.median - wall.low) / wall.median
        stages = group_stages(record.stages_s)
        shown = (stages[name] for name in ("sample", "load", "forward", "backward"))
        parts = (record.cpu_s.median, record.wait_s, *shown)
        amounts = (record.edges, record.rows_loaded, record.bytes_sent)
        table.add_row(
            record.system,
            _ms(wall.median),
            f"{100 * spread:.0f}%",
            *map(_ms, parts),
            *(human(amount).replace(" ", "") for amount in amounts),
            style="bold" if wall.median == fastest and len(records) > 1 else "",
        )
    return table


def _epochs_table(records: list["TrainRecord"]) -> Table:
    names = list(records[0].epochs[0]["accuracies"])
    table = _table("", "epoch", "loss", *names, "ms")
    for record in records:
        for epoch in record.epochs:
            scores = (f"{epoch['accuracies'][name]:.1%}" for name in names)
            table.add_row(record.system, str(epoch["epoch"] + 1), f"{epoch['loss']:.4f}", *scores, _ms(epoch["wall_s"]))
    return table


def _show_losses(report: "TrainReport", console: Console) -> None:
    """Whether all runs of our strategies trained the same steps."""
    ours = [record for record in report.records if record.loss_difference is not None]
    if len(ours) < 2:
        return
    off = max(record.loss_difference or 0.0 for record in ours)
    said = (
        f"losses of all {len(ours)} runs of our strategies {'equal' if report.losses_equal else 'DIFFER'}, to {off:.0e}"
    )
    console.print(said, style="" if report.losses_equal else "bold red", highlight=False)


def _counts_table(report: "TrainReport") -> Table:
    names = ("graph", "batch", "ranks", "strategy", "edges", "rows loaded", "bytes sent", "imbalance")
    table = _table(*names)
    table.title, table.title_justify = "counted in one process, per step", "left"
    for count in report.counts:
        amounts = (count.edges, sum(count.rows_loaded_per_rank), sum(count.bytes_sent_per_rank))
        place = (count.graph, str(count.batch_size), str(count.ranks), count.strategy)
        table.add_row(*place, *(human(amount).replace(" ", "") for amount in amounts), f"{count.imbalance:.2f}")
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name in ("", "graph", "strategy") else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"
