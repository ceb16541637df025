"""The commands of ``python -m gsplit_bench``."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json, parse_fanout
from gsplit.partitioning.defaults import C_E, C_V, EPOCHS, TOLERANCE
from gsplit_bench.loading_command import loading
from gsplit_bench.soak_command import soak
from gsplit_bench.train_command import train

if TYPE_CHECKING:
    from gsplit_bench.shuffle import ShuffleRow

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in a help text are text
    help="Measure GSplit on this machine.",
)
app.command()(loading)
app.command()(train)
app.command()(soak)


@app.command()
def sampling(
    vertices: Annotated[int, typer.Option(help="vertices of the synthetic graph")] = 1_000_000,
    edges: Annotated[int, typer.Option(help="edges of the synthetic graph")] = 30_000_000,
    fanout: Annotated[int, typer.Option(help="neighbours per vertex in every layer")] = 15,
    layers: Annotated[int, typer.Option(help="number of layers")] = 3,
    batch_size: Annotated[int, typer.Option(help="targets per mini-batch")] = 1024,
    steps: Annotated[int, typer.Option(help="mini-batches to measure")] = 20,
    as_json: Json = False,
) -> None:
    """Measure sampling on one core, against DGL if it is installed."""
    with command(as_json):
        from gsplit_bench.sampling import bench_sampling

        with progress_bars(as_json) as progress:
            report = bench_sampling(
                num_vertices=vertices,
                num_edges=edges,
                num_neighbors=(fanout,) * layers,
                batch_size=batch_size,
                steps=steps,
                progress=progress,
            )
        if as_json:
            emit_json(report.as_dict())
            return
        table = _table("", "edges/s", "ratio")
        table.add_row("gsplit", human(report.edges_per_s), "")
        table.add_row("gsplit, split path", human(report.split_edges_per_s), f"{report.split_to_plain:.2f} of plain")
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
        from gsplit.report.drawing import load_figure
        from gsplit.store.reader import open_store
        from gsplit_bench.partition import bench_partition, parse_cases
        from gsplit_bench.partition_figure import save_partitions

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
def exactness(
    model: Annotated[list[str] | None, typer.Option(help="model to check; repeatable [default: all]")] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, max=4, metavar="INT", help="ranks to check on; repeatable [default: 1 to 4]"),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, or cuda or sim against ranks on the cpu")] = "cpu",
    as_json: Json = False,
) -> None:
    """Check all models, strategies and meshes against one process.

    In float64, with every option and ownership; takes some twenty minutes, and hours on the simulated device.
    """
    with command(as_json):
        from gsplit.run.models import MODELS
        from gsplit_bench.exactness import MESHES, run_exactness

        with progress_bars(as_json) as progress:
            meshes = [mesh for mesh in MESHES if not ranks or math.prod(mesh) in ranks]
            report = run_exactness(meshes, model or list(MODELS), progress, device=device)
        if as_json:
            emit_json(report.as_dict())
        else:
            table = _table("largest difference of", "")
            for name, value in asdict(report.worst).items():
                table.add_row(name, f"{value:.1e}")
            Console().print(table)
            verdict = "all" if report.ok else "NOT all"
            Console().print(f"{len(report.rows)} cases, {verdict} within {report.tolerance:.0e}")
        if not report.ok:
            raise typer.Exit(1)


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
        Path | None, typer.Option(metavar="FILE.md", help='the table "when to use what" as Markdown')
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
