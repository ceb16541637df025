"""The strategy: how one mini-batch becomes one part per rank. One number decides: the layers that are split.

All strategies compute the same step from the same sample (law 1). They differ in which rank samples, loads and computes
which vertex. With k split layers of L, a rank

1. samples the L - k upper layers of its own targets alone, from the whole graph (no layer for ``split``, where k = L);
2. requests the vertices that these layers read from their owners (``split.request_from_owners``): a boundary;
3. samples and splits the k lower layers together with the other ranks (no layer for ``data_cached``, where k = 0).

For ``data`` k is None: a rank samples all layers alone and requests nothing.

The targets of a step of link prediction are the endpoints of a rank's pairs, of any owner. Only ``split`` needs more
than the above: its boundary is above the last layer, and the targets that it computes are those that any rank requests.

Sampling is the first of the three stages of a step. ``step_loader`` is the second, ``Batch.to`` the third. Sampling may
run ahead of training in threads, each of which has a strategy of its own.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Comm
from gsplit.features.copies import ForeignCopies
from gsplit.graph.blocks import Block, FrontierIds, TimedSeeds
from gsplit.graph.ownership import Ownership
from gsplit.keys.kernels_torch import mix
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.minibatch.pair_rows import PairRows
from gsplit.minibatch.route import Route, count_sample, skip_copied_rows
from gsplit.minibatch.split import Split, request_from_owners, split_below
from gsplit.minibatch.strategy_names import StrategySpec
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.protocol import Fanout, LayerSampler
from gsplit.sampling.temporal import TemporalSampler, scale_ownership
from gsplit.telemetry import StepTelemetry

__all__ = ["SampledStep", "Strategy"]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One rank's part of a step after sampling, before anything is loaded. Ids are those of the store.

    ``read_ids``: the vertices whose input rows this rank reads. ``input_route``: the route along which the loader
    exchanges them; None if the rank reads all its input rows. ``num_inputs``: the number of vertices in the rank's
    local input frontier. ``routes[l]``: the route of layer l in the forward pass; None if nothing is exchanged at this
    layer. Input rows take ``input_route``; degrees and ids of layer 0 take ``routes[0]``. ``foreign_ids[l]``:
    the vertices of the rows that layer l receives in its shuffle. ``requested``: see ``Batch``. ``pairs``: of a step of
    link prediction, with the route above the last layer. ``seeds``: the times of the targets, in temporal sampling,
    where a row belongs to a vertex and a time; ids are those of the vertices.
    """

    key: StepKey
    targets: Tensor
    global_batch_size: int
    blocks: tuple[Block, ...]
    read_ids: Tensor
    num_inputs: int
    frontiers: tuple[FrontierIds, ...]
    input_route: Route | None
    routes: tuple[Route | None, ...]
    telemetry: StepTelemetry
    foreign_ids: tuple[Tensor, ...]
    requested: tuple[Tensor, Route] | None = None
    pairs: PairRows | None = None
    seeds: TimedSeeds | None = None


