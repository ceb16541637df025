"""A store as users read it: every row and every target by original id, whatever the internal order.

``partition`` renumbers vertices; ``n_id`` of a mini-batch and the rows of ``gsplit.infer`` are original ids. So are
these. The map from original ids to rows is made when first needed: 8 bytes per vertex held.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, StoreError, explain
from gsplit.store.array_roles import role_of
from gsplit.store.files import Array
from gsplit.store.protocol import GraphStore

__all__ = ["OriginalOrder"]

Ids = npt.NDArray[np.int64]


class OriginalOrder:
    """The arrays of one store by original id. ``where`` names the store in messages."""

    def __init__(self, store: GraphStore, where: object) -> None:
        self._store, self._where = store, where

    @cached_property
    def _held_rows(self) -> Ids:
        """Rows of the vertices held, by ascending original id; of a whole graph, the row of each original id."""
        return np.argsort(self._store.original_ids())

    @property
    def _is_whole(self) -> bool:
        return self._store.vertex_range == (0, self._store.num_vertices)

    def array(self, name: str) -> Array:
        """A whole array: rows by original id, targets as ascending original ids. A map or a copy, read-only or not."""
        store, stored = self._store, self._store.stored_array(name)
        self._require_whole(f"array({name!r})", f"rows({name!r}, ids), or stored_array({name!r}) in internal order")
        if not store.is_renumbered:
            return stored
        if name.startswith("targets/"):
            if stored.size and not 0 <= int(stored.min()) <= int(stored.max()) < store.num_vertices:
                got, fix = f"{stored.min()}..{stored.max()}", "run gsplit inspect --verify, then restore the store"
                raise StoreError(explain(f"{self._where}: {name}", f"ids in 0..{store.num_vertices - 1}", got, fix))
            return np.asarray(store.original_ids()[stored])
        if role_of(name).rows == "vertex":
            return np.asarray(stored[self._held_rows])
        got = f"{name}, which is in the internal order of a partitioned graph"
        fix = f"use gsplit.to_pyg(store), in original ids, or stored_array({name!r})"
        raise InputError(explain(self._where, "a per-vertex array or targets", got, fix))

    def rows(self, name: str, ids: npt.ArrayLike) -> Array:
        """The rows of some vertices, in the order of ``ids``."""
        stored = self._store.stored_array(name)
        if role_of(name).rows != "vertex":
            fix = "ask for y, vertex_ids, hotness or features/NAME"
            raise InputError(explain(self._where, "a per-vertex array", name, fix))
        return np.asarray(stored[self._places(ids)])

    def vertex_names(self, ids: npt.ArrayLike | None = None) -> list[str]:
        """The string ids of some vertices, or of all by ascending original id."""
        offsets, text = self._store.stored_array("name_offsets"), self._store.stored_array("name_bytes")
        if ids is None:
            self._require_whole("vertex_names()", "vertex_names(store.original_ids())")
            places = self._held_rows if self._store.is_renumbered else np.arange(self._store.num_vertices)
        else:
            places = self._places(ids)
        ends = zip(*(np.maximum(offsets[places + next_row], 0).tolist() for next_row in (0, 1)), strict=True)
        view = np.ascontiguousarray(text).data
        return [str(view[start:stop], "utf-8", "replace") for start, stop in ends]

    def imported_ids(self, ids: npt.ArrayLike) -> list[str] | Ids:
        """The ids that some vertices were imported with: strings, numbers, or where those were 0 .. n-1, the same."""
        if "name_offsets" in self._store.names:
            return self.vertex_names(ids)
        return self.rows("vertex_ids", ids) if "vertex_ids" in self._store.names else np.asarray(ids)

    def _require_whole(self, what: str, instead: str) -> None:
        if not self._is_whole:
            first, stop = self._store.vertex_range
            got = f"a shard with vertices {first}..{stop - 1} of {self._store.num_vertices}"
            fix = f"open the whole store, or use {instead}"
            raise InputError(explain(self._where, f"all vertices for {what}", got, fix))

    def _places(self, ids: npt.ArrayLike) -> Ids:
        """Rows of vertices by original id; an id that is not held is refused."""
        wanted, count = np.asarray(ids), self._store.num_vertices
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            got = f"{wanted.dtype} {list(wanted.shape)}"
            raise InputError(explain("ids", "integers in one dimension", got, "give original ids, not a mask"))
        wanted = wanted.astype(np.int64)
        outside = wanted[(wanted < 0) | (wanted >= count)]
        if outside.size:
            got = f"{outside.size} outside, such as {outside[0]}"
            raise InputError(explain("ids", f"original ids in 0..{count - 1}", got, "correct the ids"))
        if self._is_whole:
            return self._held_rows[wanted] if self._store.is_renumbered else wanted
        held = np.asarray(self._store.original_ids())
        places = np.searchsorted(held[self._held_rows], wanted)
        rows = self._held_rows[np.minimum(places, held.size - 1)] if held.size else places
        missing = wanted[held[rows] != wanted] if held.size else wanted
        if missing.size:
            got = f"{missing.size} that it does not hold, such as {missing[0]}"
            raise InputError(explain(self._where, "ids of this shard", got, "open the whole store"))
        return rows
