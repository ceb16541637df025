"""The commands of ``python -m gsplit_bench``."""

import json
import shlex
import signal
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json, parse_fanout
from gsplit.errors import InputError, explain
from gsplit.files.atomic import write_atomic
from gsplit.partitioning.settings import C_E, C_V, EPOCHS, TOLERANCE
from gsplit_bench.paper import paper
from gsplit_bench.record import record
from gsplit_bench.train_command import train

if TYPE_CHECKING:
    from gsplit_bench.shuffle import ShuffleRow
    from gsplit_bench.soak import SoakReport

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in a help text are text
    help="Measure GSplit on this machine.",
)
app.command()(train)
app.command()(paper)
app.command()(record)


@app.command()
def sampling(
    vertices: Annotated[int, typer.Option(help="vertices of the synthetic graph")] = 1_000_000,
    edges: Annotated[int, typer.Option(help="edges of the synthetic graph")] = 30_000_000,
    fanout: Annotated[int, typer.Option(help="neighbours per vertex in every layer")] = 15,
    layers: Annotated[int, typer.Option(help="number of layers")] = 3,
    batch_size: Annotated[int, typer.Option(help="targets per mini-batch")] = 1024,
    steps: Annotated[int, typer.Option(help="mini-batches to measure")] = 20,
    store: Annotated[Path | None, typer.Option(help="draw from this store instead of a synthetic graph")] = None,
    as_json: Json = False,
) -> None:
    """Measure all built-in samplers on one core, against DGL if it is installed."""
    with command(as_json):
        from gsplit.store.reader import open_store
        from gsplit_bench.sampling import bench_sampling

        opened = None if store is None else open_store(store)
        with progress_bars(as_json) as progress:
            report = bench_sampling(
                num_vertices=vertices,
                num_edges=edges,
                num_neighbors=(fanout,) * layers,
                batch_size=batch_size,
                steps=steps,
                store=opened,
                progress=progress,
            )
        if as_json:
            emit_json(report.as_dict())
            return
        table = _table("", "edges/s", "ratio")
        table.add_row("gsplit", human(report.edges_per_s), "")
        table.add_row("gsplit, split path", human(report.split_edges_per_s), f"{report.split_to_plain:.2f} of plain")
        for draw in report.draws:
            ratio = f"{draw.time_per_edge:.2f} x the time per edge, {draw.edges:.2f} of edges, {draw.rows:.2f} of rows"
            table.add_row(draw.name, human(draw.edges_per_s), ratio)
        if report.peer is not None:
            table.add_row(report.peer.name, human(report.peer.edges_per_s), f"gsplit is {report.peer.ratio:.2f} x")
        Console().print(table)
        if report.note is not None:
            Console().print(report.note, style="yellow", highlight=False)


@app.command()
def shuffle(
    ranks: Annotated[list[int] | None, typer.Option(help="number of ranks; repeatable [default: 2 and 4]")] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="rows per rank; repeatable [default: 10000 and 100000]")
    ] = None,
    width: Annotated[int, typer.Option(help="floats per row")] = 256,
    repeats: Annotated[int, typer.Option(help="round trips to measure")] = 15,
    as_json: Json = False,
) -> None:
    """Measure the shuffle between ranks, against bare gloo.

    Forward and backward, between ranks of this machine; also against the same made of torch operations.
    """
    with command(as_json):
        from gsplit_bench.shuffle import bench_shuffle

        with progress_bars(as_json) as progress:
            report = bench_shuffle(
                world_sizes=tuple(ranks or (2, 4)),
                num_rows=tuple(rows or (10_000, 100_000)),
                width=width,
                repeats=repeats,
                progress=progress,
            )
        if as_json:
            emit_json(report.as_dict())
            return
        table = _table("ranks", "rows", "shuffle", "composed", "bare", "of composed", "over gloo", "of bare")
        for row in report.rows:
            table.add_row(*_shuffle_cells(row))
        Console().print(table)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if not name else "right")
    return table


def _shuffle_cells(row: "ShuffleRow") -> list[str]:
    speeds = (row.bytes_per_s, row.composed_bytes_per_s, row.bare_bytes_per_s)
    ratios = (row.ratio, row.ratio_over_gloo, row.ratio_to_bare)
    return [
        str(row.ranks),
        f"{row.rows:,}",
        *(f"{human(speed)}B/s" for speed in speeds),
        *(f"{ratio:.2f}" for ratio in ratios),
    ]


