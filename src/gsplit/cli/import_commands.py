"""``gsplit import KIND [INPUT] OUT.gsplit``: make a store from a graph in another form.

Importers are imported by the command that uses them, so that ``gsplit --help`` does not wait for numba.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Flags, Json, Output, settings_options
from gsplit.cli.store_view import describe, show
from gsplit.errors import InputError, explain
from gsplit.store.importers.arrow import LabelType, TableColumns
from gsplit.store.importers.vertex_ids import IdMode, UnknownIds
from gsplit.store.source import EdgeRules, GraphSource
from gsplit.store.statistics import not_finite_key
from gsplit.store.writer import check_output

if TYPE_CHECKING:
    from gsplit.store.sharded_import import ShardedImport

__all__ = ["import_app"]


import_app = typer.Typer(no_args_is_help=True, help="Make a store from a graph in another form.")


class _ImportSettings(BaseModel):
    """Settings of every import; the fields with a description are options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    symmetrise: bool = Field(False, description="add the reverse of every edge; drops duplicates")
    drop_self_loops: bool = Field(False, description="leave out edges from a vertex to itself")
    drop_duplicates: bool = Field(False, description="keep one of several equal edges")
    overwrite: bool = Field(False, description="replace a store of the same name")

    @property
    def rules(self) -> EdgeRules:
        return EdgeRules(self.symmetrise, self.drop_self_loops, self.drop_duplicates)

    def source(self) -> GraphSource:
        """The graph to import, opened."""
        raise NotImplementedError


class _SyntheticSettings(_ImportSettings):
    vertices: int = Field(description="number of vertices")
    edges: int = Field(description="number of edges to draw")
    seed: int = Field(0, description="the same seed gives the same graph")
    communities: int = Field(0, description="number of communities; 0: one per thousand vertices")
    classes: int = Field(16, description="number of labels")
    features: int = Field(64, description="columns of x")
    skew: int = Field(2, description="skew of the degrees; 1: even, 2: exponent 3, 3: exponent 2.5")
    inside: float = Field(0.8, description="share of edges inside a community")
    target_share: float = Field(0.5, description="share of vertices that are targets")
    target_communities: float = Field(1.0, description="share of communities with targets")

    def source(self) -> GraphSource:
        from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

        graph = PlantedGraph(
            num_vertices=self.vertices,
            num_edges=self.edges,
            seed=self.seed,
            num_communities=self.communities,
            num_classes=self.classes,
            num_features=self.features,
            skew=self.skew,
            inside=self.inside,
            target_share=self.target_share,
            target_communities=self.target_communities,
        )
        return synthetic_source(graph)


class _NpzSettings(_ImportSettings):
    path: Path

    def source(self) -> GraphSource:
        from gsplit.store.importers.npz import npz_source

        return npz_source(self.path)


class _OgbSettings(_ImportSettings):
    folder: Path
    split: str | None = Field(None, description="which split, where there are several")
    reverse: bool = Field(False, description="also add rev_NAME for every relation of a heterogeneous set")

    def source(self) -> GraphSource:
        from gsplit.store.importers.ogb import ogb_source

        return ogb_source(self.folder, split=self.split, reverse=self.reverse)


class _SnapSettings(_ImportSettings):
    path: Path
    features: int = Field(128, description="columns of x, random; 0: none")
    classes: int = Field(16, description="number of labels, random")
    target_share: float = Field(0.1, description="share of vertices that are targets")
    seed: int = Field(0, description="the same seed gives the same features, labels and targets")

    def source(self) -> GraphSource:
        from gsplit.store.importers.snap import RandomVertices, snap_source

        random = RandomVertices(
            num_features=self.features,
            num_classes=self.classes,
            target_share=self.target_share,
            seed=self.seed,
        )
        return snap_source(self.path, random)


class _TypedSettings(_ImportSettings):
    path: Path

    def source(self) -> GraphSource:
        from gsplit.store.importers.typed_tables import typed_tables_source

        return typed_tables_source(self.path)


