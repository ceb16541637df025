"""A generated graph with communities as a PyG ``Data``. Features are noisy; those of neighbours reduce the noise."""

import torch
from torch_geometric.data import Data


def planted_graph(num_nodes: int = 4000, num_edges: int = 60_000, num_classes: int = 8, num_features: int = 16) -> Data:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (num_nodes,), generator=g)
    members = torch.argsort(y)
    first = torch.searchsorted(y[members], torch.arange(num_classes))
    sizes = torch.bincount(y, minlength=num_classes)
    dst = torch.randint(num_nodes, (num_edges,), generator=g)
    within = torch.rand(num_edges, generator=g) < 0.8
    same = members[first[y[dst]] + (torch.rand(num_edges, generator=g) * sizes[y[dst]]).long()]
    src = torch.where(within, same, torch.randint(num_nodes, (num_edges,), generator=g))
    x = torch.randn(num_classes, num_features, generator=g)[y] + 3 * torch.randn(num_nodes, num_features, generator=g)
    train_mask = torch.rand(num_nodes, generator=g) < 0.5
    return Data(x=x, y=y, edge_index=torch.stack([src, dst]), train_mask=train_mask, num_nodes=num_nodes)