@app.command()
def partition(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a store that has not been partitioned")],
    parts: Annotated[list[int], typer.Option(min=1, help="number of parts; repeatable")],
    case: Annotated[
        list[str] | None, typer.Option(help="objective:solver, such as gsplit:metis; repeatable [default: all]")
    ] = None,
    targets: Annotated[str, typer.Option(help="targets of the mini-batches; all: every vertex")] = "train",
    fanout: Annotated[str, typer.Option(help="neighbours per hop")] = "15,15,15",
    batch_size: Annotated[int, typer.Option(min=1, help="targets per mini-batch")] = 1024,
    epochs: Annotated[int, typer.Option(min=1, help="epochs to presample")] = EPOCHS,
    held_out: Annotated[int, typer.Option(min=1, help="further epochs to measure on")] = 1,
    tolerance: Annotated[float, typer.Option(help="largest allowed work of a part, over the mean")] = TOLERANCE,
    c_v: Annotated[float, typer.Option(help="work per sampled vertex")] = C_V,
    c_e: Annotated[float, typer.Option(help="work per sampled edge")] = C_E,
    seed: Annotated[int, typer.Option(min=0, help="of the mini-batches and the solvers")] = 0,
    figure: Annotated[Path | None, typer.Option(help="picture to draw of the result; needs matplotlib")] = None,
    as_json: Json = False,
) -> None:
    """Compare partitions by several objectives and solvers.

    Measured on mini-batches that were not used for the weights.
    """
    with command(as_json):
        from gsplit.partitioning.presample import Workload
        from gsplit.report.figures import load_figure
        from gsplit.store.reader import open_store
        from gsplit_bench.partition import bench_partition, parse_cases, save_partitions

        if figure is not None:
            load_figure()
        chosen = None if targets == "all" else targets
        workload = Workload.of_store(open_store(store), chosen, parse_fanout(fanout), batch_size, seed)
        with progress_bars(as_json) as progress:
            document = bench_partition(
                workload,
                parts,
                cases=parse_cases(case),
                epochs=epochs,
                held_out=held_out,
                tolerance=tolerance,
                c_v=c_v,
                c_e=c_e,
                progress=progress,
            )
        if figure is not None:
            save_partitions({store.stem: document}, figure)
        if as_json:
            emit_json(document)
            return
        table = _table("", "cross", "rows", "work", "edges", "vert.", "targ.", "s", "memory")
        for row in document["rows"]:
            table.add_row(*_partition_cells(row))
        console = Console()
        console.print(table)
        console.print(_PARTITION_LEGEND, highlight=False)
        for row in document["rows"]:
            if "error" in row:
                console.print(
                    f"{_partition_name(row)}: {row['error']}", style="yellow", highlight=False, soft_wrap=True
                )


_PARTITION_LEGEND = """on held-out mini-batches: cross edges, of all; rows that cross, per input row;
work, edges, vertices and targets of the largest part over the mean"""


def _partition_name(row: dict[str, Any]) -> str:
    return f"{row['parts']} {row['objective']}" + ("" if row["solver"] == "random" else f" {row['solver']}")


def _partition_cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [_partition_name(row), "failed"]
    return [
        _partition_name(row),
        f"{row['cross_edge_share']:.1%}",
        f"{row['rows_shuffled_per_input']:.3f}",
        *(f"{row[f'{what}_imbalance']:.3f}" for what in ("work", "edge", "vertex", "target")),
        f"{row['seconds']:.1f}",
        f"{human(row['peak_bytes'])}B",
    ]


@app.command()
def pairs(
    store: Annotated[Path, typer.Argument(help="a partitioned store with features")],
    ranks: Annotated[int, typer.Option(min=2, help="ranks")] = 2,
    fanout: Annotated[str, typer.Option(help="neighbours per layer")] = "15,10,5",
    batch_size: Annotated[int, typer.Option(help="pairs per mini-batch, of all ranks")] = 1024,
    negatives: Annotated[int, typer.Option(help="random pairs for each pair")] = 1,
    steps: Annotated[int, typer.Option(help="steps to measure, for each strategy")] = 10,
    as_json: Json = False,
) -> None:
    """Measure steps of link prediction under split and data parallelism."""
    with command(as_json):
        from gsplit_bench.pairs import bench_pairs

        numbers = [int(number) for number in fanout.split(",")]
        found = bench_pairs(str(store), ranks, numbers, batch_size=batch_size, amount=negatives, steps=steps)
        if as_json:
            emit_json({"store": store.name, "rows": [row.as_dict() for row in found]})
            return
        table = _table("strategy", "CPU s per step", "to split", "rows", "edges")
        for row in found:
            ratios = (f"{ratio:.2f}" for ratio in (row.cpu_ratio, row.rows_ratio, row.edges_ratio))
            table.add_row(row.strategy, f"{row.cpu_s:.2f}", *ratios)
        Console().print(table)


