"""Counts of a strategy are what sets of vertices say, layer by layer and rank by rank."""

from dataclasses import replace

import pytest
import torch
from simulated import memory_store

from gsplit.errors import InputError
from gsplit.graph.ownership import own_equally
from gsplit.minibatch.strategy_names import all_strategies, parse_strategy
from gsplit.partitioning.presample import Workload
from gsplit.planner.counts import RankCounts, StrategyCounts, count_strategies
from gsplit.planner.disk import count_reads
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import Draw
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.targets import LocalTargets

NUM_VERTICES, FANOUT, BATCH, RANKS, LAYERS = 400, [3, 4, 2], 40, 3, 3
OWNERSHIP = own_equally(NUM_VERTICES, RANKS)
NAMES = [spec.name for spec in all_strategies(LAYERS)]
KEY = StepKey(3, 0, 0)
Vertices = set[int]


@pytest.fixture(scope="module")
def workload() -> Workload:
    generator = torch.Generator().manual_seed(5)
    src, dst = torch.randint(NUM_VERTICES, (2, 4000), generator=generator).numpy()
    store = memory_store(NUM_VERTICES, src, dst)
    targets = torch.randperm(NUM_VERTICES, generator=generator)[:120].sort().values.numpy()
    return Workload(store.graph, store.original_ids()[:0], targets, FANOUT, BATCH, seed=KEY.seed)


@pytest.fixture(scope="module")
def counted(workload: Workload) -> dict[str, StrategyCounts]:
    return dict(zip(NAMES, count_strategies(workload, OWNERSHIP, NAMES, steps=1), strict=True))


def test_the_sampler_of_training_is_counted(workload: Workload) -> None:
    draw = Draw(DrawOptions(sampler="labor", layer_dependency=True))
    labor = replace(workload, draw=draw)
    sampler = HostNeighborSampler(workload.graph, workload.original_ids, draw=draw)
    targets = LocalTargets(workload.targets.argsort(), workload.targets, workload.targets.size)
    batch = targets.for_step(KEY.seed, 0, 0, BATCH, shuffle=True)
    want = sample_minibatch(sampler, batch, FANOUT, StepKey(KEY.seed, 0, 0, layer_dependency=True))
    for strategy in ("split", "hybrid(1)"):
        (found,) = count_strategies(labor, OWNERSHIP, [strategy], steps=1)
        assert found.rows_loaded == want.input_ids.numel()
    (uniform,) = count_strategies(workload, OWNERSHIP, ["split"], steps=1)
    assert found.rows_loaded < uniform.rows_loaded
    assert count_reads(labor, [1 << 20], steps=1).num_bytes < count_reads(workload, [1 << 20], steps=1).num_bytes


class Oracle:
    """What every vertex draws at every layer; the rest is sets."""

    def __init__(self, workload: Workload) -> None:
        everything = torch.arange(NUM_VERTICES)
        sampler = HostNeighborSampler(workload.graph, workload.original_ids)
        self.drawn = []
        for layer in range(LAYERS):
            frontier = sampler.start(everything)
            drawn = frontier.sample_layer(KEY.layer(layer), FANOUT[LAYERS - 1 - layer])
            self.drawn.append([part.tolist() for part in drawn.sources.split(drawn.indptr.diff().tolist())])
            frontier.close()
        targets = LocalTargets(workload.targets.argsort(), workload.targets, workload.targets.size)
        self.targets = targets.for_step(KEY.seed, 0, 0, BATCH, shuffle=True).tolist()

    def frontier(self, vertices: Vertices, level: int, top: int = LAYERS) -> Vertices:
        """The sources of layer ``level`` below destinations ``vertices`` of layer ``top - 1``."""
        for layer in range(top - 1, level - 1, -1):
            vertices = vertices | {source for v in vertices for source in self.drawn[layer][v]}
        return vertices

    def edges(self, vertices: Vertices, layer: int) -> int:
        return sum(len(self.drawn[layer][v]) for v in vertices)


def owned(vertices: Vertices, rank: int) -> Vertices:
    first, stop = OWNERSHIP.range_of(rank)
    return {v for v in vertices if first <= v < stop}


@pytest.fixture(scope="module")
def oracle(workload: Workload) -> Oracle:
    return Oracle(workload)


