"""Options that mean the same in every command."""

from typing import Annotated

import typer

from gsplit.errors import InputError, explain

__all__ = ["Json", "parse_fanout"]

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]


def parse_fanout(text: str) -> list[int]:
    """Neighbours per hop.

    >>> parse_fanout("15,10,5")
    [15, 10, 5]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(explain("--fanout", "numbers like 15,10,5", text, "one per layer")) from None
