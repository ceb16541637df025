"""Routes: rows land where a route puts them, gradients return, and everything that is sent is counted."""

from typing import Any

import torch
from small_graph import small_store
from torch import Tensor

from gsplit.distributed.comm.comm import Call, SoloComm
from gsplit.features.copies import CopiedPrefixes, ForeignCopies
from gsplit.graph.ownership import Ownership
from gsplit.kernels.buffers import BufferPool
from gsplit.minibatch.route import Route, count_exchange, count_reduction, count_sample, skip_copied_rows
from gsplit.minibatch.shuffle import exchange_rows, exchange_stored
from gsplit.minibatch.split import request_from_owners
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import TorchNeighborSampler
from gsplit.telemetry import StepTelemetry

CPU = torch.device("cpu")
POOL = BufferPool(CPU)
CALL = Call("shuffle", 5, 1)


class EchoComm(SoloComm):
    """Two ranks of which the other sends the rows that were sent to it, negated."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.calls: list[str] = []

    def all_to_all(self, call: Any, out: Any, rows: Any, out_counts: Any, row_counts: Any) -> Any:
        self.calls.append(str(call))
        out.copy_(-rows)
        return super().all_to_all(call, out[:0], rows[:0], (0,), (0,))


def _shuffle() -> Route:
    return Route(torch.tensor([2, 0]), (0, 2), (0, 2), num_local=3, num_dst=1)


def _boundary() -> Route:
    """One process that sends rows to itself, as it would to a peer: rows 4 and 1 of five, and two of its own."""
    return Route(
        send_rows=torch.tensor([4, 1]),
        send_counts=(2,),
        recv_counts=(2,),
        num_local=5,
        num_dst=2,
        own_places=torch.tensor([2, 0]),
        recv_places=torch.tensor([3, 1]),
    )


def _filled(route: Route, rows: Tensor) -> Tensor:
    buffer = rows.new_empty(route.num_buffer, *rows.shape[1:])
    buffer[: route.num_local] = rows
    return buffer


def test_a_shuffle_appends_what_it_receives_and_returns_its_gradient() -> None:
    comm, route, telemetry = EchoComm(), _shuffle(), StepTelemetry()
    h = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    h_mixed, h_dst = exchange_rows(h, route, comm, CALL, POOL, telemetry)
    assert h_mixed.flatten().tolist() == [1, 2, 3, -3, -1]
    assert h_dst.flatten().tolist() == [1]
    assert telemetry.counts == {"bytes_sent": 8, "bytes_received": 8, "collectives": 1}
    (h_mixed * torch.tensor([[1.0], [1.0], [1.0], [10.0], [20.0]])).sum().backward()
    assert h.grad is not None and h.grad.flatten().tolist() == [1 - 20, 1, 1 - 10]  # the peer returns them negated
    assert comm.calls == ["shuffle of step 5, layer 1", "shuffle backward of step 5, layer 1"]
    assert (route.num_own, route.num_mixed, route.num_buffer) == (3, 5, 5)
    assert route.appends and route.destinations_are_local
    assert telemetry.counts == {"bytes_sent": 16, "bytes_received": 16, "collectives": 2}


def test_rows_without_gradient_cross_in_place_under_their_own_name() -> None:
    comm, route = EchoComm(), _shuffle()
    buffer = _filled(route, torch.tensor([7, 8, 9]))
    mixed = exchange_stored(buffer, route, comm, Call("exchange ids", 5, 1), POOL, StepTelemetry())
    assert mixed is buffer and mixed.tolist() == [7, 8, 9, -9, -7]
    assert comm.calls == ["exchange ids of step 5, layer 1"]


def test_rows_go_to_their_places_at_a_boundary() -> None:
    route, ids = _boundary(), torch.tensor([10, 11, 12, 13, 14])
    mixed = exchange_stored(_filled(route, ids), route, SoloComm(), CALL, POOL, StepTelemetry())
    assert mixed.tolist() == [11, 11, 10, 14]  # own rows 0, 1 at 2, 0; received 4, 1 at 3, 1
    assert (route.num_own, route.num_mixed, route.num_buffer) == (2, 4, 5)
    assert not route.appends and not route.destinations_are_local


def test_the_gradient_of_a_boundary() -> None:
    route = _boundary()
    h = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def both(h: torch.Tensor) -> torch.Tensor:
        h_mixed, h_dst = exchange_rows(h, route, SoloComm(), CALL, POOL, StepTelemetry(), deterministic=True)
        return torch.cat([h_mixed * 2, h_dst.sin()])

    assert torch.autograd.gradcheck(both, (h,))
    _, h_dst = exchange_rows(h, route, SoloComm(), CALL, POOL, StepTelemetry(), deterministic=True)
    (only_dst,) = torch.autograd.grad(h_dst.sum(), h, retain_graph=True)
    assert only_dst.sum(1).tolist() == [0, 6, 0, 0, 0]  # row 1, as an own and as a received one; others are not used


def test_an_own_frontier_begins_with_what_its_micro_batch_reads() -> None:
    graph = small_store("original order", 1)[0].graph
    wanted = torch.tensor([7, 3, 12, 0])
    frontier, route = request_from_owners(
        wanted,
        2,
        1,
        sampler=TorchNeighborSampler(graph, torch.empty(0, dtype=torch.int64).numpy(), CPU),
        ownership=Ownership((0, graph.num_vertices)),
        comm=SoloComm(),
        key=StepKey(0, 0, 0),
        telemetry=StepTelemetry(),
    )
    assert frontier.ids(frontier.num_rows).tolist() == wanted.tolist()
    assert route.own_places is not None and route.own_places.tolist() == [0, 1, 2, 3]
    assert route.recv_places is not None and route.recv_places.numel() == 0
    frontier.close()


def test_replicated_rows_do_not_travel() -> None:
    """Rank 0 of two owns 0..3; of vertices 4..7 it has a copy of 4, and rank 1 has one of 0."""
    ownership = Ownership((0, 4, 8))
    copies = ForeignCopies(CopiedPrefixes((0, 4, 8), (1, 1)), ownership, 0, torch.tensor([[40.0]]))
    route = Route(torch.tensor([0, 2]), (0, 2), (0, 2), num_local=3, num_dst=1)
    kept = skip_copied_rows(route, torch.tensor([0, 3, 2]), torch.tensor([5, 4]), copies)
    assert (kept.num_sent, kept.num_received, kept.num_copied, kept.num_mixed) == (1, 1, 1, route.num_mixed)
    buffer = _filled(kept, torch.tensor([[1.0], [2.0], [3.0]]))
    mixed = exchange_stored(buffer, kept, EchoComm(), CALL, POOL, StepTelemetry())
    assert mixed.flatten().tolist() == [1, 2, 3, -3, 40]  # received where vertex 5 belongs, copied where 4 does


def test_a_rank_without_rows_counts_what_it_receives() -> None:
    telemetry = StepTelemetry()
    route = Route(torch.empty(0, dtype=torch.int64), (0, 0), (0, 4), num_local=0, num_dst=0)
    count_exchange(route, torch.empty(0, 3, 2, dtype=torch.float64), telemetry)
    assert telemetry.counts["bytes_received"] == 4 * 3 * 2 * 8
    count_exchange(route, torch.empty(0, 3, 2, dtype=torch.float64), telemetry, backward=True)
    assert telemetry.counts["bytes_sent"] == 4 * 3 * 2 * 8  # their gradients


def test_ids_and_reductions_are_counted() -> None:
    telemetry, route = StepTelemetry(), Route(torch.tensor([2]), (0, 1), (0, 2), num_local=3, num_dst=1)
    count_sample([route], [route, None], telemetry)
    assert telemetry.counts == {
        "bytes_sent": 8 * (1 + 2),  # how many to the peer, and those asked for
        "bytes_received": 8 * (1 + 1),
        "collectives": 2,
        "rows_sent": 1,
        "rows_received": 2,
    }
    count_reduction(400, 4, telemetry)
    assert (telemetry.counts["bytes_sent"], telemetry.counts["collectives"]) == (24 + 600, 3)