def expected(oracle: Oracle, name: str, rank: int) -> RankCounts:
    """Layer after layer: who computes which destinations, from which sources, and where those come from."""
    spec = parse_strategy(name, LAYERS)
    everyone = range(RANKS)
    targets, by_owner = oracle.targets, spec.targets == "owner"
    micro = [owned(set(targets), r) if by_owner else set(targets[r::RANKS]) for r in everyone]
    own_from = spec.split_layers or 0
    levels = [[oracle.frontier(micro[r], level) for r in everyone] for level in range(LAYERS + 1)]  # [level][rank]
    whole = set().union(*levels[own_from])
    edges, destinations, sources, sent, received = [], [], [], [], []
    for layer in range(LAYERS):
        if layer >= own_from:
            need = [levels[layer + 1][r] for r in everyone]
            rows = [levels[layer][r] for r in everyone]
        else:
            top = oracle.frontier(whole, layer + 1, own_from)
            need = [owned(top, r) for r in everyone]
            rows = [n | {s for v in n for s in oracle.drawn[layer][v]} for n in need]
            rows = [rows[r] | owned(set().union(*rows), r) for r in everyone]  # what others need of the owner
        edges.append(oracle.edges(need[rank], layer))
        destinations.append(len(need[rank]))
        sources.append(len(rows[rank]))
        if layer in spec.exchanged_levels:
            sent.append(sum(len(owned(rows[r], rank)) for r in everyone if r != rank))
            received.append(len(rows[rank] - owned(rows[rank], rank)))
        else:
            sent.append(0)
            received.append(0)
    inputs = oracle.frontier(whole, 0, own_from)
    if spec.split_layers is not None:
        loaded = len(owned(inputs, rank))
    else:
        loaded = len(levels[0][rank])
    asked, asking = sum(received), sum(sent)
    return RankCounts(
        len(micro[rank]),
        tuple(edges),
        tuple(destinations),
        tuple(sources),
        loaded,
        tuple(sent),
        tuple(received),
        asked,
        asking,
        sum(edges),
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_does_what_sets_say(name: str, counted: dict[str, StrategyCounts], oracle: Oracle) -> None:
    for rank in range(RANKS):
        assert counted[name].ranks[rank] == expected(oracle, name, rank), (name, rank)


def test_split_computes_the_minibatch_once(counted: dict[str, StrategyCounts], workload: Workload) -> None:
    batch = sample_minibatch(
        HostNeighborSampler(workload.graph, workload.original_ids),
        torch.tensor(Oracle(workload).targets),
        FANOUT,
        KEY,
    )
    split, data = counted["split"], counted["data"]
    assert split.num_edges == sum(block.num_edges for block in batch.blocks) < data.num_edges
    for name in ("split", "hybrid(1)", "data_cached"):  # each input row is read once
        assert counted[name].rows_loaded == pytest.approx(batch.input_ids.numel())
    assert data.rows_loaded > split.rows_loaded and data.rows_sent == 0 < split.rows_sent
    assert data.edge_imbalance >= 1


def test_with_targets_at_their_owners_splitting_the_top_layer_changes_nothing(
    counted: dict[str, StrategyCounts],
) -> None:
    """Targets are distinct, so the top layer has the same edges, and the same rows cross below it."""

    def work(name: str) -> list[tuple[object, ...]]:
        return [(rank.edges, rank.rows_sent, rank.rows_loaded) for rank in counted[name].ranks]

    assert work("hybrid(2)") == work("split") != work("hybrid(1)")


def test_steps_are_averaged(workload: Workload) -> None:
    one, two = (count_strategies(workload, OWNERSHIP, ["split"], steps=steps)[0] for steps in (1, 2))
    other = count_strategies(workload, OWNERSHIP, ["split"], steps=3)[0]
    assert two.num_steps == 2 and two.num_edges != one.num_edges
    assert two.ranks[0].edges[0] * 2 != other.ranks[0].edges[0] * 3
    assert sum(rank.targets for rank in two.ranks) == BATCH


def test_replicas_take_strided_cuts(workload: Workload, oracle: Oracle) -> None:
    """Two replicas of one rank each are data parallelism on two ranks."""
    alone = own_equally(NUM_VERTICES, 1)
    pair = count_strategies(workload, alone, ["split"], replicas=2, steps=1)[0]
    data = count_strategies(workload, own_equally(NUM_VERTICES, 2), ["data"], steps=1)[0]
    assert pair.ranks == data.ranks and pair.replicas == 2


def test_impossible_counts_are_refused(workload: Workload) -> None:
    with pytest.raises(InputError, match="1 to 3 steps"):
        count_strategies(workload, OWNERSHIP, ["split"], steps=4)
    for name in ("hybrid(4)", "hybrid", "split(2)", "nothing"):
        with pytest.raises(InputError, match="strategy: expected (split, data|hybrid)"):
            parse_strategy(name, LAYERS)
