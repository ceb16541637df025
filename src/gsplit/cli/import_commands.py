"""``gsplit import KIND [INPUT] OUT.gsplit``: any graph in.

Importers are imported by the command that uses them, so that ``gsplit --help`` does not wait for numba.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Json, parse_ranges
from gsplit.cli.summary import describe, show
from gsplit.store.importers.arrow import LabelType, TableColumns
from gsplit.store.importers.vertex_ids import IdMode, UnknownIds
from gsplit.store.source import EdgeRules, GraphSource
from gsplit.store.statistics import not_finite_key
from gsplit.store.writer import check_output

__all__ = ["import_app"]


import_app = typer.Typer(no_args_is_help=True, help="Make a store from a graph in another form.")

Output = Annotated[Path, typer.Argument(metavar="OUT.gsplit", help="the store to write")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a store of the same name")]
Symmetrise = Annotated[bool, typer.Option("--symmetrise", help="add the reverse of every edge; drops duplicates")]
DropLoops = Annotated[bool, typer.Option("--drop-self-loops", help="leave out edges from a vertex to itself")]
DropDuplicates = Annotated[bool, typer.Option("--drop-duplicates", help="keep one of several equal edges")]


def _run_host(
    make: Callable[[], GraphSource],
    output: Path,
    rules: EdgeRules,
    host: int,
    hosts: int,
    ranges: str | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Build one host's shard and say which hosts are missing, or that all shards are there."""
    with command(as_json):
        from gsplit.store.sharded_import import build_shard

        cuts = None if ranges is None else parse_ranges(ranges)
        start = time.perf_counter()
        with progress_bars(as_json) as progress:
            source = make()
            done = build_shard(
                source, output, host, hosts, ranges=cuts, rules=rules, overwrite=overwrite, progress=progress
            )
        seconds, (first, stop) = time.perf_counter() - start, done.vertex_range
        if as_json:
            emit_json(
                {
                    "host": host,
                    "hosts": hosts,
                    "vertex_range": [first, stop],
                    "was_built": done.was_built,
                    "missing_hosts": done.missing,
                    "shards": [] if done.missing else [str(path) for path in done.shards],
                    "seconds": seconds,
                    "counts": done.counts,
                    "notes": list(source.notes),
                }
            )
            return
        console = Console()
        built = "built before" if done.was_built else f"built in {seconds:.1f} s"
        console.print(f"host {host}: vertices {first:,} to {stop:,} {built}", highlight=False)
        if done.missing:
            missing = ", ".join(map(str, done.missing))
            console.print(f"the shards appear when all hosts have built theirs; missing: {missing}", highlight=False)
        else:
            console.print(f"all {hosts} shards are there: {done.shards[0]} and so on", highlight=False, soft_wrap=True)
        whose = f"host {host}" if done.missing else "all hosts"
        for what, count in done.counts.items():
            if count:
                console.print(f"{whose}: {what.replace('_', ' ')}: {count:,}", highlight=False, markup=False)
        not_finite = {name: {"num_not_finite": done.counts.get(not_finite_key(name))} for name in source.features}
        _show_notes([*source.notes, *_not_finite(not_finite)], console)


def _run(make: Callable[[], GraphSource], output: Path, rules: EdgeRules, *, overwrite: bool, as_json: bool) -> None:
    """Build the store and say what it holds, how long it took and what was left out."""
    with command(as_json):
        from gsplit.store.build import build_store

        check_output(output, overwrite=overwrite)
        start = time.perf_counter()
        with progress_bars(as_json) as progress:
            source = make()
            store = build_store(source, output, rules=rules, overwrite=overwrite, progress=progress)
        seconds = time.perf_counter() - start
        document = describe(store)
        num_read = document["provenance"][-1]["counts"]["edges_read"]
        document |= {"seconds": seconds, "edges_per_s": num_read / seconds, "notes": list(source.notes)}
        if as_json:
            emit_json(document)
            return
        console = Console()
        show(document, console)
        rate = f"{human(num_read / seconds)} edges/s"
        console.print(f"\nimported {num_read:,} edges in {seconds:.1f} s ({rate})", highlight=False)
        _show_notes([*source.notes, *_not_finite(document["features"])], console)


def _show_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _not_finite(features: Mapping[str, Mapping[str, Any]]) -> list[str]:
    text = "features {}: {:,} values are NaN or infinite, and losses will be; fill them before you import"
    counts = {name: array["num_not_finite"] for name, array in features.items()}
    return [text.format(name, count) for name, count in counts.items() if count]


