"""A heterogeneous graph with values of edges, a model that reads them, and training on any mesh."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATv2Conv, GraphConv, HeteroConv, SAGEConv
from typed_models import CITED_BY, CITES, RELATIONS, WIDTHS, WRITES, WRITTEN_BY, make_data

WITH_ATTR = (CITES, WRITES, WRITTEN_BY)
WEIGHTED = (CITED_BY,)


def valued_data() -> HeteroData:
    """Some relations have features of their edges, another has weights, and there are equal edges."""
    data = make_data()
    generator = torch.Generator().manual_seed(4)
    edges = data[CITES].edge_index
    data[CITES].edge_index = torch.cat([edges, edges[:, :20]], dim=1)
    for relation in WITH_ATTR:
        count = data[relation].edge_index.size(1)
        data[relation].edge_attr = torch.rand(count, 3, generator=generator, dtype=torch.float64)
    for relation in WEIGHTED:
        count = data[relation].edge_index.size(1)
        data[relation].edge_weight = torch.rand(count, generator=generator, dtype=torch.float64)
    return data


class Valued(Module):
    """Attention with features of edges, weighted sums, and means, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        hidden = dict.fromkeys(WIDTHS, 6)
        self.convs = ModuleList(HeteroConv({r: self._conv(r, w) for r in RELATIONS}) for w in (WIDTHS, hidden))

    def _conv(self, relation: tuple[str, str, str], w: dict[str, int]) -> Module:
        ends = (w[relation[0]], w[relation[2]])
        if relation in WITH_ATTR:
            return GATv2Conv(ends, 6, add_self_loops=False, edge_dim=3)  # type: ignore[no-any-return]
        return (GraphConv if relation in WEIGHTED else SAGEConv)(ends, 6)  # type: ignore[no-any-return]

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: Any, edge_attr_dict: Any, edge_weight_dict: Any
    ) -> Tensor:
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict, edge_attr_dict=edge_attr_dict, edge_weight_dict=edge_weight_dict)
            x_dict = {name: h.tanh() for name, h in x_dict.items()}
        return x_dict["paper"]
