"""One forward of a wrapped model on one batch: runs its layers, its dropout and its batch norm.

A ``ForwardPass`` exists while the model's forward runs. The layers' forwards (``nn.split_forward``) and a torch
function mode (``nn.function_mode``), which intercepts dropout and batch norm, call it.

Which rows a dropout or batch norm call gets (vertices of which frontier, or edges of which layer) follows from the dry
run (``ForwardPlan``), not from the tensor's shape, which can be ambiguous.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gsplit.device.devices import DeferredChecks
from gsplit.errors import InputError, explain
from gsplit.graph.blocks import Block
from gsplit.kernels.csr import LOOP, CsrEdges
from gsplit.keys import kernels_torch
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.edge_handles import EdgeAttrHandle, EdgeWeightHandle
from gsplit.nn.adapters import LayerInputs
from gsplit.nn.calls import LayerCall, input_rows
from gsplit.nn.dropout import keyed_dropout, keyed_edge_mask
from gsplit.nn.forward_plan import ForwardPlan, RowSpace, Space, num_rows
from gsplit.nn.layer_edges import other_edges
from gsplit.nn.layers import edge_features_are_weights
from gsplit.nn.norm import global_batch_norm
from gsplit.nn.split_forward import SplitForward

__all__ = ["ForwardPass"]


class ForwardPass:
    """See the module. ``checks`` outlive the forward, because a device's values arrive later."""

    fuses_attention: ClassVar[bool] = True
    """Whether fused kernels may compute attention layers; False in trial runs at wrapping."""

    def __init__(self, batch: Batch, plan: ForwardPlan, checks: DeferredChecks | None = None) -> None:
        self.batch = batch
        self._plan = plan
        self._checks = DeferredChecks() if checks is None else checks
        self._num_dropouts = 0
        self._num_norms = 0
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def run_layer(self, split: SplitForward, call: LayerCall) -> Any:
        """Exchange a layer's rows and compute its destinations. A collective."""
        name = split.name
        h = input_rows(call)
        values = [*call[0], *call[1].values()]
        others = [value for value in values if isinstance(value, Tensor) and value is not h]
        if not isinstance(h, Tensor) or others:
            got = f"{len(others)} more tensors" if others else f"{type(h).__name__} in place of rows"
            fix = "pass batch.edge_attr or batch.edge_weight for values of edges; positions are not in the mini-batches"
            raise InputError(explain(name, "a call with rows and what the batch has of edges", got, fix))
        if name not in self._plan.layer_of:
            fix = "let which layers are called depend on the model's settings only"
            got = "a call that the dry run did not make"
            raise InputError(explain(name, "the same layers in every forward", got, fix))
        index = self._plan.layer_of[name]
        mixed, dst = self.batch.shuffle(index, h, of_wrapped_model=True)
        takes_attr = any(isinstance(value, EdgeAttrHandle) for value in values)
        if takes_attr and edge_features_are_weights(split.layer):
            fix = "load them as weights, NeighborLoader(..., edge_weight=NAME), and pass batch.edge_weight"
            raise InputError(explain(name, "weights of edges", "batch.edge_attr", fix))
        takes_weight = any(isinstance(value, EdgeWeightHandle) for value in values)
        stored = self.batch.layers[index]
        inputs = LayerInputs(
            batch=self.batch,
            index=index,
            call=call,
            mixed=mixed,
            dst=dst,
            edge_attr=_as_type(stored.edge_attr, h.dtype) if takes_attr else None,
            edge_weight=stored.edge_weight.to(h.dtype) if takes_weight and stored.edge_weight is not None else None,
            once=self._once,
            attention_mask=partial(self._attention_mask, index) if self.fuses_attention else None,
        )
        return self._plan.adapters[name](split, inputs)

    def _attention_mask(self, index: int, layer: Any, edges: CsrEdges) -> Tensor | None:
        """The dropout mask of a fused attention layer. Counts as the one dropout call that PyG's layer makes."""
        call = self._next_dropout()
        if not layer.training or layer.dropout <= 0:
            return None
        rows = RowSpace("looped edges" if layer.add_self_loops else "edges", index)
        if rows not in self._plan.dropouts[call : call + 1]:
            raise InputError(_explain_other_calls("dropout", call, edges.places))
        dst_ids = self.batch.destinations(index).n_id[: self.batch.blocks[index].num_dst]
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

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout keyed by step, call, and the vertex or edge of each row."""
        call = self._next_dropout()
        if not training or p == 0.0:
            return x
        rows = self._check("dropout", call, self._plan.dropouts, x)
        return keyed_dropout(x, self._row_keys(rows, self.batch.context.key.dropout(call)), p)

    def _row_keys(self, rows: RowSpace, key: int) -> Tensor:
        batch = self.batch
        if rows.space == "mixed":
            ids = self._once(("ids", rows.layer), lambda: batch.mixed_ids(rows.layer))
            return kernels_torch.mix(key, ids)
        if batch.pairs is not None and rows.space in ("endpoints", "pairs"):
            names = batch.pairs.n_id if rows.space == "endpoints" else batch.pairs.value_keys
            return kernels_torch.mix(key, names)
        if rows.space == "local":
            return kernels_torch.mix(key, batch.frontier(rows.layer).n_id[: num_rows(batch, rows)])
        dst_rows, places = self._once(
            (rows.space, rows.layer), lambda: _edge_places(batch.blocks[rows.layer], rows.space)
        )
        dst_ids = batch.destinations(rows.layer).n_id[: batch.blocks[rows.layer].num_dst]
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


def _explain_other_calls(what: str, call: int, x: Tensor) -> str:
    expected = "the same calls in every forward, as in the dry run"
    got = f"call {call} on {list(x.shape)}"
    return explain(what, expected, got, "let what the model calls depend on its settings only")


def _as_type(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Stored values in the model's type; integers stay, they may be indices of an embedding."""
    return values if values is None or not values.is_floating_point() else values.to(dtype)


def _edge_places(block: Block, space: Space) -> tuple[Tensor, Tensor]:
    """The destination row of every edge and its number among that destination's edges; LOOP for a self-loop."""
    dst = block.edge_index()[1]
    places = torch.arange(block.num_edges, device=dst.device) - block.indptr[dst]
    if space == "edges":
        return dst, places
    kept = other_edges(block)
    loops = torch.arange(block.num_dst, device=dst.device)
    return torch.cat([dst[kept], loops]), torch.cat([places[kept], torch.full_like(loops, LOOP)])
