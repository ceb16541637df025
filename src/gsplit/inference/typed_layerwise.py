"""Layer-wise inference on heterogeneous graphs: ``layerwise`` with rows by vertex type.

A layer is a module of one relation (in ``HeteroConv`` and ``to_hetero``), of all types at once (``HGTConv``), or of the
edges of all relations on fused rows (``RGCNConv``). Inputs and outputs of all of them are stored by vertex type, with a
row for each of this rank's vertices of the type. A layer of one relation is computed on chunks of destinations of its
type, with the in-edges of that relation only.

Rows that several relations read are collected once: a forward that reaches a layer has passed the layers before it, and
the same tensor has the same rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.features.protocol import RowSource, take_rows
from gsplit.graph.blocks import FrontierIds
from gsplit.graph.types import GraphTypes
from gsplit.inference.closure import edge_chunks, num_rounds, row_chunks
from gsplit.inference.layerwise import LayerwisePass, ReachedEndpoints, ReachedLayer, write_rows
from gsplit.loading.strategy import Strategy
from gsplit.loading.tiers import open_features
from gsplit.loading.typed_step_loader import TypedStepLoader
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeHandle, EdgeTypeHandle, EdgeWeightHandle
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit.minibatch.typed import StepRows
from gsplit.minibatch.typed_batch import TypedBatch, TypedLinkBatch, cut_batch
from gsplit.nn.calls import LayerCall, find_handle, input_rows, substitute
from gsplit.nn.forward_pass import ForwardPass, relation_rows, typed_batch
from gsplit.nn.forward_plan import ForwardPlan
from gsplit.nn.split_forward import SplitForward
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.relations import relation_sampler
from gsplit.telemetry import StepTelemetry

__all__ = ["TypedLayerwisePass", "labels_of", "make_pass"]

_KEY = StepKey(0, 0, 0)
Rows = Mapping[str, RowSource]
"""Rows by vertex type, numbered by ``GraphTypes.rows``."""


@dataclass(frozen=True, repr=False, kw_only=True)
class _UndecodedTypedBatch(TypedLinkBatch):
    """Stops a model that decodes pairs itself before it does."""

    def endpoints(self, h: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        raise ReachedEndpoints(h)


class _TypedReplayPass(ForwardPass):
    """Returns stored outputs in place of running layers, and stops at the layer whose inputs are wanted.

    ``given``: the tensors that the layers before it were called with, and which layer and type each was for.
    """

    def __init__(self, batch: TypedBatch, plan: ForwardPlan, outputs: Mapping[str, Rows], wanted: str | None) -> None:
        super().__init__(batch, plan)
        self._types = batch.types
        self._outputs = outputs
        self._wanted = wanted
        self.given: list[tuple[Tensor, int, str, str]] = []

    def run_layer(self, split: SplitForward, call: LayerCall) -> Any:
        if split.name == self._wanted:
            raise ReachedLayer(split, call)
        batch = typed_batch(self.batch)
        for name, rows in _rows_by_type(batch, split.name, call).items():
            self.given.append((rows, rows._version, split.name, name))
        found = {name: self._read(batch, name, rows) for name, rows in self._outputs[split.name].items()}
        handle = find_handle(call)
        if isinstance(input_rows(call), dict):
            return found
        assert handle is not None
        return batch.to_homogeneous(found) if handle.relation is None else found[handle.relation[2]]

    def _read(self, batch: TypedBatch, name: str, rows: RowSource) -> Tensor:
        ids = batch.part(name).input_ids
        return take_rows(rows, self._types.rows(ids.cpu()), ids.device)


def _rows_by_type(batch: TypedBatch, name: str, call: LayerCall) -> dict[str, Tensor]:
    """The rows that a layer was called with, by vertex type."""
    given = input_rows(call)
    handle = find_handle(call)
    if isinstance(given, dict):
        return {found: rows for found, rows in given.items() if isinstance(rows, Tensor)}
    if handle is None or handle.relation is None:
        rows_of = zip(batch.types.vertex_types, batch.rows.rows(), strict=True)
        return {found: given[rows] for found, rows in rows_of}
    src, dst = relation_rows(name, call, handle.relation)
    if handle.relation[0] == handle.relation[2] and src is not dst:
        fix = "pass one tensor of rows to a layer between equal types"
        got = f"two tensors of rows of {handle.relation[0]}"
        raise InputError(explain(f"{name} on {handle.relation}", "the same rows as sources and destinations", got, fix))
    return {handle.relation[0]: src, handle.relation[2]: dst}


class TypedLayerwisePass(LayerwisePass):
    """See the module. The outputs are those of the needed vertices of the type ``vertex_type``."""

    def __init__(self, *args: Any, vertex_type: str, **options: Any) -> None:
        """The other arguments are those of ``LayerwisePass``."""
        self._vertex_type = vertex_type
        self._inputs: dict[tuple[str, str], RowSource] = {}
        self._outputs_of: dict[str, dict[str, RowSource]] = {}
        super().__init__(*args, **options)

    def _open(self) -> None:
        local = self._local
        mesh = self._mesh
        types = local.store.types
        assert types is not None
        if mesh.host_samples:
            fix = "use gsplit.init(sample_device=...), so that the device samples, or the CPU"
            expected = "a mesh that inference on heterogeneous graphs is built for"
            raise InputError(explain("mesh", expected, f"mesh={mesh}", fix))
        self._types: GraphTypes = types
        self._x_of = {
            name: open_features(local, found, vertex_type=name) for name, found in self._arrays.of_types.items()
        }
        edge_type = local.store.stored_array("edge_type")
        self._sampler = relation_sampler(local.graph, local.original_ids, mesh.sample_device, edge_type)

    def _held(self, vertex_type: str) -> tuple[int, int]:
        """The rows of this rank's vertices of a type."""
        return self._types.row_range(vertex_type, self._local.first, self._local.stop)

    def _of_types(self, ids: Ids, names: Mapping[str, object]) -> Ids:
        numbers = [self._types.number(name) for name in names]
        return ids[np.isin(self._types.of_host(ids), numbers)]

    @property
    def _targets(self) -> Ids:
        return self._of_types(self._needed.levels[-1], {self._vertex_type: None})

    def _read_inputs(self, own: Tensor) -> Tensor:
        return torch.empty(0, device=self._mesh.device)  # rows are read by type

    def _rows_only(self, ids: Ids) -> TypedBatch:
        types = self._types
        device = self._mesh.device
        fused = super()._rows_only(ids)
        found = fused.frontiers[0]
        fused = replace(fused, frontiers=(FrontierIds(0, found.n_id, found.ids.to(device)),))
        rows = StepRows.of(fused.frontiers, fused.blocks, [None] * self._plan.depth, [], types)
        own = torch.from_numpy(ids)
        rows_of = rows.frontiers[0].rows()
        x_dict = {
            name: take_rows(x, types.rows(own[rows_of[types.number(name)].cpu()]), device).to(self._dtype)
            for name, x in self._x_of.items()
        }
        kinds = (own[:0].to(device),) * self._plan.depth
        made = cut_batch(fused, types, rows, kinds, x_dict, found.n_id)
        if self._plan.pair_type is None:
            return made
        held = {each.name: getattr(made, each.name) for each in fields(made)}
        return _UndecodedTypedBatch(**held, pair_type=self._plan.pair_type)

    def stored_outputs(self, vertex_type: str | None = None) -> RowSource:
        """See the base. The layers are computed once, however many types are asked for."""
        assert vertex_type is not None
        self._vertex_type = vertex_type
        maps: list[tuple[Any, RowSource]] = []
        for ids, out in self.outputs():
            if not maps:
                maps.append(self._new_map(f"outputs {vertex_type}", out, self._held(vertex_type)))
            write_rows(maps[0][0], self._places(torch.from_numpy(ids), vertex_type), out)
        return maps[0][1]

    def _replay_pass(self, batch: Batch, wanted: str | None) -> ForwardPass:
        return _TypedReplayPass(typed_batch(batch), self._plan, self._outputs_of, wanted)

    def _replay(self, ids: Ids) -> Any:
        out = super()._replay(ids)
        out = out.get(self._vertex_type) if isinstance(out, dict) else out
        if isinstance(out, Tensor) and out.size(0) != ids.size:
            fix = f"let forward return rows of {self._vertex_type}, or a dict with them"
            raise InputError(explain("the model's output", f"[{ids.size}, ...]", list(out.shape), fix))
        return out

    def _compute(self, name: str) -> None:
        inputs, reached = self._collect_types(name)
        self._outputs_of[name] = self._evaluate_types(inputs, reached)

    def _collect_types(self, name: str) -> tuple[dict[str, RowSource], ReachedLayer]:
        """The inputs of a layer by type, for the vertices that need them, and how the model calls the layer."""
        batch, passed, reached = self._reach(name, np.empty(0, np.int64))  # also on ranks without vertices
        assert isinstance(batch, TypedBatch) and isinstance(passed, _TypedReplayPass)
        maps = {}
        for of, rows in _rows_by_type(batch, name, reached.call).items():
            same = [
                (layer, kind)
                for tensor, version, layer, kind in passed.given
                if tensor is rows and version == rows._version and kind == of
            ]
            if same:
                self._inputs[name, of] = self._inputs[same[0]]
            elif rows is batch.x_dict.get(of) and rows._version == 0:  # not written to
                self._inputs[name, of] = self._x_of[of]
            else:
                array, self._inputs[name, of] = self._new_map(f"{name}-in {of}", rows, self._held(of))
                maps[of] = array
        ids = self._of_types(self._needed.levels[self._plan.layer_of[name]], maps)
        for chunk in row_chunks(ids) if maps else ():
            batch, _, reached = self._reach(name, chunk)
            assert isinstance(batch, TypedBatch)
            found = _rows_by_type(batch, name, reached.call)
            for of, array in maps.items():
                write_rows(array, self._places(batch.part(of).input_ids, of), found[of])
        inputs = {of: rows for (layer, of), rows in self._inputs.items() if layer == name}
        return {of: inputs[of] for of in self._types.vertex_types if of in inputs}, reached

    def _places(self, ids: Tensor, vertex_type: str) -> Ids:
        places: Ids = self._types.rows(ids.cpu()).numpy() - self._held(vertex_type)[0]
        return places

    def _evaluate_types(self, inputs: Rows, reached: ReachedLayer) -> dict[str, RowSource]:
        """A layer's outputs by type, from chunks of destinations with all their in-edges. A collective."""
        mesh = self._mesh
        local = self._local
        split = reached.split
        handle = find_handle(reached.call)
        assert handle is not None
        relation = handle.relation if not isinstance(input_rows(reached.call), dict) else None
        fanout = tuple(-1 if relation in (None, found) else 0 for found in self._types.edge_types)
        groups = mesh.loading_groups
        strategy = Strategy(parse_strategy("split", 1), [fanout], local, groups.ids, own=self._sampler)
        loader = TypedStepLoader(
            local,
            self._types,
            "",
            inputs,
            mesh=mesh,
            comm=groups.inputs,
            arrays=self._arrays,
            strategy="split",
            each_vertex_once=True,
            deterministic=True,
        )
        plan = ForwardPlan(1, {split.name: 0}, {split.name: self._plan.adapters[split.name]}, (), ())
        ids = self._needed.levels[self._plan.layer_of[split.name] + 1]
        ids = self._of_types(ids, inputs if relation is None else {relation[2]: None})
        chunks = edge_chunks(ids, local.graph)
        maps: dict[str, tuple[Any, RowSource]] = {}
        for number in range(num_rounds(chunks, mesh)):  # all ranks: as many rounds as the rank with most chunks needs
            chunk = torch.from_numpy(chunks[number] if number < len(chunks) else ids[:0])
            sampled = strategy.sample(chunk, _KEY, chunk.numel(), StepTelemetry())
            batch = loader.load(sampled).to(mesh.device).cast(self._dtype)
            out = ForwardPass(batch, plan).run_layer(split, _call_on(batch, reached.call))
            for of, rows in _outputs_by_type(batch, relation, out).items():
                if of not in maps:
                    maps[of] = self._new_map(f"{split.name}-out {of}", rows, self._held(of))
                mine = chunk[self._types.of(chunk) == self._types.number(of)]
                write_rows(maps[of][0], self._places(mine, of), rows)
        return {of: rows for of, (_, rows) in maps.items()}


