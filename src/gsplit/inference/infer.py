"""``gsplit.infer``: a model's outputs for all vertices, as an array or a .npy file in original order."""

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.inference.layerwise import InferenceOptions
from gsplit.inference.output_rows import write_file, write_rows
from gsplit.nn.parallelize import mesh_of
from gsplit.store.conversion import as_graph_store

__all__ = ["infer"]


def infer(
    model: Module, graph: Any, out: str | Path | None = None, **options: Unpack[InferenceOptions]
) -> npt.NDArray[Any]:
    """The model's outputs for all vertices with all their neighbours, row v for original vertex v. A collective.

    ``model`` is wrapped; it runs on the ranks of its mesh. ``graph`` is an opened store or a PyG ``Data``. With
    ``out``, a ``.npy`` file that every rank can write to: owners write their rows into it, and a memory map of it is
    returned. Without, one process gets an array in memory. Classes, and tables with the ids that were imported, are
    written by ``gsplit.write_predictions``.
    """
    num_ranks = mesh_of(model).size
    store = as_graph_store(graph)
    if out is None:
        if num_ranks > 1:
            fix = "give out=, a .npy file that all ranks can write to"
            raise InputError(explain("out", f"a file, for {num_ranks} ranks", out, fix))
        return write_rows(model, store, None, **options)
    path = Path(out)
    if path.suffix != ".npy":
        fix = "name it .npy, or use gsplit.write_predictions for .parquet and .csv"
        raise InputError(explain(path, "a .npy file", path.suffix or "no suffix", fix))
    write_file(model, store, path, lambda partial, rows: _rename(partial, path), **options)
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def _rename(partial: Path, path: Path) -> None:
    partial.rename(path)
