"""Layer-wise inference: a wrapped model on all neighbours, layer by layer, with one chunk in memory.

The model runs on rows of this rank's vertices, chunk by chunk. Its layers are not run but replayed: their outputs are
read from a memory map. For each layer, in the order in which the model calls them:

    collect   run the model on all row chunks up to this layer, and store the layer's inputs
    evaluate  run the layer on chunks of destinations with all their in-edges, as mini-batches of one layer whose input
              rows are the collected ones, and store its outputs

Finally the whole model is replayed. Everything between two layers is row-wise (checked at wrapping), so each chunk is
computed as on the full graph. Memory holds one chunk, the disk every layer's outputs for the rank's own vertices.
"""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.array_types import Ids
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.protocol import RowSource, take_rows
from gsplit.features.sources import MappedRows
from gsplit.files.mapped_files import check_workspace, temporary_mapped
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.graph.ownership import Ownership, own_equally
from gsplit.inference.closure import RequiredVertices, edge_chunks, num_rounds, row_chunks
from gsplit.kernels.buffers import BufferPool
from gsplit.loading.step_loader import StepLoader
from gsplit.loading.strategy import Strategy
from gsplit.loading.tiers import can_read_foreign_rows, open_features
from gsplit.minibatch.batch import Batch, BatchContext, BatchLayer
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeWeightHandle
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.local_graph import ArrayNames, Features, LocalGraph, make_ownership
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit.nn.calls import LayerCall, dtype_of, input_rows, substitute
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan
from gsplit.nn.parallelize import call_wrapped, count_evaluation, forward_plan_of, override_forward_pass
from gsplit.nn.split_forward import SplitForward
from gsplit.progress import Progress
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import make_sampler
from gsplit.sampling.protocol import LayerSampler
from gsplit.store.protocol import GraphStore
from gsplit.telemetry import StepTelemetry

__all__ = [
    "InferenceOptions",
    "LayerwisePass",
    "ReachedEndpoints",
    "ReachedLayer",
    "evaluating",
    "flat_mesh",
    "inference_ownership",
    "write_rows",
]

_KEY = StepKey(0, 0, 0)


class InferenceOptions(TypedDict, total=False):
    """Options of ``gsplit.infer``. ``workspace``: the folder for activations, by default the temporary folder."""

    ownership: Ownership | None
    features: Features
    edge_attr: str | None
    edge_weight: str | None
    workspace: str | Path | None
    progress: Progress


def flat_mesh(mesh: Mesh) -> Mesh:
    """The mesh with all ranks in one replica: in inference every rank owns vertices. A collective, once per mesh."""
    if mesh.num_replicas == 1:
        return mesh
    world = mesh.world
    loading = mesh.loading_of_all_ranks()
    return replace(mesh, shuffles=world, loading=loading, inputs=world, replica=0, num_replicas=1)


def inference_ownership(store: GraphStore, mesh: Mesh, ownership: Ownership | None) -> Ownership:
    """The owners of vertices: as in training, or equal ranges if there are more ranks than parts."""
    if ownership is None and len(store.part_boundaries) - 1 < mesh.num_splits:
        return own_equally(store.num_vertices, mesh.num_splits)
    return make_ownership(store, mesh, ownership)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode without gradients. The modes are restored afterwards."""
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]
        count_evaluation(model)


class ReachedLayer(Exception):  # noqa: N818
    """The model has called the layer whose inputs are wanted."""

    def __init__(self, split: SplitForward, call: LayerCall) -> None:
        self.split = split
        self.call = call


class ReachedEndpoints(Exception):  # noqa: N818
    """The model, which decodes pairs itself, has computed the rows of its last layer."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows


@dataclass(frozen=True, repr=False)
class _UndecodedBatch(LinkBatch):
    """Stops a model that decodes pairs itself before it does."""

    def endpoints(self, h: Tensor) -> Tensor:
        raise ReachedEndpoints(h)