def make_pass(*args: Any, vertex_type: str | None, **options: Any) -> LayerwisePass:
    """The layer-wise pass of a graph, whose outputs are those of a vertex type if it has types."""
    if vertex_type is None:
        return LayerwisePass(*args, **options)
    return TypedLayerwisePass(*args, vertex_type=vertex_type, **options)


def labels_of(vertex_type: str | None) -> str:
    """The name of the array of labels."""
    return "y" if vertex_type is None else f"y/{vertex_type}"


def _call_on(batch: TypedBatch, call: LayerCall) -> LayerCall:
    """A layer's call with the rows and edges of a batch whose input rows are those of the layer."""
    given = input_rows(call)
    handle = find_handle(call)
    assert handle is not None
    rows: Any
    edges: Any = EdgeHandle(batch, handle.relation)
    if isinstance(given, dict):
        rows = batch.x_dict
        edges = batch.edge_index_dict
    elif handle.relation is None:
        rows = batch.fused_x
    else:
        src, dst = batch.x_dict[handle.relation[0]], batch.x_dict[handle.relation[2]]
        rows = (src, dst) if isinstance(given, tuple) else src
    return substitute(call, rows, edges, EdgeWeightHandle(batch), EdgeAttrHandle(batch), kinds=EdgeTypeHandle(batch))


def _outputs_by_type(batch: TypedBatch, relation: Any, out: Any) -> dict[str, Tensor]:
    """The rows that a layer computed for its destinations, by vertex type."""
    if isinstance(out, dict):
        return {of: rows for of, rows in out.items() if rows is not None}
    if relation is not None:
        return {relation[2]: out}
    types = batch.rows.types[: out.size(0)]
    return {of: out[types == number] for number, of in enumerate(batch.types.vertex_types)}
