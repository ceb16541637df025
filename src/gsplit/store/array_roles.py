"""What an array of a store is by its name: names are made of a fixed role and, in the folders, one plain word."""

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["INPUT_POSITION", "Role", "file_of", "role_of"]

_INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_ANY = ("bool", *_INTEGERS, *_FLOATS)


@dataclass(frozen=True)
class Role:
    """What an array of this name must be: its types, what one row stands for, how many dimensions."""

    dtypes: tuple[str, ...]
    rows: Literal["vertex", "vertex + 1", "edge", "any"]
    dimensions: tuple[int, ...] = (1,)


ROLES = {
    "indptr": Role(("int64",), "vertex + 1"),
    "indices": Role(("int32", "int64"), "edge"),
    "y": Role(_ANY, "vertex", (1, 2)),
    "original_ids": Role(("int64",), "vertex"),
    "hotness": Role(("int64",), "vertex"),
    "vertex_ids": Role(("int64",), "vertex"),
    "name_offsets": Role(("int64",), "vertex + 1"),
    "name_bytes": Role(("uint8",), "any"),
}
FOLDERS = {
    "features": Role(("int8", *_FLOATS), "vertex", (2,)),
    "scales": Role(("float32",), "vertex"),
    "edges": Role(_ANY, "edge", (1, 2)),
    "targets": Role(("int64",), "any"),
    "target_positions": Role(("int64",), "any"),
}
INPUT_POSITION = "input_position"
"""The per-edge array in which an importer keeps where an edge stood in its input; no value of the edge."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,63}")


def role_of(name: str) -> Role:
    """The role of an array by its name, such as ``indptr`` or ``features/x``."""
    folder, slash, word = name.partition("/")
    if not slash and name in ROLES:
        return ROLES[name]
    if slash and folder in FOLDERS and _WORD.fullmatch(word):
        return FOLDERS[folder]
    known = ", ".join([*ROLES, *(f"{folder}/NAME" for folder in FOLDERS)])
    raise ValueError(f"array name {name[:80]!r} is not one of {known} (NAME: letters, digits, _ and -)")


def file_of(name: str) -> str:
    """The path of an array inside the store."""
    role_of(name)
    return f"{name}.npy"
