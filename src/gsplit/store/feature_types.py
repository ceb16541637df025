"""``gsplit convert``: write a store again with its features in another type, to store, read and cache fewer bytes.

Or with another array: ``internal_ids``, which older versions of gsplit did not write, or an order by time.

float16 and bfloat16 take half of float32, int8 a quarter and one float32 scale per row: the largest absolute value of a
row becomes 127. Every rank and strategy then trains on the same rounded values. All other arrays are copied. Arrays are
converted in pieces.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array
from gsplit.errors import InputError, explain
from gsplit.progress import Progress, silent
from gsplit.store.manifest import index_type, new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.source import row_slices
from gsplit.store.time_order import orders_by_time, stored_times
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter

__all__ = [
    "FEATURE_TYPES",
    "feature_values",
    "write_with_features",
    "write_with_internal_ids",
    "write_with_time_order",
]

FEATURE_TYPES = ("float32", "float16", "bfloat16", "int8")
_BFLOAT16_ROUNDING = np.uint32(0x7FFF)


def write_with_features(
    store: Store, path: str | Path, dtype: str, *, overwrite: bool = False, progress: Progress = silent
) -> Store:
    """Write ``store`` with all its feature arrays as ``dtype``, one of ``FEATURE_TYPES``, and open the result."""
    names = store.manifest.names("features")
    if dtype not in FEATURE_TYPES:
        expected = f"one of {', '.join(FEATURE_TYPES)}"
        raise InputError(explain("features", expected, repr(dtype), "choose one of these types"))
    if not names:
        got = f"the arrays {', '.join(store.names)}"
        raise InputError(explain(store.where, "features to convert", got, "import the graph with features"))
    with StoreWriter(Path(path), overwrite=overwrite) as writer:
        verify_store(store, progress)  # damage would get new checksums
        for name in store.names:
            if not name.startswith(("features/", "scales/")):
                writer.copy(name, store.dtype(name), store.stored_array(name), progress)
        for name in names:
            _convert(writer, store, name, dtype, progress)
        step = new_step("convert", {"features": dtype}, {})
        progress("flush to disk", 0, None)
        changes = {"arrays": writer.finish_arrays(), "provenance": [*store.manifest.provenance, step]}
        writer.commit(store.manifest.model_copy(update=changes))
    return open_store(path)


def write_with_internal_ids(
    store: Store, path: str | Path, *, overwrite: bool = False, progress: Progress = silent
) -> Store:
    """Write a store that an older version partitioned with the array ``internal_ids``, and open the result."""
    is_shard = store.manifest.shard is not None
    if is_shard or not store.is_renumbered or "internal_ids" in store.names:
        has_them = "a store that has them" if "internal_ids" in store.names else "a store that is not partitioned"
        fix = "give the whole store that gsplit partition wrote" if is_shard else "use the store as it is"
        got = "a shard" if is_shard else has_them
        raise InputError(explain(store.where, "a whole partitioned store without internal_ids", got, fix))
    pieces = iter([store.internal_ids])
    return _write_with(store, path, "internal_ids", index_type(store.num_vertices), pieces, overwrite, progress)


def write_with_time_order(
    store: Store, path: str | Path, name: str, *, overwrite: bool = False, progress: Progress = silent
) -> Store:
    """Write a store with the order of its edges by the times ``edges/NAME``, and open the result."""
    if f"time_order/{name}" in store.names or store.types is not None:
        got = "a graph with vertex types" if store.types is not None else f"one that has time_order/{name}"
        raise InputError(explain(store.where, f"a store without time_order/{name}", got, "use the store as it is"))
    times = stored_times(store, name)
    pieces = (order for _, order in orders_by_time(store.graph, times))
    return _write_with(store, path, f"time_order/{name}", "int32", pieces, overwrite, progress)


def _write_with(
    store: Store,
    path: str | Path,
    added: str,
    dtype: str,
    pieces: Iterator[Array],
    overwrite: bool,
    progress: Progress,
) -> Store:
    """Write a store with one more array, given in pieces, and open the result."""
    with StoreWriter(Path(path), overwrite=overwrite) as writer:
        verify_store(store, progress)  # damage would get new checksums
        for name in store.names:
            writer.copy(name, store.dtype(name), store.stored_array(name), progress)
        appender = writer.append(added, dtype)
        for piece in pieces:
            appender.append(piece)
        step = new_step("convert", {"add": added}, {})
        progress("flush to disk", 0, None)
        changes = {"arrays": writer.finish_arrays(), "provenance": [*store.manifest.provenance, step]}
        writer.commit(store.manifest.model_copy(update=changes))
    return open_store(path)


def _convert(writer: StoreWriter, store: Store, name: str, dtype: str, progress: Progress) -> None:
    full = f"features/{name}"
    num_rows, columns = store.stored_array(full).shape
    appender = writer.append(full, dtype, (columns,))
    scaling = writer.append(f"scales/{name}", "float32") if dtype == "int8" else None
    for piece in row_slices(num_rows, 8 * columns):
        values = feature_values(store, name, piece)
        if scaling is None:
            appender.append(_rounded(full, values, dtype))
        else:
            stored, scales = _scaled(full, values)
            appender.append(stored)
            scaling.append(scales)
        progress(f"convert {full}", piece.stop, num_rows)


def feature_values(store: Store, name: str, piece: slice) -> npt.NDArray[np.float32]:
    """Some rows of a feature array as float32, whatever their stored type."""
    rows = store.stored_array(f"features/{name}")[piece]
    dtype = store.dtype(f"features/{name}")
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "int8":
        return rows.astype(np.float32) * store.stored_array(f"scales/{name}")[piece, None]
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite and is counted
        return rows.astype(np.float32)


def _rounded(name: str, values: npt.NDArray[np.float32], dtype: str) -> Array:
    """Round to the nearest values of a smaller type. NaN stays NaN; a value that would become infinite is refused."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded: Array = values.astype(np.float16)
        infinite = np.isinf(rounded)
    else:
        bits = values.view(np.uint32)
        even = bits + _BFLOAT16_ROUNDING + ((bits >> np.uint32(16)) & np.uint32(1))
        quiet = bits | np.uint32(0x00400000)  # rounding the bits of a NaN up could change it
        rounded = (np.where(np.isnan(values), quiet, even) >> np.uint32(16)).astype(np.uint16)
        infinite = (rounded & 0x7FFF) == 0x7F80
    lost = np.count_nonzero(infinite & np.isfinite(values))
    if lost:
        largest = float(np.abs(values[np.isfinite(values)]).max())
        got = f"{lost} that would become infinite, such as {largest:g}"
        raise InputError(explain(name, f"values that {dtype} can hold", got, "scale the features, or use int8"))
    return rounded


def _scaled(name: str, values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Integers from -127 to 127 and the scale of each row. A row of zeros has the scale 0."""
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        got = f"{bad} NaN or infinite values"
        raise InputError(explain(name, "finite values for int8", got, "fix the features, or use float16 or bfloat16"))
    scales = np.abs(values).max(axis=1, initial=0.0) / np.float32(127)
    steps = values / np.where(scales > 0, scales, np.float32(1))[:, None]
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scales
