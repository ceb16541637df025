"""P3*: the push-pull parallelism of P3, as the GSplit paper adapts it to the ranks of one run.

Features are split by columns: every rank holds its columns of all rows, and the matching columns of the bottom layer's
weights. Every rank samples a micro-batch of its own. For the bottom layer the ranks exchange their blocks, each computes
the linear part of the layer on its columns for all micro-batches, reading each row of their union once, and pushes these
partial activations to the ranks of the micro-batches, which sum them. All above is data parallel: gradients of the
replicated weights are summed over the ranks; those of the bottom layer's columns are complete where they are.

What is pushed is a row per destination for SAGE, and a row per source for GAT, whose attention needs whole rows.
Weights and samples are those of the peer ``pyg_our_sampler``, so that the losses can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.run.models import make_model
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.reader import Store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.peers.ddp import ShuffledTargets, stored_tensor
from gsplit_bench.train_study import Scenario

__all__ = ["P3System"]


@dataclass(frozen=True)
class _Edges:
    """A block's edges. ``rows``: where its source rows are in the input; the destinations are the first of them."""

    src: Tensor
    dst: Tensor
    num_dst: int
    rows: Tensor


class _Layer(Protocol):
    """A layer in two parts: ``push`` is linear in the input, so that sums over columns make the whole of it."""

    def push(self, x: Tensor, blocks: Sequence[_Edges]) -> Tensor:
        """The linear part for several blocks, one after another."""

    def num_pushed(self, edges: _Edges) -> int:
        """How many rows ``push`` gives for a block."""

    def finish(self, h: Tensor, edges: _Edges) -> Tensor:
        """The rest of the layer for one block, from the linear part."""


class _Sage(Module):
    """SAGEConv with a mean, with the weights of PyG's for some columns of the input."""

    def __init__(self, conv: Any, columns: slice) -> None:
        super().__init__()
        self.neighbours = Parameter(conv.lin_l.weight.detach()[:, columns].clone())
        self.own = Parameter(conv.lin_r.weight.detach()[:, columns].clone())
        self.bias = Parameter(conv.lin_l.bias.detach().clone())

    def push(self, x: Tensor, blocks: Sequence[_Edges]) -> Tensor:
        means, rows = [], []
        for edges in blocks:
            zeros = x.new_zeros(edges.num_dst, x.size(1))
            total = zeros.index_add(0, edges.dst, x[edges.rows[edges.src]])
            counts = torch.bincount(edges.dst, minlength=edges.num_dst).clamp(min=1)
            means.append(total / counts.unsqueeze(1))
            rows.append(edges.rows[: edges.num_dst])
        return torch.cat(means) @ self.neighbours.T + x[torch.cat(rows)] @ self.own.T

    def num_pushed(self, edges: _Edges) -> int:
        return edges.num_dst

    def finish(self, h: Tensor, edges: _Edges) -> Tensor:
        return h + self.bias


class _Gat(Module):
    """GATConv with self-loops, with the weights of PyG's for some columns of the input."""

    def __init__(self, conv: Any, columns: slice) -> None:
        super().__init__()
        self.weight = Parameter(conv.lin.weight.detach()[:, columns].clone())
        self.att_src = Parameter(conv.att_src.detach().clone())
        self.att_dst = Parameter(conv.att_dst.detach().clone())
        self.bias = Parameter(conv.bias.detach().clone())
        self.concat, self.slope = bool(conv.concat), float(conv.negative_slope)

    def push(self, x: Tensor, blocks: Sequence[_Edges]) -> Tensor:
        return (x @ self.weight.T)[torch.cat([edges.rows for edges in blocks])]

    def num_pushed(self, edges: _Edges) -> int:
        return edges.rows.numel()

    def finish(self, h: Tensor, edges: _Edges) -> Tensor:
        loops = torch.arange(edges.num_dst)
        others = edges.src != edges.dst
        src = torch.cat([edges.src[others], loops])
        dst = torch.cat([edges.dst[others], loops])
        z = h.view(h.size(0), *self.att_src.shape[1:])
        scores = (z * self.att_src).sum(-1)[src] + (z[: edges.num_dst] * self.att_dst).sum(-1)[dst]
        scores = F.leaky_relu(scores, self.slope)
        index = dst.unsqueeze(1).expand_as(scores)
        largest = scores.new_full((edges.num_dst, scores.size(1)), -torch.inf)
        largest = largest.scatter_reduce(0, index, scores.detach(), "amax")
        powers = (scores - largest[dst]).exp()
        sums = powers.new_zeros(edges.num_dst, powers.size(1)).index_add(0, dst, powers)
        parts = (powers / sums[dst]).unsqueeze(-1) * z[src]
        out = z.new_zeros(edges.num_dst, *z.shape[1:]).index_add(0, dst, parts)
        return (out.flatten(1) if self.concat else out.mean(1)) + self.bias


