"""Heterogeneous graphs on real ranks: losses and gradients of unmodified PyG models are those of one process.

The reference runs on an unpartitioned graph, so that it has another numbering of the vertices too.
"""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typed_programs import (
    TypedCase,
    TypedRun,
    count_typed,
    infer_all,
    largest_error,
    load_from_tiers,
    stored_in_parts,
    train_all,
    train_and_save,
)
from typed_values import train_values

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.ownership import own_parts
from gsplit.nn.parallelize import parallelize
from gsplit.partitioning.presample import Workload
from gsplit.planner.counts import count_strategies
from gsplit.sampling.relations import resolve_relation_fanouts
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported
from gsplit_bench.typed_models import (
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

STRATEGIES = ("split", "data", "data_cached", "hybrid(1)")
BOUND = 1e-9
PLAIN = [3, 2]  # a list counts for every relation
THREE = {relation: [*fanouts, 2] for relation, fanouts in FANOUTS.items()}
NAMED = {"default": None, "plain": PLAIN, "three": THREE}


def _cases(splits: int, replicas: int) -> list[TypedCase]:
    """Every model with every strategy; options turn with the mesh."""
    cases = [TypedCase(kind, strategy) for kind in MODELS for strategy in STRATEGIES]
    cases += [
        TypedCase("sage", "split", prefetch=2, first_step=1),
        TypedCase("gat", "hybrid(1)", fanouts=PLAIN, prefetch=1),
        TypedCase("rgat", "split"),
        TypedCase("rgat", "hybrid(1)"),
        TypedCase("deep", "hybrid(1)", fanouts=THREE),
        TypedCase("deep", "hybrid(2)", fanouts=THREE),
        TypedCase("deep", "split", num_parts=splits, fanouts=THREE),
        TypedCase("hgt", "split", num_parts=1),  # equal ranges of ids, which are ordered by type
    ]
    if replicas == 1:
        cases.append(TypedCase("norm", "split", fanouts=PLAIN))
    return cases


@cache
def _one_process(kind: str, fanouts: str, first_step: int) -> TypedRun:
    return train_all(solo_mesh(), [TypedCase(kind, "split", 1, NAMED[fanouts], first_step=first_step)])[0]


# every change: 3 ranks and 2 x 2 with the same cases; the record exactness-tasks has all meshes
@pytest.mark.parametrize(
    "replicas, splits",
    [pytest.param(1, 2, marks=pytest.mark.weekly), (1, 3), pytest.param(1, 4, marks=pytest.mark.weekly), (2, 2)],
)
def test_models_equal_one_process(replicas: int, splits: int) -> None:
    cases = _cases(splits, replicas)
    ranks = run_ranks(train_all, replicas * splits, cases, replicas=replicas)
    for place, case in enumerate(cases):
        fanouts = next(name for name, found in NAMED.items() if found is case.fanouts)
        one = _one_process(case.kind, fanouts, case.first_step)
        assert len(set(one.losses)) == len(one.losses) == 3
        for rank in ranks:
            assert largest_error(one, rank[place]) <= BOUND, case
        warned = any("ordered by type" in text for text in ranks[0][place].warnings)
        assert warned == (case.num_parts == 1), case
        num_edges = sum(rank[place].num_edges for rank in ranks)
        if case.strategy == "split" and replicas == 1:
            assert num_edges == one.num_edges  # each in-edge is drawn on one rank
        else:
            assert num_edges >= one.num_edges
    # a rank without vertices of a type took part
    assert any(count["field"] == 0 for rank in ranks for run in rank for count in run.counts)


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


@pytest.mark.parametrize("replicas, splits", [(1, 3), (2, 2)])
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


def test_edge_values_of_relations_are_those_of_one_process() -> None:
    (one,) = train_values(solo_mesh(), 1, ("split",))
    for rank in run_ranks(train_values, 3, 5, STRATEGIES):
        for strategy, values in zip(STRATEGIES, rank, strict=True):
            errors = [np.abs(wanted - found).max() for wanted, found in zip(one, values, strict=True)]
            assert max(errors) <= BOUND, strategy


def test_caches_and_files_give_the_stored_rows(tmp_path: Path) -> None:
    data = make_data()
    data["paper"].train_mask = torch.arange(COUNTS["paper"]) % 2 == 0
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    options: dict[str, Any] = {"batch_size": 12, "solver": "random", "objective": "random", "epochs": 2}
    gsplit.partition(store, tmp_path / "p.gsplit", 5, [3, 2], "paper/train", **options)
    tiers: list[dict[str, Any]] = [
        {},
        {"cache": 600},
        {"cache": 900, "strategy": "data_cached"},
        {"cache": "1MB", "prefetch": 1},
        {"features_on_disk": True},
        {"features_on_disk": True, "cache": 700, "strategy": "hybrid(1)"},
    ]
    for ranks in (1, 3):
        for rank in run_ranks(load_from_tiers, ranks, tmp_path / "p.gsplit", tiers):
            plain, small, middle, whole, disk, both = rank
            assert all(wrong == 0 and rows > 0 for wrong, _, rows in rank)
            assert plain[1] == disk[1] == 0 and whole[1] == whole[2]  # all rows are in the cache
            assert all(0 < hits < rows for _, hits, rows in (small, middle, both)), rank


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


simulated = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))


@simulated
def test_a_device_that_samples_equals_the_host() -> None:
    """The draws and the cut in torch operations."""
    cases = [TypedCase("sage", "split"), TypedCase("rgcn", "hybrid(1)"), TypedCase("hgt", "data_cached")]
    for rank in run_ranks(train_all, 2, cases, device="sim:0", sample_device="sim:0"):
        for case, run in zip(cases, rank, strict=True):
            assert largest_error(_one_process(case.kind, "default", 0), run) <= BOUND, case


@simulated
def test_a_device_that_the_host_samples_for_is_refused() -> None:
    with pytest.raises(AssertionError, match="built for heterogeneous graphs.*sample_device"):
        run_ranks(train_all, 1, [TypedCase("sage", "split")], device="sim:0")
