"""Rankings of pairs are those of a loop over the whole graph, with OGB's rule for ties."""

from typing import Any

import numpy as np
import pytest
import torch
from link_programs import VERTICES, PairScores, link_store, pairs_of
from torch_geometric.nn import GraphSAGE
from typed_link_programs import COUNTS, LIKE, METRICS, RATES, make_encoder, plain_rows, rated, with_stored_negatives
from typed_link_programs import link_store as typed_link_store

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.inference.evaluate_links import ranks_among
from gsplit.keys import scalar
from gsplit.store.in_memory import MemoryStore

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
        others = [scalar.scaled(scalar.mix(word, slot), VERTICES) for slot in range(num_negatives)]
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
        ({"metrics": ["auc"]}, "metric: expected mrr or hits@K for pairs .got auc"),
        ({"metrics": ["myhits@5"]}, "metric: expected mrr or hits@K for pairs .got myhits@5"),
        ({"metrics": [5]}, "metric: expected mrr or hits@K for pairs .got 5"),
        ({"metrics": ["hits@0"]}, "metric: expected mrr or hits@K for pairs .got hits@0"),
        ({"metrics": []}, "metric: expected at least one"),
        ({"num_negatives": 0}, "num_negatives: expected a positive number for each pair .got 0"),
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


@pytest.mark.parametrize("size", [5, 1 << 16])
def test_many_candidates_are_ranked_in_slices(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A round of 5 endpoints: 23 candidates of a pair come in 5 slices, and the ranks are the same."""
    store, _ = link_store("mixed")
    monkeypatch.setattr("gsplit.inference.evaluate_links._ROUND_ENDPOINTS", size)
    most = 0

    def score(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, src.size(0))
        return (src * dst).sum(-1)

    metrics = ("mrr", "hits@1", "hits@5")
    found = gsplit.evaluate_links(_model(), store, pairs_of(), metrics=metrics, num_negatives=23, decoder=score)
    assert most == min(size, 46 * 23)
    monkeypatch.undo()
    assert found == gsplit.evaluate_links(_model(), store, pairs_of(), metrics=metrics, num_negatives=23)


def test_a_candidate_that_is_the_destination_is_a_tie_for_every_decoder() -> None:
    """A linear layer may round the same row differently in another batch of rows."""
    store, _ = link_store("mixed")
    pairs = pairs_of()
    negatives = pairs[1].unsqueeze(1).repeat(1, 30).numpy()
    arrays = store.arrays | {"pairs/test": pairs.T.numpy(), "pair_negatives/test": negatives}
    named = MemoryStore(store.graph, store.part_boundaries, arrays, store.dtypes)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1)).double()
    found = gsplit.evaluate_links(_model(), named, "test", metrics=["mrr"], decoder=lambda a, b: layers(a * b))
    assert found["mrr"] == pytest.approx(1 / 16, abs=1e-12)
    none = MemoryStore(
        store.graph, store.part_boundaries, arrays | {"pair_negatives/test": negatives[:, :0]}, store.dtypes
    )
    with pytest.raises(InputError, match="pair_negatives/test: expected a positive number for each pair .got 0"):
        gsplit.evaluate_links(_model(), none, "test")


def test_a_model_that_decodes_pairs_needs_a_decoder() -> None:
    store, _ = link_store("mixed")
    model = gsplit.parallelize(PairScores().double(), solo_mesh())
    with pytest.raises(InputError, match="decoder: expected a function, because the model decodes pairs itself"):
        gsplit.evaluate_links(model, store, pairs_of())


def _loop(z_src: Any, z_dst: Any, pairs: Any, others: list[list[int]]) -> list[float]:
    """Rankings of pairs, one by one; ties count half."""
    ranks = []
    for (u, v), candidates in zip(pairs.T.tolist(), others, strict=True):
        score = float(z_src[u] @ z_dst[v])
        found = [float(z_src[u] @ z_dst[w]) for w in candidates]
        above = sum(other > score + 1e-12 for other in found)
        ties = sum(abs(other - score) <= 1e-12 for other in found)
        ranks.append(1 + above + ties / 2)
    return [
        float(np.mean([1 / rank for rank in ranks])),
        *(float(np.mean([rank <= most for rank in ranks])) for most in (1, 5)),
    ]


@pytest.mark.parametrize("edge_type", [RATES, LIKE])
def test_rankings_of_types_equal_a_loop_over_all_pairs(edge_type: Any) -> None:
    """Keyed negatives by Python integers, among the vertices of the destination's type, and PyG's model."""
    store = with_stored_negatives(typed_link_store(3))
    model = gsplit.parallelize(make_encoder(), solo_mesh(), graph=store)
    z = plain_rows(model.state_dict())
    pairs = torch.from_numpy(rated()[:, ::3]).clamp(max=COUNTS["user"] - 1)
    keyed = []
    for position in range(pairs.size(1)):
        word = scalar.mix(3, 4, position)
        keyed.append([scalar.scaled(scalar.mix(word, slot), COUNTS["item"]) for slot in range(9)])
    wanted = _loop(z[edge_type[0]], z["item"], pairs, keyed)
    found = gsplit.evaluate_links(model, store, (edge_type, pairs), metrics=METRICS, num_negatives=9, seed=3)
    assert list(found.values()) == pytest.approx(wanted, abs=1e-12)
    stored = store.stored_array("pair_negatives/test").tolist()
    wanted = _loop(z[edge_type[0]], z["item"], torch.from_numpy(store.pairs("test").T), stored)
    found = gsplit.evaluate_links(model, store, (edge_type, "test"), metrics=METRICS)
    assert list(found.values()) == pytest.approx(wanted, abs=1e-12)


def test_wrong_pairs_of_types_are_refused() -> None:
    store = with_stored_negatives(typed_link_store(2))
    model = gsplit.parallelize(make_encoder(), solo_mesh(), graph=store)
    pairs = torch.from_numpy(rated()[:, :5])
    for given, message in (
        (pairs, r"pairs: expected \(edge type, pairs\) for a heterogeneous graph .got Tensor"),
        ("test", "for a heterogeneous graph .got str"),
        ((("item", "back", "user"), pairs), "where the type is one of"),
        ((RATES, pairs + 45), "pairs: expected ids in 0..39 of user"),
    ):
        with pytest.raises(InputError, match=message):
            gsplit.evaluate_links(model, store, given, num_negatives=3)
    far = store.arrays | {"pair_negatives/test": store.arrays["pair_negatives/test"] + COUNTS["item"] - 1}
    damaged = MemoryStore(store.graph, store.part_boundaries, far, store.dtypes, types=store.types)
    with pytest.raises(InputError, match="pairs: expected original ids in 0..59"):
        gsplit.evaluate_links(model, damaged, (RATES, "test"))
