"""CSV files without a header row, as OGB writes them, read a block at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gsplit.store.importers.arrow import explained, load_arrow

__all__ = ["csv_columns"]


def csv_columns(path: Path, *, floats: bool = False) -> Iterator[list[Any]]:
    """The columns of a CSV file without a header row, gzipped or not, a block at a time; as floats if asked."""
    arrow = load_arrow()
    with explained(path, "download the set again"):
        if path.stat().st_size == 0:
            return
        options = arrow.csv.ReadOptions(autogenerate_column_names=True, block_size=16 << 20)
        types: dict[str, Any] = {}
        if floats:
            with arrow.csv.open_csv(path, read_options=options) as reader:
                types = dict.fromkeys(reader.schema.names, arrow.float64())
        convert = arrow.csv.ConvertOptions(column_types=types)
        parse = arrow.csv.ParseOptions(ignore_empty_lines=not floats)  # a missing label may be an empty line
        with arrow.csv.open_csv(path, read_options=options, convert_options=convert, parse_options=parse) as reader:
            for batch in reader:
                yield batch.columns
