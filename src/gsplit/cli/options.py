"""Options that mean the same in every command."""

from typing import Annotated

import typer

__all__ = ["Json"]

Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]
