"""LABOR, weighted and replacing draws: what the definition says, by the right law, on any ranks and any numbering."""

import json
from collections import Counter
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from simulated import CPU, NONE, mixed_ids, shaped_graphs

from gsplit.errors import InputError, StoreError
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership, own_equally
from gsplit.keys import scalar
from gsplit.minibatch.split import split_in_one_process
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import open_draw
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler, TorchNeighborSampler
from gsplit.store.in_memory import MemoryStore, renumbered_store

GOLDEN = Path(__file__).parents[2] / "assets" / "golden" / "draws.json"
LABOR = DrawOptions(sampler="labor")
WEIGHTED = DrawOptions(weight_attr="w")
BOTH = DrawOptions(sampler="labor", weight_attr="w")
REPLACE = DrawOptions(replace=True)
OPTIONS = [LABOR, WEIGHTED, BOTH, REPLACE]
named = pytest.mark.parametrize("options", OPTIONS, ids=str)


def _store(src: Any, dst: Any, weights: Any, parts: Any, dtype: str = "float64") -> MemoryStore:
    return renumbered_store(np.asarray(src), np.asarray(dst), np.asarray(parts), {}, {}, {"w": (weights, dtype)})


def _sampler(
    store: MemoryStore, options: DrawOptions, first: int = 0, stop: int | None = None, *, use_torch: bool = False
) -> HostNeighborSampler | TorchNeighborSampler:
    stop = store.num_vertices if stop is None else stop
    graph = store.graph.restrict(first, stop)
    original = store.original_ids(first, stop)
    draw = open_draw(options, store, graph)
    if use_torch:
        return TorchNeighborSampler(graph, original, CPU, edge_ids=True, draw=draw)
    return HostNeighborSampler(graph, original, edge_ids=True, draw=draw)


def _defined(
    options: DrawOptions, key: int, vertex: int, sources: list[int], weights: list[float], k: int
) -> list[int]:
    """The picked positions of a column by the book: sort everything. The hash is written out again."""

    def mix(state: int, part: int) -> int:
        z = (state + (part + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    of_vertex = mix(key, vertex)
    if options.replace and k > 0:
        return [((mix(of_vertex, slot) >> 32) * len(sources)) >> 32 for slot in range(k if sources else 0)]
    positions = list(range(len(sources)))
    words = [mix(key, source) if options.sampler == "labor" else mix(of_vertex, j) for j, source in enumerate(sources)]
    numbers: list[float] = list(words)
    if options.weight_attr is not None:
        positions = [j for j in positions if weights[j] > 0]
        numbers = [scalar.neg_log2(word) / w if w > 0 else 0.0 for word, w in zip(words, weights, strict=True)]
    if k < 0:
        return positions
    return sorted(sorted(positions, key=lambda j: (numbers[j], j))[:k])


@st.composite
def weighted_graphs(draw: st.DrawFn) -> tuple[int, Any, Any, Any]:
    """Graphs with parallel edges and hubs; weights with many zeros, vertices without any, equal and tiny ones."""
    n, src, dst = draw(shaped_graphs())
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    weights = rng.exponential(1.0, src.size) * (rng.random(src.size) > draw(st.sampled_from([0.0, 0.2, 0.9, 1.0])))
    weights[dst == draw(st.integers(0, n - 1))] = draw(st.sampled_from([0.0, 1.0, 1e-290]))
    return n, src, dst, weights


@given(
    weighted_graphs(),
    st.sampled_from(OPTIONS),
    st.lists(st.one_of(st.just(-1), st.integers(1, 9), st.just(70)), min_size=1, max_size=3),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.data(),
)
def test_layers_are_what_the_definition_says(
    graph: tuple[int, Any, Any, Any], options: DrawOptions, fanouts: list[int], seed: int, use_torch: bool, data: Any
) -> None:
    n, src, dst, weights = graph
    store = _store(src, dst, weights, data.draw(st.permutations(range(n))))
    original = store.original_ids()
    stored = store.stored_array("edges/w")
    targets = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=8))
    key = StepKey(seed, 3, 5)
    sampler = _sampler(store, options, use_torch=use_torch)
    batch = sample_minibatch(sampler, torch.tensor(targets, dtype=torch.int64), fanouts, key)
    ids = batch.input_ids.numpy()
    for hop, fanout in enumerate(fanouts):
        layer = len(fanouts) - 1 - hop
        block = batch.blocks[layer]
        assert block.edge_ids is not None
        for row in range(block.num_dst):
            v = int(original[ids[row]])
            edges = sorted(zip(src[dst == v].tolist(), weights[dst == v].tolist(), strict=True))
            sources, of_edges = [s for s, _ in edges], [w for _, w in edges]
            want = [edges[j] for j in _defined(options, key.layer(layer), v, sources, of_edges, fanout)]
            drawn = slice(int(block.indptr[row]), int(block.indptr[row + 1]))
            found = original[ids[block.src_rows[drawn].numpy()]].tolist()
            assert list(zip(found, stored[block.edge_ids[drawn].numpy()].tolist(), strict=True)) == want


