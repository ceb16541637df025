"""``gsplit.evaluate_links``: exact rankings of pairs among negatives, on any number of ranks.

The rows of all endpoints are computed layer by layer with all neighbours (``layerwise``) and stored in a file of each
rank. Then each rank takes every W-th pair, in rounds of bounded memory. In a round it requests the rows of its pairs
and their negatives from their owners, along the same route as a step of ``split`` above its last layer.

A pair's rank among its K negatives follows OGB: ties count half. With s the score of the pair and t those of negatives,

    rank = 1 + (number of t > s + number of t >= s) / 2          mrr = mean of 1 / rank;  hits@k = share of rank <= k

A score of NaN is the lowest of a pair and the highest of a negative. A negative that is the pair's own destination has
the pair's score: a decoder may round it differently in another batch of rows.

Pairs of a heterogeneous graph are those of an edge type, by ids in the types of its ends. Rows are stored by vertex
type, and negatives are vertices of the destination's type.
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
from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks
from gsplit.errors import InputError, explain
from gsplit.features.protocol import RowSource, take_rows
from gsplit.graph.ownership import Ownership
from gsplit.inference.closure import RequiredVertices, all_vertices, targets_closure
from gsplit.inference.evaluate import EvaluationOptions
from gsplit.inference.layerwise import InferenceOptions, evaluating, flat_mesh, inference_ownership
from gsplit.inference.metrics import check_metrics
from gsplit.inference.typed_layerwise import make_pass
from gsplit.kernels.buffers import BufferPool
from gsplit.loading.link_loader import Pairs, list_pairs, to_internal, type_of_pairs
from gsplit.loading.plan import fingerprint_of
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph
from gsplit.minibatch.shuffle import exchange_stored
from gsplit.minibatch.split import request_from_owners
from gsplit.nn.parallelize import check_features, forward_plan_of, mesh_of
from gsplit.progress import Progress, silent
from gsplit.sampling.kernels_torch import first_seen
from gsplit.sampling.minibatch import StepKey, evaluation_key
from gsplit.sampling.neighbor import make_sampler
from gsplit.sampling.pairs import draw_vertices
from gsplit.sampling.protocol import LayerSampler
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore
from gsplit.telemetry import StepTelemetry

__all__ = ["Decoder", "LinkEvaluationOptions", "evaluate_links", "evaluate_pair_lists", "ranks_among"]

_ROUND_ENDPOINTS = 1 << 16
_KEY = StepKey(0, 0, 0)
Decoder = Callable[[Tensor, Tensor], Tensor]
"""Scores [n] of pairs, from the rows [n, D] of their sources and of their destinations."""
_Rows = dict[str | None, RowSource]
"""Stored outputs by vertex type; of None without types."""


def evaluate_links(
    model: Module,
    graph: Any,
    pairs: Pairs,
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

    In a heterogeneous graph ``pairs`` is (edge type, name or tensor), by ids in the types of the ends, stored negatives
    too. Negatives are vertices of the destination's type, and the model returns rows by vertex type.
    """
    found, _ = evaluate_pair_lists(
        model,
        graph,
        [pairs],
        metrics=metrics,
        num_negatives=num_negatives,
        decoder=decoder,
        seed=seed,
        **options,
    )
    return found[0]


class LinkEvaluationOptions(EvaluationOptions, total=False):
    """Options of ``evaluate_links``."""

    num_negatives: int
    decoder: Decoder | None
    seed: int


def evaluate_pair_lists(
    model: Module,
    graph: Any,
    lists: Sequence[Pairs],
    *,
    metrics: Sequence[str] = ("mrr", "hits@10"),
    num_negatives: int = 1000,
    decoder: Decoder | None = None,
    seed: int = 0,
    **options: Unpack[InferenceOptions],
) -> tuple[list[dict[str, float]], int]:
    """``evaluate_links`` of several lists, whose rows are computed once; and the edges that it computed."""
    names = [metric.name for metric in check_metrics(metrics, of_pairs=True)]
    return _Evaluation(model, graph, lists, num_negatives, seed, **options).scores(names, decoder)


