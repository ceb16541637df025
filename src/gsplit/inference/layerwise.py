"""Layer-wise inference: a wrapped model on all neighbours, layer after layer, in memory for a chunk.

The model is not taken apart. It runs on rows of this rank's vertices, chunk by chunk, with every layer's outputs read
from a memory map; where a layer's outputs are not there yet, its inputs are collected instead. For each layer, in the
order in which the model calls them:

    collect   run the model on all row chunks up to this layer and keep what it would be given
    evaluate  for chunks of destinations with all their in-edges: a mini-batch of one layer, like those of training,
              whose input rows are the collected ones; keep the layer's outputs

and at last run the model through. Everything between two layers is row-wise (wrapping has checked that), so each chunk
is computed as on the full graph. Held in memory: a chunk. On disk: every layer's outputs for the rank's own vertices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.batch import Batch, BatchContext, BatchLayer
from gsplit.blocks import Block, FrontierIds
from gsplit.distributed.mesh import Mesh
from gsplit.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeWeightHandle
from gsplit.errors import InputError, explain
from gsplit.feature_tiers import open_features
from gsplit.features.protocol import RowSource, take_rows
from gsplit.features.sources import MappedRows
from gsplit.inference.closure import Ids, RequiredVertices, edge_chunks, num_rounds, row_chunks
from gsplit.inference.workspace import new_workspace_file
from gsplit.kernels.buffers import BufferPool
from gsplit.local_graph import ArrayNames, Features, LocalGraph, make_ownership
from gsplit.nn.calls import LayerCall, dtype_of, one_vertex, rows_of, substitute
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan
from gsplit.nn.parallelize import call_wrapped, forward_plan_of, override_forward_pass
from gsplit.ownership import Ownership, own_equally
from gsplit.progress import Progress
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import make_sampler
from gsplit.store.protocol import GraphStore
from gsplit.strategies.loading import StepLoader
from gsplit.strategies.spec import parse_strategy
from gsplit.strategies.strategy import Strategy
from gsplit.telemetry import StepTelemetry

__all__ = ["InferenceOptions", "LayerwisePass", "evaluating", "flat_mesh", "inference_ownership"]

_KEY = StepKey(0, 0, 0)


class InferenceOptions(TypedDict, total=False):
    """Options of ``gsplit.infer``. ``workspace``: where activations are kept, by default the temporary folder."""

    ownership: Ownership | None
    features: Features
    edge_attr: str | None
    edge_weight: str | None
    workspace: str | Path | None
    progress: Progress


def flat_mesh(mesh: Mesh) -> Mesh:
    """The mesh in which every rank has vertices of its own: replicas share nothing in inference."""
    if mesh.num_replicas == 1:
        return mesh
    world = mesh.world
    return replace(mesh, shuffles=world, loading=world, inputs=world, replica=0, num_replicas=1)


def inference_ownership(store: GraphStore, mesh: Mesh, ownership: Ownership | None) -> Ownership:
    """Who computes which vertices: as in training, or equal ranges where replicas make more ranks than parts."""
    if ownership is None and len(store.part_boundaries) - 1 < mesh.num_splits:
        return own_equally(store.num_vertices, mesh.num_splits)
    return make_ownership(store, mesh, ownership)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode, no gradients; afterwards as it was."""
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]


class _Reached(Exception):  # noqa: N818
    """The model has come to the layer whose inputs are wanted."""


class _Replay(ForwardPass):
    """Answers layers from stored outputs, and stops at the one whose inputs are wanted."""

    def __init__(self, batch: Batch, plan: ForwardPlan, outputs: dict[str, RowSource], wanted: str | None) -> None:
        super().__init__(batch, plan)
        self._outputs, self._wanted = outputs, wanted
        self.call: LayerCall = ((), {})

    def enter_layer(self, name: str, layer: Module, call: LayerCall) -> LayerCall:
        """Give a stored layer next to nothing to do."""
        if name == self._wanted:
            self.call = call
            raise _Reached
        self.inside = name
        h, context, attr = rows_of(call), self.batch.context, None
        if context.arrays.edge_attr is not None:
            source = context.graph.edge_rows(context.arrays.edge_attr)
            attr = torch.empty(0, *source.row_shape, dtype=source.dtype, device=h.device)
            attr = attr.to(h.dtype) if attr.is_floating_point() else attr
        return one_vertex(call, h, attr, single_input=name in self._plan.single_input)

    def leave_layer(self, out: Any) -> Any:
        """What the layer gave for these rows."""
        name, self.inside = self.inside, None
        assert name is not None
        return take_rows(self._outputs[name], self.batch.input_ids, self.batch.x.device)