class _TableSettings(_ImportSettings):
    edges: Path
    vertices: Path | None = Field(
        None, description="table of vertices: id, y, split, features", json_schema_extra={"metavar": "TABLE"}
    )
    src: str = Field("src", description="column of source ids")
    dst: str = Field("dst", description="column of destination ids")
    edge_column: tuple[str, ...] = Field((), description="a per-edge value to keep; repeatable")
    id_column: str = Field("id", description="column of vertex ids")
    label_column: str = Field("y", description="column of labels")
    split_column: str = Field("split", description="column that is train, val or test")
    label_type: LabelType = Field(
        LabelType.AUTO, description="classes: also whole floats; values to regress on: also integers"
    )
    feature_column: tuple[str, ...] = Field((), description="a number column of x, or a pattern: 'f*'; repeatable")
    list_column: str = Field("x", description="column of lists that is x")
    ids: IdMode = Field(IdMode.AUTO, description="how ids become vertices (docs/import.md)")
    num_vertices: int | None = Field(None, description="number of vertices, for dense ids without a vertex table")
    unknown_ids: UnknownIds = Field(
        UnknownIds.REFUSE, description="edges with an id that is not in the vertex table: refuse, or drop and count"
    )
    delimiter: str | None = Field(
        None,
        description="delimiter of CSV files [default: the one of , ; tab | in their first line]",
        json_schema_extra={"metavar": "SIGN"},
    )
    pairs: tuple[str, ...] = Field(
        (),
        description="table of vertex pairs to keep under a name: src, dst, label, negatives; repeatable",
        json_schema_extra={"metavar": "NAME=TABLE"},
    )
    host: int | None = Field(None, ge=0, description="number of this host, from 0; builds its shard only")
    hosts: int | None = Field(None, ge=1, description="number of hosts that build shards")
    ranges: list[int] | None = Field(None, description="where hosts' vertices begin and end [default: equal]")

    def source(self) -> GraphSource:
        from gsplit.store.importers.tables import tables_source

        columns = TableColumns(
            src=self.src,
            dst=self.dst,
            edge_values=self.edge_column,
            id=self.id_column,
            label=self.label_column,
            split=self.split_column,
            feature_list=self.list_column,
            features=self.feature_column,
            label_type=self.label_type,
        )
        return tables_source(
            self.edges,
            self.vertices,
            columns=columns,
            ids=self.ids,
            num_vertices=self.num_vertices,
            unknown_ids=self.unknown_ids,
            delimiter=self.delimiter,
            pairs=self._pair_tables(),
        )

    def _pair_tables(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for text in self.pairs:
            name, sign, file = text.partition("=")
            if not sign or not file or name in found:
                fix = "give every list of pairs a name of its own: --pairs train=train.csv"
                raise InputError(explain("--pairs", "NAME=TABLE, every name once", text, fix))
            found[name] = Path(file)
        return found


@import_app.command()
@settings_options()
def synthetic(*, output: Output, flags: Flags[_SyntheticSettings], as_json: Json = False) -> None:
    """Generate a graph with communities, labels and features.

    Degrees follow a power law.
    """
    with command(as_json):
        _import(flags.parse(), output, as_json=as_json)


@import_app.command()
@settings_options()
def npz(
    *,
    source: Annotated[Path, typer.Argument(metavar="INPUT.npz", help="edge_index and optional arrays")],
    output: Output,
    flags: Flags[_NpzSettings],
    as_json: Json = False,
) -> None:
    """Import a numpy .npz file.

    Arrays: edge_index, and optionally x, y, train_idx, val_idx, test_idx and edge_weight.
    """
    with command(as_json):
        _import(flags.parse(path=source), output, as_json=as_json)


@import_app.command()
@settings_options()
def tables(
    *,
    edges: Annotated[Path, typer.Argument(metavar="EDGES", help="Parquet or CSV file, or a folder of them")],
    output: Output,
    flags: Flags[_TableSettings],
    as_json: Json = False,
) -> None:
    """Import Parquet or CSV tables of edges and vertices.

    Ids may be strings or integers. With --host i --hosts N, N processes each build a shard.
    """
    with command(as_json):
        settings = flags.parse(edges=edges)
        if settings.host is None and settings.hosts is None and settings.ranges is None:
            _import(settings, output, as_json=as_json)
        else:
            _import_shard(settings, output, as_json=as_json)


@import_app.command()
@settings_options(only=("drop_self_loops", "drop_duplicates", "overwrite"))
def typed(
    *,
    source: Annotated[Path, typer.Argument(metavar="GRAPH.toml", help="names the tables of every type")],
    output: Output,
    flags: Flags[_TypedSettings],
    as_json: Json = False,
) -> None:
    """Import a heterogeneous graph from Parquet or CSV tables.

    A TOML file names the tables of vertex types and edge types (docs/heterogeneous.md).
    """
    with command(as_json):
        _import(flags.parse(path=source), output, as_json=as_json)


@import_app.command()
@settings_options()
def ogb(
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="what OGB downloaded, such as dataset/ogbn_arxiv")],
    output: Output,
    flags: Flags[_OgbSettings],
    as_json: Json = False,
) -> None:
    """Import a folder that OGB downloaded.

    Reads csv.gz files, the binary layout of papers100M and the folders of heterogeneous sets such as mag.
    """
    with command(as_json):
        _import(flags.parse(folder=folder), output, as_json=as_json)


