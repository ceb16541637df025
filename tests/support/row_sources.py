"""Arrays in files and in memory as sources of rows, and ids to ask them for."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from gsplit.features.disk import DiskRows
from gsplit.features.sources import torch_dtype

DTYPES = ["int8", "float16", "bfloat16", "float32", "float64", "int64"]


def stored_array(dtype: str, num_rows: int, columns: int, seed: int = 0) -> npt.NDArray[Any]:
    """Rows as a store keeps them; bfloat16 as its bits."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(-120, 120, (num_rows, columns)))
    typed = values.to(torch_dtype(dtype))
    array: npt.NDArray[Any] = (typed.view(torch.uint16) if dtype == "bfloat16" else typed).numpy()
    return array


def as_tensor(array: npt.NDArray[Any], dtype: str) -> Tensor:
    """What a store's array means."""
    bits = torch.from_numpy(array)
    return bits.view(torch.bfloat16) if dtype == "bfloat16" else bits


def open_rows(path: Path, array: npt.NDArray[Any], dtype: str, *, first_id: int = 0, threads: int = 2) -> DiskRows:
    """An array saved and opened again, to be read and not mapped."""
    np.save(path, array)
    return DiskRows(
        str(path),
        os.open(path, os.O_RDONLY),
        offset=path.stat().st_size - array.nbytes,
        num_rows=array.shape[0],
        row_shape=array.shape[1:],
        dtype=torch_dtype(dtype),
        first_id=first_id,
        threads=threads,
    )


@st.composite
def wanted_rows(draw: st.DrawFn, num_rows: int, most: int = 300) -> npt.NDArray[np.int64]:
    """Rows to ask for: none, one, all, runs, duplicates, in any order."""
    rows = st.integers(0, num_rows - 1)
    ids = draw(
        st.one_of(
            st.lists(rows, max_size=most),
            st.permutations(range(num_rows)),
            st.builds(lambda a, n: [(a + i) % num_rows for i in range(n)], rows, st.integers(0, most)),
            st.builds(lambda a, step: list(range(a, num_rows, step)), rows, st.integers(1, 9)),
        )
    )
    return np.array(ids, np.int64)
