"""The second stage of a step of a heterogeneous graph: reads the rows of every type and cuts the batch by types.

Each type has features of its own width, and is read and exchanged along its own route (``minibatch.typed``), in the
thread of the loader. Every rank joins the exchange of every type with features, with or without rows (law 5).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gsplit.device.devices import copy_to_device
from gsplit.distributed.comm.comm import Call
from gsplit.features.protocol import RowSource, take_rows
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.loading.step_loader import StepLoader
from gsplit.loading.strategy import SampledStep
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.minibatch.route import Route
from gsplit.minibatch.shuffle import exchange_stored
from gsplit.minibatch.typed import RowTypes, StepRows, cut_route
from gsplit.minibatch.typed_batch import TypedBatch, cut_batch

__all__ = ["TypedStepLoader"]


class TypedStepLoader(StepLoader):
    """Reads the arrays of the batches of one loader. ``features``: of every type that has some, by row in the type.

    ``pair_type``: the edge type of pairs. ``options``: those of ``StepLoader``.
    """

    def __init__(
        self,
        graph: LocalGraph,
        types: GraphTypes,
        target_type: str,
        features: Mapping[str, RowSource],
        pair_type: EdgeType | None = None,
        **options: Any,
    ) -> None:
        super().__init__(graph, features=None, labels=False, **options)
        self._types = types
        self._target_type = target_type
        self._pair_type = pair_type
        self._features_of = features
        self._kinds = graph.edge_types()
        if f"y/{target_type}" in graph.store.names:
            self._labels = graph.rows(f"y/{target_type}", target_type)

    def load(self, sampled: SampledStep) -> TypedBatch:
        """Read the rows of a sampled step. A collective."""
        fused = super().load(sampled)
        device = self._mesh.sample_device
        telemetry = sampled.telemetry
        with telemetry.span("split"):
            foreign_ids = [copy_to_device(ids, device) for ids in sampled.foreign_ids]
            rows = StepRows.of(sampled.frontiers, sampled.blocks, sampled.routes, foreign_ids, self._types)
            kinds = []
            for block in sampled.blocks:
                assert block.edge_ids is not None
                kinds.append(take_rows(self._kinds, block.edge_ids, device).long())
            inputs = self._cut_inputs(sampled, rows)
        x_dict = self._read_types(sampled, inputs)
        n_id = self._exchange_ids(sampled)
        with telemetry.span("split"):
            batch = cut_batch(
                fused, self._types, rows, tuple(kinds), x_dict, n_id, self._target_type, self._pair_type, inputs
            )
        batch.record_bytes()
        return batch

    def _label_rows(self, targets: Tensor) -> Tensor:
        return self._types.rows(targets)

    def _read_inputs(self, sampled: SampledStep) -> Tensor:
        """No fused rows: ``load`` reads the rows of every type."""
        return torch.empty(0, device=self._mesh.sample_device)

    def _cut_inputs(self, sampled: SampledStep, step_rows: StepRows) -> list[tuple[Tensor, Route | None]]:
        """The vertices of every type whose input rows this rank reads, and the route of these rows."""
        ids = sampled.read_ids
        local = step_rows.frontiers[0]
        if ids is not sampled.frontiers[0].ids:  # data_cached: owners read what other ranks compute
            local = RowTypes.of(self._types.of(ids), self._types.num_types)
        routes = None
        if sampled.input_route is not None:
            routes = cut_route(sampled.input_route, local, step_rows.mixed[0], self._types)
        return [(ids[rows], None if routes is None else routes[number]) for number, rows in enumerate(local.rows())]

    def _read_types(self, sampled: SampledStep, inputs: list[tuple[Tensor, Route | None]]) -> dict[str, Tensor]:
        """The mixed input rows of every type with features. A collective for each of them."""
        found = {}
        for name, features in self._features_of.items():  # all ranks: every type, in the order of the graph
            ids, route = inputs[self._types.number(name)]
            sampled.telemetry.count("input_rows", ids.numel())
            found[name] = self._read_rows(features, self._types.rows(ids), route, sampled, name)
        return found

    def _exchange_ids(self, sampled: SampledStep) -> Tensor:
        """The original ids of the mixed input rows. A collective of the loading group."""
        ids = sampled.frontiers[0].n_id
        route = sampled.routes[0]
        if route is None:
            return ids
        buffer = ids.new_empty(route.num_buffer)
        buffer[: route.num_local] = ids[: route.num_local]
        call = Call("exchange ids of input rows", sampled.key.step, 0)
        return exchange_stored(buffer, route, self._comm, call, self._pool, sampled.telemetry)
