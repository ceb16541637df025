"""``gsplit.write_predictions``: what a model says of every vertex, as a file that joins with the user's own tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.distributed.comm.comm import Call
from gsplit.errors import InputError, explain
from gsplit.inference.layerwise import InferenceOptions
from gsplit.inference.metrics import predicted_classes
from gsplit.inference.output_rows import target_ids, write_file
from gsplit.inference.prediction_table import TABLES, PredictionTable, What, check_request, default_what
from gsplit.nn.parallelize import mesh_of
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import OriginalOrder

__all__ = ["Predictions", "write_predictions"]


@dataclass(frozen=True)
class Predictions:
    """A file of predictions: a table with these columns after ``id``, or a .npy array with these columns.

    ``num_without_class``: rows whose outputs are not finite, where classes were asked for; they have none.
    """

    path: Path
    what: What
    num_rows: int
    columns: tuple[str, ...]
    num_without_class: int = 0


def write_predictions(
    model: Module,
    graph: Any,
    out: str | Path,
    *,
    what: What | None = None,
    only: str | None = None,
    class_names: Sequence[str] | None = None,
    **options: Unpack[InferenceOptions],
) -> Predictions:
    """Write what a wrapped model says of every vertex, exactly, from all neighbours. A collective.

    ``out`` ends in .parquet or .csv: a table with a column ``id`` that holds the ids of the import (strings, integers,
    or 0 .. n-1), ascending; or in .npy: an array, row v for original vertex v. ``what``: ``classes``, ``outputs`` or
    ``both``, which only tables can hold; by default outputs for .npy, and for tables classes where the graph has class
    labels, else outputs. Where the largest output is NaN or infinite, the class is empty, -1 in .npy. ``only``: a
    table of the targets of this name, such as ``test``. ``class_names`` are written instead of numbers; by default
    those of the store. Every rank must be able to write to the folder of ``out``; other options are those of
    ``gsplit.infer``.
    """
    path, store = Path(out), as_graph_store(graph)
    what = what or default_what(path, classifies=store.num_classes > 0)
    check_request(path, what, only)
    if path.suffix in TABLES and store.vertex_range != (0, store.num_vertices):
        fix = "open the whole store, or write .npy"
        raise InputError(explain(path, "the ids of all vertices for a table", "a shard", fix))
    names = tuple(store.class_names if class_names is None else _checked_names(class_names))
    vertices = None if only is None else target_ids(store, only)
    num_without_class = torch.zeros(1, dtype=torch.int64)

    def convert(rows: Tensor) -> Tensor:
        if what == "outputs":
            return rows
        _check_classes(rows, names)
        classes = predicted_classes(rows)
        num_without_class.add_((classes < 0).sum().cpu())
        return classes if what == "classes" else rows

    def table_of(rows: npt.NDArray[Any]) -> PredictionTable:
        return PredictionTable(what, names, rows, vertices)

    def finish(partial: Path, rows: npt.NDArray[Any]) -> None:
        if path.suffix in TABLES:
            table_of(rows).write(path, OriginalOrder(store, path))
        else:
            partial.rename(path)

    rows = write_file(model, store, path, finish, only=only, convert=convert, **options)
    comm = mesh_of(model).world
    total = num_without_class.to(comm.device)
    comm.all_reduce(Call("count rows without a class"), total).wait()
    return Predictions(path, what, rows.shape[0], table_of(rows).columns, int(total))


def _checked_names(names: object) -> list[str]:
    """Names of classes as a caller gives them, each a string."""
    found = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    words = [name for name in found if isinstance(name, str)]
    if isinstance(names, str) or len(words) < len(found):
        fix = "give a list such as ['ham', 'spam']"
        raise InputError(explain("class names", "a string for every class", repr(names)[:80], fix))
    return words


def _check_classes(rows: Tensor, names: Sequence[str]) -> None:
    if rows.dim() != 2 or rows.shape[1] < 2:
        got, fix = f"shape {list(rows.shape)}", "write its outputs as they are: what outputs"
        raise InputError(explain("the model's output", "a column per class", got, fix))
    if names and len(names) != rows.shape[1]:
        fix = "give the names of the classes that the model was trained on"
        raise InputError(explain("class names", f"{rows.shape[1]}, one per output", len(names), fix))