class LayerwisePass:
    """One inference of one model on this rank's vertices. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        model: Module,
        local: LocalGraph,
        mesh: Mesh,
        arrays: ArrayNames,
        needed: RequiredVertices,
        *,
        workspace: str | Path | None,
        progress: Progress,
    ) -> None:
        self._model, self._local, self._mesh, self._arrays = model, local, mesh, arrays
        self._needed, self._workspace, self._progress = needed, workspace, progress
        self._plan, self._dtype = forward_plan_of(model), dtype_of(model)
        self._x = open_features(local, arrays.features)
        device, edge_ids = mesh.sample_device, arrays.has_edge_values
        self._sampler = make_sampler(local.graph, local.original_ids, device, edge_ids=edge_ids)
        self._outputs: dict[str, RowSource] = {}

    def outputs(self) -> Iterator[tuple[Ids, Tensor]]:
        """Outputs of the needed vertices, in chunks, each with its vertices. Collective until the first."""
        names = list(self._plan.layer_of)
        for number, name in enumerate(names):
            self._progress("layers", number, len(names))
            self._outputs[name] = self._evaluate(name, *self._collect(name))
        self._progress("layers", len(names), len(names))
        for ids in row_chunks(self._needed.levels[-1]):
            out = self._replay(ids, None)[1]
            if not isinstance(out, Tensor):
                fix = "let forward return one tensor with a row per vertex"
                raise InputError(explain("the model's output", "a tensor", type(out).__name__, fix))
            yield ids, out

    def _new_map(self, name: str, rows: Tensor) -> tuple[npt.NDArray[Any], MappedRows]:
        """A map for rows like these of all own vertices, in a file without a name: whatever ends us, it is gone."""
        bits = rows[:0].view(torch.uint16) if rows.dtype == torch.bfloat16 else rows[:0]
        shape, dtype = (self._local.stop - self._local.first, *rows.shape[1:]), bits.cpu().numpy().dtype
        array = new_workspace_file(self._workspace, f"rows of {name}", dtype, shape)
        return array, MappedRows(name, array, rows.dtype, self._local.first)

    def _rows_only(self, ids: Ids) -> Batch:
        """A batch of rows and no edges, for a model whose layers are answered from elsewhere."""
        own, device = torch.from_numpy(ids), self._mesh.device
        context = BatchContext(
            self._mesh, _KEY, self._local, self._arrays, "split", each_vertex_once=True, pool=BufferPool(device)
        )
        block = Block(torch.zeros(ids.size + 1, dtype=torch.int64), own[:0], ids.size).to(device)
        layer = BatchLayer(block)
        return Batch(
            x=take_rows(self._x, own, device).to(self._dtype),
            labels=None,
            frontiers=(FrontierIds(0, self._local.to_original_ids(own).to(device), own),),
            layers=(layer,) * self._plan.depth,
            num_targets=ids.size,
            global_batch_size=ids.size,
            context=context,
        )

    def _replay(self, ids: Ids, wanted: str | None) -> tuple[_Replay, Any]:
        """The model on some own vertices, up to a layer or through; returns what it gave, None if it was stopped."""
        batch = self._rows_only(ids)
        replay = _Replay(batch, self._plan, self._outputs, wanted)
        with override_forward_pass(self._model, replay):
            try:
                return replay, call_wrapped(self._model, batch)
            except _Reached:
                return replay, None

    def _collect(self, name: str) -> tuple[RowSource, LayerCall]:
        """The inputs of a layer for the vertices that need them, and how the model calls it."""
        ids = self._needed.levels[self._plan.layer_of[name]]
        probe, _ = self._replay(ids[:0], name)  # also on ranks without vertices
        h = rows_of(probe.call)
        if h is probe.batch.x and h._version == 0:
            return self._x, probe.call  # the stored features themselves, not written to
        array, rows = self._new_map(f"{name}-in", h)
        for chunk in row_chunks(ids):
            replay, _ = self._replay(chunk, name)
            _write(array, chunk - self._local.first, rows_of(replay.call))
        return rows, probe.call

    def _evaluate(self, name: str, inputs: RowSource, call: LayerCall) -> RowSource:
        """A layer's outputs for the vertices that need them, from chunks with all their in-edges. A collective."""
        mesh, local, layer = self._mesh, self._local, self._model.get_submodule(name)
        groups = mesh.loading_groups
        strategy = Strategy(parse_strategy("split", 1), [-1], local, groups.ids, own=self._sampler)
        loader = StepLoader(
            local,
            mesh,
            groups.inputs,
            inputs,
            self._arrays,
            strategy="split",
            each_vertex_once=True,
            deterministic=True,
            labels=False,
        )
        plan = ForwardPlan(1, {name: 0}, frozenset({name}) & self._plan.single_input, (), ())
        chunks = edge_chunks(self._needed.levels[self._plan.layer_of[name] + 1], local.graph)
        array: npt.NDArray[Any] | None = None
        for number in range(num_rounds(chunks, mesh)):  # all ranks: as many rounds as the rank with most chunks needs
            ids = chunks[number] if number < len(chunks) else np.empty(0, np.int64)
            targets = torch.from_numpy(ids).to(mesh.sample_device)
            sampled = strategy.sample(targets, _KEY, ids.size, StepTelemetry())
            batch = loader.load(sampled).to(mesh.device).cast(self._dtype)
            out = _run_layer(ForwardPass(batch, plan), name, layer, call)
            if array is None:
                array, rows = self._new_map(f"{name}-out", out)
            _write(array, ids - local.first, out)
        return rows


def _run_layer(forward_pass: ForwardPass, name: str, layer: Module, call: LayerCall) -> Any:
    """One layer on one mini-batch, called as the model calls it."""
    batch = forward_pass.batch
    handles = (EdgeHandle(batch), EdgeWeightHandle(batch), EdgeAttrHandle(batch))
    try:
        args, kwargs = forward_pass.enter_layer(name, layer, substitute(call, batch.x, *handles))
        return forward_pass.leave_layer(layer(*args, **kwargs))
    finally:
        forward_pass.close()


def _write(target: npt.NDArray[Any], places: Ids, rows: Tensor) -> None:
    rows = rows.detach().cpu()
    target[places] = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
