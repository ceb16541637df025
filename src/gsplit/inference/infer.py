"""``gsplit.infer`` and ``gsplit.write_predictions``: exact outputs of a model for all vertices, in original order.

Outputs go to memory, or to a .npy file that all ranks map and write to. The file has a temporary name, NAME.partial,
until it is complete; rank 0 then renames it, or writes a Parquet or CSV table of it. For a table on object storage,
that file is in the workspace.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import Call, run_on_rank_zero
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.files.atomic import open_lock, try_lock
from gsplit.files.mapped_files import fill_mapped
from gsplit.files.objects import as_url
from gsplit.files.places import cache_folder
from gsplit.graph.ownership import Ownership
from gsplit.inference.closure import all_vertices, targets_closure
from gsplit.inference.layerwise import InferenceOptions, evaluating, flat_mesh, inference_ownership
from gsplit.inference.metrics import predicted_classes
from gsplit.inference.prediction_table import TABLES, PredictionTable, What, check_request, default_what
from gsplit.inference.typed_layerwise import labels_of, make_pass
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph
from gsplit.nn.parallelize import check_features, forward_plan_of, mesh_of
from gsplit.progress import Progress, silent
from gsplit.sampling.neighbor import make_sampler
from gsplit.store.conversion import as_graph_store
from gsplit.store.files import plain_header
from gsplit.store.protocol import GraphStore, OriginalOrder
from gsplit.store.reader import Store

__all__ = ["Predictions", "infer", "write_predictions"]


def infer(
    model: Module,
    graph: Any,
    out: str | Path | None = None,
    *,
    vertex_type: str | None = None,
    **options: Unpack[InferenceOptions],
) -> npt.NDArray[Any]:
    """The model's outputs for all vertices with all their neighbours, row v for original vertex v. A collective.

    ``model`` is wrapped; it runs on the ranks of its mesh. ``graph`` is an opened store or a PyG ``Data``. ``out`` is a
    ``.npy`` file that every rank can write to: each rank writes the rows of its vertices, and a memory map of the file
    is returned. One process may leave it out and gets an array in memory. For classes, and for tables with the ids of
    the import, use ``gsplit.write_predictions``.

    In a heterogeneous graph the outputs are those of the vertices of ``vertex_type``, row v for vertex v of the type.
    """
    num_ranks = mesh_of(model).size
    store = as_graph_store(graph)
    _check_type(store, vertex_type)
    if out is None:
        if num_ranks > 1:
            fix = "give out=, a .npy file that all ranks can write to"
            raise InputError(explain("out", f"a file, for {num_ranks} ranks", out, fix))
        return _write_rows(model, store, None, vertex_type=vertex_type, **options)
    path = Path(out)
    if path.suffix != ".npy":
        fix = "name it .npy, or use gsplit.write_predictions for .parquet and .csv"
        raise InputError(explain(path, "a .npy file", path.suffix or "no suffix", fix))
    check_request(path, None, None)
    _write_file(model, store, path, vertex_type=vertex_type, **options)
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Predictions:
    """A file of predictions: a table with these columns after ``id``, or a .npy array with these columns.

    ``num_without_class``: rows without a class, because their outputs are not finite, if classes were written.
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
    vertex_type: str | None = None,
    **options: Unpack[InferenceOptions],
) -> Predictions:
    """Write the predictions of a wrapped model for every vertex, exact, from all neighbours. A collective.

    ``out`` ends in .parquet or .csv: a table with a column ``id`` that holds the ids of the import (strings, integers,
    or 0 .. n-1), ascending; or in .npy: an array, row v for original vertex v. ``what``: ``classes``, ``outputs`` or
    ``both``, which only tables can hold; by default outputs for .npy, and for tables classes where the graph has class
    labels, else outputs. Where the largest output is NaN or infinite, the class is empty, -1 in .npy. ``only``: a
    table of the targets of this name, such as ``test``. ``class_names`` are written instead of numbers; by default
    those of the store. Every rank must be able to write to the folder of ``out``; other options are those of
    ``gsplit.infer``. In a heterogeneous graph the rows are the vertices of ``vertex_type``, and ``only`` is the name of
    targets of the type, without it.
    """
    path = Path(out)
    store = as_graph_store(graph)
    _check_type(store, vertex_type)
    classifies = store.num_classes > 0 if vertex_type is None else _has_classes(store, vertex_type)
    what = what or default_what(path, classifies=classifies)
    check_request(path, what, only)
    is_table = path.suffix in TABLES
    first, stop = store.vertex_range
    if is_table and (first, stop) != (0, store.num_vertices):
        fix = "open the whole store, or write .npy"
        got = f"a shard of vertices {first}..{stop - 1}"
        raise InputError(explain(path, "the ids of all vertices for a table", got, fix))
    names = tuple(_class_names(store, vertex_type) if class_names is None else _check_names(class_names))
    vertices = None if only is None else _target_ids(store, only, vertex_type)
    num_without_class = torch.zeros(1, dtype=torch.int64)

    def convert(rows: Tensor) -> Tensor:
        if what == "outputs":
            return rows
        _check_classes(rows, names)
        classes = predicted_classes(rows)
        num_without_class.add_((classes < 0).sum().cpu())
        return classes if what == "classes" else rows

    def make_table(rows: npt.NDArray[Any]) -> PredictionTable:
        return PredictionTable(what=what, class_names=names, rows=rows, vertices=vertices)

    table = make_table if is_table else None
    rows = _write_file(
        model, store, path, make_table=table, only=only, convert=convert, vertex_type=vertex_type, **options
    )
    mesh_of(model).control.all_reduce(Call("count rows without a class"), num_without_class).wait()
    return Predictions(
        path=path,
        what=what,
        num_rows=rows.shape[0],
        columns=make_table(rows).columns,
        num_without_class=int(num_without_class),
    )


