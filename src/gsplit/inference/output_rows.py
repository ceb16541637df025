"""The outputs of a model, or its classes, in original order: in memory, or in a file that all ranks write to."""

import os
from collections.abc import Callable
from contextlib import ExitStack
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
from gsplit.graph.ownership import Ownership
from gsplit.inference.closure import all_vertices, targets_closure
from gsplit.inference.layerwise import InferenceOptions, LayerwisePass, evaluating, flat_mesh, inference_ownership
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph
from gsplit.nn.parallelize import forward_plan_of, mesh_of
from gsplit.progress import Progress, silent
from gsplit.sampling.neighbor import make_sampler
from gsplit.store.files import plain_header
from gsplit.store.protocol import GraphStore

__all__ = ["RowOptions", "target_ids", "write_file", "write_rows"]


class RowOptions(InferenceOptions, total=False):
    """``convert``: what is written of a chunk of outputs. ``only``: the name of stored targets; else all vertices."""

    convert: Callable[[Tensor], Tensor]
    only: str | None


def write_rows(
    model: Module,
    store: GraphStore,
    file: Path | None,
    *,
    convert: Callable[[Tensor], Tensor] = lambda rows: rows,
    only: str | None = None,
    ownership: Ownership | None = None,
    features: Features = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> npt.NDArray[Any]:
    """What the model says, through ``convert``, a row per vertex by original id. A collective.

    ``only``: of the targets of this name, in the order of their original ids. With ``file``, a new .npy file that every
    rank can write to; it is whole when this returns. Options are those of ``gsplit.infer``.
    """
    mesh = flat_mesh(mesh_of(model))
    local = LocalGraph(store, mesh, inference_ownership(store, mesh, ownership))
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    depth, wanted = forward_plan_of(model).depth, None if only is None else target_ids(store, only)
    with evaluating(model):
        if only is None:
            needed = all_vertices(local, mesh, depth)
        else:
            sampler = make_sampler(local.graph, local.original_ids, mesh.sample_device)
            needed = targets_closure(local.targets(only).ids, local, sampler, mesh, depth)
        run = LayerwisePass(model, local, mesh, arrays, needed, workspace=workspace, progress=progress)
        result: npt.NDArray[Any] | None = None
        for ids, rows in run.outputs():
            values = _as_numpy(convert(rows))
            if result is None:
                num_rows = store.num_vertices if wanted is None else wanted.size
                result = _make_result(file, (num_rows, *values.shape[1:]), values.dtype, mesh)
            original = local.to_original_ids(torch.from_numpy(ids)).numpy()
            result[original if wanted is None else np.searchsorted(wanted, original)] = values
    assert result is not None
    if isinstance(result, np.memmap):
        result.flush()  # on a network file system other hosts see the file, not this rank's map of it
    # all ranks: every rank that continues finds all rows written
    mesh.world.all_reduce(Call("finish output", long_wait=True), torch.zeros(1, device=mesh.device)).wait()
    return result


def write_file(
    model: Module,
    store: GraphStore,
    path: Path,
    finish: Callable[[Path, npt.NDArray[Any]], None],
    **options: Unpack[RowOptions],
) -> npt.NDArray[Any]:
    """Write rows to a file beside ``path`` and have rank 0 make ``path`` of it: there and whole, or not. A collective.

    ``finish`` gets the .npy file and its rows; what it leaves of the file is removed.
    """
    mesh, partial = mesh_of(model), path.with_name(f"{path.name}.partial")
    with ExitStack() as held:
        run_on_rank_zero(mesh.world, "check output", lambda: _take_place(path, partial, held))
        rows = write_rows(model, store, partial, **options)
        # mapped again: on a network file system the map of before may not show the rows of other hosts
        run_on_rank_zero(mesh.world, "finish file", lambda: finish(partial, _open_result(partial)))
        return rows


def target_ids(store: GraphStore, name: str) -> Ids:
    """The targets of a whole store as ascending original ids."""
    targets = store.stored_targets(name)[0]
    return np.sort(store.original_ids()[targets]) if store.is_renumbered else np.sort(targets)


def _check_place(path: Path) -> None:
    """Refuse an output that has no folder, or is one."""
    if not path.parent.is_dir() or path.is_dir():
        got = "a folder" if path.is_dir() else "a folder that does not exist"
        raise InputError(explain(path, "a file in a folder that exists", got, "choose another place"))


def _take_place(path: Path, partial: Path, held: ExitStack) -> None:
    """Make the partial file, empty, and lock it: until ``held`` ends, another process that wants it is refused."""
    _check_place(path)
    if partial.is_symlink():
        partial.unlink()  # a stranger's, never followed
    file = open_lock(partial)
    held.callback(os.close, file)
    if try_lock(file) is False or not _is_open_as(file, partial):  # or: what the one before us has just put in place
        fix = "wait until it has ended, or write to another file"
        raise InputError(explain(path, "no other process that writes it", "another process is writing it", fix))
    held.callback(lambda: partial.unlink() if _is_open_as(file, partial) else None)


def _is_open_as(file: int, path: Path) -> bool:
    """Whether the file that is open still has this name."""
    return path.exists() and os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))


def _as_numpy(rows: Tensor) -> npt.NDArray[Any]:
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy(force=True)


def _make_result(path: Path | None, shape: tuple[int, ...], dtype: np.dtype[Any], mesh: Mesh) -> npt.NDArray[Any]:
    """Where results go: an array, or a file that rank 0 makes and all open. A collective."""
    if path is None:
        return np.empty(shape, dtype)
    run_on_rank_zero(mesh.world, "make output", lambda: _create(path, dtype, shape))
    return _open_result(path)


def _open_result(path: Path) -> npt.NDArray[Any]:
    return np.load(path, mmap_mode="r+", allow_pickle=False)  # type: ignore[no-any-return]


def _create(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    try:
        fill_mapped(path, dtype, shape, plain_header(dtype, shape))
    except OSError as error:
        fix = "free space, or write to another disk"
        raise InputError(explain(path, "room for all rows", error.strerror, fix)) from None
