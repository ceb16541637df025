"""Whether degrees are degrees, before a model is made of them: opening a store only samples its arrays."""

import numpy as np
import numpy.typing as npt

from gsplit.errors import StoreError, explain
from gsplit.graph import Graph

__all__ = ["check_degrees"]

_VERIFY = "run gsplit inspect --verify, then restore the store or import it again"


def check_degrees(graph: Graph) -> npt.NDArray[np.int64]:
    """In-degrees of all vertices; those of damaged offsets are refused."""
    degrees = graph.in_degrees()
    if degrees.size and not 0 <= int(degrees.min()) <= int(degrees.max()) <= graph.indices.size:
        got = f"{degrees.min()}..{degrees.max()}"
        raise StoreError(explain("indptr", f"in-degrees of 0..{graph.indices.size}", got, _VERIFY))
    return degrees
