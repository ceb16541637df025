"""``gsplit.infer``: a model's outputs for all vertices, as an array or a file in original order."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Module

from gsplit.distributed.comm import Call, run_on_rank_zero
from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.inference.closure import all_vertices
from gsplit.inference.layerwise import LayerwisePass, evaluating, flat_mesh, inference_ownership
from gsplit.local_graph import ArrayNames, FeatureNames, LocalGraph
from gsplit.mapped_files import create_mapped
from gsplit.nn.parallelize import forward_plan_of, mesh_of
from gsplit.ownership import Ownership
from gsplit.progress import Progress, silent
from gsplit.store.conversion import as_graph_store
from gsplit.store.files import plain_header

__all__ = ["infer"]


def infer(
    model: Module,
    graph: Any,
    out: str | Path | None = None,
    *,
    ownership: Ownership | None = None,
    features: FeatureNames = "x",
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> npt.NDArray[Any]:
    """The model's outputs for all vertices with all their neighbours, row v for original vertex v. A collective.

    ``model`` is wrapped; it runs on the ranks of its mesh. ``graph`` is an opened store or a PyG ``Data``. With
    ``out``, a ``.npy`` file that every rank can write to: owners write their rows into it, and a memory map of it is
    returned. Without, one process gets an array in memory. ``workspace`` is where activations are kept meanwhile: about
    the width of all layers' outputs together, in floats, per vertex.
    """
    mesh, store = flat_mesh(mesh_of(model)), as_graph_store(graph)
    if out is None and mesh.size > 1:
        fix = "give out=, a .npy file that all ranks can write to"
        raise InputError(explain("out", f"a file, for {mesh.size} ranks", "none", fix))
    path = None if out is None else Path(out)
    partial = None if path is None else path.with_name(f"{path.name}.partial")
    if path is not None:
        run_on_rank_zero(mesh.world, "check output", lambda: _check_file(path))
    local = LocalGraph(store, mesh, inference_ownership(store, mesh, ownership))
    arrays = ArrayNames(store, features, edge_attr, edge_weight)
    try:
        with evaluating(model):
            needed = all_vertices(local, mesh, forward_plan_of(model).depth)
            run = LayerwisePass(model, local, mesh, arrays, needed, workspace=workspace, progress=progress)
            result = _write_all(run, local, partial, mesh)
        if path is None or partial is None:
            return result
        del result  # written
        _barrier(mesh, "finish output")
        run_on_rank_zero(mesh.world, "rename output", lambda: _rename(partial, path))
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    finally:
        if partial is not None and mesh.rank == 0:
            partial.unlink(missing_ok=True)


def _check_file(path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        got = "a folder" if path.is_dir() else "a folder that does not exist"
        raise InputError(explain(path, "a file in a folder that exists", got, "choose another place"))


def _rename(partial: Path, path: Path) -> None:
    partial.rename(path)


def _write_all(run: LayerwisePass, local: LocalGraph, partial: Path | None, mesh: Mesh) -> npt.NDArray[Any]:
    """Outputs of own vertices to their places in original order. A collective."""
    result: npt.NDArray[Any] | None = None
    for ids, rows in run.outputs():
        values = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy(force=True)
        if result is None:
            result = _make_result(partial, (local.store.num_vertices, *values.shape[1:]), values.dtype, mesh)
        result[local.to_original_ids(torch.from_numpy(ids)).numpy()] = values
    assert result is not None
    return result


def _barrier(mesh: Mesh, what: str) -> None:
    mesh.world.all_reduce(
        Call(what, long_wait=True), torch.zeros(1, device=mesh.device)
    ).wait()  # all ranks: before the rename


def _create(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    path.unlink(missing_ok=True)  # what a run that was killed left
    create_mapped(path, dtype, shape, plain_header(dtype, shape))


def _make_result(path: Path | None, shape: tuple[int, ...], dtype: np.dtype[Any], mesh: Mesh) -> npt.NDArray[Any]:
    """Where results go: an array, or a file that rank 0 makes and all open. A collective."""
    if path is None:
        return np.empty(shape, dtype)
    run_on_rank_zero(mesh.world, "make output", lambda: _create(path, dtype, shape))
    return np.load(path, mmap_mode="r+", allow_pickle=False)  # type: ignore[no-any-return]
