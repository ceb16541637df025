"""What ranks run in the test of counted traffic."""

import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.telemetry import StepTelemetry

LAYERS, HIDDEN = 3, 16


def count_steps(mesh: Mesh, path: str, strategies: list[str]) -> list[tuple[dict[str, int], int]]:
    """Per strategy: what one training step counted, and the bytes that its routes and gradients say it sends."""
    graph, found = gsplit.open(path), []
    for strategy in strategies:
        loader = gsplit.NeighborLoader(graph, [4] * LAYERS, "train", batch_size=64, strategy=strategy, mesh=mesh)
        model = gsplit.parallelize(GraphSAGE(graph.num_features, HIDDEN, LAYERS, graph.num_classes), mesh)
        batch = loader.make_batch(0, 0)
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        sampled = loader._sample(loader._makers[0].strategy, batch.key, StepTelemetry())
        inputs = sampled.input_route
        routes = [layer.route for layer in batch.layers if layer.route is not None]
        hidden = routes[1:]
        if sampled.requested is not None:  # data_cached: its boundary is below the first layer
            routes = [sampled.requested[1]]
        rows = [] if inputs is None else [inputs.num_sent * graph.num_features]
        rows += [(route.num_sent + route.num_received) * HIDDEN for route in hidden]  # there, and gradients back
        peers = mesh.size - 1
        ids = sum(8 * (peers + route.num_received) for route in routes)
        weights = list(model.parameters())
        numbers = len(weights) + 1 + mesh.size  # flags, a tag, and at a first backward the sums of weights
        reduced = [4, 4 * (sum(weight.numel() for weight in weights) + numbers)]
        sums = sum(2 * peers * size // mesh.size for size in reduced)
        found.append((dict(batch.telemetry.counts), ids + 4 * sum(rows) + sums))
    return found


def count_batch_norm(mesh: Mesh, path: str) -> tuple[dict[str, int], dict[str, int]]:
    """What one training step counted without batch norm, and with batch norm behind all layers but the last."""
    graph = gsplit.open(path)
    found = []
    for norm in (None, "batch_norm"):
        loader = gsplit.NeighborLoader(graph, [4] * LAYERS, "train", batch_size=64, mesh=mesh)
        net = GraphSAGE(graph.num_features, HIDDEN, LAYERS, graph.num_classes, norm=norm)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not name.startswith("norms"))  # so that as many gradients are averaged
        model = gsplit.parallelize(net, mesh)
        batch = loader.make_batch(0, 0)
        loss = batch.mean(F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        found.append(dict(batch.telemetry.counts))
    return found[0], found[1]
