"""``gsplit convert STORE OUT.gsplit``: the same graph with its features in another type."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gsplit.cli.console import command, emit_json, progress_bars
from gsplit.cli.options import Json
from gsplit.cli.summary import describe, show
from gsplit.store.reader import open_store
from gsplit.store.writer import check_output

__all__ = ["convert"]


def convert(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="a directory made by gsplit import or partition")],
    output: Annotated[Path, typer.Argument(metavar="OUT.gsplit", help="the store to write")],
    features: Annotated[str, typer.Option(help="float32, float16, bfloat16, or int8 with a scale for every row")],
    overwrite: Annotated[bool, typer.Option(help="replace a store of the same name")] = False,
    as_json: Json = False,
) -> None:
    """Write a store with its features in another type.

    Smaller types take less disk, memory and cache; training then sees the rounded values.
    """
    with command(as_json):
        from gsplit.store.feature_types import write_with_features  # numba, only when used

        check_output(output, overwrite=overwrite)
        opened = open_store(store)
        with progress_bars(as_json) as progress:
            made = write_with_features(opened, output, features, overwrite=overwrite, progress=progress)
        document = describe(made)
        if as_json:
            emit_json(document)
        else:
            show(document, Console())
