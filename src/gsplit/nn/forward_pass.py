"""One forward of a wrapped model on one batch: runs its layers, its dropout and its batch norm.

A ``ForwardPass`` exists while the model's forward runs. The layers' forwards (``nn.split_forward``) and a torch
function mode (``nn.function_mode``), which intercepts dropout and batch norm, call it.

Which rows a dropout or batch norm call gets (vertices of which frontier, or edges of which layer) follows from the dry
run (``ForwardPlan``), not from the tensor's shape, which can be ambiguous.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from gsplit.device.devices import DeferredChecks
from gsplit.errors import InputError, explain
from gsplit.graph.blocks import Block
from gsplit.graph.types import EdgeType
from gsplit.kernels.csr import LOOP, CsrEdges
from gsplit.keys import kernels_torch
from gsplit.minibatch.batch import Batch, BatchLayer
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeWeightHandle
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.adapters import LayerInputs
from gsplit.nn.calls import LayerCall, find_handle, input_rows, substitute
from gsplit.nn.dropout import keyed_dropout, keyed_edge_mask
from gsplit.nn.forward_plan import ForwardPlan, RowSpace, Space, num_rows
from gsplit.nn.fused_layers import Activation
from gsplit.nn.layer_edges import other_edges
from gsplit.nn.layers import adds_self_loops, edge_features_are_weights, is_attention, is_deterministic
from gsplit.nn.norm import global_batch_norm
from gsplit.nn.split_forward import SplitForward
from gsplit.nn.wrappers_and_hooks import has_user_hooks, runs_pyg_code

__all__ = ["ForwardPass", "relation_rows", "typed_batch"]


class ForwardPass:
    """See the module. ``checks`` outlive the forward, because a device's values arrive later."""

    allows_fused: ClassVar[bool] = True
    """Whether fused kernels may compute layers; False in trial runs at wrapping."""
    allows_draws: bool = False
    """Whether the model may draw random numbers: only in the run in which parameters get their sizes and values."""
    interception: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which dropout and batch norm are intercepted; ``run_layer`` is called outside of it."""

    def __init__(self, batch: Batch, plan: ForwardPlan, checks: DeferredChecks | None = None) -> None:
        self.batch = batch
        self._plan = plan
        self._checks = DeferredChecks() if checks is None else checks
        self._num_dropouts = 0
        self._num_norms = 0
        self._made: dict[Any, Any] = {}
        self._applied: list[tuple[ref[Tensor], Activation]] = []  # outputs of layers that have applied a ReLU

    def close(self) -> None:
        """End the forward, with the values before the ReLU in outputs that are kept somewhere."""
        self.restore_outputs([output() for output, _ in self._applied])
        self.interception = nullcontext  # the mode holds this pass, and with it the batch

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def run_layer(self, split: SplitForward, call: LayerCall) -> Any:
        """Exchange a layer's rows and compute its destinations. A collective."""
        name = split.name
        h = input_rows(call)
        values = [*call[0], *call[1].values()]
        handle = find_handle(call)
        relation = None if handle is None else handle.relation
        others = [value for value in values if isinstance(value, Tensor) and value is not h]
        if not isinstance(h, Tensor if relation is None else Tensor | tuple | dict) or others:
            got = f"{len(others)} more tensors" if others else f"{type(h).__name__} in place of rows"
            fix = "pass batch.edge_attr or batch.edge_weight for values of edges; positions are not in the mini-batches"
            raise InputError(explain(name, "a call with rows and what the batch has of edges", got, fix))
        if name not in self._plan.layer_of:
            fix = "let which layers are called depend on the model's settings only"
            got = "a call that the dry run did not make"
            raise InputError(explain(name, "the same layers in every forward", got, fix))
        num_dropouts = self._num_dropouts
        self._applied = [found for found in self._applied if found[0]() is not None]
        self.restore_outputs([h])
        if isinstance(h, dict):
            out = self._run_all_types(split, call, self._plan.layer_of[name])
        elif relation is not None:
            out = self._run_relation(split, call, self._plan.layer_of[name], relation)
        else:
            out = self._run_all_edges(split, call, self._plan.layer_of[name])
        # a layer without edges may have left its dropout out, but the calls behind it keep their numbers
        self._num_dropouts = num_dropouts + self._plan.layer_dropouts.get(name, 0)
        return out

    def _around_stock(self, split: SplitForward) -> AbstractContextManager[None]:
        """The context for calling a layer's own forward: intercepted, unless it is known not to drop or draw."""
        is_known = split.patched is None and is_deterministic(split.layer) and runs_pyg_code(split.layer)
        return nullcontext() if is_known else self.interception()

    def _run_all_edges(self, split: SplitForward, call: LayerCall, index: int) -> Any:
        """Compute the destinations of a layer from the edges of all relations, or of a graph without types."""
        h = input_rows(call)
        edge_attr, edge_weight = _edge_values(split, call, self.batch.layers[index], h.dtype)
        activation = None
        if split.name in self._plan.activations and not has_user_hooks(split.layer):
            activation = Activation()
        inputs = LayerInputs(
            batch=self.batch,
            index=index,
            call=call,
            h=h,
            shuffle=partial(self.batch.shuffle, index, h, of_wrapped_model=True),
            exchange=self.batch.row_exchange(index, h),
            edge_attr=edge_attr,
            edge_weight=edge_weight,
            once=self._once,
            around_stock=self._around_stock,
            attention_mask=partial(self._attention_mask, index),
            allows_fused=self.allows_fused,
            activation=activation,
        )
        out = self._plan.adapters[split.name](split, inputs)
        if activation is not None and activation.is_applied:
            self._applied.append((ref(out), activation))
        return out

    def _run_relation(self, split: SplitForward, call: LayerCall, index: int, relation: EdgeType) -> Any:
        """Compute the destinations of one relation. A collective, once for each tensor of source rows."""
        src, dst = relation_rows(split.name, call, relation)
        if relation[0] != relation[2] and adds_self_loops(split.layer):
            got = f"add_self_loops=True between {relation[0]} and {relation[2]}"
            fix = "make it with add_self_loops=False"
            raise InputError(explain(f"{split.name} on {relation}", "self-loops between equal types", got, fix))
        mixed, mixed_dst = self._mix(index, relation[0], src)
        same_rows = dst is src and relation[0] == relation[2]
        edge_attr, edge_weight = _edge_values(split, call, self.batch.part(relation).layers[index], src.dtype)
        inputs = LayerInputs(
            batch=self.batch,
            index=index,
            call=call,
            h=mixed,
            shuffle=lambda: (mixed, mixed_dst if same_rows else self._destinations(index, relation[2], dst)),
            exchange=None,
            edge_attr=edge_attr,
            edge_weight=edge_weight,
            once=self._once,
            around_stock=self._around_stock,
            attention_mask=partial(self._attention_mask, index),
            allows_fused=self.allows_fused and not is_attention(split.layer),
            of=relation,
            dst_is_prefix=same_rows,
        )
        return self._plan.adapters[split.name](split, inputs)

    def _run_all_types(self, split: SplitForward, call: LayerCall, index: int) -> dict[str, Tensor | None]:
        """Call a layer with the mixed rows of all types, and keep the destinations' outputs. A collective per type."""
        rows_of = input_rows(call)
        dicts = (each for each in (*call[0], *call[1].values()) if isinstance(each, dict))
        relations = list(next(each for each in dicts if find_handle(((each,), {})) is not None))
        for relation in relations:
            relation_rows(split.name, (((rows_of.get(relation[0]), rows_of.get(relation[2])),), {}), relation)
        mixed = {name: self._mix(index, name, h)[0] for name, h in rows_of.items()}
        edges = {
            relation: self._once(
                ("edge_index", index, relation, None), self.batch.part(relation).blocks[index].edge_index
            )
            for relation in relations
        }
        args, kwargs = substitute(call, mixed, edges, None, None)
        with self._around_stock(split):
            out = split.stock(*args, **kwargs)
        if not isinstance(out, dict):
            fix = "use HGTConv, or HeteroConv with a layer for every edge type"
            raise InputError(explain(split.name, "a layer that returns rows by vertex type", type(out).__name__, fix))
        return {
            name: None if rows is None else rows[: self.batch.part(name).blocks[index].num_dst]
            for name, rows in out.items()
        }

    def _mix(self, index: int, vertex_type: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed rows and the destinations of a type, exchanged once per tensor however many layers read it."""
        # the tensor is kept with them: the id of a tensor that is gone may be given to another
        _, mixed, dst = self._once(
            ("mixed", index, vertex_type, id(h)),
            lambda: (h, *self.batch.part(vertex_type).shuffle(index, h, of_wrapped_model=True)),
        )
        return mixed, dst

    def _destinations(self, index: int, vertex_type: str, h: Tensor) -> Tensor:
        """The destinations of a type. A collective at a boundary, where they are not the first rows of the tensor."""
        layer = self.batch.part(vertex_type).layers[index]
        if index and not layer.destinations_are_local:
            return self._mix(index, vertex_type, h)[1]
        num_rows = layer.num_local if index else layer.block.num_src
        if h.size(0) != num_rows:
            fix = "pass the output of the layer below, one row per destination"
            raise InputError(
                explain(f"rows of {vertex_type} at layer {index}", f"[{num_rows}, ...]", list(h.shape), fix)
            )
        return h[: layer.block.num_dst]

    def _attention_mask(self, index: int, layer: Any, edges: CsrEdges) -> Tensor | None:
        """The dropout mask of a fused attention layer. Counts as the one dropout call that PyG's layer makes."""
        call = self._next_dropout()
        if not layer.training or layer.dropout <= 0:
            return None
        rows = RowSpace("looped edges" if adds_self_loops(layer) else "edges", index)
        if rows not in self._plan.dropouts[call : call + 1]:
            raise InputError(_explain_other_calls("dropout", call, edges.places))
        dst_ids = self.batch.destinations(index).names[: self.batch.blocks[index].num_dst]
        dst_keys = kernels_torch.mix(self.batch.context.key.dropout(call), dst_ids)
        return keyed_edge_mask(dst_keys, edges.indptr, edges.places, layer.heads, layer.dropout)

    def _next_dropout(self) -> int:
        number = self._num_dropouts
        self._num_dropouts += 1
        return number

    def _check(self, what: str, call: int, known: tuple[RowSpace, ...], x: Tensor) -> RowSpace:
        if call >= len(known) or x.size(0) != self._once(known[call], lambda: num_rows(self.batch, known[call])):
            raise InputError(_explain_other_calls(what, call, x))
        return known[call]

    @property
    def has_activations(self) -> bool:
        """Whether a layer has applied a ReLU to its output."""
        return bool(self._applied)

    def relu(self, x: Tensor | None) -> Tensor | None:
        """The ReLU of x, if the layer that computed x has applied it and the model has not called it before.

        Not under hooks on saved tensors: checkpointing compares what a function saves with what it saves again.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        if x is not None and x.requires_grad and not torch.is_grad_enabled():
            return None  # in a function with a backward of its own
        for output, activation in self._applied:
            if x is not None and output() is x and not activation.is_called:
                return activation.relu(x)
        return None

    def restore_outputs(self, read: Iterable[Any]) -> None:
        """Give the outputs of layers among some values, which are read, the values before the ReLU."""
        if not self._applied:
            return
        ids = {id(value) for value in read if value is not None}
        for output, activation in self._applied:
            tensor = output()
            if tensor is not None and id(tensor) in ids:
                activation.restore(tensor)
        self._applied = [(output, activation) for output, activation in self._applied if activation.is_applied]

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout keyed by step, call, and the vertex or edge of each row."""
        call = self._next_dropout()
        if not training or p == 0.0:
            return x
        rows = self._check("dropout", call, self._plan.dropouts, x)
        return keyed_dropout(x, self._row_keys(rows, self.batch.context.key.dropout(call)), p)

    def _row_keys(self, rows: RowSpace, key: int) -> Tensor:
        batch = self.batch.part(rows.of)
        if rows.space == "mixed":
            ids = self._once(("ids", rows.layer, rows.of), lambda: batch.mixed_names(rows.layer))
            return kernels_torch.mix(key, ids)
        if batch.pairs is not None and rows.space in ("endpoints", "pairs"):
            names = batch.pairs.names if rows.space == "endpoints" else batch.pairs.value_keys
            return kernels_torch.mix(key, names)
        if rows.space == "local":
            return kernels_torch.mix(key, batch.frontier(rows.layer).names[: num_rows(self.batch, rows)])
        dst_rows, places = self._once(("places", rows), lambda: _edge_places(batch.blocks[rows.layer], rows.space))
        of_dst = self.batch.part(rows.of[2] if isinstance(rows.of, tuple) else None)
        dst_ids = of_dst.destinations(rows.layer).names[: batch.blocks[rows.layer].num_dst]
        dst_keys = kernels_torch.mix(key, dst_ids)
        return kernels_torch.mix(dst_keys[dst_rows], places)

    def batch_norm(
        self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> Tensor:
        """Batch norm; in training, over the rows of all ranks."""
        call = self._num_norms
        self._num_norms += 1
        if not training:
            return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)
        rows = self._check("batch norm", call, self._plan.norms, x)
        if rows.space == "mixed":
            fix = "put it behind a layer, not before the first or inside a layer that takes one tensor of rows"
            raise InputError(explain("batch norm", "rows that one rank holds", "rows that several ranks hold", fix))
        context = self.batch.context
        if not context.each_vertex_once:
            fix = "use strategy='split' with one replica, or a row-wise norm such as LayerNorm"
            got = f"strategy={context.strategy!r} on {context.mesh.size} ranks"
            raise InputError(explain("batch norm", "each vertex computed on one rank", got, fix))
        return global_batch_norm(
            x,
            mean,
            var,
            weight,
            bias,
            momentum=momentum,
            eps=eps,
            comm=context.mesh.world,
            step=context.key.step,
            checks=self._checks,
            telemetry=self.batch.telemetry,
        )


def typed_batch(batch: Batch) -> TypedBatch:
    """The batch of a heterogeneous graph, which a call with rows or edges by type needs."""
    if not isinstance(batch, TypedBatch):
        fix = "call the model with batch.x and batch.edge_index"
        raise InputError(explain("a layer", "a batch of a heterogeneous graph", "a batch without types", fix))
    return batch


def relation_rows(name: str, call: LayerCall, relation: EdgeType) -> tuple[Tensor, Tensor]:
    """The rows of sources and of destinations that a layer was called with for a relation."""
    given = input_rows(call)
    src, dst = given if isinstance(given, tuple) and len(given) == 2 else (given, given)
    for vertex_type, rows in ((relation[0], src), (relation[2], dst)):
        if not isinstance(rows, Tensor):
            fix = (
                f"add a relation into {vertex_type} to the layer below, such as the reverse of {relation}, or leave "
                f"{relation} out of this layer"
            )
            got = f"{type(rows).__name__} in place of rows of {vertex_type}, which no layer below computes"
            raise InputError(explain(f"{name} on {relation}", f"rows of {relation[0]} and {relation[2]}", got, fix))
    if not isinstance(given, tuple) and relation[0] != relation[2]:
        fix = f"pass (rows of {relation[0]}, rows of {relation[2]})"
        raise InputError(explain(f"{name} on {relation}", "a pair of tensors", "one tensor", fix))
    return src, dst


def _explain_other_calls(what: str, call: int, x: Tensor) -> str:
    expected = "the same calls in every forward, as in the dry run"
    got = f"call {call} on {list(x.shape)}"
    return explain(what, expected, got, "let what the model calls depend on its settings only")


def _edge_values(
    split: SplitForward, call: LayerCall, stored: BatchLayer, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The features and the weights of edges that a layer is called with, in the model's type."""
    values = [*call[0], *call[1].values()]
    takes_attr = any(isinstance(value, EdgeAttrHandle) for value in values)
    if takes_attr and edge_features_are_weights(split.layer):
        fix = "load them as weights, NeighborLoader(..., edge_weight=NAME), and pass batch.edge_weight"
        raise InputError(explain(split.name, "weights of edges", "batch.edge_attr", fix))
    takes_weight = any(isinstance(value, EdgeWeightHandle) for value in values)
    weight = stored.edge_weight.to(dtype) if takes_weight and stored.edge_weight is not None else None
    return _as_type(stored.edge_attr, dtype) if takes_attr else None, weight


def _as_type(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Stored values in the model's type; integers stay, they may be indices of an embedding."""
    return values if values is None or not values.is_floating_point() else values.to(dtype)


def _edge_places(block: Block, space: Space) -> tuple[Tensor, Tensor]:
    """The destination row of every edge and its number among that destination's edges; LOOP for a self-loop."""
    dst = block.dst_rows()
    places = torch.arange(block.num_edges, device=dst.device) - block.indptr[dst]
    if space == "edges":
        return dst, places
    kept = other_edges(block)
    loops = torch.arange(block.num_dst, device=dst.device)
    return torch.cat([dst[kept], loops]), torch.cat([places[kept], torch.full_like(loops, LOOP)])