@app.command()
def typed_steps(
    ranks: Annotated[int, typer.Option(min=1, help="ranks")] = 1,
    batch_size: Annotated[int, typer.Option(help="targets per mini-batch, of all ranks")] = 1024,
    steps: Annotated[int, typer.Option(help="steps to measure, for each side")] = 10,
    scale: Annotated[float, typer.Option(help="size of the generated graph, relative to 6.7 M edges")] = 1.0,
    as_json: Json = False,
) -> None:
    """Measure steps of a heterogeneous graph against the same graph without types."""
    with command(as_json):
        from gsplit_bench.typed_steps import bench_typed_steps

        found = bench_typed_steps(ranks, steps=steps, batch_size=batch_size, scale=scale)
        if as_json:
            emit_json(found.as_dict())
            return
        table = _table("per drawn edge, typed to untyped", "")
        for name in ("batch_ratio", "model_ratio", "step_ratio", "bare_ratio"):
            table.add_row(name, f"{getattr(found, name):.2f}")
        Console().print(table)


@app.command()
def report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE", help="JSON documents of train, partition, planner-check; folders of runs"),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="page to write")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(metavar="FOLDER", help="folder for the pictures, one file each")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="trace of the runs, for Perfetto or chrome://tracing")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE.md", help="the tables as Markdown: when to use what, speed-ups, records"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace files of the same names")] = False,
    as_json: Json = False,
) -> None:
    """Write a page with pictures of measurements and runs."""
    with command(as_json):
        from gsplit_bench.report.sections import write_study

        written = write_study(sources, out, png=png, trace=trace, markdown=markdown, overwrite=overwrite)
        if as_json:
            emit_json(written.as_dict())
            return
        console = Console()
        for path in written.files:
            console.print(str(path), highlight=False, soft_wrap=True)


@app.command()
def loading(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a partitioned store")],
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="number of ranks; repeatable [default: 2 and 4]")
    ] = None,
    targets: Annotated[str, typer.Option(help="targets of the mini-batches; all: every vertex")] = "train",
    fanout: Annotated[str, typer.Option(help="neighbours per hop")] = "15,15,15",
    batch_size: Annotated[int, typer.Option(min=1, help="targets of the GLOBAL mini-batch")] = 1024,
    steps: Annotated[int, typer.Option(min=0, help="mini-batches to count; 0: an epoch")] = 0,
    run_steps: Annotated[int, typer.Option(min=0, help="mini-batches that real ranks load; 0: none")] = 8,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="where real ranks read: memory, map, warm, cold, bus, network or indexed; repeatable [default: all]"
        ),
    ] = None,
    cache: Annotated[float, typer.Option(min=0, max=1, help="cache of each rank, of all features")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="of the mini-batches; not that of the partition")] = 1,
    as_json: Json = False,
) -> None:
    """Measure what ranks load, against data parallelism.

    Rows and cache hits are counted for all ranks in one process; real ranks then read from memory, from disk (warm;
    cold: dropped from the page cache before every step), from sources throttled to 12 GB/s (bus) and 1 GB/s (network),
    and, as PyG does, by indexing a cold memory map (indexed).
    """
    with command(as_json):
        from gsplit.partitioning.presample import Workload
        from gsplit.store.reader import open_store
        from gsplit_bench.loading import count_loading, time_loading
        from gsplit_bench.loading_runs import SOURCES

        opened, chosen = open_store(store), None if targets == "all" else targets
        workload = Workload.of_store(opened, chosen, parse_fanout(fanout), batch_size, seed)
        numbers, sources = ranks or [2, 4], source or list(SOURCES)
        with progress_bars(as_json) as progress:
            document = count_loading(opened, workload, numbers, steps=steps, progress=progress)
            document["runs"] = time_loading(
                opened,
                chosen,
                workload,
                numbers,
                sources if run_steps else [],
                steps=run_steps,
                cache_share=cache,
                progress=progress,
            )
        if as_json:
            emit_json(document)
            return
        for table in (_redundancy(document), _hits(document), _copies(document), _loading_runs(document)):
            if table.row_count:
                Console().print(table)


