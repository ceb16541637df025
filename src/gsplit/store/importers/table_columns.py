"""Which column of a table means what, and which one a user may have meant.

>>> guess_column("src", "--src", ["source", "target"]), guess_column("y", "--label-column", ["id", "Label"])
('source', 'Label')
>>> guess_column("split", "--split-column", ["id", "x0"]) is None
True
>>> match_columns(["f*", "age"], ["id", "f1", "f0", "age"])
['f1', 'f0', 'age']
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase

__all__ = ["LabelType", "TableColumns", "guess_column", "is_pattern", "match_columns"]

_OTHER_NAMES = {
    "--src": ("src", "source", "from", "src_id", "source_id", "start", "head", "u", "citing"),
    "--dst": ("dst", "target", "to", "dst_id", "target_id", "destination", "end", "tail", "v", "cited"),
    "--id-column": ("id", "node_id", "vertex_id", "node", "vertex", "name", "key"),
    "--label-column": ("y", "label", "labels", "class", "category", "target"),
    "--split-column": ("split", "set", "subset", "fold", "partition", "part"),
}


class LabelType(StrEnum):
    """What labels are: as their type says, classes also where they are whole floats, or values also where integers."""

    AUTO = "auto"
    CLASSES = "classes"
    VALUES = "values"


@dataclass(frozen=True)
class TableColumns:
    """Which column means what. ``features`` are names of number columns, or patterns such as ``f*``."""

    src: str = "src"
    dst: str = "dst"
    edge_values: Sequence[str] = ()
    id: str = "id"
    label: str = "y"
    split: str = "split"
    feature_list: str = "x"
    features: Sequence[str] = field(default_factory=tuple)
    label_type: LabelType = LabelType.AUTO


def guess_column(wanted: str, option: str, names: Sequence[str]) -> str | None:
    """The column that is likely meant by one that is not there: of like spelling, or of another usual name."""
    plain = {name.strip().lower(): name for name in names}
    for other in (wanted.strip().lower(), *_OTHER_NAMES.get(option, ())):
        if other in plain:
            return plain[other]
    close = get_close_matches(wanted.lower(), plain, 1, cutoff=0.6)
    return plain[close[0]] if close else None


def is_pattern(name: str) -> bool:
    """Whether a name stands for several columns."""
    return any(sign in name for sign in "*?[")


def match_columns(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that names and patterns stand for, each once, in the order of the patterns and then of the table."""
    found: list[str] = []
    for pattern in patterns:
        here = (
            [pattern] if pattern in names or not is_pattern(pattern) else [n for n in names if fnmatchcase(n, pattern)]
        )
        found += [name for name in here if name not in found]
    return found
