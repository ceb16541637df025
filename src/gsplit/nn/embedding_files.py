"""The files of a saved embedding: a folder with a .npy file for every array, and the rest as JSON.

    FOLDER/weight.npy  exp_avg.npy  exp_avg_sq.npy        a row for every vertex, by original id
    FOLDER/state.json                                     shape and type, and the optimizer's numbers and options

Every rank maps the files and writes or reads the rows of its own vertices, so no rank holds all rows. The folder has a
temporary name until all ranks have written. An optimizer with one state per row, such as torch's SparseAdam, SGD or
Adagrad, is saved with the rows.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.optim import Optimizer

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import assert_same_on_all_ranks, run_on_all_ranks, run_on_rank_zero
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.files.atomic import replace_folder, write_atomic
from gsplit.files.mapped_files import create_mapped
from gsplit.files.untrusted import Expected, read_document
from gsplit.store.files import plain_header

__all__ = ["SavedRows", "load_optimizer", "pack_optimizer", "read_rows", "write_rows"]

_STATE = "state.json"
_EXPECTED = Expected("rows that OwnedEmbedding.save wrote", "give the folder of an embedding of this graph")


@checked_dataclass(frozen=True)
class SavedRows:
    """``state.json``. ``arrays``: names of files. ``numbers``, ``options``: of the optimizer, if it is saved."""

    vertex_type: str | None
    num_rows: int
    num_columns: int
    dtype: str
    arrays: list[str]
    numbers: dict[str, int | float] = field(default_factory=dict)
    options: dict[str, Any] | None = None


_SAVED = TypeAdapter(SavedRows)


def pack_optimizer(saved: SavedRows, optimizer: Optimizer, shape: torch.Size) -> tuple[SavedRows, dict[str, Tensor]]:
    """Add the state of an optimizer of one parameter. Also returns its arrays, which have a row per vertex."""
    packed = optimizer.state_dict()
    state = packed["state"].get(0, {})
    sparse = [name for name, value in state.items() if isinstance(value, Tensor) and value.layout != torch.strided]
    if sparse:
        fix = "use SGD without momentum, Adagrad or SparseAdam, or save the rows alone"
        raise InputError(explain("optimizer", "a state of dense tensors", f"a sparse {sparse[0]}", fix))
    arrays = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
    numbers = {name: _number(value) for name, value in state.items() if name not in arrays}
    options = {name: _number(value) for name, value in packed["param_groups"][0].items() if name != "params"}
    return replace(saved, arrays=[*saved.arrays, *arrays], numbers=numbers, options=options), arrays


def load_optimizer(optimizer: Optimizer, saved: SavedRows, arrays: Mapping[str, Tensor], path: Path) -> None:
    """Give an optimizer of one parameter the state that was saved."""
    if saved.options is None:
        raise _EXPECTED.refuse(path, "rows without the state of an optimizer")
    state = {**saved.numbers, **{name: rows for name, rows in arrays.items() if name != saved.arrays[0]}}
    groups = [{**saved.options, "params": [0]}]
    optimizer.load_state_dict({"state": {0: state} if state else {}, "param_groups": groups})


def _number(value: Any) -> Any:
    """A number of a state or an option, which may be a tensor, for JSON."""
    if isinstance(value, Tensor) and value.numel() != 1:
        fix = "use an optimizer with a state per row, such as torch.optim.SparseAdam"
        raise InputError(explain("optimizer", "numbers, and tensors of the shape of the rows", list(value.shape), fix))
    return value.item() if isinstance(value, Tensor) else value


def write_rows(path: Path, saved: SavedRows, arrays: Mapping[str, Tensor], row_ids: Ids, mesh: Mesh) -> None:
    """Write this rank's rows of every array, with the others. A collective."""
    partial = path.with_name(f".{path.name}.partial")
    assert_same_on_all_ranks(mesh.control, "OwnedEmbedding.save", {"path": str(path), **vars(saved)})

    def write() -> None:
        for name, rows in arrays.items():
            try:
                file = np.load(partial / f"{name}.npy", mmap_mode="r+", allow_pickle=False)
            except OSError as error:
                fix = "save to a disk that all ranks can write to"
                raise InputError(explain(partial, "files that rank 0 has made", error, fix)) from None
            file[row_ids] = rows.numpy(force=True)
            file.flush()

    def finish() -> None:
        replaced = replace_folder(partial, path)
        if replaced is not None:
            shutil.rmtree(replaced)

    run_on_rank_zero(mesh.control, "make files", lambda: _make_files(partial, saved))
    # all ranks: the first replica writes, and the others have the same rows
    run_on_all_ranks(mesh.control, "write rows", write if mesh.replica == 0 else lambda: None)
    run_on_rank_zero(mesh.control, "finish files", finish)


def _make_files(folder: Path, saved: SavedRows) -> None:
    """Make a file for every array, with room for all rows."""
    if folder.exists():
        shutil.rmtree(folder)  # left by a process that was killed
    folder.mkdir(parents=True)
    shape = (saved.num_rows, saved.num_columns)
    dtype = np.dtype(saved.dtype)
    for name in saved.arrays:
        create_mapped(folder / f"{name}.npy", dtype, shape, plain_header(dtype, shape))
    write_atomic(folder / _STATE, [json.dumps(_SAVED.dump_python(saved)).encode()])


def read_rows(path: Path, wanted: SavedRows, row_ids: Ids) -> tuple[SavedRows, dict[str, Tensor]]:
    """What was saved, and this rank's rows of every array. ``wanted``: the shape and type of the embedding."""
    try:
        saved = _SAVED.validate_python(read_document(path / _STATE, _EXPECTED))
    except ValidationError as error:
        raise _EXPECTED.refuse(path / _STATE, error) from None
    for name in ("vertex_type", "num_rows", "num_columns", "dtype"):
        if getattr(saved, name) != getattr(wanted, name):
            raise _EXPECTED.refuse(path, f"{name} {getattr(saved, name)} instead of {getattr(wanted, name)}")
    if saved.arrays[:1] != wanted.arrays or not all(name.isidentifier() for name in saved.arrays):
        raise _EXPECTED.refuse(path, f"the arrays {saved.arrays}")
    return saved, {name: _read_array(path / f"{name}.npy", wanted, row_ids) for name in saved.arrays}


def _read_array(path: Path, wanted: SavedRows, row_ids: Ids) -> Tensor:
    try:
        file = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _EXPECTED.refuse(path, error) from None
    if file.shape != (wanted.num_rows, wanted.num_columns) or file.dtype != np.dtype(wanted.dtype):
        raise _EXPECTED.refuse(path, f"{file.dtype} {list(file.shape)}")
    return torch.from_numpy(np.asarray(file[row_ids]))
