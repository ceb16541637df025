"""Splitting: from the sampled sources of each rank to its split of the mini-batch (paper section 3, Algorithm 1).

A step samples its layers from the targets down. At each layer a rank samples the in-edges of its own vertices
(``sampling``, without communication). Some sources belong to other ranks. The rank sends their ids to the owners (one
exchange of counts and one of ids, on every rank, also if they are empty: law 5), and each owner appends the requested
vertices to its local frontier. The result is a ``Route``, along which ``shuffle`` later moves the rows of these
vertices. Requests are computed and exchanged on the host, also if a device samples. Assumes that every rank has the
in-edges of the vertices that it owns.

Destinations are a prefix (law 4): the frontier starts with the targets and only grows, so the local frontier of a layer
is a prefix of the one below it. The mixed frontier is [local frontier | received rows, grouped by owner].

Example: two ranks, one layer, fanout 2. Rank 0 owns vertices 0..4, rank 1 owns 5..9. The targets are 1 and 7. Rank 0
samples 1 <- {3, 6}, rank 1 samples 7 <- {3, 8}.

>>> import numpy as np
>>> from gsplit.graph.graph import Graph
>>> from gsplit.sampling.neighbor import TorchNeighborSampler
>>> ownership = Ownership((0, 5, 10))
>>> edges_of_rank_0 = Graph(np.array([0, 0, 2, 2, 2, 2]), np.array([3, 6]), num_vertices=10)
>>> edges_of_rank_1 = Graph(np.array([0, 0, 0, 2, 2, 2]), np.array([3, 8]), num_vertices=10, first_vertex=5)
>>> no_ids = np.empty(0, np.int64)  # the ids are original ids
>>> samplers = [TorchNeighborSampler(edges, no_ids, torch.device("cpu"))
...             for edges in (edges_of_rank_0, edges_of_rank_1)]
>>> frontiers = [samplers[0].start(torch.tensor([1])), samplers[1].start(torch.tensor([7]))]

Each rank groups its foreign sources by owner: rank 0 needs 6 from rank 1, and rank 1 needs 3 from rank 0.

>>> requests = [group_by_owner(frontier.sample_layer(0, 2), ownership) for frontier in frontiers]
>>> [(request.ids.tolist(), request.counts) for request in requests]
[([6], (0, 1)), ([3], (1, 0))]

After the exchange each owner adds the requested vertices. Local frontiers are [destinations, own sources, requested by
others]; 3 is already in the frontier of rank 0.

>>> layers = [add_requested(frontiers[0], requests[0], requested_ids=requests[1].ids, requested_counts=(0, 1)),
...           add_requested(frontiers[1], requests[1], requested_ids=requests[0].ids, requested_counts=(1, 0))]
>>> [frontier.ids(frontier.num_rows).tolist() for frontier in frontiers]
[[1, 3], [7, 8, 6]]

The mixed frontiers are [1, 3 | 6] and [7, 8, 6 | 3]. Blocks have rows of the mixed frontier as sources, and routes have
rows of the local frontier that are sent: rank 0 sends row 1 (vertex 3), rank 1 sends row 2 (vertex 6).

>>> [layer.block.edge_index().tolist() for layer in layers]
[[[1, 2], [0, 0]], [[3, 1], [0, 0]]]
>>> [(layer.route.send_rows.tolist(), layer.route.send_counts) for layer in layers]
[([1], (0, 1)), ([2], (1, 0))]

``request_from_owners`` does the same for the micro-batches of ``hybrid(k)`` and ``data_cached``, above the layers that
are split.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.device.devices import copy_to_device
from gsplit.device.packing import map_tensors
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.graph.blocks import Block
from gsplit.graph.ownership import Ownership
from gsplit.kernels.jit import kernel
from gsplit.minibatch.relay import relay_requests
from gsplit.minibatch.route import Relay, Route
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.protocol import Fanout, Frontier, LayerSampler, SampledLayer
from gsplit.telemetry import StepTelemetry

__all__ = [
    "LayerSplit",
    "Request",
    "Split",
    "add_requested",
    "group_by_owner",
    "request_from_owners",
    "exchange_ids",
    "split_below",
    "split_in_one_process",
    "split_minibatch",
]


@dataclass(frozen=True, slots=True)
class Request:
    """The vertices whose rows a rank needs from others at one layer.

    ``ids`` are grouped by owner, ``counts[p]`` of them belong to rank p. ``places[i]`` is the position in ``ids`` of
    ``drawn.foreign_ids[i]``. Foreign sources [8, 3, 9], where rank 0 owns 3 and rank 2 owns 8 and 9, give
    ids = [3, 8, 9], counts = (1, 0, 2) and places = [1, 0, 2] on rank 1.
    """

    drawn: SampledLayer
    ids: Tensor
    counts: tuple[int, ...]
    places: Tensor


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """One layer of one rank's split. ``foreign_ids``: whose rows it receives, grouped by owner; on the host."""

    block: Block
    route: Route
    foreign_ids: Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's split of a mini-batch: its layers, from the input up, and the vertices whose input rows it reads."""

    layers: tuple[LayerSplit, ...]
    input_ids: Tensor
    num_targets: int