def _skewed() -> tuple[int, Any, Any, Any]:
    rng = np.random.default_rng(5)
    n, num_edges = 400, 6000
    src, dst = rng.integers(0, n, num_edges), rng.integers(0, n, num_edges) ** 2 // n
    return n, src, dst, rng.exponential(1.0, num_edges) * (rng.random(num_edges) > 0.1)


def _edges_by_layer(store: MemoryStore, ownership: Ownership, options: DrawOptions, *, use_torch: bool) -> Any:
    """A split mini-batch as {destination: sources in the order drawn} of every layer, and its input rows."""
    original = torch.from_numpy(store.original_ids())
    internal = torch.from_numpy(np.argsort(store.original_ids()))
    samplers = [
        _sampler(store, options, *ownership.range_of(rank), use_torch=use_torch) for rank in range(ownership.num_ranks)
    ]
    targets = internal[torch.arange(0, 400, 7)]
    splits = split_in_one_process(samplers, targets, [5, 4, -1], StepKey(3, 1, 4, options.layer_dependency), ownership)
    layers = []
    for layer in range(3):
        found: dict[int, list[int]] = {}
        for split, ids in zip(splits, mixed_ids(splits, layer), strict=True):
            block = split.layers[layer].block
            names = original[ids]
            sources = names[block.src_rows].split(block.indptr.diff().tolist())
            for v, of_v in zip(names[: block.num_dst].tolist(), sources, strict=True):
                assert v not in found, "a vertex drawn on two ranks"
                found[v] = of_v.tolist()
        layers.append(found)
    return layers, sorted(v for split in splits for v in original[split.input_ids].tolist())


@pytest.mark.parametrize("layer_dependency", [False, True])
@named
def test_ranks_and_numbering_do_not_change_the_mini_batch(options: DrawOptions, layer_dependency: bool) -> None:
    n, src, dst, weights = _skewed()
    given_options = DrawOptions(
        sampler=options.sampler,
        weight_attr=options.weight_attr,
        replace=options.replace,
        layer_dependency=layer_dependency,
    )
    want: Any = None
    for numbering in range(3):
        parts = np.random.default_rng(numbering).permutation(n) if numbering else np.zeros(n, np.int64)
        store = _store(src, dst, weights, parts)
        for ranks in (1, 2, 3, 4):
            use_torch = ranks == 3
            found = _edges_by_layer(store, own_equally(n, ranks), given_options, use_torch=use_torch)
            want = want or found
            assert found == want, (numbering, ranks)
    layers, inputs = want
    assert sum(len(sources) for layer in layers for sources in layer.values()) > 1000 and len(inputs) > 300
    shared = layers[1].keys() & layers[2].keys()  # fanouts 4 and 5: with one key the smaller draw is a part
    nested = [v for v in shared if Counter(layers[1][v]) <= Counter(layers[2][v])]
    assert (len(nested) == len(shared)) == layer_dependency