class Strategy:
    """Samples one rank's part of every step. All ranks of a replica, the group of ranks
    that splits its share of the mini-batch, call it for the same steps in the same order.

    ``graph``: the vertices that this rank samples. ``own`` samples the rank's own vertices and is needed if layers are
    split or owners read rows; ``whole`` samples all vertices and is needed if layers are not split. ``comm``: the ranks
    of the replica, for ids. ``copies``: rows of other ranks that this rank has copies of. ``reads_foreign_rows``: this
    rank can read the input rows of all ranks, so that none are exchanged.
    """

    def __init__(
        self,
        spec: StrategySpec,
        num_neighbors: Sequence[Fanout],
        graph: LocalGraph,
        comm: Comm,
        *,
        own: LayerSampler | None = None,
        whole: LayerSampler | None = None,
        copies: ForeignCopies | None = None,
        reads_foreign_rows: bool = False,
    ) -> None:
        self.spec = spec
        self._graph = graph
        self._comm = comm
        self._copies = copies
        self._reads_foreign_rows = reads_foreign_rows
        self._own = own
        self._whole = whole
        num_upper = len(num_neighbors) - (spec.split_layers or 0)
        self._upper_fanouts = num_neighbors[:num_upper]
        self._lower_fanouts = num_neighbors[num_upper:]

    @property
    def num_sampler_bytes(self) -> int:
        """Memory of the samplers between mini-batches."""
        return sum(sampler.num_bytes for sampler in (self._own, self._whole) if sampler is not None)

    @property
    def num_range_bytes(self) -> int:
        """The part of this memory whose size is proportional to the rank's range of vertices."""
        return 0 if self._own is None else self._own.num_range_bytes

    def sample(
        self,
        targets: Tensor,
        key: StepKey,
        global_batch_size: int,
        telemetry: StepTelemetry,
        *,
        pairs: PairRows | None = None,
        excluded: ExcludedEdges | None = None,
        seeds: TimedSeeds | None = None,
        times: Tensor | None = None,
    ) -> SampledStep:
        """Sample this rank's part of a step, for its targets of the mini-batch. A collective over ``comm``.

        ``pairs``: the targets are the endpoints of these. ``excluded``: edges that the mini-batch must not have.
        ``seeds``: the times of the targets, in temporal sampling; ``times``: the distinct ones of all ranks, ascending.
        The targets of pairs are (vertex, time) pairs already.
        """
        for sampler in (self._own, self._whole):
            if sampler is not None:
                sampler.excluded = excluded
            if times is not None and sampler is not None:
                assert isinstance(sampler, TemporalSampler)
                sampler.times = times
        if times is not None and seeds is not None:
            targets = targets * times.numel() + torch.searchsorted(times, seeds.time)
        upper: MiniBatch | None = None
        if self._upper_fanouts:
            assert self._whole is not None
            with telemetry.span("sample"):
                level = self.spec.split_layers or 0
                upper = sample_minibatch(self._whole, targets, self._upper_fanouts, key, bottom_layer=level)
        if self.spec.split_layers is None:
            assert upper is not None
            lower = Split(layers=(), input_ids=upper.input_ids, num_targets=0)
            boundary = None
        else:
            ownership = (
                self._graph.ownership if times is None else scale_ownership(self._graph.ownership, times.numel())
            )
            lower, boundary = self._sample_lower(
                targets, upper, key, ownership, telemetry, requests_targets=pairs is not None
            )
        telemetry.record_max("sampler_bytes", self.num_sampler_bytes)
        joined = self._join(lower, boundary, upper, targets, pairs, times, key, global_batch_size, telemetry)
        return joined if seeds is None else replace(joined, seeds=seeds)

    def _sample_lower(
        self,
        targets: Tensor,
        upper: MiniBatch | None,
        key: StepKey,
        ownership: Ownership,
        telemetry: StepTelemetry,
        *,
        requests_targets: bool,
    ) -> tuple[Split, Route | None]:
        """Sample the split layers, below the targets or below the vertices that micro-batches read. A collective."""
        assert self._own is not None
        if upper is None and not requests_targets:
            frontier = self._own.start(targets)
            boundary = None
        else:
            frontier, boundary = request_from_owners(
                targets if upper is None else upper.input_ids,
                num_dst=0 if upper is None else upper.blocks[0].num_dst,
                layer=len(self._lower_fanouts),
                sampler=self._own,
                ownership=ownership,
                comm=self._comm,
                key=key,
                telemetry=telemetry,
            )
        with closing(frontier):
            return split_below(frontier, self._lower_fanouts, key, ownership, self._comm, telemetry), boundary

    def _join(
        self,
        lower: Split,
        boundary: Route | None,
        upper: MiniBatch | None,
        targets: Tensor,
        pairs: PairRows | None,
        times: Tensor | None,
        key: StepKey,
        global_batch_size: int,
        telemetry: StepTelemetry,
    ) -> SampledStep:
        """Join the lower and upper layers to one step, with the routes of their rows."""
        num_times = 1 if times is None else times.numel()
        blocks = tuple(layer.block for layer in lower.layers)
        routes: list[Route | None] = [layer.route for layer in lower.layers]
        asked = [layer.route for layer in lower.layers]
        if boundary is not None:
            asked.append(boundary)
        requested = None if lower.layers or boundary is None else (_vertices(lower.input_ids, num_times), boundary)
        read_ids, input_route = self._read_inputs(lower, boundary, upper, telemetry)
        frontiers = [(0, lower.input_ids)]
        if upper is not None:
            blocks += upper.blocks
            if lower.layers:  # hybrid(k): the vertices above the boundary are not those below it
                routes.append(boundary)
                frontiers.append((len(lower.layers) + 1, upper.input_ids))
            else:
                frontiers = [(0, upper.input_ids)]
        routes += [None] * (len(blocks) - len(routes))
        top: Route | None = None
        if pairs is not None and upper is None:  # split: the boundary is above the last layer
            top = boundary
            targets = lower.input_ids[: lower.num_targets]
            pairs = replace(pairs, route=top)
        count_sample(asked, [input_route, *routes[1:], top], telemetry)
        return SampledStep(
            key=key,
            targets=_vertices(targets, num_times),
            global_batch_size=global_batch_size,
            blocks=blocks,
            read_ids=_vertices(read_ids, num_times),
            num_inputs=lower.input_ids.numel(),
            frontiers=tuple(self._frontier_ids(level, ids, times) for level, ids in frontiers),
            input_route=input_route,
            routes=tuple(routes),
            telemetry=telemetry,
            foreign_ids=tuple(_vertices(layer.foreign_ids, num_times) for layer in lower.layers),
            requested=requested,
            pairs=pairs,
        )

    def _frontier_ids(self, level: int, ids: Tensor, times: Tensor | None) -> FrontierIds:
        """The vertices of a frontier. With ``times``, ``ids`` are those of (vertex, time) pairs."""
        convert = self._graph.to_original_ids
        if times is not None:
            vertices = ids // times.numel()
            n_id = convert(vertices)
            return FrontierIds(level, n_id, vertices, timed=mix(n_id, times[ids % times.numel()]))
        on_host = self._graph.device.type == "cpu"  # a device gets original ids with the batch
        return FrontierIds(level, convert if on_host else convert(ids), ids)

    def _read_inputs(
        self, lower: Split, boundary: Route | None, upper: MiniBatch | None, telemetry: StepTelemetry
    ) -> tuple[Tensor, Route | None]:
        """The vertices whose input rows this rank reads, and the route to the mixed rows; None if it reads them all."""
        if not self._reads_foreign_rows:
            return lower.input_ids, self._input_route(lower, telemetry) if lower.layers else boundary
        if lower.layers:  # the mixed frontier (law 4)
            return torch.cat([lower.input_ids, lower.layers[0].foreign_ids]), None
        assert upper is not None
        return upper.input_ids, None

    def _input_route(self, lower: Split, telemetry: StepTelemetry) -> Route:
        """The route of stored features: that of the bottom layer, without the rows that receivers have copies of."""
        bottom = lower.layers[0]
        if self._copies is None:
            return bottom.route
        with telemetry.span("split"):
            return skip_copied_rows(bottom.route, lower.input_ids, bottom.foreign_ids, self._copies)


def _vertices(ids: Tensor, num_times: int) -> Tensor:
    """The vertices of (vertex, time) pairs (``sampling.temporal``); of a single time, the ids themselves."""
    return ids if num_times == 1 else ids // num_times
