"""Rows of several columns in temporary files: appended in pieces, read back in pieces."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.array_types import Array
from gsplit.store.files import read_exactly, storage_dtype, write_all
from gsplit.store.source import ValueType

__all__ = ["Spill"]

Columns = Mapping[str, Array]


class Spill:
    """Edges on disk: columns of integers that name them, and their values, each in a file ``STEM.NAME``."""

    def __init__(self, stem: Path, keys: Mapping[str, np.dtype[Any]], values: Mapping[str, ValueType]) -> None:
        self.stem = stem
        self.keys = keys
        self.values = values
        self.size = 0

    def _file(self, name: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{name}")

    def append(self, keys: Columns, values: Columns) -> None:
        """Add rows, given as columns of the right types."""
        for name, array in keys.items():
            write_all(self._file(name), array)
        for name, array in values.items():
            write_all(self._file(f"value.{name}"), array)
        self.size += next(iter(keys.values())).size

    def read(self, start: int, stop: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """The keys and values of some rows."""
        count = max(0, stop - start)
        keys = {name: self._read(name, dtype, start, count) for name, dtype in self.keys.items()}
        values = {}
        for name, kind in self.values.items():
            width = prod(kind.row_shape)
            flat = self._read(f"value.{name}", storage_dtype(kind.dtype), start * width, count * width)
            values[name] = flat.reshape(count, *kind.row_shape)
        return keys, values

    def _read(self, name: str, dtype: np.dtype[Any], start: int, count: int) -> Array:
        return read_exactly(self._file(name), dtype, start, count) if count else np.empty(0, dtype)

    def remove(self) -> None:
        """Delete the files."""
        for name in [*self.keys, *(f"value.{name}" for name in self.values)]:
            self._file(name).unlink(missing_ok=True)
