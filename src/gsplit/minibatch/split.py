"""Splitting: from the sources one rank drew to its split of the mini-batch (paper section 3, Algorithm 1).

Stands between ``sampling`` (which draws in-edges and knows nothing of other ranks) and ``shuffle`` (which moves
features along the paths found here). Assumes that every rank holds the in-edges of the vertices it owns. Each layer
takes one exchange of counts and one of ids, whatever the data (law 5). ``ask_owners`` does the same above the layers
that are split, where each rank has a micro-batch of its own: strategies ``hybrid(k)`` and ``data_cached``.

A rank asks the owner of each foreign source for it; the owner appends what it is asked for to its own frontier. Two
ranks, one layer, fanout 2; rank 0 owns vertices 0..4, rank 1 owns 5..9; targets 1 and 7. Rank 0 draws 1 <- {3, 6},
rank 1 draws 7 <- {3, 8}:

>>> from gsplit.sampling.neighbor import TorchNeighborSampler
>>> import numpy as np
>>> from gsplit.graph.graph import Graph
>>> ownership = Ownership((0, 5, 10))
>>> zero = Graph(np.array([0, 0, 2, 2, 2, 2]), np.array([3, 6]), num_vertices=10)
>>> one = Graph(np.array([0, 0, 0, 2, 2, 2]), np.array([3, 8]), num_vertices=10, first_vertex=5)
>>> cpu, same = torch.device("cpu"), np.empty(0, np.int64)
>>> frontiers = [TorchNeighborSampler(zero, same, cpu).start(torch.tensor([1])),
...              TorchNeighborSampler(one, same, cpu).start(torch.tensor([7]))]
>>> asks = [ask(frontier.sample_layer(0, 2), ownership) for frontier in frontiers]
>>> [(request.ids.tolist(), request.counts) for request in asks]  # 6 from rank 1; 3 from rank 0
[([6], (0, 1)), ([3], (1, 0))]
>>> layers = [answer(frontiers[0], asks[0], asks[1].ids, (0, 1)), answer(frontiers[1], asks[1], asks[0].ids, (1, 0))]
>>> [frontier.ids(frontier.num_rows).tolist() for frontier in frontiers]  # destinations, own sources, asked for
[[1, 3], [7, 8, 6]]
>>> [layer.block.edge_index().tolist() for layer in layers]  # mixed: [1, 3 / 6] and [7, 8, 6 / 3]
[[[1, 2], [0, 0]], [[3, 1], [0, 0]]]
>>> [(layer.route.send_rows.tolist(), layer.route.send_counts) for layer in layers]
[([1], (0, 1)), ([2], (1, 0))]
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Comm
from gsplit.graph.blocks import Block
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.route import Route
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import Frontier, LayerSampler, SampledLayer
from gsplit.telemetry import StepTelemetry

__all__ = [
    "LayerSplit",
    "Request",
    "Split",
    "answer",
    "ask",
    "ask_owners",
    "exchange_ids",
    "split_below",
    "split_in_one_process",
    "split_minibatch",
]


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank needs from the others at one layer: ids, owner after owner, ``counts[p]`` of them from rank p.

    ``places[slot]`` says where the layer's foreign id number ``slot`` went in ``ids``.
    """

    drawn: SampledLayer
    ids: Tensor
    counts: tuple[int, ...]
    places: Tensor


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """One layer of one rank's split. ``foreign_ids`` are the vertices whose rows it receives, owner after owner."""

    block: Block
    route: Route
    foreign_ids: Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's split of a mini-batch: layers from the bottom up, and the ids of its local input frontier."""

    layers: tuple[LayerSplit, ...]
    input_ids: Tensor
    num_targets: int


def ask(drawn: SampledLayer, ownership: Ownership) -> Request:
    """Group the foreign sources of a layer by owner, in order of first occurrence."""
    owners = ownership.owners(drawn.foreign_ids)
    order = torch.argsort(owners, stable=True)
    counts = tuple(torch.bincount(owners, minlength=ownership.num_ranks).tolist())  # device sync
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return Request(drawn, drawn.foreign_ids[order], counts, places)


def answer(frontier: Frontier, request: Request, asked_ids: Tensor, asked_counts: tuple[int, ...]) -> LayerSplit:
    """Take in what others asked for, then fix every row of the layer.

    ``asked_ids`` are vertices of this rank, peer after peer, ``asked_counts[p]`` of them wanted by rank p.
    """
    drawn = request.drawn
    send_rows = frontier.locate(asked_ids)
    num_local = frontier.num_rows
    src_rows = frontier.resolve(drawn, request.places + num_local)
    route = Route(send_rows, asked_counts, request.counts, num_local, drawn.num_dst)
    return LayerSplit(Block(drawn.indptr, src_rows, route.num_mixed, drawn.edge_ids), route, request.ids)


def split_minibatch(
    sampler: LayerSampler,
    targets: Tensor,
    num_neighbors: list[int],
    key: StepKey,
    ownership: Ownership,
    comm: Comm,
    telemetry: StepTelemetry,
) -> Split:
    """Sample and split all layers of this rank's split, from its targets down (paper, Algorithm 1)."""
    with closing(sampler.start(targets)) as frontier:
        return split_below(frontier, num_neighbors, key, ownership, comm, telemetry)


