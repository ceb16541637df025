"""The strategy: how one mini-batch becomes one part per rank, with one number, the layers that are split.

All strategies compute the same step from the same sample (law 1); they differ in who samples, loads and computes which
vertex (``spec``). With k split layers of L a rank

- samples the L - k upper layers of its own targets by itself, with all edges at hand (none if k = L: ``split``);
- asks the owners of the vertices that these layers read (``split.ask_owners``): a boundary;
- samples and splits the k layers below together with the other ranks (none if k = 0: ``data_cached``).

Without a number (``data``) it samples all layers by itself and asks no one. Sampling is the first of a step's stages,
``sample``, ``load`` and ``finish`` (``loading``); it may run ahead of training in a thread of its own.
"""

from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from gsplit.distributed.comm.comm import Comm
from gsplit.features.copies import ForeignCopies
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.minibatch.route import Route, count_sample, skip_replicated_rows
from gsplit.minibatch.split import Split, ask_owners, split_below
from gsplit.minibatch.strategy_names import StrategySpec
from gsplit.sampling.minibatch import MiniBatch, StepKey, sample_minibatch
from gsplit.sampling.protocol import LayerSampler
from gsplit.telemetry import StepTelemetry

__all__ = ["SampledStep", "Strategy"]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One rank's part of a step after sampling, before anything was loaded; ids are the store's.

    ``read_ids``: the vertices whose input rows this rank reads. ``input_route``: how they become the mixed input rows,
    in the loader; ``routes`` are those of the layers, for the forward pass. None: the rank has all rows itself.
    """

    key: StepKey
    targets: Tensor
    global_batch_size: int
    blocks: tuple[Block, ...]
    read_ids: Tensor
    frontiers: tuple[FrontierIds, ...]
    input_route: Route | None
    routes: tuple[Route | None, ...]
    telemetry: StepTelemetry


class Strategy:
    """Samples one rank's part of every step. All ranks of a replica call it for the same steps in the same order.

    ``graph``: the vertices that may be sampled here. ``own`` samples the rank's own vertices, ``whole`` all of them;
    each is needed only where the strategy uses it. ``comm``: the ranks of the replica, for ids.
    """

    def __init__(
        self,
        spec: StrategySpec,
        num_neighbors: list[int],
        graph: LocalGraph,
        comm: Comm,
        *,
        own: LayerSampler | None = None,
        whole: LayerSampler | None = None,
        copies: ForeignCopies | None = None,
    ) -> None:
        self.spec, self._graph, self._comm, self._copies = spec, graph, comm, copies
        self._own, self._whole = own, whole
        num_upper = len(num_neighbors) - (spec.split_layers or 0)
        self._upper_fanouts = num_neighbors[:num_upper]
        self._lower_fanouts = num_neighbors[num_upper:]

    @property
    def num_sampler_bytes(self) -> int:
        """Memory that samplers hold between mini-batches."""
        return sum(sampler.num_bytes for sampler in (self._own, self._whole) if sampler is not None)

    @property
    def num_range_bytes(self) -> int:
        """The part of it that is of the size of the rank's range of vertices."""
        return 0 if self._own is None else self._own.num_range_bytes

    def sample(self, targets: Tensor, key: StepKey, global_batch_size: int, telemetry: StepTelemetry) -> SampledStep:
        """This rank's part of a step, for its targets of the mini-batch. A collective of the replica."""
        upper: MiniBatch | None = None
        if self._upper_fanouts:
            assert self._whole is not None
            with telemetry.span("sample"):
                level = self.spec.split_layers or 0
                upper = sample_minibatch(self._whole, targets, self._upper_fanouts, key, bottom_layer=level)
        if self.spec.split_layers is None:
            assert upper is not None
            lower, boundary = Split((), upper.input_ids, 0), None
        else:
            lower, boundary = self._sample_lower(targets, upper, key, telemetry)
        telemetry.record_max("sampler_bytes", self.num_sampler_bytes)
        return self._join(lower, boundary, upper, targets, key, global_batch_size, telemetry)

    def _sample_lower(
        self, targets: Tensor, upper: MiniBatch | None, key: StepKey, telemetry: StepTelemetry
    ) -> tuple[Split, Route | None]:
        """The layers that are split, below the targets or below what the micro-batches read. A collective."""
        assert self._own is not None
        ownership, boundary = self._graph.ownership, None
        if upper is None:
            frontier = self._own.start(targets)
        else:
            frontier, boundary = ask_owners(
                upper.input_ids,
                upper.blocks[0].num_dst,
                len(self._lower_fanouts),
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
        key: StepKey,
        global_batch_size: int,
        telemetry: StepTelemetry,
    ) -> SampledStep:
        """Lower and upper layers as one step, with the routes of their rows."""
        blocks = tuple(layer.block for layer in lower.layers)
        routes: list[Route | None] = [layer.route for layer in lower.layers]
        asked = [*(layer.route for layer in lower.layers), *([] if boundary is None else [boundary])]
        input_route, frontiers = boundary, [(0, lower.input_ids)]
        if lower.layers:
            input_route = self._input_route(lower, telemetry)
        if upper is not None:
            blocks += upper.blocks
            if lower.layers:  # hybrid(k): other vertices above the boundary than below it
                routes.append(boundary)
                frontiers.append((len(lower.layers) + 1, upper.input_ids))
            else:
                frontiers = [(0, upper.input_ids)]
        routes += [None] * (len(blocks) - len(routes))
        count_sample(asked, [input_route, *routes[1:]], telemetry)
        return SampledStep(
            key=key,
            targets=targets,
            global_batch_size=global_batch_size,
            blocks=blocks,
            read_ids=lower.input_ids,
            frontiers=tuple(FrontierIds(level, self._graph.to_original_ids(ids), ids) for level, ids in frontiers),
            input_route=input_route,
            routes=tuple(routes),
            telemetry=telemetry,
        )

    def _input_route(self, lower: Split, telemetry: StepTelemetry) -> Route:
        bottom = lower.layers[0]
        if self._copies is None:
            return bottom.route
        with telemetry.span("split"):
            return skip_replicated_rows(bottom.route, lower.input_ids, bottom.foreign_ids, self._copies)
