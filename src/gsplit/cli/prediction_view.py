"""What a user reads of a file of predictions: how many rows, which columns, and how to join or to get the rest."""

from typing import TYPE_CHECKING

from gsplit.inference.prediction_table import TABLES
from gsplit.store.reader import Store

if TYPE_CHECKING:
    from gsplit.inference.predictions import Predictions
    from gsplit.run.results import InferenceResult

__all__ = ["describe_predictions"]

_MOST_COLUMNS = 4


def describe_predictions(result: "InferenceResult", store: Store) -> str:
    """A line about the file, a hint where there is more to have, and a warning where outputs are not finite."""
    lost = result.predictions.num_without_class
    warning = f"\nno class in {lost:,} rows: the model's outputs there are NaN or infinite" if lost else ""
    return _describe_file(result.predictions, store) + warning


def _describe_file(made: "Predictions", store: Store) -> str:
    columns = list(made.columns)
    if len(columns) > _MOST_COLUMNS:
        columns = [*columns[: _MOST_COLUMNS - 1], "...", columns[-1]]
    if made.path.suffix in TABLES:
        text = f"{made.path}: {made.num_rows:,} rows, columns id, {', '.join(columns)}"
        return text + ("; outputs too: --what both" if made.what == "classes" else "")
    shape = f"{made.num_rows:,} x {len(made.columns):,}" if made.what == "outputs" else f"{made.num_rows:,}"
    text = f"{made.path}: {shape}, {made.what}; row v is original vertex v"
    named = {"name_offsets": "strings", "vertex_ids": "mapped numbers"}
    found = [kind for array, kind in named.items() if array in store.names]
    return f"{text}; ids are {found[0]}: a .parquet or .csv table holds them" if found else text
