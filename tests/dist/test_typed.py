"""Heterogeneous graphs on real ranks: losses and gradients of unmodified PyG models are those of one process.

The reference runs on an unpartitioned graph, so that it has another numbering of the vertices too.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typed_models import (
    BATCH,
    COUNTS,
    FANOUTS,
    MODELS,
    TRAINED,
    WIDTHS,
    Fused,
    make_data,
    make_model,
    make_store,
)
from typed_programs import (
    count_typed,
    infer_all,
    stored_in_parts,
    train_and_save,
)

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.ownership import own_parts
from gsplit.nn.parallelize import parallelize
from gsplit.partitioning.presample import Workload
from gsplit.planner.counts import count_strategies
from gsplit.sampling.relations import resolve_relation_fanouts
from gsplit_bench.ranks import run_ranks

STRATEGIES = ("split", "data", "data_cached", "hybrid(1)")
BOUND = 1e-9


INFERRED = (*MODELS, "rgat", "deep", "norm")


def _papers(kind: str) -> np.ndarray[Any, Any]:
    """The outputs of PyG's model for all papers of the whole graph."""
    data = make_data()
    model = parallelize(make_model(kind), solo_mesh(), graph=make_store(2)).eval()
    with torch.no_grad():
        if isinstance(model, Fused):
            whole = data.to_homogeneous(node_attrs=[])
            encoded = model.encode(data.x_dict)
            out = model.run(torch.cat([encoded[name] for name in COUNTS]), whole.edge_index, whole.edge_type)
            return np.asarray(out[: COUNTS["paper"]])
        out = model(data.x_dict, data.edge_index_dict)
        return np.asarray(out["paper"] if isinstance(out, dict) else out)


@pytest.mark.parametrize("replicas, splits", [(1, 3)])
def test_inference_and_scores_are_those_of_pyg_on_the_whole_graph(replicas: int, splits: int, tmp_path: Path) -> None:
    kinds = INFERRED if replicas == 1 else MODELS
    ranks = run_ranks(infer_all, replicas * splits, kinds, tmp_path, replicas=replicas)
    y = make_data()["paper"].y.numpy()
    for kind in kinds:
        wanted = _papers(kind)
        right = (wanted.argmax(1) == y)[TRAINED].mean()
        for rank in ranks:
            assert np.abs(rank[kind] - wanted).max() < 1e-11, kind
            assert float(rank[f"{kind} score"]) == pytest.approx(float(right), abs=1e-12), kind


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_the_planner_counts_by_type_what_ranks_do(ranks: int, replicas: int, tmp_path: Path) -> None:
    """Rows of every type and edges of every relation, layer by layer, and the bytes that ranks read and send."""
    splits = ranks // replicas
    store = gsplit.open(stored_in_parts(tmp_path, splits))
    assert store.types is not None
    fanouts = resolve_relation_fanouts(FANOUTS, store.types)
    workload = Workload.of_store(store, "paper/train", fanouts, BATCH)
    ownership = own_parts(store.part_boundaries, splits, store.part_loads)
    featured = ("paper", "author")
    strategies = (*STRATEGIES, "data(owner)", "data_cached(strided)")
    counted = count_strategies(workload, ownership, strategies, replicas=replicas, steps=2, featured=featured)
    found = run_ranks(count_typed, ranks, store.path, strategies, replicas=replicas)
    widths = np.array([8 * WIDTHS[name] if name in featured else 0 for name in COUNTS])
    crossing = 0.0
    for number, (strategy, counts) in enumerate(zip(strategies, counted, strict=True)):
        assert strategy == counts.spec.name
        for rank, planned in enumerate(counts.ranks):
            did = {name: np.mean([step[name] for step in found[rank][number]], axis=0) for name in found[0][0][0]}
            assert planned.types is not None
            for name in ("edges", "destinations", "sources"):
                np.testing.assert_array_equal(getattr(planned.types, name), did[name], f"{strategy} {name}")
                assert np.sum(getattr(planned, name)) == np.sum(did[name])
            assert planned.rows_loaded == sum(planned.types.rows_loaded) == did["rows_loaded"], strategy
            assert np.dot(planned.types.rows_loaded, widths) == did["bytes_loaded"], strategy
            sent = np.where(widths > 0, did["rows_sent"], 0)
            np.testing.assert_array_equal(planned.types.rows_sent, sent, strategy)
            assert planned.rows_sent[0] == sent.sum()
            crossing += planned.rows_sent[0]
    assert crossing > 0


def test_a_killed_training_continues_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    steps = 7  # of four in an epoch
    whole = run_ranks(train_and_save, 2, tmp_path / "whole", steps)
    killed = tmp_path / "killed"
    with pytest.raises(AssertionError):
        run_ranks(train_and_save, 2, killed, steps, 5)
    shutil.copytree(killed, tmp_path / "copy")
    again = run_ranks(train_and_save, 2, killed, steps)
    other = run_ranks(train_and_save, 3, tmp_path / "copy", steps)
    for wanted, found in zip(whole, again, strict=True):
        assert 0 < found.num_before < 5 and found.losses == wanted.losses and found.scores == wanted.scores
        assert all(np.array_equal(found.weights[name], value) for name, value in wanted.weights.items())
    for found in other:
        assert found.num_before > 0 and found.losses == pytest.approx(whole[0].losses, abs=BOUND)
        assert all(np.abs(found.weights[name] - value).max() < BOUND for name, value in whole[0].weights.items())
        assert found.scores == whole[0].scores
