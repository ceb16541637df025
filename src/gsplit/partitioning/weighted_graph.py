"""The input of solvers: an undirected, weighted graph in memory maps of a folder.

A solver runs in a process of its own, so this module loads fast: no torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array
from gsplit.files.mapped_files import create_mapped
from gsplit.store.files import plain_header

__all__ = ["WeightedGraph", "open_weighted", "place_array"]

_NAMES = ("xadj", "adjncy", "edge_weights", "vertex_weights")


@dataclass(frozen=True)
class WeightedGraph:
    """Neighbours of v are ``adjncy[xadj[v] : xadj[v + 1]]``, ascending, each once, both ways; weights likewise.

    ``edge_weights`` is empty where all are one. ``vertex_weights`` has a column per balance constraint.
    """

    xadj: npt.NDArray[np.int64]
    adjncy: Array
    edge_weights: npt.NDArray[np.int64]
    vertex_weights: npt.NDArray[np.int64]

    @property
    def num_vertices(self) -> int:
        return int(self.xadj.size - 1)


def place_array(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Create an array in the folder as a memory map."""
    return create_mapped(folder / f"{name}.npy", dtype, shape, plain_header(np.dtype(dtype), shape))


def open_weighted(folder: Path) -> WeightedGraph:
    """Open the graph of a folder."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _NAMES}
    return WeightedGraph(**arrays)
