"""The boundary: what crosses, and that its backward is the transpose of its forward."""

import torch

from gsplit.blocks import ShuffleIndex
from gsplit.boundary import BoundaryExchange, BoundaryIndex, ask_owners
from gsplit.distributed.comm import SoloComm
from gsplit.exchange import mix_rows
from gsplit.kernels.buffers import BufferPool
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import TorchNeighborSampler
from gsplit.telemetry import StepTelemetry
from gsplit_bench.exactness import small_store

CPU = torch.device("cpu")


def _boundary() -> BoundaryExchange:
    """One process that sends rows to itself, as it would to a peer: rows 4 and 1 of five, and two of its own."""
    index = ShuffleIndex(torch.tensor([4, 1]), (2,), (2,), num_local=5, num_dst=2)
    places = (torch.tensor([2, 0]), torch.tensor([3, 1]))
    return BoundaryExchange(BoundaryIndex(index, *places), SoloComm(), 0, 1, BufferPool(CPU), deterministic=True)


def test_rows_go_to_their_places() -> None:
    exchange = _boundary()
    ids = torch.tensor([10, 11, 12, 13, 14])
    assert mix_rows(exchange, ids, "ids").tolist() == [11, 11, 10, 14]  # own rows 0, 1 at 2, 0; received 4, 1 at 3, 1
    assert (exchange.num_local, exchange.num_mixed, exchange.num_dst, exchange.num_input) == (5, 4, 2, 5)
    assert not exchange.destinations_are_local


def test_the_gradient_of_a_boundary() -> None:
    exchange = _boundary()
    h = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def both(h: torch.Tensor) -> torch.Tensor:
        h_mixed, h_dst = exchange.mix(h)
        return torch.cat([h_mixed * 2, h_dst.sin()])

    assert torch.autograd.gradcheck(both, (h,))
    _, h_dst = exchange.mix(h)
    (only_dst,) = torch.autograd.grad(h_dst.sum(), h, retain_graph=True)
    assert only_dst.sum(1).tolist() == [0, 6, 0, 0, 0]  # row 1, as an own and as a received one; others are not used


def test_an_own_frontier_begins_with_what_its_micro_batch_reads() -> None:
    graph = small_store("original order", 1)[0].graph
    sampler = TorchNeighborSampler(graph, torch.empty(0, dtype=torch.int64).numpy(), CPU)
    wanted = torch.tensor([7, 3, 12, 0])
    where = (sampler, Ownership((0, graph.num_vertices)), SoloComm(), StepKey(0, 0, 0), StepTelemetry())
    frontier, index = ask_owners(wanted, 2, 1, *where)
    assert frontier.ids(frontier.num_rows).tolist() == wanted.tolist()
    assert index.own_places.tolist() == [0, 1, 2, 3] and index.received_places.numel() == 0
    frontier.close()
