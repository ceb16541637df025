"""Rankings of pairs are those of a loop over the whole graph, with OGB's rule for ties."""

from typing import Any

import numpy as np
import pytest
import torch
from link_programs import VERTICES, PairScores, link_store, pairs_of
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.inference.evaluate_links import ranks_among
from gsplit.keys import scalar

WIDTH = 5


def _model() -> Any:
    torch.manual_seed(0)
    return gsplit.parallelize(GraphSAGE(WIDTH, 6, 2, 4).double(), solo_mesh())


@pytest.mark.parametrize("num_negatives", [2, 30])
def test_rankings_equal_a_loop_over_all_pairs(num_negatives: int) -> None:
    """By a definition of keyed negatives on Python integers, and PyG's model on the whole graph."""
    store, _ = link_store("mixed")
    pairs = pairs_of()[:, :20]
    model = _model()
    graph = store.graph
    original = torch.from_numpy(store.original_ids())
    dst = torch.repeat_interleave(torch.arange(VERTICES), torch.from_numpy(graph.in_degrees()))
    edges = original[torch.stack([torch.from_numpy(graph.indices.astype(np.int64)), dst])]
    x = torch.from_numpy(store.array("features/x"))
    plain = GraphSAGE(WIDTH, 6, 2, 4).double()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        z = plain.eval()(x, edges)
    ranks = []
    for position, (u, v) in enumerate(pairs.T.tolist()):
        word = scalar.mix(3, 4, position)
        others = [scalar.bounded(scalar.mix(word, slot), VERTICES) for slot in range(num_negatives)]
        score = float(z[u] @ z[v])
        found = [float(z[u] @ z[w]) for w in others]
        above = sum(other > score + 1e-12 for other in found)
        ties = sum(abs(other - score) <= 1e-12 for other in found)
        ranks.append(1 + above + ties / 2)
    scores = gsplit.evaluate_links(
        model, store, pairs, metrics=("mrr", "hits@1", "hits@5"), num_negatives=num_negatives, seed=3
    )
    assert scores["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]), abs=1e-12)
    assert scores["hits@1"] == pytest.approx(np.mean([rank <= 1 for rank in ranks]), abs=1e-12)
    assert scores["hits@5"] == pytest.approx(np.mean([rank <= 5 for rank in ranks]), abs=1e-12)


def test_ties_count_half_and_nan_loses() -> None:
    nan = float("nan")
    others = torch.tensor([[1.0, 1.0, 0.0], [nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert ranks_among(torch.tensor([1.0, 1.0, nan]), others).tolist() == [2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["auc"]}, "metrics: expected mrr or hits@K .got auc"),
        ({"metrics": ["hits@0"]}, "metrics: expected mrr or hits@K .got hits@0"),
        ({"metrics": []}, "metrics: expected at least one"),
        ({"num_negatives": 0}, "num_negatives: expected a positive number .got 0"),
        ({"pairs": torch.zeros(2, 0, dtype=torch.int64)}, "pairs: expected at least one pair .got 0 pairs"),
        ({"pairs": torch.tensor([[0], [VERTICES]])}, f"pairs: expected original ids in 0..{VERTICES - 1} .got 90..90"),
        ({"decoder": lambda src, dst: src[:, :2]}, "decoder: expected 46 scores"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    store, _ = link_store("mixed")
    pairs = options.pop("pairs", pairs_of())
    with pytest.raises(InputError, match=message):
        gsplit.evaluate_links(_model(), store, pairs, **{"num_negatives": 3, **options})


def test_a_model_that_decodes_pairs_needs_a_decoder() -> None:
    store, _ = link_store("mixed")
    model = gsplit.parallelize(PairScores().double(), solo_mesh())
    with pytest.raises(InputError, match="decoder: expected a function, because the model decodes pairs itself"):
        gsplit.evaluate_links(model, store, pairs_of())