def _check_names(names: object) -> list[str]:
    """Class names given by the caller; each must be a string."""
    found = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    words = [name for name in found if isinstance(name, str)]
    if isinstance(names, str) or len(words) < len(found):
        fix = "give a list such as ['ham', 'spam']"
        raise InputError(explain("class names", "a string for every class", repr(names)[:80], fix))
    return words


def _check_classes(rows: Tensor, names: Sequence[str]) -> None:
    if rows.dim() != 2 or rows.shape[1] < 2:
        got = f"shape {list(rows.shape)}"
        fix = "write its outputs as they are: what outputs"
        raise InputError(explain("the model's output", "a column per class", got, fix))
    if names and len(names) != rows.shape[1]:
        fix = "give the names of the classes that the model was trained on"
        raise InputError(explain("class names", f"{rows.shape[1]}, one per output", len(names), fix))


def _check_type(store: GraphStore, vertex_type: str | None) -> None:
    """Refuse a heterogeneous graph without a vertex type, and any other graph with one."""
    if (store.types is None) != (vertex_type is None):
        names = (
            "None, the graph has no types" if store.types is None else f"one of {', '.join(store.types.vertex_types)}"
        )
        raise InputError(explain("vertex_type", names, vertex_type, "write gsplit.infer(..., vertex_type='paper')"))
    if store.types is not None and vertex_type is not None:
        store.types.number(vertex_type)  # refuses unknown types


def _class_names(store: GraphStore, vertex_type: str | None) -> Sequence[str]:
    """Those of the labels of a store, or of one of its vertex types."""
    if vertex_type is None or store.types is None or not isinstance(store, Store):
        return store.class_names
    return store.manifest.vertex_types[store.types.number(vertex_type)].class_names


def _has_classes(store: GraphStore, vertex_type: str) -> bool:
    name = labels_of(vertex_type)
    return name in store.names and store.stored_array(name).ndim == 1 and "int" in store.dtype(name)


def _target_ids(store: GraphStore, name: str, vertex_type: str | None) -> Ids:
    """The targets of a whole store as ascending original ids, in the type if there are types."""
    if store.types is None or vertex_type is None:
        targets = store.stored_targets(name)[0]
        return np.sort(store.original_ids()[targets]) if store.is_renumbered else np.sort(targets)
    targets = store.stored_targets(f"{vertex_type}/{name}")[0]
    found: Ids = np.sort(store.original_ids()[targets]) - store.types.offsets[store.types.number(vertex_type)]
    return found


def _write_file(
    model: Module,
    store: GraphStore,
    path: Path,
    *,
    make_table: Callable[[npt.NDArray[Any]], PredictionTable] | None = None,
    convert: Callable[[Tensor], Tensor] = lambda rows: rows,
    only: str | None = None,
    vertex_type: str | None = None,
    **options: Unpack[InferenceOptions],
) -> npt.NDArray[Any]:
    """Write rows to a partial file; rank 0 renames it, or writes a table of it. A collective.

    The file at ``path`` is complete, or is not there.
    """
    mesh = mesh_of(model)
    partial = _partial_of(path, options.get("workspace"))

    def finish() -> None:
        if make_table is None:
            partial.rename(path)
        else:  # mapped again: on a network file system the earlier map may not show the rows of other hosts
            make_table(_open_result(partial)).write(path, OriginalOrder(store, path), vertex_type)

    with ExitStack() as held:
        run_on_rank_zero(mesh.control, "check output", lambda: _lock_partial(path, partial, held))
        rows = _write_rows(model, store, partial, convert=convert, only=only, vertex_type=vertex_type, **options)
        run_on_rank_zero(mesh.control, "finish file", finish)
        return rows


