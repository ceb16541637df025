"""Pairs with times in one process: the edges that a loop in Python draws, PyG's outputs, and refusals."""

from typing import Any

import pytest
import torch
from temporal_link_programs import (
    FANOUTS,
    Row,
    TimedLinkCase,
    TimedLinkResult,
    record_step,
    timed_link_loader,
    timed_pairs,
)
from temporal_programs import WIDTH, temporal_edges, temporal_store
from torch_geometric.data import HeteroData
from torch_geometric.nn import GCN, GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.keys import scalar
from gsplit.sampling.minibatch import StepKey


def _drawn(row: Row, key: int, fanout: int, *, last: bool, left_out: set[tuple[int, int]]) -> list[tuple[Row, int]]:
    """The sources of a row and the times of the edges, by a loop over all edges."""
    vertex, until = row
    edges = zip(*(values.tolist() for values in temporal_edges()), strict=True)
    early = sorted((time, source) for source, dst, time in edges if dst == vertex and time <= until)
    taken = list(range(len(early)))
    if len(early) > fanout and last:
        taken = taken[-fanout:]
    elif len(early) > fanout:
        taken = []
        word = scalar.mix(key, scalar.mix(vertex, until))
        for slot in range(fanout):
            largest = len(early) - fanout + slot
            position = scalar.scaled(scalar.mix(word, slot), largest + 1)
            taken.append(largest if position in taken else position)
    found = [early[position] for position in taken]
    return [((source, until), time) for time, source in found if (source, vertex) not in left_out]


@pytest.mark.parametrize("temporal_strategy", ["uniform", "last"])
@pytest.mark.parametrize(("negatives", "exclude"), [("binary", "reverse"), ("triplet", True), ("binary", False)])
def test_the_edges_are_those_of_a_loop(temporal_strategy: str, negatives: str, exclude: Any) -> None:
    pairs, times = timed_pairs()
    case = TimedLinkCase(temporal_strategy=temporal_strategy, negatives=negatives, exclude=exclude)
    loader = timed_link_loader(solo_mesh(), case)
    num_left_out = 0
    for step in range(len(loader)):
        result = TimedLinkResult()
        record_step(loader.make_batch(1, step), result)
        own = result.positions[0]
        seeds = {(tuple(pairs[:, place].tolist()), int(times[place])) for place in own}
        ends = {((u, t), (v, t)) for (u, v), t in seeds}
        assert ends <= set(result.pairs[0])  # both endpoints at the time of the pair
        left_out = {pair for pair, _ in seeds} if exclude else set()
        if exclude == "reverse":
            left_out |= {(v, u) for u, v in left_out}
        rows = {row for pair in result.pairs[0] for row in pair}
        wanted = []
        for layer, fanout in ((1, FANOUTS[0]), (0, FANOUTS[1])):
            key = StepKey(5, 1, step).layer(layer)
            last = temporal_strategy == "last"
            drawn = {row: _drawn(row, key, fanout, last=last, left_out=left_out) for row in rows}
            every = {row: _drawn(row, key, fanout, last=last, left_out=set()) for row in rows}
            num_left_out += sum(map(len, every.values())) - sum(map(len, drawn.values()))
            wanted += [(layer, source, row, time) for row, found in drawn.items() for source, time in found]
            rows |= {source for found in drawn.values() for source, _ in found}
        assert result.edges[0] == sorted(wanted)
    assert (num_left_out > 0) == bool(exclude)


def test_all_neighbours_are_those_of_pyg_on_the_edges_until_each_time() -> None:
    pairs, times = timed_pairs()
    src, dst, edge_time = (torch.from_numpy(values) for values in temporal_edges())
    x = torch.from_numpy(temporal_store("original")[0].array("features/x"))
    torch.manual_seed(0)
    plain = GraphSAGE(WIDTH, 8, 2, 6).double()
    model = gsplit.parallelize(GraphSAGE(WIDTH, 8, 2, 6).double(), solo_mesh())
    model.load_state_dict(plain.state_dict())
    loader = timed_link_loader(
        solo_mesh(), TimedLinkCase(negatives="none", exclude=False), num_neighbors=[-1, -1], shuffle=False
    )
    seen = 0
    for batch in loader:
        z = model(batch.x, batch.edge_index)
        assert torch.equal(batch.edge_label_time, times[batch.input_id])
        for place, (u, v) in zip(batch.input_id.tolist(), batch.edge_label_index.T.tolist(), strict=True):
            kept = edge_time <= times[place]
            rows = plain(x, torch.stack([src, dst])[:, kept])[pairs[:, place]]
            assert torch.allclose(z[[u, v]], rows, rtol=0, atol=1e-9)
            seen += 1
    assert seen == pairs.size(1)