def _titled(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _redundancy(document: dict[str, Any]) -> Table:
    table = _titled("edges computed and rows loaded", "ranks", "edges", "data", "split", "rows", "data", "split")
    for row in document["redundancy"]:
        cells = [cell for what in ("edges", "rows") for cell in _ratios(row, what)]
        table.add_row(str(row["ranks"]), *cells)
    return table


def _ratios(row: dict[str, Any], what: str) -> list[str]:
    ratios = (f"{row[f'{what}_{who}_to_mini']:.2f} x" for who in ("data", "split"))
    return [human(row[what]["mini"]), *ratios]


def _hits(document: dict[str, Any]) -> Table:
    table = _titled("cache hits", "ranks", "order", "cached", "measured", "predicted", "most off")
    for row in document["hits"]:
        shares = (f"{row[name]:.1%}" for name in ("budget", "measured", "predicted", "most_off"))
        table.add_row(str(row["ranks"]), row["order"], *shares)
    return table


def _copies(document: dict[str, Any]) -> Table:
    table = _titled("rows exchanged at layer 0, with copies", "ranks", "copied", "rows exchanged", "of no copies")
    for row in document["copies"]:
        cells = (f"{row['budget']:.0%}", human(row["rows_received"]), f"{row['of_no_copies']:.1%}")
        table.add_row(str(row["ranks"]), *cells)
    return table


def _loading_runs(document: dict[str, Any]) -> Table:
    names = ("ranks", "source", "strategy", "rows", "bytes", "hits", "predicted", "s", "CPU s")
    table = _titled("real ranks, sampling and loading", *names)
    for row in document["runs"]:
        hits = (f"{row['hits_measured']:.1%}", f"{row['hits_predicted']:.1%}")
        sizes = (human(row["rows_loaded"]), f"{human(row['bytes_loaded'])}B")
        times = (f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}")
        table.add_row(str(row["ranks"]), row["source"], row["strategy"], *sizes, *hits, *times)
    return table


@app.command()
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
            help="of kill, stall, freeze, terminate, orphan, memory, clock (needs cc), full-disk, slow-disk, stuck-disk "
            "(as root); on two hosts kill, drop, loss, cut [default: all]",
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=0, metavar="INT", help="faults to inflict; 0: only train undisturbed")] = 20,
    minutes: Annotated[
        float | None, typer.Option(min=0, metavar="MINUTES", help="inflict faults for so long, instead of a count")
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="mean time from a start to its fault")] = 30.0,
    seed: Annotated[int, typer.Option(metavar="INT", help="of the faults' order and moments")] = 0,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, metavar="INT", help="2: network namespaces with a cable (as root)")
    ] = 1,
    rate: Annotated[str, typer.Option(metavar="RATE", help="of the cable, as tc takes it")] = "1gbit",
    delay: Annotated[float, typer.Option(metavar="MS", help="of the cable, one way (netem)")] = 0.0,
    loss: Annotated[float, typer.Option(metavar="PERCENT", help="packets that the cable loses (BPF)")] = 0.0,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the document here, after every fault")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train under faults; compare with an undisturbed run.

    Exit code 1 if a fault was not met as it should be, a loss differs, or something grows that a run holds: memory,
    threads, descriptors, segments of shared memory, temporary files.
    """
    with command(as_json):
        if find_spec("psutil") is None:
            raise InputError(explain("bench soak", "psutil", "no such package", "pip install 'gsplit[bench]'"))
        from gsplit.store.reader import open_store
        from gsplit_bench.soak import SoakPlan, run_soak
        from gsplit_bench.soak_faults import FAULTS, HOST_FAULTS

        open_store(store)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the run, too, and take its disk away
        names = tuple(faults.split(",")) if faults else tuple(FAULTS if hosts == 1 else HOST_FAULTS)
        options = tuple(shlex.split(train))
        plan = SoakPlan(store, nproc, options, save_every, names, count, minutes, every, seed, hosts, rate, delay, loss)

        def save(report: "SoakReport") -> None:
            if record is not None:
                write_atomic(record, [json.dumps(_document(report), indent=1).encode()])

        with progress_bars(as_json) as progress:
            report = run_soak(plan, progress=progress, save=save)
        save(report)
        if as_json:
            emit_json(_document(report))
        else:
            _show(report, Console())
        if not report.passed:
            raise typer.Exit(1)


def _document(report: "SoakReport") -> dict[str, Any]:
    from gsplit_bench.machine import current_commit, describe_machine, installed_versions

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
    equal = "equal" if report.losses_equal else "[red]NOT equal[/]"
    console.print(
        f"{report.lives} starts, {report.trainings} trainings of {report.num_losses} steps in {report.seconds:.0f} s; "
        f"losses {equal} to those of an undisturbed run ({report.uninterrupted_s:.0f} s)"
    )
    for name, slope in report.slopes.items():
        growth = f"{human(slope.mean)} {slope.per_hour:+.3g} ± {slope.error:.2g} per hour"
        console.print(f"{name.replace('_', ' ')}: {growth}" + ("" if slope.is_flat else " [red]grows[/]"))


_SCRIPTS = {
    "attention": ("attention:main", "Measure GAT, GATv2 and Transformer: our kernels, PyG's layers and DGL's."),
    "bare-loop": ("bare_loop:main", "Measure a step of one process against a bare loop over the same blocks."),
    "between-hosts": ("between_hosts:main", "Count the rows between hosts, and those that cross once."),
    "bf16": ("bf16:main", "Measure training under autocast against float32."),
    "compare-versions": ("compare_versions:main", "Measure a step before and after a change, in turn."),
    "disk-reads": ("disk_reads:main", "Measure reads of random rows out of a file, by several methods."),
    "faults": ("faults:main", "Try every kind of fault at every place of a run."),
    "host-steps": ("host_steps:main", "Measure steps on several imitated hosts: bytes on their cables, and seconds."),
    "import-speed": ("import_speed:main", "Measure imports of Parquet: speed and memory by size."),
    "inference": ("inference:main", "Compare exact inference with a full-graph forward of PyG."),
    "kernel-matrix": ("kernel_matrix:main", "Compile every Triton kernel for every architecture."),
    "exactness": ("exactness:main", "Check every combination of options on ranks against one process."),
    "layer-cost": ("layer_cost:main", "Measure what a vertex and an edge cost a layer."),
    "loading-record": ("loading:record", "Put documents of the command loading together as one record."),
    "many-ranks": ("many_ranks:main", "Split steps of up to a thousand ranks in one process, and count them."),
    "measured": ("measured:main", "Print the table of docs/measured.md."),
    "objects": ("objects:main", "Train from a store on an S3 server with injected faults, against the local store."),
    "partition-studies": ("partition_studies:main", "Measure presampling, seeds, merged parts and memory of solvers."),
    "pipeline": ("pipeline:main", "Measure what prefetching hides."),
    "planner-check": ("planner_check:main", "Compare the planner's predictions with records of the command train."),
    "planner-choice": ("measured_choice:main", "Judge the choice by trial steps at the points of a planner check."),
    "planner-paper": ("paper_table:main", "Print the paper's Table 3 beside the planner's predictions."),
    "profile": ("profile_step:main", "Show where the CPU seconds of a step go, beside the machine's limit."),
    "quality": ("quality:main", "Compare samplers, link prediction and vertex types with what they replace."),
    "resume": ("resume:main", "Check exact resume: kills, other numbers of ranks, cost of saving."),
    "sampling-threads": ("sampling_threads:main", "Measure sampling on the host in several threads."),
    "scale": ("scale:main", "Print the tables of docs/scale.md."),
    "sharded-import": ("sharded_import:main", "Compare an import by several processes with one."),
    "sharded-partition": ("sharded_partition:main", "Compare restreaming by ranks with one process."),
    "shuffle-share": ("shuffle_share:main", "Measure the share of a step that goes into shuffles."),
    "start-ranks": ("start_ranks:main", "Measure the start of up to 64 ranks: seconds, sockets, threads."),
    "step-overhead": ("step_overhead:main", "Count Python calls, launches and waits of a step, before and after."),
    "two-hosts": ("two_hosts_check:main", "Compare two imitated hosts with one process, and cut the cable."),
    "verify-cost": ("verify_cost:main", "Measure what comparing the first step with one process costs."),
    "watch-cost": ("watch_cost:main", "Measure what the watch over collectives costs."),
}
"""Commands that read their own arguments, as module:function."""


def _add_script(name: str, place: str, summary: str) -> None:
    own = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=summary, context_settings=own)
    def run(context: typer.Context) -> None:
        module, function = place.split(":")
        code = getattr(import_module(f"gsplit_bench.{module}"), function)(context.args)
        raise typer.Exit(code or 0)


for _name, (_place, _summary) in _SCRIPTS.items():
    _add_script(_name, _place, _summary)
