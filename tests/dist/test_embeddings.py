"""Owned embeddings on real ranks: losses, weights and trained rows are those of ``torch.nn.Embedding`` in one process.

The reference runs on an unpartitioned graph, so that it has another numbering of the vertices too.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_programs import (
    EmbeddingCase,
    EmbeddingRun,
    infer_in_replicas,
    infer_outputs,
    largest_difference,
    refusals,
    resume_all,
    train_embeddings,
)

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

BOUND = 1e-9
CASES = [
    EmbeddingCase("untyped"),
    EmbeddingCase("untyped", "hybrid(1)"),
    EmbeddingCase("untyped", "data_cached", prefetch=2),
    EmbeddingCase("untyped", num_parts=1),
    EmbeddingCase("links"),
    EmbeddingCase("links", "data_cached"),
    EmbeddingCase("sage"),
    EmbeddingCase("sage", "data_cached"),
    EmbeddingCase("sage", num_parts=1, prefetch=1),  # equal ranges of ids: ranks without authors or fields
    EmbeddingCase("sage", "hybrid(1)", prefetch=2),
    EmbeddingCase("rgcn"),
    EmbeddingCase("rgcn", "data_cached(strided)"),
]


@cache
def _one_process(kind: str) -> EmbeddingRun:
    return train_embeddings(solo_mesh(), [EmbeddingCase(kind, num_parts=1)], by_torch=True)[0]


# every change: one process, 3 ranks and 2 x 2 with the same cases
@pytest.mark.parametrize(
    "replicas, splits",
    [
        (1, 1),
        pytest.param(1, 3, marks=pytest.mark.weekly),
        pytest.param(2, 2, marks=pytest.mark.weekly),
    ],
)
def test_rows_are_trained_as_in_one_process(replicas: int, splits: int) -> None:
    if splits == 1:
        ranks = [train_embeddings(solo_mesh(), [*CASES, EmbeddingCase("untyped", "data")])]
    else:
        ranks = run_ranks(train_embeddings, replicas * splits, CASES, replicas=replicas)
    for place, case in enumerate([*CASES, EmbeddingCase("untyped", "data")][: len(ranks[0])]):
        runs = [rank[place] for rank in ranks]
        one = _one_process(case.kind)
        assert len(set(one.losses)) == 5
        assert largest_difference(one, runs) <= BOUND, case
        for number, (_, whole) in enumerate(one.tables):
            tables = [run.tables[number] for run in runs]
            # a rank holds the rows of its vertices, and a replica holds each row once
            held = np.concatenate([ids for ids, _ in tables])
            assert np.array_equal(np.sort(held), np.repeat(np.arange(whole.shape[0]), replicas)), case
            assert all(rows.shape == (ids.size, whole.shape[1]) for ids, rows in tables)
            for first, other in zip(tables, tables[splits:], strict=False):  # the same vertices in the next replica
                np.testing.assert_array_equal(first[1], other[1])
    if splits > 1:
        empty = [ids.size == 0 for rank in ranks for run in rank for ids, _ in run.tables]
        assert any(empty) and not all(empty)


def test_training_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Rows and the state of the optimizer, by original id, and on another partition."""
    run_ranks(resume_all, 3, EmbeddingCase("untyped", num_parts=6), tmp_path, 0, 2)
    run_ranks(resume_all, 4, EmbeddingCase("untyped", "data_cached", num_parts=5), tmp_path, 2, 2, replicas=2)
    last = run_ranks(resume_all, 2, EmbeddingCase("untyped", num_parts=1), tmp_path, 4, 1)
    one = _one_process("untyped")
    assert largest_difference(EmbeddingRun(one.losses[4:], one.weights, one.tables), last) <= BOUND
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "rows-"]


def test_exact_inference_reads_the_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    outputs, accuracy, mrr = infer_outputs(solo_mesh(), tmp_path)
    assert 0 < accuracy < 1
    assert 0 < mrr < 1
    for rank in run_ranks(infer_outputs, 3, tmp_path):
        assert np.abs(rank[0] - outputs).max() <= BOUND
        assert rank[1] == accuracy
        assert abs(rank[2] - mrr) <= BOUND


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    for messages in run_ranks(refusals, 2):
        assert "got strategy='data'). Fix: change the strategy" in messages[0]
        assert "got strategy='data(owner)')" in messages[1]
        assert "OwnedEmbedding: dim: expected the same on every rank (got rank 0: 6, rank 1: 7)" in messages[2]
    with pytest.raises(AssertionError, match=r"vertices of this rank \(got vertices of other owners among"):
        run_ranks(infer_in_replicas, 4, tmp_path, replicas=2)


@pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
def test_rows_on_a_device() -> None:
    untyped = [EmbeddingCase("untyped"), EmbeddingCase("untyped", "data_cached")]
    typed = [EmbeddingCase("sage"), EmbeddingCase("rgcn", "data_cached")]
    for cases, sample_device in ((untyped, None), (untyped + typed, "sim:0")):
        ranks = run_ranks(train_embeddings, 2, cases, device="sim:0", sample_device=sample_device)
        for place, case in enumerate(cases):
            assert largest_difference(_one_process(case.kind), [rank[place] for rank in ranks]) <= BOUND, case
