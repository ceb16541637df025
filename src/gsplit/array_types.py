"""Names for the numpy array types that most modules use."""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Ids"]

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
"""Vertex ids, positions and counts."""