@named
def test_a_recorded_sample_does_not_change(options: DrawOptions) -> None:
    """From a file: a change of a hash, of the logarithm or of an order makes runs differ from what they were."""
    n, src, dst, weights = _skewed()
    store = _store(src, dst, weights, np.zeros(n, np.int64))
    frontier = _sampler(store, options).start(torch.arange(0, n, 40))
    drawn = frontier.sample_layer(StepKey(1, 2, 3).layer(0), 4)
    assert drawn.edge_ids is not None
    found = [part.tolist() for part in drawn.edge_ids.split(drawn.indptr.diff().tolist())]
    assert found == json.loads(GOLDEN.read_text())[str(options)]


def _column(weights: npt.NDArray[np.float64], vertices: int) -> MemoryStore:
    """Vertices with the same in-edges."""
    degree = weights.size
    src = np.tile(np.arange(vertices, vertices + degree), vertices)
    dst = np.repeat(np.arange(vertices), degree)
    return _store(src, dst, np.tile(weights, vertices), np.zeros(vertices + degree, np.int64))


def _subsets(options: DrawOptions, weights: npt.NDArray[np.float64], k: int, trials: int) -> Counter[tuple[int, ...]]:
    """How often each set of positions is drawn by one vertex over some steps."""
    sampler = _sampler(_column(weights, 1), options)
    found: Counter[tuple[int, ...]] = Counter()
    for step in range(trials):
        frontier = sampler.start(torch.tensor([0]))
        edges = frontier.sample_layer(StepKey(1, 0, step).layer(0), k).edge_ids
        assert edges is not None
        found[tuple(sorted(edges.tolist()))] += 1
        frontier.close()
    return found


def _successive(weights: npt.NDArray[np.float64]) -> dict[tuple[int, ...], float]:
    """The law of two draws without replacement, each in proportion to the weights that are left."""
    p = weights / weights.sum()
    law: dict[tuple[int, ...], float] = {}
    for a, b in permutations(range(weights.size), 2):
        pair = (min(a, b), max(a, b))
        law[pair] = law.get(pair, 0.0) + float(p[a] * p[b] / (1 - p[a]))
    return law


@pytest.mark.parametrize("unit", [1.0, 1e-288])  # only proportions matter
@pytest.mark.parametrize("options", [LABOR, WEIGHTED, BOTH], ids=str)
def test_subsets_have_the_law_of_the_sampler(options: DrawOptions, unit: float) -> None:
    trials = 20_000
    weights = np.array([1.0, 2.0, 3.0, 4.0, 8.0, 0.5]) * unit
    law = dict.fromkeys(combinations(range(6), 2), 1 / 15) if options == LABOR else _successive(weights)
    found = _subsets(options, weights, 2, trials)
    assert set(found) <= set(law)
    statistic = sum((found[pair] - trials * share) ** 2 / (trials * share) for pair, share in law.items())
    assert 1e-4 < chi2.sf(statistic, len(law) - 1) < 1 - 1e-4


def test_draws_with_replacement_are_multinomial() -> None:
    trials = 20_000
    found = _subsets(REPLACE, np.ones(4), 2, trials)
    law = dict.fromkeys(combinations(range(4), 2), 1 / 8) | {(i, i): 1 / 16 for i in range(4)}
    assert set(found) == set(law)
    statistic = sum((found[pair] - trials * share) ** 2 / (trials * share) for pair, share in law.items())
    assert 1e-4 < chi2.sf(statistic, len(law) - 1) < 1 - 1e-4