def _write_rows(
    model: Module,
    store: GraphStore,
    file: Path | None,
    *,
    convert: Callable[[Tensor], Tensor] = lambda rows: rows,
    only: str | None = None,
    vertex_type: str | None = None,
    ownership: Ownership | None = None,
    features: Features = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> npt.NDArray[Any]:
    """Outputs of the model through ``convert``, one row per vertex by original id. A collective.

    ``only``: rows of the targets of this name, in the order of their original ids. ``file``: a new .npy file that every
    rank can write to, complete when this returns. Other options are those of ``gsplit.infer``.
    """
    check_features(model, features)
    mesh = flat_mesh(mesh_of(model))
    local = LocalGraph(store, mesh, inference_ownership(store, mesh, ownership))
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    depth = forward_plan_of(model).depth
    wanted = None if only is None else _target_ids(store, only, vertex_type)
    num_rows = store.num_vertices if vertex_type is None or store.types is None else store.types.count(vertex_type)
    first_id = 0
    if vertex_type is not None and store.types is not None:
        first_id = store.types.offsets[store.types.number(vertex_type)]
    result: npt.NDArray[Any] | None = None
    with evaluating(model):
        if only is None and vertex_type is None:
            needed = all_vertices(local, mesh, depth)
        else:
            sampler = make_sampler(local.graph, local.original_ids, mesh.sample_device)
            targets = local.targets(only if vertex_type is None else (vertex_type, only))
            needed = targets_closure(targets.ids, local, sampler, mesh, depth)
        run = make_pass(
            model, local, mesh, arrays, needed, workspace=workspace, progress=progress, vertex_type=vertex_type
        )
        for ids, rows in run.outputs():
            values = _as_numpy(convert(rows))
            if result is None:
                shape = (num_rows if wanted is None else wanted.size, *values.shape[1:])
                result = _make_result(file, shape, values.dtype, mesh)
            original = local.to_original_ids(torch.from_numpy(ids)).numpy() - first_id
            result[original if wanted is None else np.searchsorted(wanted, original)] = values
    assert result is not None
    if isinstance(result, np.memmap):
        result.flush()  # on a network file system other hosts see the file, not this rank's map of it
    # all ranks: every rank that continues finds all rows written
    mesh.control.all_reduce(Call("finish output", long_wait=True), torch.zeros(1)).wait()
    return result


def _as_numpy(rows: Tensor) -> npt.NDArray[Any]:
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy(force=True)


def _make_result(path: Path | None, shape: tuple[int, ...], dtype: np.dtype[Any], mesh: Mesh) -> npt.NDArray[Any]:
    """An array for the rows, or a file that rank 0 makes and all ranks map. A collective."""
    if path is None:
        return np.empty(shape, dtype)
    run_on_rank_zero(mesh.control, "make output", lambda: _create(path, dtype, shape))
    return _open_result(path)


def _create(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    try:
        fill_mapped(path, dtype, shape, plain_header(dtype, shape))
    except OSError as error:
        fix = "free space, or write to another disk"
        raise InputError(explain(path, "room for all rows", error.strerror, fix)) from None


def _open_result(path: Path) -> npt.NDArray[Any]:
    return np.load(path, mmap_mode="r+", allow_pickle=False)  # type: ignore[no-any-return]


def _partial_of(path: Path, workspace: str | Path | None) -> Path:
    """The file for the rows until they are complete: beside ``path``, or on this host if that is on object storage."""
    if as_url(path) is None:
        return path.with_name(f"{path.name}.partial")
    folder = cache_folder() / "predictions" if workspace is None else Path(workspace)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.partial"


def _lock_partial(path: Path, partial: Path, held: ExitStack) -> None:
    """Make an empty partial file and lock it until ``held`` ends, which removes it; a locked one is refused."""
    if not partial.parent.is_dir() or path.is_dir():
        got = "a folder" if path.is_dir() else "a folder that does not exist"
        raise InputError(explain(path, "a file in a folder that exists", got, "choose another path"))
    if partial.is_symlink():
        partial.unlink()  # links are not followed
    file = open_lock(partial)
    held.callback(os.close, file)
    if try_lock(file) is False or not _is_open_as(file, partial):  # or: the process before us has just renamed it
        fix = "wait until it has ended, or write to another file"
        raise InputError(explain(path, "a file that no other process writes", f"{partial.name} is locked", fix))
    held.callback(lambda: partial.unlink() if _is_open_as(file, partial) else None)


def _is_open_as(file: int, path: Path) -> bool:
    """Whether this open file is the one at ``path``."""
    return path.exists() and os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
