"""What a user's program adds to the package: a sampler and a source of rows (``gsplit.extending``)."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from gsplit.extending import DrawnSampler, RowsRead, SampledRange, mix
from tests.exactness.graphs import WIDTH, make_data

__all__ = ["UserRows", "coin_sampler"]


def _toss(part: SampledRange, ids: Tensor, key: int, fanout: int) -> tuple[Tensor, Tensor]:
    """Of the first ``fanout`` in-edges of a vertex, or of all, each by a coin of its own."""
    indptr = torch.from_numpy(np.array(part.graph.indptr)).to(ids.device)
    rows = ids - part.graph.first_vertex
    degrees = indptr[rows + 1] - indptr[rows]
    tossed = degrees if fanout < 0 else degrees.clamp(max=fanout)
    owner = torch.repeat_interleave(torch.arange(rows.numel(), device=ids.device), tossed)
    position = torch.arange(owner.numel(), device=ids.device) - (tossed.cumsum(0) - tossed)[owner]
    heads = (mix(mix(key, part.to_original_ids(ids))[owner], position) & 1).bool()
    return torch.bincount(owner[heads], minlength=rows.numel()), (indptr[rows][owner] + position)[heads]


def coin_sampler(part: SampledRange) -> DrawnSampler:
    return DrawnSampler(part, partial(_toss, part))


class UserRows:
    """The rows of the graph with one type, by original id."""

    row_shape = (WIDTH,)
    dtype = torch.float32
    fingerprint = "1"

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        out.copy_(make_data("one").x[ids])
        return RowsRead(rows=ids.numel(), num_bytes=out.nbytes)
