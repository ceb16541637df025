"""``gsplit.evaluate_links``: exact rankings of pairs among negatives, on any number of ranks.

The rows of all endpoints are computed layer by layer with all neighbours (``layerwise``) and stored in a file of each
rank. Then each rank takes every W-th pair, in rounds of bounded memory. In a round it requests the rows of its pairs
and their negatives from their owners, along the same route as a step of ``split`` above its last layer.

A pair's rank among its K negatives follows OGB: ties count half. With s the score of the pair and t those of negatives,

    rank = 1 + (number of t > s + number of t >= s) / 2          mrr = mean of 1 / rank;  hits@k = share of rank <= k

A score of NaN is the lowest of a pair and the highest of a negative.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.array_types import Array, Ids
from gsplit.device.packing import map_tensors
from gsplit.distributed.comm.comm import Call
from gsplit.errors import InputError, explain
from gsplit.features.protocol import RowSource, take_rows
from gsplit.graph.ownership import Ownership
from gsplit.inference.closure import RequiredVertices, all_vertices, targets_closure
from gsplit.inference.layerwise import InferenceOptions, LayerwisePass, evaluating, flat_mesh, inference_ownership
from gsplit.kernels.buffers import BufferPool
from gsplit.loading.link_loader import list_pairs, to_internal
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph
from gsplit.minibatch.shuffle import exchange_stored
from gsplit.minibatch.split import request_from_owners
from gsplit.nn.parallelize import forward_plan_of, mesh_of
from gsplit.progress import Progress, silent
from gsplit.sampling.kernels_torch import first_seen
from gsplit.sampling.minibatch import StepKey, evaluation_key
from gsplit.sampling.neighbor import make_sampler
from gsplit.sampling.pairs import draw_vertices
from gsplit.sampling.protocol import LayerSampler
from gsplit.store.conversion import as_untyped_store
from gsplit.store.protocol import GraphStore
from gsplit.telemetry import StepTelemetry

__all__ = ["Decoder", "evaluate_links", "ranks_among"]

_ROUND_ENDPOINTS = 1 << 16
_KEY = StepKey(0, 0, 0)
Decoder = Callable[[Tensor, Tensor], Tensor]
"""Scores [n] of pairs, from the rows [n, D] of their sources and of their destinations."""


def evaluate_links(
    model: Module,
    graph: Any,
    pairs: str | Tensor,
    *,
    metrics: Sequence[str] = ("mrr", "hits@10"),
    num_negatives: int = 1000,
    decoder: Decoder | None = None,
    seed: int = 0,
    **options: Unpack[InferenceOptions],
) -> dict[str, float]:
    """Exact scores of pairs among negative destinations, the same on every rank. A collective.

    ``pairs``: the name of stored pairs, or a tensor [2, n] of original ids; all of them count as edges. ``metrics``:
    "mrr" and "hits@K". Negatives are those stored with the pairs, or ``num_negatives`` for each, uniform over all
    vertices, by a key of ``seed`` and the pair's position in the list. ``decoder``: scores from two tensors of rows; by
    default their dot product. A model that decodes pairs itself needs it, such as ``decoder=model.score``. Other
    options are those of ``gsplit.infer``.
    """
    return _Evaluation(model, graph, pairs, num_negatives, seed, **options).scores(_parse_metrics(metrics), decoder)


class _Evaluation:
    """One evaluation on this rank."""

    def __init__(
        self,
        model: Module,
        graph: Any,
        pairs: str | Tensor,
        num_negatives: int,
        seed: int,
        *,
        ownership: Ownership | None = None,
        features: Features = "x",
        edge_attr: str | None = "edge_attr",
        edge_weight: str | None = "edge_weight",
        workspace: str | Path | None = None,
        progress: Progress = silent,
    ) -> None:
        self._model = model
        self._mesh = flat_mesh(mesh_of(model))
        self._store = as_untyped_store(graph, "gsplit.evaluate_links")
        self._local = LocalGraph(self._store, self._mesh, inference_ownership(self._store, self._mesh, ownership))
        self._arrays = ArrayNames(self._store, features, edge_attr, edge_weight)
        self._workspace = workspace
        self._progress = progress
        self._pairs = list_pairs(self._store, pairs, None)
        self._negatives = _Negatives(self._store, pairs, num_negatives, seed)
        if self._pairs.num_pairs == 0:
            raise InputError(explain("pairs", "at least one pair", "0 pairs", "name other pairs"))

    def scores(self, metrics: dict[str, int | None], decoder: Decoder | None) -> dict[str, float]:
        """The scores by name. A collective."""
        if decoder is None and forward_plan_of(self._model).pairs:
            fix = "pass decoder=, a function of the rows of sources and of destinations"
            raise InputError(explain("decoder", "a function, because the model decodes pairs itself", None, fix))
        mesh = self._mesh
        local = self._local
        sampler = make_sampler(local.graph, local.original_ids, mesh.sample_device)
        with evaluating(self._model):
            run = LayerwisePass(
                self._model,
                local,
                mesh,
                self._arrays,
                self._needed(sampler),
                workspace=self._workspace,
                progress=self._progress,
            )
            rows = run.stored_outputs()
            sums = torch.zeros(len(metrics) + 1, dtype=torch.float64)
            for src, dst, others in self._rounds():
                z_src, z_dst, z_others = self._fetch(rows, sampler, src, dst, others)
                ranks = ranks_among(*_score(decoder or _dot, z_src, z_dst, z_others)).cpu()
                found = [(1 / ranks if k is None else (ranks <= k).double()).sum() for k in metrics.values()]
                sums += torch.stack([*found, torch.tensor(float(src.numel()), dtype=torch.float64)])
        there = sums.to(mesh.device)
        mesh.world.all_reduce(Call("sums of ranks"), there).wait()  # all ranks: once
        return {name: float(there[place] / there[-1]) for place, name in enumerate(metrics)}

    @property
    def _pairs_per_round(self) -> int:
        return max(1, _ROUND_ENDPOINTS // (self._negatives.count + 2))

    def _needed(self, sampler: LayerSampler) -> RequiredVertices:
        """The endpoints of all pairs and negatives that this rank owns, and what their rows need. A collective."""
        local = self._local
        depth = forward_plan_of(self._model).depth
        if self._pairs.num_pairs * self._negatives.count > local.store.num_vertices:
            return all_vertices(local, self._mesh, depth)
        wanted = np.zeros(local.stop - local.first, bool)
        positions = np.arange(self._pairs.num_pairs)
        size = self._pairs_per_round
        for first in range(0, positions.size, size):
            for ids in self._read(positions[first : first + size]):
                found = to_internal(self._store, ids.reshape(-1)).numpy()
                wanted[found[(found >= local.first) & (found < local.stop)] - local.first] = True
        return targets_closure(local.first + np.flatnonzero(wanted), local, sampler, self._mesh, depth)

    def _read(self, positions: Ids) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and negatives at some positions of the list, by original id."""
        src, dst = self._pairs.read(positions)
        found = (torch.from_numpy(src), torch.from_numpy(dst), self._negatives.read(positions))
        for ids in found:
            _check_ids(ids, self._store.num_vertices)
        return found

    def _rounds(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's pairs in rounds. All ranks have the same number of them."""
        mesh = self._mesh
        size = self._pairs_per_round
        for first in range(0, self._pairs.num_pairs, size * mesh.size):
            stop = min(first + size * mesh.size, self._pairs.num_pairs)
            yield self._read(np.arange(first + mesh.rank, stop, mesh.size))

    def _fetch(
        self, rows: RowSource, sampler: LayerSampler, src: Tensor, dst: Tensor, others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of this rank's sources, destinations and negatives. A collective."""
        mesh = self._mesh
        ids, places = first_seen(torch.cat([src, dst, others.reshape(-1)]), 0)
        frontier, route = request_from_owners(
            to_internal(self._store, ids).to(mesh.sample_device),
            num_dst=0,
            layer=forward_plan_of(self._model).depth,
            sampler=sampler,
            ownership=self._local.ownership,
            comm=mesh.loading_groups.ids,
            key=_KEY,
            telemetry=StepTelemetry(),
        )
        with closing(frontier):
            own = take_rows(rows, frontier.ids(frontier.num_rows), mesh.device)
        route = map_tensors(lambda tensor: tensor.to(mesh.device), route)
        pool = BufferPool(mesh.device)
        call = Call("rows of endpoints")
        z = exchange_stored(own, route, mesh.shuffles, call, pool, StepTelemetry())  # all ranks: once per round
        places = places.to(mesh.device)
        n = src.numel()
        return z[places[:n]], z[places[n : 2 * n]], z[places[2 * n :]].view(*others.shape, *z.shape[1:])


class _Negatives:
    """The negative destinations of pairs: stored ones [n, K], or K by key."""

    def __init__(self, store: GraphStore, pairs: str | Tensor, num_negatives: int, seed: int) -> None:
        self._stored: Array | None = store.pair_negatives(pairs) if isinstance(pairs, str) else None
        self._num_vertices = store.num_vertices
        self._key = evaluation_key(seed)
        if not isinstance(num_negatives, int) or num_negatives < 1:
            raise InputError(explain("num_negatives", "a positive number", num_negatives, "choose 1000"))
        self.count = num_negatives if self._stored is None else int(self._stored.shape[1])

    def read(self, positions: Ids) -> Tensor:
        """Negatives of the pairs at some positions [n, K], by original id."""
        if self._stored is not None:
            return torch.from_numpy(np.array(self._stored[positions], np.int64))
        slots = torch.arange(self.count)
        return draw_vertices(self._key, torch.from_numpy(positions).unsqueeze(1), slots, self._num_vertices)


def ranks_among(score: Tensor, others: Tensor) -> Tensor:
    """The rank of each score [n] among others [n, K], in float64; see the module.

    >>> ranks_among(torch.tensor([2.0]), torch.tensor([[3.0, 2.0, 1.0, 1.0]])).tolist()
    [2.5]
    """
    score = score.unsqueeze(1)
    return 1 + ((~(others <= score)).sum(1) + (~(others < score)).sum(1)).double() / 2


def _dot(src: Tensor, dst: Tensor) -> Tensor:
    return (src * dst).sum(-1)


def _score(decoder: Decoder, src: Tensor, dst: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of pairs [n] and of their negatives [n, K]."""
    num_pairs, num_negatives = others.shape[:2]
    of_pairs = decoder(src, dst)
    of_others = decoder(src.repeat_interleave(num_negatives, dim=0), others.flatten(0, 1))
    for found, count in ((of_pairs, num_pairs), (of_others, num_pairs * num_negatives)):
        if found.numel() != count:
            fix = "return one score per pair"
            raise InputError(explain("decoder", f"{count} scores", list(found.shape), fix))
    return of_pairs.reshape(-1), of_others.reshape(num_pairs, num_negatives)


def _check_ids(ids: Tensor, num_vertices: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_vertices:
        got = f"{ids.min()}..{ids.max()}"
        raise InputError(explain("pairs", f"original ids in 0..{num_vertices - 1}", got, "correct the pairs"))


def _parse_metrics(names: Sequence[str]) -> dict[str, int | None]:
    """The metrics by name: None for mrr, and k for hits@k."""
    found: dict[str, int | None] = {}
    for name in names:
        _, _, number = name.partition("hits@")
        if name != "mrr" and not (number.isdecimal() and int(number) > 0):
            raise InputError(explain("metrics", "mrr or hits@K", name, "choose one of these"))
        found[name] = None if name == "mrr" else int(number)
    if not found:
        raise InputError(explain("metrics", "at least one", list(names), "name mrr"))
    return found