class _RankedPairs:
    """A list of pairs with their negatives, by original id. ``types``: those of sources and of destinations."""

    def __init__(self, store: GraphStore, pairs: Pairs, num_negatives: int, seed: int) -> None:
        of, listed = type_of_pairs(store, pairs, reverse={})
        everything = range(store.num_vertices)
        self.types = (None, None) if of is None else (of.edge_type[0], of.edge_type[2])
        self.ends = (everything, everything) if of is None else (of.sources, of.destinations)
        assert listed is not None
        self.negatives = _Negatives(store, listed, self.ends[1], num_negatives, seed)
        self._pairs = list_pairs(store, listed, None)
        if of is not None:
            self._pairs = of.fuse(self._pairs)
        if self.num_pairs == 0:
            raise InputError(explain("pairs", "at least one pair", "0 pairs", "name other pairs"))

    @property
    def num_pairs(self) -> int:
        return self._pairs.num_pairs

    def read(self, positions: Ids, slots: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and some of the negatives at some positions of the list."""
        src, dst = map(torch.from_numpy, self._pairs.read(positions))
        for ids, end in zip((src, dst), self.ends, strict=True):
            _check_ids(ids, end.stop)
        return src, dst, self.negatives.read(positions, slots)

    def rounds(self, rank: int, num_ranks: int) -> Iterator[Ids]:
        """The positions of a rank's pairs in rounds of bounded size. All ranks have the same number of them."""
        size = num_ranks * max(1, _ROUND_ENDPOINTS // (min(self.negatives.count, _ROUND_ENDPOINTS) + 2))
        for first in range(0, self.num_pairs, size):
            yield np.arange(first + rank, min(first + size, self.num_pairs), num_ranks)


class _Evaluation:
    """One evaluation on this rank."""

    def __init__(
        self,
        model: Module,
        graph: Any,
        lists: Sequence[Pairs],
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
        check_features(model, features)
        self._model = model
        self._mesh = flat_mesh(mesh_of(model))
        self._store = as_graph_store(graph)
        self._local = LocalGraph(self._store, self._mesh, inference_ownership(self._store, self._mesh, ownership))
        self._arrays = ArrayNames(self._store, features, edge_attr, edge_weight)
        self._workspace = workspace
        self._progress = progress
        self._lists = [_RankedPairs(self._store, pairs, num_negatives, seed) for pairs in lists]
        names = ", ".join(_describe(pairs) for pairs in lists)
        counts = [ranked.negatives.count for ranked in self._lists]
        self._compared = {"pairs": names, "num_negatives": counts, "seed": seed}

    def scores(self, metrics: list[str], decoder: Decoder | None) -> tuple[list[dict[str, float]], int]:
        """The scores of every list by name, and the number of edges computed. A collective."""
        if decoder is None and forward_plan_of(self._model).pairs:
            fix = "pass decoder=, a function of the rows of sources and of destinations"
            raise InputError(explain("decoder", "a function, because the model decodes pairs itself", None, fix))
        mesh = self._mesh
        local = self._local
        # all ranks: ranks with other pairs would have another number of rounds
        assert_same_on_all_ranks(mesh.control, "gsplit.evaluate_links", {**self._compared, "metrics": metrics})
        sampler = make_sampler(local.graph, local.original_ids, mesh.sample_device)
        with evaluating(self._model):
            needed = self._needed(sampler)
            types = list(dict.fromkeys(of for ranked in self._lists for of in ranked.types))
            run = make_pass(
                self._model,
                local,
                mesh,
                self._arrays,
                needed,
                workspace=self._workspace,
                progress=self._progress,
                vertex_type=types[0],
            )
            rows = {of: run.stored_outputs(of) for of in types}  # all ranks: the same lists, compared above
            found = [self._score_list(ranked, rows, sampler, metrics, decoder or _dot) for ranked in self._lists]
        return found, needed.num_edges

    def _score_list(
        self, ranked: _RankedPairs, rows: _Rows, sampler: LayerSampler, metrics: list[str], decoder: Decoder
    ) -> dict[str, float]:
        """The scores of one list. A collective."""
        mesh = self._mesh
        of_src, of_dst = (rows[of] for of in ranked.types)
        sums = torch.zeros(len(metrics), dtype=torch.float64)
        for positions in ranked.rounds(mesh.rank, mesh.size):
            ranks = torch.ones(positions.size, dtype=torch.float64)
            for slots in ranked.negatives.slices():
                src, dst, others = ranked.read(positions, slots)
                z_src = self._fetch(of_src, sampler, src)
                z_dst, z_others = self._fetch(of_dst, sampler, torch.cat([dst, others.reshape(-1)])).tensor_split(
                    [dst.numel()]
                )
                z_others = z_others.view(*others.shape, *z_others.shape[1:])
                same = (others == dst.unsqueeze(1)).to(mesh.device)
                ranks += ranks_among(*_score(decoder, z_src, z_dst, z_others, same)).cpu() - 1
            sums += torch.stack([_sum_of(metric, ranks) for metric in metrics])
        mesh.control.all_reduce(Call("sums of ranks"), sums).wait()  # all ranks: once per list
        return {name: float(sums[place] / ranked.num_pairs) for place, name in enumerate(metrics)}

    def _needed(self, sampler: LayerSampler) -> RequiredVertices:
        """The endpoints of all pairs and negatives that this rank owns, and what their rows need. A collective."""
        local = self._local
        depth = forward_plan_of(self._model).depth
        if sum(ranked.num_pairs * ranked.negatives.count for ranked in self._lists) > local.store.num_vertices:
            return all_vertices(local, self._mesh, depth)
        wanted = np.zeros(local.stop - local.first, bool)
        for ranked in self._lists:
            for positions in ranked.rounds(0, 1):
                for slots in ranked.negatives.slices():
                    for ids in ranked.read(positions, slots):
                        found = to_internal(self._store, ids.reshape(-1)).numpy()
                        wanted[found[(found >= local.first) & (found < local.stop)] - local.first] = True
        return targets_closure(local.first + np.flatnonzero(wanted), local, sampler, self._mesh, depth)

    def _fetch(self, rows: RowSource, sampler: LayerSampler, wanted: Tensor) -> Tensor:
        """The rows of some vertices, of one type if there are types, by original id. A collective."""
        mesh = self._mesh
        types = self._store.types
        ids, places = first_seen(wanted, 0)
        frontier, route = request_from_owners(
            to_internal(self._store, ids),
            num_dst=0,
            layer=forward_plan_of(self._model).depth,
            sampler=sampler,
            ownership=self._local.ownership,
            comm=mesh.loading_groups.ids,
            key=_KEY,
            telemetry=StepTelemetry(),
        )
        with closing(frontier):
            own = frontier.ids(frontier.num_rows)
            z = take_rows(rows, own if types is None else types.rows(own), mesh.device)
        route = map_tensors(lambda tensor: tensor.to(mesh.device), route)
        pool = BufferPool(mesh.device)
        call = Call("rows of endpoints")
        z = exchange_stored(z, route, mesh.shuffles, call, pool, StepTelemetry())  # all ranks: twice per slice
        return z[places.to(mesh.device)]


class _Negatives:
    """The negative destinations of pairs: stored ones [n, K], or K by key. ``end``: the vertices that they may be."""

    def __init__(self, store: GraphStore, pairs: str | Tensor, end: range, num_negatives: int, seed: int) -> None:
        self._stored: Array | None = store.pair_negatives(pairs) if isinstance(pairs, str) else None
        self._end = end
        self._key = evaluation_key(seed)
        self.count = num_negatives if self._stored is None else int(self._stored.shape[1])
        if not hasattr(self.count, "__index__") or self.count < 1:
            where = "num_negatives" if self._stored is None else f"pair_negatives/{pairs}"
            raise InputError(explain(where, "a positive number for each pair", self.count, "choose 1000"))

    def slices(self) -> Iterator[slice]:
        """All negatives of a pair, in slices of bounded size."""
        for first in range(0, self.count, _ROUND_ENDPOINTS):
            yield slice(first, min(first + _ROUND_ENDPOINTS, self.count))

    def read(self, positions: Ids, slots: slice) -> Tensor:
        """Some of the negatives of the pairs at some positions [n, slots], by original id."""
        if self._stored is not None:
            found = torch.from_numpy(np.array(self._stored[positions, slots], np.int64))
            _check_ids(found, len(self._end))
        else:
            numbers = torch.arange(slots.start, slots.stop)
            found = draw_vertices(self._key, torch.from_numpy(positions).unsqueeze(1), numbers, len(self._end))
        return found + self._end.start


def ranks_among(score: Tensor, others: Tensor) -> Tensor:
    """The rank of each score [n] among others [n, K], in float64; see the module.

    >>> ranks_among(torch.tensor([2.0]), torch.tensor([[3.0, 2.0, 1.0, 1.0]])).tolist()
    [2.5]
    """
    score = score.unsqueeze(1)
    return 1 + ((~(others <= score)).sum(1) + (~(others < score)).sum(1)).double() / 2


def _describe(pairs: Pairs) -> str:
    """A short text that identifies a list of pairs."""
    return f"{pairs[0]} {fingerprint_of(pairs[1])}" if isinstance(pairs, tuple) else fingerprint_of(pairs)


def _sum_of(metric: str, ranks: Tensor) -> Tensor:
    """The sum over pairs of what a metric is the mean of."""
    return (1 / ranks if metric == "mrr" else (ranks <= int(metric.removeprefix("hits@"))).double()).sum()


def _dot(src: Tensor, dst: Tensor) -> Tensor:
    return (src * dst).sum(-1)


def _score(decoder: Decoder, src: Tensor, dst: Tensor, others: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of pairs [n] and of their negatives [n, K], of which some are the ``same`` as the destination."""
    num_pairs, num_negatives = others.shape[:2]
    of_pairs = decoder(src, dst)
    of_others = decoder(src.repeat_interleave(num_negatives, dim=0), others.flatten(0, 1))
    for found, count in ((of_pairs, num_pairs), (of_others, num_pairs * num_negatives)):
        if found.numel() != count:
            fix = "return one score per pair"
            raise InputError(explain("decoder", f"{count} scores", list(found.shape), fix))
    of_pairs = of_pairs.reshape(-1)
    return of_pairs, torch.where(same, of_pairs.unsqueeze(1), of_others.reshape(num_pairs, num_negatives))


def _check_ids(ids: Tensor, num_vertices: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_vertices:
        got = f"{ids.min()}..{ids.max()}"
        raise InputError(explain("pairs", f"original ids in 0..{num_vertices - 1}", got, "correct the pairs"))