def split_below(
    frontier: Frontier,
    num_neighbors: list[int],
    key: StepKey,
    ownership: Ownership,
    comm: Comm,
    telemetry: StepTelemetry,
) -> Split:
    """Sample and split the layers below a frontier of own vertices, down to the input."""
    num_targets, layers = frontier.num_rows, list[LayerSplit]()
    for hop, fanout in enumerate(num_neighbors):
        layer = len(num_neighbors) - 1 - hop
        with telemetry.span("sample"):
            drawn = frontier.sample_layer(key.layer(layer), fanout)
        with telemetry.span("split"):
            request = ask(drawn, ownership)
        with telemetry.span("exchange_ids"):  # all ranks: every layer of every step, empty or not
            asked_ids, asked_counts = exchange_ids(comm, key, layer, request.ids, request.counts)
        with telemetry.span("split"):
            layers.insert(0, answer(frontier, request, asked_ids, asked_counts))
    return Split(tuple(layers), frontier.ids(frontier.num_rows), num_targets)


def ask_owners(
    ids: Tensor,
    num_dst: int,
    layer: int,
    *,
    sampler: LayerSampler,
    ownership: Ownership,
    comm: Comm,
    key: StepKey,
    telemetry: StepTelemetry,
) -> tuple[Frontier, Route]:
    """Ask the owners for the vertices of a micro-batch's lowest frontier, the sources of ``layer``. A collective.

    Returns the frontier of own vertices that any rank asked for, open, which the layers below are split from, and the
    route of their rows: a boundary. The frontier begins with the vertices that this rank's own micro-batch reads, in
    that order. In the example above, if rank 0's micro-batch reads [1, 3, 6] and rank 1's reads [7, 3, 8], the owners'
    frontiers are [1, 3] and [7, 8, 6]; on rank 1 ``own_places`` is [0, 2] and ``recv_places`` is [1], for vertex 3.
    """
    with telemetry.span("split"):
        owners = ownership.owners(ids)
        own = owners == comm.rank
        own_places = own.nonzero().view(-1)  # device sync
        others = (~own).nonzero().view(-1)  # device sync
        recv_places = others[torch.argsort(owners[others], stable=True)]
        counts = tuple(torch.bincount(owners[others], minlength=ownership.num_ranks).tolist())  # device sync
        foreign = ids[recv_places]
    with telemetry.span("exchange_ids"):  # all ranks: once per step, empty or not
        asked_ids, asked_counts = exchange_ids(comm, key, layer, foreign, counts)
    with telemetry.span("split"):
        frontier = sampler.start(ids[own_places])
        send_rows = frontier.locate(asked_ids)
    route = Route(
        send_rows=send_rows,
        send_counts=asked_counts,
        recv_counts=counts,
        num_local=frontier.num_rows,
        num_dst=num_dst,
        own_places=own_places,
        recv_places=recv_places,
    )
    return frontier, route


def exchange_ids(
    comm: Comm, key: StepKey, layer: int, ids: Tensor, counts: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Send ids to their owners, ``counts[p]`` of them to rank p; returns what was asked of this rank. A collective."""
    detail = f"epoch {key.epoch}, seed {key.seed}"
    asked_counts = comm.all_to_all_counts(Call("count ids", key.step, layer, detail), counts)
    asked_ids = ids.new_empty(sum(asked_counts))
    comm.all_to_all(Call("exchange ids", key.step, layer, detail), asked_ids, ids, asked_counts, counts).wait()
    return asked_ids, asked_counts


def split_in_one_process(
    samplers: Sequence[LayerSampler], targets: Tensor, num_neighbors: list[int], key: StepKey, ownership: Ownership
) -> list[Split]:
    """What ``split_minibatch`` makes on every rank, without ranks: exchanges are transpositions of lists.

    ``samplers[r]`` holds the in-edges of rank r's vertices; ``targets`` are those of all ranks.
    """
    ranks = range(ownership.num_ranks)
    owners = ownership.owners(targets)
    frontiers = [sampler.start(targets[owners == rank]) for rank, sampler in enumerate(samplers)]
    num_targets = [frontier.num_rows for frontier in frontiers]
    layers: list[list[LayerSplit]] = [[] for _ in ranks]
    try:
        for hop, fanout in enumerate(num_neighbors):
            layer_key = key.layer(len(num_neighbors) - 1 - hop)
            requests = [ask(frontier.sample_layer(layer_key, fanout), ownership) for frontier in frontiers]
            pieces = [request.ids.split(request.counts) for request in requests]
            for rank in ranks:
                asked_ids = torch.cat([pieces[peer][rank] for peer in ranks])
                asked_counts = tuple(requests[peer].counts[rank] for peer in ranks)
                layers[rank].insert(0, answer(frontiers[rank], requests[rank], asked_ids, asked_counts))
        ids = [frontier.ids(frontier.num_rows) for frontier in frontiers]
        return [Split(tuple(layers[rank]), ids[rank], num_targets[rank]) for rank in ranks]
    finally:
        for frontier in frontiers:
            frontier.close()