def group_by_owner(drawn: SampledLayer, ownership: Ownership) -> Request:
    """Group the foreign sources of a layer by owner; within an owner, in the order in which they were drawn."""
    ids, counts, places = _group(drawn.foreign_ids, ownership)
    return Request(drawn=drawn, ids=ids, counts=counts, places=places)


def _group(ids: Tensor, ownership: Ownership) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """Ids grouped by owner, in their order within an owner, the number of each owner, and the place of each id."""
    counts = np.zeros(ownership.num_ranks, np.int64)
    grouped = np.empty(ids.numel(), np.int64)
    places = np.empty(ids.numel(), np.int64)
    _count_and_place(ids.numpy(), np.array(ownership.boundaries), counts, grouped, places)
    return torch.from_numpy(grouped), tuple(counts.tolist()), torch.from_numpy(places)


@kernel
def _count_and_place(ids: Ids, boundaries: Ids, counts: Ids, grouped: Ids, places: Ids) -> None:
    """A stable counting sort by owner; torch's sort takes five times as long."""
    owners = np.searchsorted(boundaries[1:-1], ids, side="right")
    for i in range(ids.size):
        counts[owners[i]] += 1
    begins = np.cumsum(counts) - counts
    for i in range(ids.size):
        place = begins[owners[i]]
        begins[owners[i]] += 1
        grouped[place] = ids[i]
        places[i] = place


def add_requested(
    frontier: Frontier,
    request: Request,
    requested_ids: Tensor,
    requested_counts: tuple[int, ...],
    relay: Relay | None = None,
) -> LayerSplit:
    """Append the requested vertices to the local frontier, then compute the rows of the layer's edges and its route.

    ``requested_ids`` are vertices of this rank, grouped by the rank that needs them, ``requested_counts[p]`` of them
    for rank p; with a ``relay``, by the ranks of this host that need them, then by the hosts.
    """
    drawn = request.drawn
    send_rows = frontier.locate(requested_ids)  # appends those that are not in the frontier yet
    num_local = frontier.num_rows
    src_rows = frontier.resolve(drawn, request.places + num_local)  # received rows are behind the local ones (law 4)
    route = Route(
        send_rows=send_rows,
        send_counts=requested_counts,
        recv_counts=request.counts,
        num_local=num_local,
        num_dst=drawn.num_dst,
        relay=map_tensors(lambda tensor: copy_to_device(tensor, send_rows.device), relay),
    )
    block = Block(drawn.indptr, src_rows, num_src=route.num_mixed, edge_ids=drawn.edge_ids)
    return LayerSplit(block=block, route=route, foreign_ids=request.ids)


def split_minibatch(
    sampler: LayerSampler,
    targets: Tensor,
    num_neighbors: Sequence[Fanout],
    key: StepKey,
    ownership: Ownership,
    comm: Comm,
    telemetry: StepTelemetry,
) -> Split:
    """Sample and split all layers, from this rank's targets down (paper, Algorithm 1). A collective."""
    with closing(sampler.start(targets)) as frontier:
        return split_below(frontier, num_neighbors, key, ownership, comm, telemetry)


def split_below(
    frontier: Frontier,
    num_neighbors: Sequence[Fanout],
    key: StepKey,
    ownership: Ownership,
    comm: Comm,
    telemetry: StepTelemetry,
) -> Split:
    """Sample and split the layers below a frontier of own vertices, down to the input. A collective."""
    num_targets = frontier.num_rows
    layers: list[LayerSplit] = []
    for hop, fanout in enumerate(num_neighbors):
        layer = len(num_neighbors) - 1 - hop
        with telemetry.span("sample"):
            drawn = frontier.sample_layer(key.layer(layer), fanout)
        with telemetry.span("split"):
            request = group_by_owner(drawn, ownership)
        with telemetry.span("exchange_ids"):  # all ranks: every layer of every step, empty or not
            requested = exchange_ids(comm, key, layer, request.ids, request.counts)
        with telemetry.span("split"):
            layers.insert(0, add_requested(frontier, request, *requested))
    return Split(layers=tuple(layers), input_ids=frontier.ids(frontier.num_rows), num_targets=num_targets)


