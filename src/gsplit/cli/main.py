"""The ``gsplit`` command: its verbs, each in a module of its own."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gsplit.cli.bench_commands import bench_app
from gsplit.cli.console import command, emit_json, progress_bars
from gsplit.cli.import_commands import import_app
from gsplit.cli.options import Json
from gsplit.cli.partition_commands import partition, shard
from gsplit.cli.selftest_command import selftest
from gsplit.cli.summary import describe, show, show_partition
from gsplit.cli.train_commands import infer, train, verify
from gsplit.store.reader import open_store

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in a help text are text
    help="Train graph neural networks on big graphs, split-parallel.",
)
app.add_typer(import_app, name="import")
app.add_typer(bench_app, name="bench")
for verb in (partition, shard, train, infer, verify, selftest):
    app.command()(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("gsplit"))
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None: ...


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a directory made by gsplit import")],
    check: Annotated[bool, typer.Option("--verify", help="read and check everything: checksums, ids, orders")] = False,
    as_json: Json = False,
) -> None:
    """Show what a store contains; with --verify, check every byte."""
    with command(as_json):
        opened = open_store(store)
        document = describe(opened) | {"verified": check}
        if check:
            from gsplit.store.verify import verify_store  # numba, only when used

            with progress_bars(as_json) as progress:
                verify_store(opened, progress)
        if as_json:
            emit_json(document)
            return
        console = Console()
        show(document, console)
        show_partition(document, console)
        if check:
            console.print("\nverified: every checksum, every id and every order is right", style="green")


def main() -> None:
    """Entry point of the ``gsplit`` script."""
    app()