def test_a_run_with_other_times_is_another_run() -> None:
    pairs, times = timed_pairs()
    store, _ = temporal_store("original")
    texts = [
        gsplit.LinkNeighborLoader(store, [2], pairs, edge_label_time=found, time_attr="time").description
        for found in (times, times + 1)
    ]
    assert texts[0] != texts[1]


def test_verify_takes_pairs_with_times() -> None:
    pairs, times = timed_pairs()
    found = gsplit.verify(
        GraphSAGE(WIDTH, 8, 2, 6),
        temporal_store("mixed")[0],
        [3, 2],
        edge_label_index=pairs,
        edge_label_time=times,
        time_attr="time",
        temporal_strategy="last",
        neg_sampling="triplet",
        loss_fn="bpr",
        batch_size=20,
        strategy="data",
    )
    assert found.ok and found.largest_gradient > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edge_label_time": None}, r"time_attr and edge_label_time \(got time_attr='time', without edge_label_time\)"),
        ({"time_attr": None}, r"time_attr and edge_label_time \(got time_attr=None, with edge_label_time\)"),
        ({"edge_label_time": torch.zeros(46)}, r"edge_label_time: expected a tensor of 46 integers .got torch.float32"),
        ({"edge_label_time": torch.arange(45)}, r"a tensor of 46 integers \(got torch.int64 \[45\]\)"),
        ({"edge_label_time": 3}, "edge_label_time: expected a tensor of 46 integers .got int"),
        (
            {"neg_sampling": "joint"},
            "neg_sampling: expected negatives of one pair each, for edge_label_time .got joint",
        ),
        ({"neg_sampling": "in_batch"}, "for edge_label_time .got in_batch, whose negatives are shared"),
        ({"sampler": "labor"}, "time_attr: expected the uniform sampler"),
        ({"strategy": "auto"}, r"time_attr: expected options that .* built for \(got strategy='auto'\)"),
        ({"input_time": torch.arange(46)}, "pairs have times by edge_label_time"),
    ],
)
def test_what_does_not_combine_is_refused(options: dict[str, Any], message: str) -> None:
    pairs, times = timed_pairs()
    given: dict[str, Any] = {"edge_label_time": times, "time_attr": "time"} | options
    with pytest.raises(InputError, match=message):
        gsplit.LinkNeighborLoader(temporal_store("mixed")[0], [2], pairs, **given)


def test_types_other_modes_and_degrees_are_refused() -> None:
    data = HeteroData()
    data["a"].x = torch.zeros(3, 2)
    of = ("a", "to", "a")
    data[of].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    timed: dict[str, Any] = {"edge_label_time": torch.zeros(1).long(), "time_attr": "time"}
    with pytest.raises(InputError, match="time_attr: .* built for .got a graph with the vertex types a"):
        gsplit.LinkNeighborLoader(data, [2], (of, torch.zeros(2, 1).long()), **timed)
    batch = timed_link_loader(solo_mesh(), TimedLinkCase()).make_batch(0, 0)
    with pytest.raises(InputError, match="batch.seed_time: expected neg_sampling triplet .got binary"):
        _ = batch.seed_time
    model = gsplit.parallelize(GCN(WIDTH, 8, 2, 6).double(), solo_mesh())
    with pytest.raises(InputError, match="GCN normalisation: expected a mini-batch without times"):
        model(batch.x, batch.edge_index)
    pairs, _ = timed_pairs()
    plain = gsplit.LinkNeighborLoader(temporal_store("mixed")[0], [2], pairs).make_batch(0, 0)
    with pytest.raises(InputError, match="batch.edge_label_time: expected pairs with times .got pairs without times"):
        _ = plain.edge_label_time
