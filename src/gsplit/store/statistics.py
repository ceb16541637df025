"""Counts over edges, labels and features that are made once, while a store is built."""

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gsplit.array_types import Array, Ids

__all__ = [
    "UNLABELLED",
    "Statistics",
    "count_classes",
    "count_not_finite",
    "count_unlabelled",
    "degree_bin_labels",
    "degree_histogram",
    "not_finite_key",
    "without_empty_tail",
]

UNLABELLED = "unlabelled_vertices"
"""Key of the number of vertices without a label in the provenance of an import."""

Count = Annotated[int, Field(ge=0, le=1 << 62)]


class Statistics(BaseModel):
    """Counts over the stored in-edges of the store's vertex range."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_self_loops: Count
    num_duplicate_edges: Count
    num_isolated_vertices: Count
    max_in_degree: Count
    in_degree_histogram: Annotated[list[Count], Field(max_length=64)]


def degree_histogram(in_degrees: Ids) -> Ids:
    """Number of vertices per bin: degree 0, 1, 2-3, 4-7, and so on by powers of two; always 64 bins.

    >>> degree_histogram(np.array([0, 1, 2, 3, 4]))[:4].tolist()
    [1, 1, 2, 1]
    """
    _, exponents = np.frexp(in_degrees.astype(np.float64))  # exact below 2**53: the exponent is the bit length
    return np.bincount(np.clip(exponents, 0, 63), minlength=64).astype(np.int64)


def count_classes(y: Array, dtype: str) -> int:
    """Largest label plus one, for one integer label per vertex; else 0."""
    return max(0, int(y.max()) + 1) if y.size and y.ndim == 1 and dtype.startswith(("int", "uint")) else 0


def not_finite_key(feature: str) -> str:
    """Key of the number of NaN and infinite values of a feature array in the provenance of an import."""
    return f"not_finite_in_{feature}"


def count_not_finite(rows: Array, dtype: str) -> int:
    """Number of NaN and infinite elements. bfloat16 comes as its bits.

    >>> count_not_finite(np.array([1.0, np.nan, -np.inf]), "float64")
    2
    """
    if dtype == "bfloat16":
        return int(np.count_nonzero((rows & 0x7F80) == 0x7F80))
    return rows.size - int(np.count_nonzero(np.isfinite(rows)))


def count_unlabelled(y: Array, dtype: str) -> int:
    """Number of vertices without a label: -1 for classes, NaN for values, in all columns.

    >>> count_unlabelled(np.array([0, -1, 2]), "int64"), count_unlabelled(np.array([[0.5, np.nan]]), "float64")
    (1, 0)
    """
    if dtype == "bfloat16":
        missing = (y & 0x7FFF) > 0x7F80
    else:
        missing = np.isnan(y) if y.dtype.kind == "f" else y < 0
    return int(np.count_nonzero(missing.reshape(y.shape[0], -1).all(axis=1))) if y.size else 0


def without_empty_tail(histogram: Ids) -> list[int]:
    """The bins up to the last that is not empty, as stored in the manifest."""
    kept: list[int] = histogram[: int(np.flatnonzero(histogram).max(initial=0)) + 1].tolist()
    return kept


def degree_bin_labels(count: int) -> list[str]:
    """Names of the first ``count`` bins.

    >>> degree_bin_labels(4)
    ['0', '1', '2-3', '4-7']
    """
    return ["0", "1", *(f"{1 << (b - 1)}-{(1 << b) - 1}" for b in range(2, count))][:count]
