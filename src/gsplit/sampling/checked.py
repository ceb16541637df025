"""A sampler that the program gave to the loader, with everything checked that it hands on.

Rows and ids that a sampler returns become addresses in kernels and in messages to other ranks, so a mistake in one must
end in an error that says what was wrong. What cannot be seen here is whether a draw depends on the key and the vertex
alone (law 1): ``gsplit.verify`` finds that out.
"""

import torch
from torch import Tensor

from gsplit.errors import InputError, explain
from gsplit.sampling.kernels_torch import place_foreign
from gsplit.sampling.protocol import Frontier, LayerSampler, SampledLayer, SampledRange

__all__ = ["CheckedFrontier", "CheckedSampler"]


def _wrong(expected: str, got: object) -> InputError:
    return InputError(explain("sampler", expected, got, "see gsplit.extending.LayerSampler"))


class CheckedSampler:
    """See ``LayerSampler``."""

    def __init__(self, sampler: LayerSampler, part: SampledRange) -> None:
        if not hasattr(sampler, "start"):
            raise _wrong("a function that returns a LayerSampler", f"one that returns {type(sampler).__name__}")
        self._sampler, self._part = sampler, part

    @property
    def num_bytes(self) -> int:
        return self._sampler.num_bytes

    @property
    def num_range_bytes(self) -> int:
        return self._sampler.num_range_bytes

    def start(self, targets: Tensor) -> "CheckedFrontier":
        return CheckedFrontier(self._sampler.start(targets), self._part, targets)


class CheckedFrontier:
    """See ``Frontier``. Checks wait for the device, if ids lie on one."""

    def __init__(self, frontier: Frontier, part: SampledRange, targets: Tensor) -> None:
        self._frontier, self._part = frontier, part
        self._ids = targets[:0]
        self._take_new_rows()
        if not torch.equal(self._ids, targets):
            raise _wrong("a frontier that starts with the targets, in their order", f"{self._ids.numel()} other rows")

    @property
    def num_rows(self) -> int:
        return self._ids.numel()

    def ids(self, num_rows: int) -> Tensor:
        return self._ids[:num_rows]

    def sample_layer(self, key: int, fanout: int) -> SampledLayer:
        num_dst = self.num_rows
        drawn = self._frontier.sample_layer(key, fanout)
        if not isinstance(drawn, SampledLayer):
            raise _wrong("sample_layer to return a SampledLayer", type(drawn).__name__)
        self._take_new_rows()
        self._check_layer(drawn, num_dst)
        edge_ids = self._checked_edges(drawn) if self._part.edge_ids else None
        return SampledLayer(drawn.indptr, drawn.sources, drawn.foreign_ids, edge_ids)

    def locate(self, ids: Tensor) -> Tensor:
        rows = self._frontier.locate(ids)
        self._take_new_rows()
        self._check_ids("rows of locate", rows, 0, self.num_rows)
        if not torch.equal(self._ids[rows], ids):
            raise _wrong("locate to return the rows of the ids it was given", "rows of other vertices")
        return rows

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        return place_foreign(drawn.sources, foreign_rows)

    def close(self) -> None:
        self._frontier.close()

    def _take_new_rows(self) -> None:
        """Look at the rows that were appended; those before must be as they were (law 4)."""
        graph, known = self._part.graph, self._ids.numel()
        ids = self._frontier.ids(self._frontier.num_rows)
        self._check_ids("ids of the frontier", ids, graph.first_vertex, graph.stop_vertex)
        if not torch.equal(ids[:known], self._ids):
            raise _wrong("rows that are only appended", "a frontier whose first rows have changed")
        self._ids = ids

    def _check_layer(self, drawn: SampledLayer, num_dst: int) -> None:
        graph, indptr, sources = self._part.graph, drawn.indptr, drawn.sources
        self._check_form("sources", sources)
        self._check_form("indptr", indptr)
        ends = (indptr.numel(), *indptr[[0, -1]].tolist()) if indptr.numel() else (0,)
        if ends != (num_dst + 1, 0, sources.numel()) or bool((indptr.diff() < 0).any()):
            expected = f"indptr of {num_dst} rows, rising from 0 to the {sources.numel()} sources"
            raise _wrong(expected, f"{indptr.numel() - 1} rows, {indptr[:1].tolist()} to {indptr[-1:].tolist()}")
        self._check_ids("foreign_ids", drawn.foreign_ids, 0, graph.num_vertices)
        if bool(((drawn.foreign_ids >= graph.first_vertex) & (drawn.foreign_ids < graph.stop_vertex)).any()):
            raise _wrong("foreign_ids of other ranks' vertices", "vertices of this rank among them")
        self._check_ids("sources", sources, -drawn.foreign_ids.numel(), self.num_rows)

    def _checked_edges(self, drawn: SampledLayer) -> Tensor:
        if drawn.edge_ids is None:
            fix = "return them, or load no values of edges: edge_attr=None, edge_weight=None"
            raise InputError(explain("sampler", "edge_ids of all edges drawn", "none", fix))
        self._check_form("edge_ids", drawn.edge_ids)
        if drawn.edge_ids.numel() != drawn.num_edges:
            raise _wrong("edge_ids of all edges drawn", f"{drawn.edge_ids.numel()} of {drawn.num_edges}")
        indptr = self._part.graph.indptr
        self._check_ids("edge_ids", drawn.edge_ids, int(indptr[0]), int(indptr[-1]))
        return drawn.edge_ids

    def _check_ids(self, name: str, ids: Tensor, low: int, high: int) -> None:
        """Refuse ids or rows that are not all from ``low`` to below ``high``."""
        self._check_form(name, ids)
        if ids.numel() and not low <= int(ids.min()) <= int(ids.max()) < high:
            raise _wrong(f"{name} in {low}..{high - 1}", f"{int(ids.min())}..{int(ids.max())}")

    def _check_form(self, name: str, ids: Tensor) -> None:
        device = self._part.device
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != device.type:
            got = f"{ids.dtype} {list(ids.shape)} on {ids.device}" if isinstance(ids, Tensor) else type(ids).__name__
            raise _wrong(f"{name} as one dimension of int64 on {device}", got)
