"""Blocks and routes cut by type: against the edges and rows of the fused ones, with both kernels."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsplit.errors import StoreError
from gsplit.graph.blocks import Block
from gsplit.graph.types import GraphTypes
from gsplit.minibatch import typed
from gsplit.minibatch.route import Relay, Route
from gsplit.minibatch.typed import RowTypes, cut_block, cut_route

RELATIONS = (("a", "to", "b"), ("b", "to", "b"), ("b", "of", "a"), ("c", "in", "a"))
TYPES = GraphTypes(("a", "b", "c"), RELATIONS, (0, 3, 6, 6), (0, 3, 6, 6))


def _block(seed: int, num_mixed: int) -> tuple[Block, torch.Tensor, RowTypes]:
    """A block of typed edges: some destinations without edges, some relations without edges."""
    rng = np.random.default_rng(seed)
    types = torch.from_numpy(rng.integers(0, 2, num_mixed))
    num_dst = int(rng.integers(0, num_mixed + 1))
    sources: list[int] = []
    kinds: list[int] = []
    indptr = [0]
    for dst in range(num_dst):
        fitting = [
            (relation, src)
            for relation, (source, _, destination) in enumerate(RELATIONS)
            for src in range(num_mixed)
            if TYPES.number(source) == types[src] and TYPES.number(destination) == types[dst]
        ]
        picked = sorted(rng.permutation(len(fitting))[: rng.integers(0, 5)])
        kinds += [fitting[place][0] for place in picked]
        sources += [fitting[place][1] for place in picked]
        indptr.append(len(kinds))
    block = Block(torch.tensor(indptr), torch.tensor(sources, dtype=torch.int64), num_mixed)
    return block, torch.tensor(kinds, dtype=torch.int64), RowTypes.of(types, 3)


@given(st.integers(0, 10_000), st.integers(0, 12))
def test_the_blocks_of_relations_have_the_edges_of_the_fused_block(seed: int, num_mixed: int) -> None:
    block, kinds, mixed = _block(seed, num_mixed)
    cut = cut_block(block, kinds, mixed, TYPES)
    rows = mixed.rows()
    src, dst = block.edge_index()
    for relation, (source, _, destination) in enumerate(RELATIONS):
        of_src = rows[TYPES.number(source)]
        of_dst = rows[TYPES.number(destination)]
        found = cut[relation]
        assert found.num_src == of_src.numel()
        assert found.num_dst == int((of_dst < block.num_dst).sum())
        edges = found.edge_index()
        assert torch.equal(of_src[edges[0]], src[kinds == relation])
        assert torch.equal(of_dst[edges[1]], dst[kinds == relation])


@given(st.integers(0, 10_000), st.integers(0, 12))
def test_both_kernels_cut_the_same(seed: int, num_mixed: int) -> None:
    block, kinds, mixed = _block(seed, num_mixed)
    arguments: Any = (block, kinds, mixed, [0, 1, 1, 2], [1, 1, 0, 0], mixed.counts(block.num_dst))
    for ours, theirs in zip(typed._cut_on_host(*arguments), typed._cut_on_device(*arguments), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("cut", [typed._cut_on_host, typed._cut_on_device])
@pytest.mark.parametrize("kind", [1, 7])
def test_an_edge_of_another_type_is_refused(cut: Any, kind: int) -> None:
    mixed = RowTypes.of(torch.tensor([0, 1]), 3)
    block = Block(torch.tensor([0, 1]), torch.tensor([1]), 2)
    with pytest.raises(StoreError, match="edges whose types"):
        cut(block, torch.tensor([kind]), mixed, [0, 1, 1, 2], [1, 1, 0, 0], (1, 0, 0))


@given(st.integers(0, 10_000), st.booleans())
def test_rows_along_the_cut_routes_are_those_of_the_fused_route(seed: int, boundary: bool) -> None:
    """Law 4 and trap 10: per type, destinations, local and received rows are where a route says they are."""
    rng = np.random.default_rng(seed)
    num_local, num_sent = int(rng.integers(1, 9)), (int(rng.integers(0, 4)), int(rng.integers(0, 4)))
    received = torch.from_numpy(rng.integers(0, 3, 5))  # types of the received rows
    recv_counts = (2, 3)
    local = RowTypes.of(torch.from_numpy(rng.integers(0, 3, num_local)), 3)
    send_rows = torch.from_numpy(rng.integers(0, num_local, sum(num_sent)))
    own_places = recv_places = None
    num_own = num_local
    if boundary:
        num_own = int(rng.integers(0, num_local + 1))
        order = torch.from_numpy(rng.permutation(num_own + 5))
        own_places, recv_places = order[:num_own].sort().values, order[num_own:]
    mixed_types = torch.empty(num_own + 5, dtype=torch.int64)
    mixed_types[torch.arange(num_own) if own_places is None else own_places] = local.types[:num_own]
    mixed_types[torch.arange(num_own, num_own + 5) if recv_places is None else recv_places] = received
    mixed = RowTypes.of(mixed_types, 3)
    num_dst = int(rng.integers(0, num_own + 1))
    relay = Relay(torch.tensor([0, 2, 5]), torch.tensor([2, 0, 1, 2]), far_counts=(0, 3), near_counts=(1, 3))
    route = Route(send_rows, num_sent, recv_counts, num_local, num_dst, own_places, recv_places, relay=relay)
    for number, cut in enumerate(cut_route(route, local, mixed, TYPES)):
        assert cut.relay is not None and cut.relay.ids.tolist() == [[0, 2], [5], []][number]
        assert cut.relay.rows.tolist() == [[0, 1], [0, 0], []][number]
        assert cut.relay.far_counts == [(0, 2), (0, 1), (0, 0)][number]
        assert cut.relay.near_counts == [(0, 2), (1, 1), (0, 0)][number]
        rows = local.rows()[number]
        assert cut.num_local == rows.numel()
        assert cut.num_mixed == mixed.rows()[number].numel()
        assert cut.num_dst == int((mixed.rows()[number] < num_dst).sum())
        assert cut.appends == (not boundary)
        wanted = [part[local.types[part] == number] for part in send_rows.split(num_sent)]
        assert [part.tolist() for part in rows[cut.send_rows].split(cut.send_counts)] == [w.tolist() for w in wanted]
        assert cut.recv_counts == tuple(int((part == number).sum()) for part in received.split(recv_counts))
        if boundary:
            assert own_places is not None and cut.own_places is not None and cut.recv_places is not None
            mine = own_places[local.types[:num_own] == number]
            assert torch.equal(mixed.rows()[number][cut.own_places], mine)
            assert recv_places is not None
            assert torch.equal(mixed.rows()[number][cut.recv_places], recv_places[received == number])
