"""Models that hide from the checks what cannot be split: behind NaN, scale, buffers, modes or empty ranks."""

import pytest
import torch
from small_graph import small_store
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from gsplit import InputError, NeighborLoader, parallelize
from gsplit.distributed.comm.mesh import solo_mesh


class Two(nn.Module):
    """Two layers; subclasses do something wrong between them."""

    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(6, 6), SAGEConv(6, 6)
        self.register_buffer("gate", torch.zeros(()))

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(x, self.first(x, edge_index)), edge_index)
        return out


class MixBehindNan(Two):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return (h - 10).sqrt() - h.mean(0)


class MixBehindGate(Two):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.gate * h.mean(0)


class MixBehindScale(Two):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        return torch.cat([out - out.mean(0), 1e12 * x[: out.size(0), :1]], 1)


class OwnStatistics(Two):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        if self.training:
            self.gate.copy_(h.detach().mean())
        return h


class LeavesEarly(Two):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x.new_zeros(0, 6) if x.size(0) == 0 else super().forward(x, edge_index)


@pytest.mark.parametrize(
    "kind, message",
    [
        (MixBehindNan, "output on a toy mini-batch: expected finite numbers"),
        (MixBehindGate, "every target's output to depend on its neighbourhood only"),
        (MixBehindScale, "every target's output to depend on its neighbourhood only"),
        (OwnStatistics, "expected buffers that do not depend on a mini-batch's rows .got gate"),
        (LeavesEarly, "the same layers in every forward .got a forward without first, second where a rank has no rows"),
    ],
)
def test_what_cannot_be_split_is_refused_however_it_hides(kind: type[Two], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parallelize(kind(), solo_mesh())


class OnlyInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(6, 6) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.convs[0](x, edge_index)
        z = self.convs[1](h, edge_index)
        z = z if self.training else z + h[: z.size(0)]
        out: Tensor = self.convs[2](z, edge_index)
        return out


def test_hybrids_refuse_rows_that_are_joined_in_one_mode_only_and_hand_written_models() -> None:
    model = parallelize(OnlyInEvaluation().double(), solo_mesh())
    store = small_store("random", 1)[0]
    batch = NeighborLoader(store, [3, 2, 2], "train", batch_size=10, strategy="hybrid(1)").make_batch(0, 0)
    with pytest.raises(InputError, match=r"strategy='hybrid\(1\)': expected a model that joins no rows"):
        model(batch.x, batch.edge_index)
    with pytest.raises(InputError, match="batch.shuffle: expected a strategy whose levels are prefixes"):
        batch.shuffle(1, torch.zeros(batch.layers[1].num_local, 2))
