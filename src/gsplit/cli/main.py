"""The ``gsplit`` command and its subcommands."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gsplit.cli.doctor_command import doctor
from gsplit.cli.grouped_options import Command, GroupedCommand
from gsplit.cli.import_commands import import_app
from gsplit.cli.plan_command import plan
from gsplit.cli.report_command import report
from gsplit.cli.store_commands import convert, inspect, partition, propagate, shard, upload
from gsplit.cli.train_commands import infer, train, verify
from gsplit.distributed.launch.forked_rank import end_process, exit_code

__all__ = ["app", "main"]


class _InOrderOfUse(TyperGroup):
    """Lists commands in the order in which a new user needs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: name != "import")


app = typer.Typer(
    cls=_InOrderOfUse,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in a help text are text
    help="Train graph neural networks on big graphs, split-parallel.",
)
app.add_typer(import_app, name="import")
for verb in (inspect, convert, propagate, partition, shard, upload, plan, train, infer, verify, report, doctor):
    app.command(cls=GroupedCommand if verb in (train, verify) else Command)(verb)


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


def main() -> None:
    """Entry point of the ``gsplit`` script."""
    try:
        app()
    except SystemExit as end:
        end_process(exit_code(end))