class _ReplayPass(ForwardPass):
    """Returns stored outputs in place of running layers, and stops at the layer whose inputs are wanted."""

    def __init__(self, batch: Batch, plan: ForwardPlan, outputs: dict[str, RowSource], wanted: str | None) -> None:
        super().__init__(batch, plan)
        self._outputs = outputs
        self._wanted = wanted

    def run_layer(self, split: SplitForward, call: LayerCall) -> Any:
        if split.name == self._wanted:
            raise ReachedLayer(split, call)
        return take_rows(self._outputs[split.name], self.batch.input_ids, self.batch.x.device)


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
        self._model = model
        self._local = local
        self._mesh = mesh
        self._arrays = arrays
        self._needed = needed
        self._workspace = workspace
        self._progress = progress
        self._plan = forward_plan_of(model)
        self._dtype = dtype_of(model.parameters())
        self._outputs: dict[str, RowSource] = {}
        self._is_computed = False
        self._open()

    def _open(self) -> None:
        """Open the input rows and make the sampler."""
        local = self._local
        self._x = open_features(local, self._arrays.features)
        self._sampler: LayerSampler = make_sampler(
            local.graph, local.original_ids, self._mesh.sample_device, edge_ids=self._arrays.has_edge_values
        )

    @property
    def _targets(self) -> Ids:
        """This rank's vertices whose outputs are wanted."""
        return self._needed.levels[-1]

    def outputs(self) -> Iterator[tuple[Ids, Tensor]]:
        """Outputs of the needed vertices, in chunks, each with its vertices. Collective until the first."""
        names = list(self._plan.layer_of)
        for number, name in enumerate(names if not self._is_computed else ()):
            self._progress("layers", number, len(names))
            self._compute(name)
        self._is_computed = True
        self._progress("layers", len(names), len(names))
        for ids in row_chunks(self._targets):
            out = self._replay(ids)
            if not isinstance(out, Tensor):
                fix = "let forward return one tensor with a row per vertex"
                raise InputError(explain("the model's output", "a tensor", type(out).__name__, fix))
            yield ids, out

    def stored_outputs(self, vertex_type: str | None = None) -> RowSource:
        """Outputs of the needed vertices in a file of the workspace, the first time a collective.

        Rows are numbered by vertex or, with types, by row of ``vertex_type``.
        """
        array: npt.NDArray[Any] | None = None
        for ids, out in self.outputs():
            if array is None:
                array, rows = self._new_map("outputs", out)
            write_rows(array, ids - self._local.first, out)
        return rows

    def _compute(self, name: str) -> None:
        """Compute the outputs of a layer. A collective."""
        inputs, split, call = self._collect(name)
        self._outputs[name] = self._evaluate(inputs, split, call)

    def _new_map(
        self, name: str, rows: Tensor, held: tuple[int, int] | None = None
    ) -> tuple[npt.NDArray[Any], MappedRows]:
        """A map for rows like these of all own vertices, in an unnamed file that is removed with the process.

        ``held``: the first row and one past the last, if rows are not numbered by vertex.
        """
        bits = rows[:0].view(torch.uint16) if rows.dtype == torch.bfloat16 else rows[:0]
        first, stop = (self._local.first, self._local.stop) if held is None else held
        dtype = bits.cpu().numpy().dtype
        array = _new_workspace_file(self._workspace, f"rows of {name}", dtype, (stop - first, *rows.shape[1:]))
        return array, MappedRows(name, array, rows.dtype, first)

    def _rows_only(self, ids: Ids) -> Batch:
        """A batch of rows without edges, for a replay."""
        own = torch.from_numpy(ids)
        device = self._mesh.device
        context = BatchContext(
            self._mesh, _KEY, self._local, self._arrays, "split", each_vertex_once=True, pool=BufferPool(device)
        )
        block = Block(torch.zeros(ids.size + 1, dtype=torch.int64), own[:0], ids.size).to(device)
        layer = BatchLayer(block)
        kind = _UndecodedBatch if self._plan.pairs else Batch
        return kind(
            x=self._read_inputs(own),
            labels=None,
            frontiers=(FrontierIds(0, self._local.to_original_ids(own).to(device), own),),
            layers=(layer,) * self._plan.depth,
            num_targets=ids.size,
            global_batch_size=ids.size,
            context=context,
        )

    def _read_inputs(self, own: Tensor) -> Tensor:
        """The input rows of some own vertices."""
        return take_rows(self._x, own, self._mesh.device).to(self._dtype)

    def _replay_pass(self, batch: Batch, wanted: str | None) -> ForwardPass:
        """A forward pass that returns stored outputs, up to the layer ``wanted``."""
        return _ReplayPass(batch, self._plan, self._outputs, wanted)

    def _replay(self, ids: Ids) -> Any:
        """The model's output for some own vertices, from the stored outputs of its layers."""
        batch = self._rows_only(ids)
        with override_forward_pass(self._model, self._replay_pass(batch, None)):
            try:
                return call_wrapped(self._model, batch)
            except ReachedEndpoints as reached:
                return reached.rows

    def _reach(self, name: str, ids: Ids) -> tuple[Batch, ForwardPass, ReachedLayer]:
        """The model's call of a layer for some own vertices, with their batch and the forward pass."""
        batch = self._rows_only(ids)
        forward_pass = self._replay_pass(batch, name)
        with override_forward_pass(self._model, forward_pass):
            try:
                call_wrapped(self._model, batch)
            except ReachedLayer as reached:
                return batch, forward_pass, reached.with_traceback(None)  # whose frames hold the batch
        raise AssertionError(f"{name} was not called")  # the dry run saw a call

    def _inputs_of(self, name: str, ids: Ids) -> tuple[SplitForward, LayerCall, bool]:
        """A layer, the model's call of it for some own vertices, and whether its rows are ``batch.x`` itself."""
        batch, _, reached = self._reach(name, ids)
        h = input_rows(reached.call)
        return reached.split, reached.call, h is batch.x and h._version == 0  # not written to

    def _collect(self, name: str) -> tuple[RowSource, SplitForward, LayerCall]:
        """The inputs of a layer for the vertices that need them, the layer, and how the model calls it."""
        ids = self._needed.levels[self._plan.layer_of[name]]
        split, call, is_stored = self._inputs_of(name, ids[:0])  # also on ranks without vertices
        if is_stored:
            return self._x, split, call
        array, rows = self._new_map(f"{name}-in", input_rows(call))
        for chunk in row_chunks(ids):
            _, chunk_call, _ = self._inputs_of(name, chunk)
            write_rows(array, chunk - self._local.first, input_rows(chunk_call))
        return rows, split, call

    def _evaluate(self, inputs: RowSource, split: SplitForward, call: LayerCall) -> RowSource:
        """A layer's outputs for the vertices that need them, from chunks with all their in-edges. A collective.

        Ranks of one host read stored features in place, as in training; they exchange the outputs of other layers.
        User hooks on the layer do not run here but in the replays, which call the layer as the model does.
        """
        mesh = self._mesh
        local = self._local
        name = split.name
        groups = mesh.loading_groups
        in_place = can_read_foreign_rows(
            inputs, local.store, mesh, wanted=inputs is self._x and mesh.replica_shares_host
        )
        strategy = Strategy(
            parse_strategy("split", 1),
            [-1],
            local,
            groups.ids,
            own=self._sampler,
            reads_foreign_rows=in_place,
        )
        loader = StepLoader(
            local,
            mesh,
            groups.inputs,
            inputs,
            self._arrays,
            strategy="split",
            each_vertex_once=True,
            deterministic=True,
            in_place=in_place,
            labels=False,
        )
        plan = ForwardPlan(1, {name: 0}, {name: self._plan.adapters[name]}, (), ())
        chunks = edge_chunks(self._needed.levels[self._plan.layer_of[name] + 1], local.graph)
        array: npt.NDArray[Any] | None = None
        for number in range(num_rounds(chunks, mesh)):  # all ranks: as many rounds as the rank with most chunks needs
            ids = chunks[number] if number < len(chunks) else np.empty(0, np.int64)
            sampled = strategy.sample(torch.from_numpy(ids), _KEY, ids.size, StepTelemetry())
            batch = loader.load(sampled).to(mesh.device).cast(self._dtype)
            chunk_call = substitute(
                call,
                rows=batch.x,
                edges=EdgeHandle(batch),
                weights=EdgeWeightHandle(batch),
                attr=EdgeAttrHandle(batch),
            )
            out = ForwardPass(batch, plan).run_layer(split, chunk_call)
            if array is None:
                array, rows = self._new_map(f"{name}-out", out)
            write_rows(array, ids - local.first, out)
        return rows


def write_rows(target: npt.NDArray[Any], places: Ids, rows: Tensor) -> None:
    """Write rows of any type into a workspace file."""
    rows = rows.detach().cpu()
    target[places] = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _new_workspace_file(folder: str | Path | None, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Map a new file without a name, with its space reserved."""
    place = Path(tempfile.gettempdir() if folder is None else folder)
    check_workspace(place)
    try:
        return temporary_mapped(place, name, dtype, shape)
    except OSError as error:
        wanted = prod(shape) * np.dtype(dtype).itemsize
        got = f"{shutil.disk_usage(place).free:,} free" if error.errno == errno.ENOSPC else error.strerror
        fix = "free space, or name a folder on a larger disk: workspace=, on the command line --workspace FOLDER"
        raise InputError(explain(f"workspace {place}", f"{wanted:,} bytes for {name}", got, fix)) from None