class _SumPartials(torch.autograd.Function):
    """Sends every rank the partial rows of its micro-batch and sums what arrives; gradients go to all ranks."""

    @staticmethod
    def forward(ctx: Any, partials: Tensor, counts: list[int], rank: int) -> Tensor:
        ctx.counts, ctx.rank, own, size = counts, rank, counts[rank], len(counts)
        received = partials.new_empty(size * own, partials.size(1))
        dist.all_to_all_single(received, partials.contiguous(), [own] * size, counts)
        return received.view(size, own, partials.size(1)).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own, size = ctx.counts[ctx.rank], len(ctx.counts)
        received = gradients[0].new_empty(sum(ctx.counts), gradients[0].size(1))
        dist.all_to_all_single(received, gradients[0].repeat(size, 1), ctx.counts, [own] * size)
        return received, None, None


class P3System:
    """See ``ddp.System``."""

    note = ""

    def __init__(self, scenario: Scenario, store: Store, mesh: Mesh, dtype: torch.dtype = torch.float32) -> None:
        layers = {"sage": _Sage, "gat": _Gat}
        if mesh.device.type != "cpu":
            fix = "measure on the CPU, or leave p3 out"
            raise InputError(explain("system p3", "ranks on the CPU: it was written for them", mesh.device, fix))
        if scenario.model not in layers or scenario.features != "memory":
            fix = "measure sage or gat with --features memory, or leave p3 out"
            got = f"{scenario.model} with features on {scenario.features}"
            raise InputError(explain("system p3", "sage or gat, features in memory", got, fix))
        torch.manual_seed(scenario.seed)
        stock: Any = make_model(
            scenario.model,
            in_channels=store.num_features,
            hidden_channels=scenario.hidden,
            num_layers=len(scenario.fanout),
            out_channels=store.num_classes,
            heads=scenario.heads,
        )
        self._scenario, self._mesh, self._dtype = scenario, mesh, dtype
        width = store.num_features
        columns = slice(width * mesh.rank // mesh.size, width * (mesh.rank + 1) // mesh.size)
        kind = layers[scenario.model]
        made = [kind(conv, slice(None) if n else columns) for n, conv in enumerate(stock.convs)]
        self.model = ModuleList(made).to(dtype)
        bottom = [p for p in made[0].parameters() if p.dim() == 2]  # weights by columns: this rank's own
        self._replicated = [p for p in self.model.parameters() if all(p is not other for other in bottom)]
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=scenario.learning_rate)
        self._columns = stored_tensor(store, "features/x")[:, columns].to(dtype).contiguous()
        self._labels = stored_tensor(store, "y")
        self._targets = ShuffledTargets(scenario, store)
        original = np.asarray(store.original_ids()) if store.is_renumbered else np.empty(0, np.int64)
        self._sampler = HostNeighborSampler(store.graph, original)

    def train_step(self, epoch: int, step: int) -> StepTelemetry:
        telemetry = StepTelemetry(epoch, step)
        targets = self._targets.of_rank(epoch, step, self._mesh)
        with telemetry.span("sample"):
            key = StepKey(self._scenario.seed, epoch, step)
            drawn = sample_minibatch(self._sampler, targets, list(self._scenario.fanout), key)
            blocks = [(*block.edge_index(), block.num_dst) for block in drawn.blocks]
        with telemetry.span("exchange_ids"):
            bottoms, union = self._exchange_blocks(blocks[0], drawn.input_ids)
        with telemetry.span("load_features"):
            x = self._columns[union]
            y = self._labels[targets]
        with telemetry.span("forward"):
            h = self._bottom(x, bottoms, telemetry)
            for layer, (src, dst, num_dst) in zip(self._layers()[1:], blocks[1:], strict=True):
                edges = _Edges(src, dst, num_dst, torch.arange(h.size(0)))
                h = layer.finish(layer.push(h.relu(), [edges]), edges)
            loss = F.cross_entropy(h, y, reduction="sum") / self._targets.num_in_step(step)
        with telemetry.span("backward"):
            loss.backward()
            total = self._sum_gradients(loss.detach())
        with telemetry.span("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        telemetry.record("loss", total)
        telemetry.count("targets", targets.numel())
        telemetry.count("edges", sum(src.numel() for src, _, _ in blocks))
        telemetry.count("input_rows", drawn.input_ids.numel())
        telemetry.count("rows_loaded", union.numel())
        telemetry.count("bytes_loaded", x.nbytes)
        return telemetry

    def _layers(self) -> list[_Layer]:
        return list(self.model)  # type: ignore[arg-type]

    def _exchange_blocks(self, bottom: tuple[Tensor, Tensor, int], ids: Tensor) -> tuple[list[_Edges], Tensor]:
        """The bottom blocks of all ranks, on the rows of the union of their inputs, and the ids of these rows."""
        src, dst, num_dst = bottom
        head = torch.tensor([num_dst, ids.numel(), src.numel()])
        gathered = [head, ids, src, dst]
        parts = [gathered] if self._mesh.size == 1 else self._all_gather(torch.cat(gathered), head)
        union, places = torch.unique(torch.cat([part[1] for part in parts]), return_inverse=True)
        rows = places.split([part[1].numel() for part in parts])
        found = [_Edges(p[2], p[3], int(p[0][0]), where) for p, where in zip(parts, rows, strict=True)]
        return found, union

    def _all_gather(self, own: Tensor, head: Tensor) -> list[list[Tensor]]:
        heads = [torch.empty_like(head) for _ in range(self._mesh.size)]
        dist.all_gather(heads, head)
        lengths = [[head.numel(), int(h[1]), int(h[2]), int(h[2])] for h in heads]
        longest = max(map(sum, lengths))
        padded = [own.new_empty(longest) for _ in heads]
        dist.all_gather(padded, F.pad(own, (0, longest - own.numel())))
        return [list(part[: sum(sizes)].split(sizes)) for part, sizes in zip(padded, lengths, strict=True)]

    def _bottom(self, x: Tensor, bottoms: list[_Edges], telemetry: StepTelemetry) -> Tensor:
        layer, rank = self._layers()[0], self._mesh.rank
        h = layer.push(x, bottoms)
        if self._mesh.size > 1:
            counts = [layer.num_pushed(edges) for edges in bottoms]
            with telemetry.span("shuffle"):
                row_bytes = h[:1].nbytes
                h = _SumPartials.apply(h, counts, rank)  # type: ignore[no-untyped-call]
            telemetry.count("rows_sent", sum(counts) - counts[rank])
            telemetry.count("bytes_sent", (sum(counts) - counts[rank]) * row_bytes)
        return layer.finish(h, bottoms[rank])

    def _sum_gradients(self, loss: Tensor) -> Tensor:
        """Sum the gradients of the replicated weights, and the loss, over the ranks."""
        if self._mesh.size == 1:
            return loss
        gradients = [p.grad for p in self._replicated if p.grad is not None]
        flat = torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat)
        for gradient, values in zip(gradients, flat[1:].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        return flat[0]
