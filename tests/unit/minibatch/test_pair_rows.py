"""However pairs are divided among ranks, and however vertices are numbered, the ranks have the pairs of one process."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gsplit.minibatch.pair_rows import PairRows, own_pairs
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.pairs import ListedPairs, Negatives

MODES = st.sampled_from(
    [
        None,
        Negatives("binary", 2),
        Negatives("binary", 0.4),
        Negatives("triplet", 1),
        Negatives("triplet", 3),
        Negatives("joint", 4),
        Negatives("in_batch"),
    ]
)


def _by_id(ids: Tensor, rows: PairRows) -> tuple[list[Any], list[Any]]:
    """What a loss reads of every pair, and of every negative pair, by original id."""
    n = rows.input_id.numel()
    pairs = []
    for i in range(n):
        shared = rows.mode in ("joint", "in_batch")
        negatives = rows.negatives if shared else rows.negatives[i] if rows.mode == "triplet" else rows.negatives[:0]
        column = int(rows.own_columns[i]) if rows.mode == "in_batch" else -1
        label = None if rows.label is None else float(rows.label[i])
        ends = ids[rows.index[:, i]].tolist()
        pairs.append((int(rows.input_id[i]), ends, ids[negatives.reshape(-1)].tolist(), column, label))
    others = [tuple(pair) for pair in ids[rows.index[:, n:]].T.tolist()]
    return pairs, list(zip(others, rows.value_keys[n:].tolist(), strict=True))


@given(st.integers(0, 2**62), st.integers(1, 20), st.integers(1, 8), st.integers(1, 5), MODES, st.booleans(), st.data())
def test_ranks_have_the_pairs_and_negatives_of_one_process(
    seed: int, num_pairs: int, batch_size: int, num_ranks: int, negatives: Negatives | None, labelled: bool, data: Any
) -> None:
    n = 30
    rng = np.random.default_rng(seed % 1000)
    labels = rng.integers(0, 3, num_pairs) if labelled and (negatives is None or negatives.mode == "binary") else None
    listed = ListedPairs.listed(rng.integers(0, n, (num_pairs, 2)), labels)
    for number in range(-(-num_pairs // batch_size)):
        step = listed.for_step(StepKey(seed, 1, number), batch_size, negatives, n)
        ranks = torch.tensor(
            data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=step.num_pairs, max_size=step.num_pairs))
        )
        wanted, wanted_others = _by_id(*own_pairs(step, torch.ones(step.num_pairs, dtype=torch.bool), labels))
        found: list[Any] = []
        others: list[Any] = []
        num_values = 0
        for rank in range(num_ranks):
            ids, rows = own_pairs(step, ranks == rank, labels)
            assert ids.unique().numel() == ids.numel() and torch.equal(ids, rows.n_id)
            assert rows.num_values == step.num_values
            assert rows.value_keys.numel() == rows.index.size(1)
            num_values += rows.index.size(1)
            pairs, of_rank = _by_id(ids, rows)
            found += pairs
            others += of_rank
        assert sorted(found) == sorted(wanted) and sorted(others) == sorted(wanted_others)
        assert num_values == step.num_values
