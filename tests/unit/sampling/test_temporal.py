"""Temporal draws: the edges that a loop in Python finds, by both versions, on any ranks and numbering."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import CPU, cut_points, mixed_ids, shaped_graphs
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, StoreError
from gsplit.graph.ownership import Ownership, own_equally
from gsplit.keys import scalar
from gsplit.minibatch.split import split_in_one_process
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.targets import SeedTimes, local_listed_targets
from gsplit.sampling.temporal import (
    HostTemporalSampler,
    TemporalSampler,
    TorchTemporalSampler,
    open_edge_times,
    scale_ownership,
    temporal_sampler,
)
from gsplit.store.in_memory import MemoryStore, renumbered_store

KEY = StepKey(1, 2, 3)
TIMES = st.sampled_from(["ties", "same", "distinct", "negative"])


def _edge_times(kind: str, count: int, seed: int) -> Ids:
    rng = np.random.default_rng(seed)
    low, high = {"ties": (0, 4), "same": (7, 8), "distinct": (0, 10**15), "negative": (-50, 3)}[kind]
    return rng.integers(low, high, count)


def _store(n: int, src: Ids, dst: Ids, time: Ids, parts: Ids | None = None) -> MemoryStore:
    parts = np.zeros(n, np.int64) if parts is None else parts
    return renumbered_store(src, dst, parts, {}, {}, {"time": (time, "int64")})


def _sampler(
    store: MemoryStore, first: int, stop: int, times: Ids, *, last: bool, use_torch: bool = False
) -> TemporalSampler:
    make = TorchTemporalSampler if use_torch else HostTemporalSampler
    graph = store.graph.restrict(first, stop)
    edges = open_edge_times(store, graph, "time")
    sampler = make(graph, np.asarray(store.original_ids(first, stop)), CPU, edges, last=last, edge_ids=True)
    sampler.times = torch.from_numpy(times)
    return sampler


def _loop(edges: list[tuple[int, int, int]], v: int, t: int, key: int, fanout: int, *, last: bool) -> list[int]:
    """The sources drawn for a vertex and a time, from (source, destination, time), by a loop over all edges."""
    early = sorted((time, source) for source, destination, time in edges if destination == v and time <= t)
    sources = [source for _, source in early]
    if fanout < 0 or len(sources) <= fanout:
        return sources
    if last:
        return sources[len(sources) - fanout :]
    word = scalar.mix(key, scalar.mix(v, t))
    taken: list[int] = []
    for slot in range(fanout):
        largest = len(sources) - fanout + slot
        position = scalar.bounded(scalar.mix(word, slot), largest + 1)
        taken.append(largest if position in taken else position)
    return [sources[position] for position in taken]


@given(shaped_graphs(), TIMES, st.sampled_from([-1, 1, 2, 5, 80]), st.booleans(), st.integers(0, 99))
def test_both_versions_draw_what_a_loop_over_edges_finds(
    graph: tuple[int, Ids, Ids], kind: str, fanout: int, last: bool, seed: int
) -> None:
    n, src, dst = graph
    time = _edge_times(kind, src.size, seed)
    times = np.unique(np.random.default_rng(seed).choice(np.append(time, [-60, 2, 10**15]), 3))
    store = _store(n, src, dst, time, np.random.default_rng(seed).permutation(n))
    original = np.asarray(store.original_ids())
    edges = list(zip(src.tolist(), dst.tolist(), time.tolist(), strict=True))
    every = torch.arange(n * times.size)
    found = []
    for use_torch in (False, True):
        sampler = _sampler(store, 0, n, times, last=last, use_torch=use_torch)
        indptr, sources, places = sampler.draw_layer(KEY.layer(0), every, fanout)
        assert np.array_equal(store.graph.indices[places.numpy()], sources.numpy() // times.size)
        found.append((indptr, sources, places))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    indptr, sources, places = found[0]
    of_edges = store.stored_array("edges/time")[places.numpy()]
    for i in range(every.numel()):
        v, t = int(original[i // times.size]), int(times[i % times.size])
        row = slice(int(indptr[i]), int(indptr[i + 1]))
        assert (sources[row] % times.size == i % times.size).all() and (of_edges[row] <= t).all()
        names = original[(sources[row] // times.size).numpy()].tolist()
        assert names == _loop(edges, v, t, KEY.layer(0), fanout, last=last)


def _batch(store: MemoryStore, ownership: Ownership, targets: Ids, slots: Ids, times: Ids, **how: bool) -> Any:
    """A split mini-batch as {(destination, time): sources in the order drawn} of every layer, and its input rows."""
    original = np.asarray(store.original_ids())
    internal = np.argsort(original)
    ranks = [ownership.range_of(rank) for rank in range(ownership.num_ranks)]
    samplers = [_sampler(store, first, stop, times, **how) for first, stop in ranks]
    ids = torch.from_numpy(internal[targets] * times.size + slots)
    owners = scale_ownership(ownership, times.size)
    splits = split_in_one_process(samplers, ids, [4, 3, -1], KEY, owners)

    def named(found: Tensor) -> list[tuple[int, int]]:
        return [(int(original[i // times.size]), int(times[i % times.size])) for i in found.tolist()]

    layers = []
    for layer in range(3):
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for split, mixed in zip(splits, mixed_ids(splits, layer), strict=True):
            block = split.layers[layer].block
            names = named(mixed)
            sources = block.src_rows.split(block.indptr.diff().tolist())
            for row, of_row in zip(names[: block.num_dst], sources, strict=True):
                assert row not in rows, "a row drawn on two ranks"
                rows[row] = [names[source] for source in of_row.tolist()]
                assert all(time == row[1] for _, time in rows[row])
            assert block.edge_ids is not None
        layers.append(rows)
    return layers, sorted(name for split in splits for name in named(split.input_ids))


def _skewed() -> tuple[int, Ids, Ids, Ids]:
    rng = np.random.default_rng(5)
    n, count = 300, 5000
    return n, rng.integers(0, n, count), rng.integers(0, n, count) ** 2 // n, rng.integers(0, 40, count)


@pytest.mark.parametrize("last", [False, True])
def test_ranks_and_numbering_do_not_change_the_mini_batch(last: bool) -> None:
    n, src, dst, time = _skewed()
    rng = np.random.default_rng(6)
    targets = np.append(rng.permutation(n)[:30], [8, 8])  # a vertex at two times
    times = np.unique(rng.integers(0, 40, 9))
    slots = np.append(rng.integers(0, times.size, 30), [0, 3])
    want: Any = None
    for numbering in range(3):
        parts = np.random.default_rng(numbering).permutation(n) if numbering else np.zeros(n, np.int64)
        store = _store(n, src, dst, time, parts)
        for ranks in (1, 2, 3, 4):
            how = {"last": last, "use_torch": ranks == 3}
            found = _batch(store, own_equally(n, ranks), targets, slots, times, **how)
            want = want or found
            assert found == want, (numbering, ranks)
    edges = list(zip(src.tolist(), dst.tolist(), time.tolist(), strict=True))
    count = 0
    for layer, (rows, fanout) in enumerate(zip(want[0], [-1, 3, 4], strict=True)):
        for (v, t), sources in list(rows.items())[::7]:
            wanted = _loop(edges, v, t, KEY.layer(layer), fanout, last=last)
            assert [source for source, _ in sources] == wanted
            count += len(wanted)
    assert count > 200 and {len(sources) for sources in want[0][2].values()} >= {3, 4}


@given(shaped_graphs(), TIMES, st.data())
def test_any_ranges_give_the_mini_batch_of_one_rank(
    graph: tuple[int, Ids, Ids], kind: str, data: st.DataObject
) -> None:
    """Ranks without vertices, targets without an in-edge before their time, all edges at one time."""
    n, src, dst = graph
    time = _edge_times(kind, src.size, 3)
    store = _store(n, src, dst, time)
    times = np.unique([int(time.min(initial=0)) - 1, int(np.median(np.append(time, 0))), int(time.max(initial=0))])
    targets = np.arange(0, n, 2)
    slots = targets // 2 % times.size
    ownership = data.draw(cut_points(n, 3))
    alone = _batch(store, Ownership((0, n)), targets, slots, times, last=False)
    assert _batch(store, ownership, targets, slots, times, last=False) == alone
    rows = alone[0][2]
    assert not any(rows[row] for row in rows if row[1] < time.min(initial=0))


def test_the_host_draws_with_compiled_kernels_and_holds_the_order() -> None:
    store = _store(3, np.array([0, 1, 2]), np.array([1, 1, 1]), np.array([5, 2, 5]))
    edges = open_edge_times(store, store.graph, "time")
    assert edges.order.tolist() == [1, 0, 2]
    none = np.empty(0, np.int64)
    sampler = temporal_sampler(store.graph, none, CPU, edges, last=False, edge_ids=False)
    assert isinstance(sampler, HostTemporalSampler) and sampler.num_bytes == sampler.num_range_bytes == 12
    sampler.times = torch.tensor([2, 5])
    drawn = sampler.start(torch.tensor([2, 3])).sample_layer(0, -1)
    assert drawn.indptr.tolist() == [0, 1, 4] and drawn.edge_ids is None


@pytest.mark.parametrize("use_torch", [False, True])
@pytest.mark.parametrize("order", [[1, 0, 3], [-1, 0, 2]])
def test_a_damaged_order_is_refused(use_torch: bool, order: list[int]) -> None:
    store = _store(3, np.array([0, 1, 2]), np.array([1, 1, 1]), np.array([5, 2, 5]))
    store.arrays["time_order/time"] = np.array(order, np.int32)
    with pytest.raises(StoreError, match="the graph: expected offsets and ids in range"):
        _sampler(store, 0, 3, np.array([9]), last=False, use_torch=use_torch).draw_layer(0, torch.tensor([1]), -1)


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (np.zeros(2), "time", r"edges/time: expected one integer per edge \(got float64 \[2\]\)"),
        (np.zeros((2, 2), np.int64), "time", r"edges/time: expected one integer per edge \(got int64 \[2, 2\]\)"),
        (
            np.zeros(2, np.int64),
            "when",
            r"time_attr: expected the name of a stored per-edge array \(got 'when'; stored",
        ),
    ],
)
def test_other_times_are_refused(values: Any, name: str, message: str) -> None:
    store = renumbered_store(
        np.array([0, 1]), np.array([1, 1]), np.zeros(2, np.int64), {}, {}, {"time": (values, values.dtype.name)}
    )
    with pytest.raises(InputError, match=message):
        open_edge_times(store, store.graph, name)


def test_times_of_smaller_integers_are_converted() -> None:
    time = np.array([[3], [1]], np.uint8)
    store = renumbered_store(np.array([0, 1]), np.array([1, 1]), np.zeros(2, np.int64), {}, {}, {"t": (time, "uint8")})
    edges = open_edge_times(store, store.graph, "t")
    assert edges.time.dtype == np.int64 and edges.time.tolist() == [3, 1] and edges.order.tolist() == [1, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), unique=True), st.integers(0, 10), st.integers(0, 10))
def test_a_vertex_may_be_a_target_at_several_times(listed: list[tuple[int, int]], one: int, other: int) -> None:
    ids = np.array([v for v, _ in listed], np.int64)
    times = np.array([t for _, t in listed], np.int64)
    first, stop = sorted((one, other))
    seeds = SeedTimes.sorted(times, ids)
    targets = local_listed_targets(ids, np.arange(first, stop), first, seeds)
    places, own = targets.places_in_step(0, 1, 0, 100, shuffle=True)
    listed_at = np.empty(len(listed), np.int64)
    for place in range(len(listed)):  # where the permutation of the epoch puts the sorted list
        listed_at[place] = scalar.permute(place, len(listed), StepKey(0, 1, 0).targets()) if listed else 0
    found = sorted((int(v), int(seeds.time[listed_at[p]])) for p, v in zip(places, own, strict=True))
    assert found == sorted((v, t) for v, t in listed if first <= v < stop)
    assert [(int(ids[i]), int(times[i])) for i in seeds.input_id] == sorted(listed)


def test_the_same_vertex_and_time_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"every vertex once at each time \(got 1 repeated, such as vertex 4 at 7\)"):
        SeedTimes.sorted(np.array([7, 7, 1]), np.array([4, 4, 4]))