@import_app.command()
def synthetic(
    output: Output,
    vertices: Annotated[int, typer.Option(help="number of vertices")],
    edges: Annotated[int, typer.Option(help="number of edges drawn")],
    seed: Annotated[int, typer.Option(help="the same seed gives the same graph")] = 0,
    communities: Annotated[int, typer.Option(help="0: one per thousand vertices")] = 0,
    classes: Annotated[int, typer.Option(help="number of labels")] = 16,
    features: Annotated[int, typer.Option(help="columns of x")] = 64,
    skew: Annotated[int, typer.Option(help="1: even degrees, 2: exponent 3, 3: exponent 2.5")] = 2,
    inside: Annotated[float, typer.Option(help="share of edges inside a community")] = 0.8,
    target_share: Annotated[float, typer.Option(help="share of vertices that are targets")] = 0.5,
    target_communities: Annotated[float, typer.Option(help="share of communities with targets")] = 1.0,
    symmetrise: Symmetrise = False,
    drop_self_loops: DropLoops = False,
    drop_duplicates: DropDuplicates = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Generate a graph with communities, labels and features.

    Degrees follow a power law.
    """

    def make() -> GraphSource:
        from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

        graph = PlantedGraph(
            num_vertices=vertices,
            num_edges=edges,
            seed=seed,
            num_communities=communities,
            num_classes=classes,
            num_features=features,
            skew=skew,
            inside=inside,
            target_share=target_share,
            target_communities=target_communities,
        )
        return synthetic_source(graph)

    rules = EdgeRules(symmetrise, drop_self_loops, drop_duplicates)
    _run(make, output, rules, overwrite=overwrite, as_json=as_json)


@import_app.command()
def npz(
    source: Annotated[Path, typer.Argument(metavar="INPUT.npz", help="edge_index and optional arrays")],
    output: Output,
    symmetrise: Symmetrise = False,
    drop_self_loops: DropLoops = False,
    drop_duplicates: DropDuplicates = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Import a numpy .npz file.

    Arrays: edge_index, and optionally x, y, train_idx, val_idx, test_idx and edge_weight.
    """

    def make() -> GraphSource:
        from gsplit.store.importers.npz import npz_source

        return npz_source(source)

    rules = EdgeRules(symmetrise, drop_self_loops, drop_duplicates)
    _run(make, output, rules, overwrite=overwrite, as_json=as_json)


@import_app.command()
def tables(
    edges: Annotated[Path, typer.Argument(metavar="EDGES", help="Parquet or CSV file, or a folder of them")],
    output: Output,
    vertices: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="table of vertices: id, y, split, features")
    ] = None,
    src: Annotated[str, typer.Option(metavar="NAME", help="column of source ids")] = "src",
    dst: Annotated[str, typer.Option(metavar="NAME", help="column of destination ids")] = "dst",
    edge_column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="a per-edge value to keep; repeatable")
    ] = None,
    id_column: Annotated[str, typer.Option(metavar="NAME", help="column of vertex ids")] = "id",
    label_column: Annotated[str, typer.Option(metavar="NAME", help="column of labels")] = "y",
    split_column: Annotated[str, typer.Option(metavar="NAME", help="column saying train, val or test")] = "split",
    label_type: Annotated[
        LabelType, typer.Option(help="classes: also whole floats; values to regress on: also integers")
    ] = LabelType.AUTO,
    feature_column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="a number column of x, or a pattern: 'f*'; repeatable")
    ] = None,
    list_column: Annotated[str, typer.Option(metavar="NAME", help="column of lists that is x")] = "x",
    ids: Annotated[IdMode, typer.Option(help="how ids become vertices (docs/import.md)")] = IdMode.AUTO,
    num_vertices: Annotated[int | None, typer.Option(help="for dense ids without a vertex table")] = None,
    unknown_ids: Annotated[
        UnknownIds, typer.Option(help="edges with an id that is not in the vertex table: refuse, or drop and count")
    ] = UnknownIds.REFUSE,
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="SIGN", help="of CSV files [default: the one of , ; tab | in their first line]"),
    ] = None,
    host: Annotated[int | None, typer.Option(min=0, help="number of this host, from 0; builds its shard only")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="number of hosts that build shards")] = None,
    ranges: Annotated[str | None, typer.Option(help="where hosts' vertices begin and end [default: equal]")] = None,
    symmetrise: Symmetrise = False,
    drop_self_loops: DropLoops = False,
    drop_duplicates: DropDuplicates = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Import Parquet or CSV tables of edges and vertices.

    Ids may be strings or integers. With --host i --hosts N, N processes each build a shard.
    """

    def make() -> GraphSource:
        from gsplit.store.importers.tables import tables_source

        columns = TableColumns(
            src=src,
            dst=dst,
            edge_values=tuple(edge_column or ()),
            id=id_column,
            label=label_column,
            split=split_column,
            feature_list=list_column,
            features=tuple(feature_column or ()),
            label_type=label_type,
        )
        return tables_source(
            edges,
            vertices,
            columns=columns,
            ids=ids,
            num_vertices=num_vertices,
            unknown_ids=unknown_ids,
            delimiter=delimiter,
        )

    rules = EdgeRules(symmetrise, drop_self_loops, drop_duplicates)
    if host is None and hosts is None and ranges is None:
        _run(make, output, rules, overwrite=overwrite, as_json=as_json)
        return
    if host is None or hosts is None:
        raise typer.BadParameter("--host and --hosts go together; --ranges needs both")
    _run_host(make, output, rules, host, hosts, ranges, overwrite=overwrite, as_json=as_json)


@import_app.command()
def ogb(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="what OGB downloaded, such as dataset/ogbn_arxiv")],
    output: Output,
    split: Annotated[str | None, typer.Option(help="which split, where there are several")] = None,
    symmetrise: Symmetrise = False,
    drop_self_loops: DropLoops = False,
    drop_duplicates: DropDuplicates = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Import a folder that OGB downloaded.

    Reads csv.gz files and the binary layout of papers100M.
    """

    def make() -> GraphSource:
        from gsplit.store.importers.ogb import ogb_source

        return ogb_source(folder, split=split)

    rules = EdgeRules(symmetrise, drop_self_loops, drop_duplicates)
    _run(make, output, rules, overwrite=overwrite, as_json=as_json)
