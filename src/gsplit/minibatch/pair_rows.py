"""One rank's pairs of a step, as rows of their endpoints.

A pair belongs to one rank, which computes its loss from the final rows of its endpoints. ``own_pairs`` lists the
endpoints of a rank's pairs and negatives, each once, and the pairs as rows of that list. Under ``split`` the owners of
these vertices compute the rows, and ``LinkBatch.endpoints`` exchanges them above the last layer; under the other
strategies the rank computes them itself.

In a step with the pairs (1, 7) and (3, 1) and one negative (3, 9) of the second pair, a rank with the second pair has
the endpoints [3, 1, 9] and the rows

>>> from gsplit.sampling.pairs import Negatives
>>> one = torch.ones(1, dtype=torch.int64)
>>> step = StepPairs(torch.tensor([4, 0]), torch.tensor([1, 3]), torch.tensor([7, 1]), neg_src=3 * one, neg_dst=9 * one,
...                  neg_pair=one, neg_slot=0 * one, negatives=Negatives("binary", 0.5))
>>> ids, rows = own_pairs(step, torch.tensor([False, True]), labels=None)
>>> ids.tolist(), rows.index.tolist(), rows.label.tolist(), rows.input_id.tolist()
([3, 1, 9], [[0, 0], [1, 2]], [1.0, 0.0], [0])
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gsplit.array_types import Array
from gsplit.keys.kernels_torch import mix
from gsplit.minibatch.route import Route
from gsplit.sampling.kernels_torch import first_seen
from gsplit.sampling.pairs import StepPairs

__all__ = ["PairRows", "own_pairs"]


@dataclass(frozen=True, slots=True)
class PairRows:
    """See the module. Rows are those of the endpoints, whose original ids are ``n_id``.

    ``index``: the sources and destinations of this rank's pairs [2, n], followed by its negative pairs for ``binary``.
    ``negatives``: the rows of negative destinations, for ``triplet`` [n] or [n, K], for ``joint`` [K]; for ``in_batch``
    the destinations of all pairs of the step [B], of which the pairs have the columns ``own_columns``. ``label``: one
    for every column of ``index``. ``value_keys``: names of these columns, for random numbers. ``num_values``: the
    number of columns over all ranks. ``route``: the exchange of the endpoints' rows; None if the rank computes them.
    ``time``: of every endpoint, in temporal sampling, where a vertex has a row for every time.
    """

    mode: str
    input_id: Tensor
    index: Tensor
    negatives: Tensor
    own_columns: Tensor
    label: Tensor | None
    n_id: Tensor
    value_keys: Tensor
    num_values: int
    route: Route | None = None
    time: Tensor | None = None

    @property
    def names(self) -> Tensor:
        """Names of the endpoints, for random numbers: of the vertex, or of the vertex and the time."""
        return self.n_id if self.time is None else mix(self.n_id, self.time)


def own_pairs(step: StepPairs, mine: Tensor, labels: Array | None) -> tuple[Tensor, PairRows]:
    """The endpoints (original ids, each once) of the pairs that are ``mine``, and the pairs as rows of them.

    ``labels``: of all pairs of the list.
    """
    positions = step.positions[mine]
    src = step.src[mine]
    dst = step.dst[mine]
    slots = torch.zeros_like(positions)
    label = None if labels is None else torch.from_numpy(labels[positions.numpy()])
    others = step.neg_dst
    own_columns = positions[:0]
    if step.mode == "binary":
        own = mine[step.neg_pair]
        pairs = step.neg_pair[own]
        src = torch.cat([src, step.neg_src[own]])
        dst = torch.cat([dst, step.neg_dst[own]])
        slots = torch.cat([slots, step.neg_slot[own] + 1])
        others = others[:0]
        if step.negatives is not None:
            label = torch.ones(positions.numel()) if label is None else label
            label = torch.cat([label, label.new_zeros(pairs.numel(), *label.shape[1:])])
        names = torch.cat([positions, step.positions[pairs]])
    else:
        names = positions
    if step.mode == "triplet":
        others = others.view(-1, mine.numel()).T[mine]  # negative m is that of pair m % B
        others = others.squeeze(1) if others.size(1) == 1 else others  # as PyG
    if step.mode == "in_batch":
        others = step.dst
        own_columns = mine.nonzero().view(-1)
    ids, rows = first_seen(torch.cat([src, dst, others.reshape(-1)]), 0)
    rows_src, rows_dst, rows_others = rows.split([src.numel(), dst.numel(), others.numel()])
    return ids, PairRows(
        mode=step.mode,
        input_id=positions,
        index=torch.stack([rows_src, rows_dst]),
        negatives=rows_others.view(others.shape),
        own_columns=own_columns,
        label=label,
        n_id=ids,
        value_keys=mix(names, slots),
        num_values=step.num_values,
    )
