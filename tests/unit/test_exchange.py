"""Exchanges between layers: what they say of their rows is what they do, on all ranks in one process."""

from typing import Any

import pytest
import torch

from gsplit.blocks import ShuffleIndex
from gsplit.distributed.comm import SoloComm
from gsplit.exchange import Exchange, IdentityExchange, PremixedExchange, ShuffleExchange, mix_rows
from gsplit.kernels.buffers import BufferPool

CPU = torch.device("cpu")


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


def _shuffle(comm: SoloComm | None = None) -> ShuffleExchange:
    index = ShuffleIndex(torch.tensor([2, 0]), (0, 2), (0, 2), num_local=3, num_dst=1)
    return ShuffleExchange(index, comm or EchoComm(), 5, 1, BufferPool(CPU), False)


def test_identity_moves_nothing() -> None:
    exchange = IdentityExchange(num_local=4, num_dst=2)
    h = torch.randn(4, 3, requires_grad=True)
    h_mixed, h_dst = exchange.mix(h)
    assert torch.equal(h_mixed, h) and torch.equal(h_dst, h[:2])
    (h_mixed.sum() + 10 * h_dst.sum()).backward()
    assert h.grad is not None and h.grad[:, 0].tolist() == [11, 11, 1, 1]
    assert (exchange.num_input, exchange.num_mixed, exchange.num_sent, exchange.num_received) == (4, 4, 0, 0)
    assert exchange.num_collectives == 0
    assert mix_rows(exchange, torch.arange(6), "ids").tolist() == [0, 1, 2, 3]


def test_a_shuffle_appends_what_it_receives_and_returns_its_gradient() -> None:
    comm = EchoComm()
    exchange = _shuffle(comm)
    h = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    h_mixed, h_dst = exchange.mix(h)
    assert h_mixed.flatten().tolist() == [1, 2, 3, -3, -1]
    assert h_dst.flatten().tolist() == [1]
    (h_mixed * torch.tensor([[1.0], [1.0], [1.0], [10.0], [20.0]])).sum().backward()
    assert h.grad is not None and h.grad.flatten().tolist() == [1 - 20, 1, 1 - 10]  # the peer returns them negated
    assert comm.calls == ["shuffle of step 5, layer 1", "shuffle backward of step 5, layer 1"]
    assert (exchange.num_input, exchange.num_local, exchange.num_mixed, exchange.num_dst) == (3, 3, 5, 1)
    assert (exchange.num_sent, exchange.num_received, exchange.num_collectives) == (2, 2, 1)


def test_rows_without_gradient_cross_under_their_own_name() -> None:
    comm = EchoComm()
    assert mix_rows(_shuffle(comm), torch.tensor([7, 8, 9, 99]), "exchange ids").tolist() == [7, 8, 9, -9, -7]
    assert comm.calls == ["exchange ids of step 5, layer 1"]


def test_premixed_rows_are_taken_as_they_are() -> None:
    comm = EchoComm()
    exchange = PremixedExchange(_shuffle(comm))
    h = torch.randn(5, 2)
    h_mixed, h_dst = exchange.mix(h)
    assert h_mixed is h and torch.equal(h_dst, h[:1])
    assert comm.calls == []
    assert (exchange.num_input, exchange.num_local, exchange.num_mixed, exchange.num_dst) == (5, 3, 5, 1)
    assert (exchange.num_sent, exchange.num_received, exchange.num_collectives) == (0, 0, 0)
    assert mix_rows(exchange, torch.tensor([7, 8, 9]), "ids").tolist() == [7, 8, 9, -9, -7]  # other rows still cross


@pytest.mark.parametrize("exchange", [IdentityExchange(3, 1), _shuffle(), PremixedExchange(_shuffle())])
def test_all_are_exchanges(exchange: Exchange) -> None:
    h = torch.randn(exchange.num_input, 2)
    h_mixed, h_dst = exchange.mix(h)
    assert h_mixed.size(0) == exchange.num_mixed >= exchange.num_local >= exchange.num_dst == h_dst.size(0)