def request_from_owners(
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
    """Request the source vertices of ``layer``, the lowest layer of a micro-batch, from their owners. A collective.

    Returns an open frontier of own vertices, from which the layers below are split, and the route of their rows: a
    boundary. The frontier starts with the own vertices in ``ids``, in that order, followed by those that only other
    ranks requested. In the example above, if the micro-batch of rank 0 reads ids [1, 3, 6] and that of rank 1 reads
    [7, 3, 8], the frontiers are [1, 3] and [7, 8, 6]. On rank 1, own_places is [0, 2] (vertices 7 and 8) and
    recv_places is [1] (vertex 3).
    """
    with telemetry.span("split"):
        ids = ids.cpu()  # device sync
        own = ownership.owners(ids) == comm.rank
        own_places = own.nonzero().view(-1)
        others = (~own).nonzero().view(-1)
        foreign, counts, places = _group(ids[others], ownership)
        recv_places = torch.empty_like(others)
        recv_places[places] = others
    with telemetry.span("exchange_ids"):  # all ranks: once per step, empty or not
        requested_ids, requested_counts, relay = exchange_ids(comm, key, layer, foreign, counts)
    with telemetry.span("split"):
        frontier = sampler.start(ids[own_places])
        send_rows = frontier.locate(requested_ids)
    route = Route(
        send_rows=send_rows,
        send_counts=requested_counts,
        recv_counts=counts,
        num_local=frontier.num_rows,
        num_dst=num_dst,
        own_places=copy_to_device(own_places, send_rows.device),
        recv_places=copy_to_device(recv_places, send_rows.device),
        relay=map_tensors(lambda tensor: copy_to_device(tensor, send_rows.device), relay),
    )
    return frontier, route


def exchange_ids(
    comm: Comm, key: StepKey, layer: int, ids: Tensor, counts: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...], Relay | None]:
    """Send ids to their owners, ``counts[p]`` of them to rank p. Returns the ids and counts received. A collective.

    Between hosts also what this rank passes on to the ranks of its host.
    """
    detail = f"epoch {key.epoch}, seed {key.seed}"
    counting = Call("count ids", key.step, layer, detail)
    sending = Call("exchange ids", key.step, layer, detail)
    if comm.levels is not None:
        return relay_requests(comm.levels, counting, sending, ids, counts)
    requested_counts = comm.all_to_all_counts(counting, counts)
    requested_ids = ids.new_empty(sum(requested_counts))
    comm.all_to_all(sending, requested_ids, ids, requested_counts, counts).wait()
    return requested_ids, requested_counts, None


def split_in_one_process(
    samplers: Sequence[LayerSampler],
    targets: Tensor,
    num_neighbors: Sequence[Fanout],
    key: StepKey,
    ownership: Ownership,
) -> list[Split]:
    """The splits of all ranks, as ``split_minibatch`` makes them, computed in one process without communication.

    ``samplers[r]`` has the in-edges of rank r's vertices. ``targets`` are those of all ranks.
    """
    ranks = range(ownership.num_ranks)
    owners = ownership.owners(targets)
    frontiers = [sampler.start(targets[owners == rank]) for rank, sampler in enumerate(samplers)]
    num_targets = [frontier.num_rows for frontier in frontiers]
    layers: list[list[LayerSplit]] = [[] for _ in ranks]
    try:
        for hop, fanout in enumerate(num_neighbors):
            layer_key = key.layer(len(num_neighbors) - 1 - hop)
            requests = [group_by_owner(frontier.sample_layer(layer_key, fanout), ownership) for frontier in frontiers]
            pieces = [request.ids.split(request.counts) for request in requests]
            for rank in ranks:
                requested_ids = torch.cat([pieces[peer][rank] for peer in ranks])
                requested_counts = tuple(requests[peer].counts[rank] for peer in ranks)
                layers[rank].insert(0, add_requested(frontiers[rank], requests[rank], requested_ids, requested_counts))
        ids = [frontier.ids(frontier.num_rows) for frontier in frontiers]
        return [Split(layers=tuple(layers[rank]), input_ids=ids[rank], num_targets=num_targets[rank]) for rank in ranks]
    finally:
        for frontier in frontiers:
            frontier.close()
