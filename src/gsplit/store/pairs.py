"""Lists of vertex pairs for link prediction: from a user's arrays, checked, and added to a store that exists.

A list is ``pairs/NAME`` [n, 2] with, optionally, ``pair_labels/NAME`` [n] and ``pair_negatives/NAME`` [n, K], all by
original id. So partitioning and shards copy them, and a mini-batch of pairs does not depend on the numbering.
"""

from typing import Any

import numpy as np

from gsplit.errors import InputError, explain
from gsplit.store.manifest import new_step, role_of
from gsplit.store.reader import Store, open_store
from gsplit.store.source import PairList, check_edge_index, dtype_name
from gsplit.store.writer import StoreWriter, check_output

__all__ = ["add_pairs", "check_pairs", "pair_list"]

_SHAPES = {"pairs": "n, 2", "pair_labels": "n", "pair_negatives": "n, K"}


def pair_list(name: str, pairs: Any, labels: Any = None, negatives: Any = None) -> PairList:
    """A list from arrays or tensors on the host: pairs [2, n] as in PyG, labels [n], negative destinations [n, K]."""
    ends = np.asarray(pairs)
    check_edge_index(f"pairs {name}", ends.dtype, ends.shape)
    wrong = None if negatives is None else np.asarray(negatives)
    if wrong is not None and wrong.dtype.kind in "iu":
        wrong = wrong.astype(np.int64)
    return PairList(ends.T.astype(np.int64), None if labels is None else np.asarray(labels), wrong)


def check_pairs(name: str, found: PairList, num_vertices: int) -> None:
    """Refuse a name that is not a word, other shapes or types than a store has, and ids that are not vertices."""
    try:
        arrays = [(full, role_of(full), array) for full, array in found.arrays(name).items()]
    except ValueError as error:
        raise InputError(explain("names", "plain words", error, "rename the pairs")) from None
    num_pairs = found.pairs.shape[0]
    for full, role, array in arrays:
        folder = full.partition("/")[0]
        fits = array.ndim in role.dimensions and array.shape[0] == num_pairs
        if not fits or dtype_name(array.dtype) not in role.dtypes or (folder == "pairs" and array.shape[1] != 2):
            expected = f"{' or '.join(role.dtypes)} of shape [{_SHAPES[folder]}], n = {num_pairs}"
            got = f"{array.dtype} {list(array.shape)}"
            raise InputError(explain(full, expected, got, "give one row per pair, and convert the type"))
        if folder != "pair_labels" and array.size and not 0 <= int(array.min()) <= int(array.max()) < num_vertices:
            row = int(np.flatnonzero(((array < 0) | (array >= num_vertices)).any(axis=1))[0])
            got = f"{array[row].tolist()} in row {row}"
            raise InputError(explain(full, f"ids in 0..{num_vertices - 1}", got, "remove or correct these pairs"))


def add_pairs(
    store: Store, name: str, pairs: Any, *, labels: Any = None, negatives: Any = None, replace: bool = False
) -> Store:
    """Add a list of pairs to a store and open it again. ``replace``: also if it has one of this name.

    ``pairs`` [2, n], source and destination, ``labels`` [n] and ``negatives`` [n, K], negative destinations of each
    pair, are arrays or tensors on the host, with original ids. The store is replaced atomically; its other files are
    linked, not copied. Stores that are open, ``store`` too, keep what they have.

    >>> store = gsplit.add_pairs(store, "train", torch.tensor([[4, 1], [0, 3]]))  # doctest: +SKIP
    """
    found = pair_list(name, pairs, labels, negatives)
    check_pairs(name, found, store.num_vertices)
    check_output(store.path, overwrite=True)
    manifest = open_store(store.path).manifest  # with lists that were added after ``store`` was opened
    if name in manifest.names("pairs") and not replace:
        fix = "choose another name, or pass replace=True"
        raise InputError(explain(store.where, f"other pairs than {', '.join(manifest.names('pairs'))}", name, fix))
    replaced = [f"{folder}/{name}" for folder in _SHAPES]
    kept = {full: entry for full, entry in manifest.arrays.items() if full not in replaced}
    with StoreWriter(store.path, overwrite=True) as writer:
        for full, entry in kept.items():
            writer.link(full, entry, store.path)
        for full, array in found.arrays(name).items():
            writer.write(full, array.dtype.name, array)
        step = new_step("add pairs", {"name": name}, {"pairs_stored": found.pairs.shape[0]})
        changes = {"arrays": writer.finish_arrays(), "provenance": [*manifest.provenance, step]}
        writer.commit(manifest.model_copy(update=changes))
    return open_store(store.path)