@pytest.mark.parametrize("use_torch", [False, True])
def test_parallel_edges_are_taken_in_the_order_of_their_positions(use_torch: bool) -> None:
    """Trap 5: in LABOR all edges from one source have one number. Weights name the positions."""
    src, dst = np.repeat([1, 2], 6), np.zeros(12, np.int64)
    store = _store(src, dst, np.tile(np.arange(1.0, 7.0), 2), np.zeros(3, np.int64))
    sampler = _sampler(store, LABOR, use_torch=use_torch)
    firsts = set()
    for step in range(20):
        block = sample_minibatch(sampler, torch.tensor([0]), [8], StepKey(1, 0, step)).blocks[0]
        assert block.edge_ids is not None
        first = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 6, 7, 8, 9, 10, 11]
        assert block.edge_ids.tolist() in first
        firsts.add(tuple(block.edge_ids.tolist()))
    assert len(firsts) == 2  # either source is preferred at some step


def test_labor_has_correlated_samples() -> None:
    """Trap 6: many vertices share their sources, so the error of a sum over them does not average out."""
    n, degree, fanout, steps = 60, 20, 5, 200
    src, dst = np.tile(np.arange(degree), n), np.repeat(np.arange(n), degree)
    store = _store(src, dst, np.ones(src.size), np.zeros(n, np.int64))
    value = np.linspace(-1.0, 1.0, degree)
    error = {}
    for options in (DrawOptions(), LABOR):
        sampler = _sampler(store, options)
        sums = []
        for step in range(steps):
            batch = sample_minibatch(sampler, torch.arange(n), [fanout], StepKey(1, 0, step))
            sums.append(value[batch.input_ids[batch.blocks[0].src_rows].numpy()].mean())
        error[options.sampler] = float(np.mean(np.square(sums)))
    assert error["labor"] > 20 * error["uniform"]  # 60 times if all choose alike


def test_labor_draws_the_same_sources_for_equal_columns_and_uniform_does_not() -> None:
    store = _column(np.arange(1.0, 31.0), 50)
    for options, distinct in ((LABOR, 5), (BOTH, 5), (DrawOptions(), 30), (WEIGHTED, 30)):
        frontier = _sampler(store, options).start(torch.arange(50))
        drawn = frontier.sample_layer(9, 5)
        assert drawn.num_edges == 250
        assert (frontier.num_rows - 50 == distinct) or (distinct == 30 and frontier.num_rows - 50 > 20)


@named
def test_host_and_torch_agree_on_a_hub_of_many_chunks(options: DrawOptions) -> None:
    rng = np.random.default_rng(2)
    n, degree = 3000, 20_000
    src = rng.integers(0, n, degree)  # every source several times: equal hashes
    weights = rng.choice([0.0, 0.5, 1.0, 1e-3, 1e6], degree)
    store = _store(src, np.zeros(degree, np.int64), weights, rng.permutation(n), "float64")
    hub = int(np.flatnonzero(store.original_ids() == 0)[0])
    for fanout in (1, 15, 255, 256, 257, 1000, 19_999, 20_000, -1):
        host, there = (
            _sampler(store, options, use_torch=use_torch).start(torch.tensor([hub])).sample_layer(77, fanout).edge_ids
            for use_torch in (False, True)
        )
        assert host is not None and there is not None and torch.equal(host, there)
        assert options.replace or fanout < 0 or host.numel() <= fanout


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "bool", "bfloat16"])
def test_weights_of_any_number_type_draw_as_float64_ones(dtype: str) -> None:
    n, src, dst, _ = _skewed()
    values = torch.arange(src.size) % (2 if dtype == "bool" else 5)
    stored = values.to(getattr(torch, dtype))
    array = (stored.view(torch.uint16) if dtype == "bfloat16" else stored).numpy()
    layers = []
    for weights, kind in ((array, dtype), (values.double().numpy(), "float64")):
        frontier = _sampler(_store(src, dst, weights, np.zeros(n, np.int64), kind), WEIGHTED).start(torch.arange(n))
        layers.append(frontier.sample_layer(5, 4).edge_ids)
    assert layers[0] is not None and layers[1] is not None and torch.equal(layers[0], layers[1])