@import_app.command()
@settings_options()
def snap(
    *,
    path: Annotated[Path, typer.Argument(metavar="EDGES.txt", help="edge list from SNAP, also .txt.gz")],
    output: Output,
    flags: Flags[_SnapSettings],
    as_json: Json = False,
) -> None:
    """Import an edge list from SNAP.

    Features, labels and targets are random. Use --symmetrise for undirected graphs such as com-orkut.ungraph.txt.gz.
    """
    with command(as_json):
        _import(flags.parse(path=path), output, as_json=as_json)


def _import(settings: _ImportSettings, output: Path, *, as_json: bool) -> None:
    """Build a store and show what it contains, how long it took and what was left out."""
    check_output(output, overwrite=settings.overwrite)
    start = time.perf_counter()
    with progress_bars(as_json) as progress:
        source = settings.source()
        from gsplit.store.build import build_store  # numba, which a missing file need not wait for

        store = build_store(source, output, rules=settings.rules, overwrite=settings.overwrite, progress=progress)
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


def _import_shard(settings: _TableSettings, output: Path, *, as_json: bool) -> None:
    """Build one host's shard; show which hosts are missing, or that all shards are there."""
    if settings.host is None or settings.hosts is None:
        got = f"--host {settings.host}, --hosts {settings.hosts}"
        raise InputError(explain("a shard", "--host and --hosts", got, "give both; --ranges needs them too"))
    start = time.perf_counter()
    with progress_bars(as_json) as progress:
        source = settings.source()
        from gsplit.store.sharded_import import build_shard

        built = build_shard(
            source,
            output,
            settings.host,
            settings.hosts,
            ranges=settings.ranges,
            rules=settings.rules,
            overwrite=settings.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    if not as_json:
        _show_shard(built, settings, source, seconds)
        return
    emit_json(
        {
            "host": settings.host,
            "hosts": settings.hosts,
            "vertex_range": list(built.vertex_range),
            "was_built": built.was_built,
            "missing_hosts": built.missing,
            "shards": [] if built.missing else [str(path) for path in built.shards],
            "seconds": seconds,
            "counts": built.counts,
            "notes": list(source.notes),
        }
    )


def _show_shard(built: "ShardedImport", settings: _TableSettings, source: GraphSource, seconds: float) -> None:
    console = Console()
    first, stop = built.vertex_range
    how = "built before" if built.was_built else f"built in {seconds:.1f} s"
    console.print(f"host {settings.host}: vertices {first:,} to {stop:,} {how}", highlight=False)
    if built.missing:
        missing = ", ".join(map(str, built.missing))
        console.print(f"the shards appear when all hosts have built theirs; missing: {missing}", highlight=False)
    else:
        text = f"all {settings.hosts} shards are there: {built.shards[0]} and so on"
        console.print(text, highlight=False, soft_wrap=True)
    whose = f"host {settings.host}" if built.missing else "all hosts"
    for what, count in built.counts.items():
        if count:
            console.print(f"{whose}: {what.replace('_', ' ')}: {count:,}", highlight=False, markup=False)
    not_finite = {name: {"num_not_finite": built.counts.get(not_finite_key(name))} for name in source.features}
    _show_notes([*source.notes, *_not_finite(not_finite)], console)


def _show_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _not_finite(features: Mapping[str, Mapping[str, Any]]) -> list[str]:
    text = "features {}: {:,} values are NaN or infinite, and losses will be; fill them before you import"
    counts = {name: array["num_not_finite"] for name, array in features.items()}
    return [text.format(name, count) for name, count in counts.items() if count]
