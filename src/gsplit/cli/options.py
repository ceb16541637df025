"""Options that mean the same in every command."""

from typing import Annotated

import typer

from gsplit.errors import InputError, explain

__all__ = ["Json", "parse_fanout", "parse_ranges"]

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]


def parse_fanout(text: str) -> list[int]:
    """Neighbours per hop.

    >>> parse_fanout("15,10,5")
    [15, 10, 5]
    """
    return _numbers(text, "--fanout", "numbers like 15,10,5", "one per layer")


def parse_ranges(text: str) -> list[int]:
    """Where ranges of vertices begin, and the number of vertices.

    >>> parse_ranges("0,100,250")
    [0, 100, 250]
    """
    return _numbers(text, "--ranges", "numbers like 0,100,250", "one per host and the number of vertices")


def _numbers(text: str, option: str, expected: str, fix: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(explain(option, expected, text, fix)) from None