@pytest.mark.parametrize(
    "weights, message",
    [
        (
            np.array([1.0, -0.5, 1.0]),
            r"edges/w: expected finite weights, each 0 or at least 1e-290 .got -0.5 of edge 1",
        ),
        (np.array([1.0, 0.0, 1e-300]), "got 1e-300 of edge 2"),  # all would be drawn as if equal
        (np.array([1.0, 1.0, np.inf]), r"got inf of edge 2"),
        (np.array([np.nan, 1.0, 1.0]), r"got nan of edge 0"),
        (np.ones((3, 2)), r"edges/w: expected one number per edge .got float64 .3, 2."),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights: Any, message: str) -> None:
    store = _store([0, 1, 2], [0, 1, 2], weights, [0, 0, 0])
    with pytest.raises(InputError, match=message):
        open_draw(WEIGHTED, store, store.graph)


def test_weights_are_checked_in_the_range_of_the_rank_alone() -> None:
    store = _store([0, 1, 2], [0, 1, 2], np.array([1.0, 2.0, -1.0]), [0, 0, 0])
    assert open_draw(WEIGHTED, store, store.graph.restrict(1, 2)).weights.tolist() == [2.0]


def test_options_that_contradict_or_do_not_exist_are_refused() -> None:
    store = _store([0], [0], np.ones(1), [0])
    with pytest.raises(InputError, match="weight_attr: expected the name of a stored per-edge array .got 'v'; .* w"):
        open_draw(DrawOptions(weight_attr="v"), store, store.graph)
    for arguments, message in (
        ({"sampler": "labor", "replace": True}, "replace: expected the uniform sampler without weights .got .* labor"),
        ({"weight_attr": "w", "replace": True}, "replace: expected .* weight_attr w"),
        ({"sampler": "labor-i"}, "labor-i looks at all vertices of the layer, .* use sampler='labor'"),
        ({"sampler": "labor-*"}, "looks at all vertices"),
        ({"sampler": "LADIES"}, "LADIES looks at all vertices"),
        (
            {"sampler": "fastgcn"},
            "sampler: expected a sampler whose draws for a vertex depend on this vertex .*fastgcn",
        ),
        ({"sampler": "weighted"}, "weight_attr='edge_weight'"),
        ({"sampler": "replace"}, "replace=True"),
        ({"sampler": "walk"}, "expected 'uniform' or 'labor', .* .got 'walk'.*add-a-sampler"),
        ({"sampler": 3}, "expected 'uniform' or 'labor', .* .got 3"),
    ):
        with pytest.raises(InputError, match=message):
            DrawOptions(**arguments)


def test_a_damaged_graph_is_a_message_not_a_stray_read() -> None:
    good = _store([0, 1, 2, 0, 1], [0, 0, 0, 0, 1], np.ones(5), [0, 1, 2])
    for options in (LABOR, BOTH):
        draw = open_draw(options, good, good.graph)
        damaged = Graph(good.graph.indptr, np.array([0, 1, 99, 0, 1]), 3)
        with pytest.raises(StoreError, match=r"got ids 0..99, of 3 vertices.*gsplit inspect --verify"):
            HostNeighborSampler(damaged, NONE, draw=draw).start(torch.tensor([0])).sample_layer(1, 2)
    for options in OPTIONS:
        draw = open_draw(options, good, good.graph)
        damaged = Graph(np.array([0, 2**61, 5, 5]), good.graph.indices, 3)
        with pytest.raises(StoreError, match=r"at vertex 0, of 5 edges"):
            HostNeighborSampler(damaged, NONE, draw=draw).start(torch.tensor([0])).sample_layer(1, 2)
    huge = Graph(np.array([0, 2**33]), np.broadcast_to(np.zeros(1, np.int32), 2**33), 1)
    draw = open_draw(REPLACE, good, good.graph)
    with pytest.raises(StoreError, match=r"fewer than 2\*\*32 in-edges per vertex"):
        HostNeighborSampler(huge, NONE, draw=draw).start(torch.tensor([0])).sample_layer(1, 2)
