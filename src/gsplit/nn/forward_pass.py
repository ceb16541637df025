"""One forward of a wrapped model on one batch: which edges a layer gets, and what dropout and batch norm do.

While the model's forward runs, a ``ForwardPass`` knows the batch; hooks on the layers ask it for their inputs, and a
torch function mode (``nn.function_mode``) sends dropout and batch norm to it.

Which rows a dropout call or a batch norm sees (vertices of which frontier, or edges of which layer) is not guessed from
the shape, which can be ambiguous, but was learned by the dry run (``ForwardPlan``).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.batch import Batch
from gsplit.blocks import Block
from gsplit.devices import DeferredChecks
from gsplit.edge_handles import EdgeAttrHandle, EdgeWeightHandle
from gsplit.errors import InputError, explain
from gsplit.kernels.csr import LOOP
from gsplit.keys import kernels_torch
from gsplit.nn.attention import attention_edges, run_attention_layer, takes_fused_attention
from gsplit.nn.calls import LayerCall, one_vertex, rows_of, substitute
from gsplit.nn.column_layers import check_linear, run_on_columns
from gsplit.nn.dropout import keyed_dropout, keyed_edge_mask
from gsplit.nn.forward_plan import ForwardPlan, RowSpace, Space, num_rows
from gsplit.nn.gcn import GcnOptions, gcn_options, normalised_edges
from gsplit.nn.layers import edge_features_are_weights, takes_csr, to_csr
from gsplit.nn.norm import global_batch_norm
from gsplit.nn.self_loops import adds_self_loops, looped_edges, other_edges
from gsplit.partial_sums import PartialSums

__all__ = ["ForwardPass"]


class ForwardPass:
    """See the module. Hooks call ``enter_layer`` and ``leave_layer``, the function mode ``dropout`` and ``batch_norm``.

    ``close`` it when the forward is over, also one that failed.
    """

    fuses_attention: ClassVar[bool] = True
    """Whether attention layers may be computed by our kernels; not while a model is being tried."""

    def __init__(self, batch: Batch, plan: ForwardPlan, checks: DeferredChecks | None = None) -> None:
        """``checks`` outlive the forward: a device's values come later."""
        self.batch, self._plan = batch, plan
        self._checks = DeferredChecks() if checks is None else checks
        self._num_dropouts, self._num_norms = 0, 0
        self.inside: str | None = None
        self._answer: Tensor | None = None  # what a layer gives that our kernels have computed already
        self._made: dict[Any, Any] = {}
        self._switched_off: list[tuple[Module, str]] = []

    def close(self) -> None:
        """Let layers do by themselves again what is done here for them."""
        for layer, name in self._switched_off:
            setattr(layer, name, True)
        self._switched_off = []

    def _switch_off(self, layer: Module, name: str) -> None:
        """Have a layer leave out, until ``close``, what is done here."""
        setattr(layer, name, False)
        self._switched_off.append((layer, name))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def enter_layer(self, name: str, layer: Module, call: LayerCall) -> LayerCall:
        """The call of a layer with its own rows and edges in place of the model's. A collective."""
        h, values = rows_of(call), [*call[0], *call[1].values()]
        others = [value for value in values if isinstance(value, Tensor) and value is not h]
        if not isinstance(h, Tensor) or others:
            got = f"{len(others)} more tensors" if others else "no tensor of rows"
            fix = "pass batch.edge_attr or batch.edge_weight for values of edges; positions are not in the mini-batches"
            raise InputError(explain(name, "a call with rows and what the batch has of edges", got, fix))
        if name not in self._plan.layer_of:
            fix = "let which layers are called depend on the model's settings only"
            raise InputError(
                explain(name, "the same layers in every forward", "a call that the dry run did not make", fix)
            )
        index = self._plan.layer_of[name]
        weighted = any(isinstance(value, EdgeWeightHandle) for value in values)
        exchange = self.batch.layers[index].exchange
        if isinstance(exchange, PartialSums):
            self._answer = self._sum_columns(name, layer, call, exchange, weighted)
            self.inside = name
            return one_vertex(
                call, h.new_empty(0, exchange.num_columns), None, single_input=name in self._plan.single_input
            )
        mixed, dst = self.batch.shuffle(index, h, of_wrapped_model=True)
        if any(isinstance(value, EdgeAttrHandle) for value in values) and edge_features_are_weights(layer):
            fix = "load them as weights, NeighborLoader(..., edge_weight=NAME), and pass batch.edge_weight"
            raise InputError(explain(name, "weights of edges", "batch.edge_attr", fix))
        attr = _as_type(self.batch.layers[index].edge_attr, h.dtype)
        attr = attr if any(isinstance(value, EdgeAttrHandle) for value in values) else None
        self.inside = name
        if self.fuses_attention and takes_fused_attention(layer, call, mixed, attr):
            self._answer = self._attend(index, layer, mixed, dst, attr)
            if layer.add_self_loops:  # of the one vertex, which PyG would find by a mask
                self._switch_off(layer, "add_self_loops")
            return one_vertex(call, h, attr)
        edges, weights = None, None
        if h.device.type != "cpu" and adds_self_loops(layer):
            edges, attr = looped_edges(self.batch.blocks[index], attr, layer)
            self._switch_off(layer, "add_self_loops")  # done here without a wait for the device
        else:
            edges, weights = self._edges(index, layer, h.dtype, weighted)
        rows = mixed if name in self._plan.single_input else (mixed, dst)
        return substitute(call, rows, edges, weights, attr)

    def _sum_columns(self, name: str, layer: Module, call: LayerCall, sums: PartialSums, weighted: bool) -> Tensor:
        """The bottom layer from all ranks' columns of the input rows. A collective."""
        h, telemetry = rows_of(call), self.batch.telemetry
        check_linear(name, layer)
        if h is not self.batch.x:
            got, fix = (
                "rows that were changed before it, or by dropout",
                "pass batch.x as it is, or use another strategy",
            )
            raise InputError(explain(f"strategy='push_pull', {name}", "the input rows themselves, batch.x", got, fix))
        edges, weights = self._edges(0, layer, h.dtype, weighted)
        rows = h if name in self._plan.single_input else (h, h[: sums.num_dst])
        partial, bias = run_on_columns(layer, substitute(call, rows, edges, weights, None), sums)
        telemetry.count("bytes_sent", sums.num_sent * partial[:1].nbytes)
        telemetry.count("bytes_received", sums.num_received * partial[:1].nbytes)
        telemetry.count("collectives", sums.num_collectives)
        with telemetry.span("shuffle"):
            out = sums.sum(partial[: sums.num_dst])
        return out if bias is None else out + bias

    def _attend(self, index: int, layer: Any, mixed: Tensor, dst: Tensor, attr: Tensor | None) -> Tensor:
        """An attention layer by our kernels; counts as the one call of dropout that the layer itself would make."""
        call, self._num_dropouts = self._num_dropouts, self._num_dropouts + 1
        block, loops, keep = self.batch.blocks[index], bool(layer.add_self_loops), None
        edges = self._once(
            ("attention", index, loops),
            lambda: attention_edges(block, add_self_loops=loops),
        )
        if layer.training and layer.dropout > 0:
            rows = RowSpace("looped edges" if loops else "edges", index)
            if rows not in self._plan.dropouts[call : call + 1]:
                raise InputError(_explain_other_calls("dropout", call, edges.places))
            dst_ids = self.batch.destinations(index).n_id[: block.num_dst]
            dst_keys = kernels_torch.mix(self.batch.context.key.dropout(call), dst_ids)
            keep = keyed_edge_mask(dst_keys, edges.indptr, edges.places, layer.heads, layer.dropout)
        return run_attention_layer(layer, (mixed, dst), attr, block, edges, keep)

    def leave_layer(self, out: Any) -> Any:
        """Keep the destinations of a layer that knows no others; give what our kernels computed in its place."""
        name, self.inside = self.inside, None
        answer, self._answer = self._answer, None
        assert name is not None
        self.close()
        if answer is not None:
            return answer
        if name not in self._plan.single_input:
            return out
        return out[: self.batch.layers[self._plan.layer_of[name]].exchange.num_dst]

    def _edges(self, index: int, layer: Module, dtype: torch.dtype, weighted: bool) -> tuple[Any, Tensor | None]:
        """The edges of a layer in the fastest form that is exact for it, and their weights if they stand apart."""
        block, gcn = self.batch.blocks[index], gcn_options(layer)
        stored = self.batch.layers[index].edge_weight
        weights = stored.to(dtype) if weighted and stored is not None else None
        if gcn is not None:
            key = ("gcn", index, gcn, weighted, dtype)
            block, weights = self._once(key, lambda: self._normalised(index, gcn, weights, dtype))
            self._switch_off(layer, "normalize")  # done here, by the degrees of the whole graph
        if takes_csr(layer, dtype, block.indptr.device):
            values = weights
            if values is None:
                values = torch.ones(block.num_edges, dtype=dtype, device=block.indptr.device)
            return self._once(("csr", index, gcn, weighted, dtype), lambda: to_csr(block, values)), None
        return self._once(("edge_index", index, gcn), block.edge_index), weights

    def _normalised(
        self, index: int, gcn: GcnOptions, weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Block, Tensor]:
        """GCN's edges and weights. A collective."""
        deg_inv_sqrt, loop_weight = self.batch.gcn_norm(
            index,
            add_self_loops=gcn.add_self_loops,
            fill_value=gcn.fill_value,
            weighted=weights is not None,
            dtype=dtype,
        )
        block = self.batch.blocks[index]
        return normalised_edges(block, deg_inv_sqrt, weights, loop_weight, add_self_loops=gcn.add_self_loops)

    def _check(self, what: str, call: int, known: tuple[RowSpace, ...], x: Tensor) -> RowSpace:
        if call >= len(known) or x.size(0) != self._once(known[call], lambda: num_rows(self.batch, known[call])):
            raise InputError(_explain_other_calls(what, call, x))
        return known[call]

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout keyed by step, call, and the vertex or edge of each row."""
        if self._answer is not None:  # inside a layer that has been computed, and this dropout with it
            return x
        call, self._num_dropouts = self._num_dropouts, self._num_dropouts + 1
        if not training or p == 0.0:
            return x
        rows = self._check("dropout", call, self._plan.dropouts, x)
        return keyed_dropout(x, self._row_keys(rows, self.batch.context.key.dropout(call)), p)

    def _row_keys(self, rows: RowSpace, key: int) -> Tensor:
        batch = self.batch
        if rows.space == "mixed":
            ids = self._once(("ids", rows.layer), lambda: batch.mixed_ids(rows.layer))
            return kernels_torch.mix(key, ids)
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
        """Batch norm, in training over all ranks."""
        call, self._num_norms = self._num_norms, self._num_norms + 1
        if not training:
            return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)
        rows = self._check("batch norm", call, self._plan.norms, x)
        if rows.space == "mixed":
            got, fix = (
                "rows that several ranks hold",
                "put it behind a layer, not before the first or inside a single_input one",
            )
            raise InputError(explain("batch norm", "rows that one rank holds", got, fix))
        context = self.batch.context
        if not context.each_vertex_once:
            fix = "use strategy='split' with one replica, or a row-wise norm such as LayerNorm"
            got = f"strategy={context.strategy!r} on {context.mesh.size} ranks"
            raise InputError(explain("batch norm", "each vertex computed on one rank", got, fix))
        where = (context.mesh.world, context.key.step, self._checks)
        return global_batch_norm(x, mean, var, weight, bias, momentum, eps, *where)


def _explain_other_calls(what: str, call: int, x: Tensor) -> str:
    expected, got = "the same calls in every forward, as in the dry run", f"call {call} on {list(x.shape)}"
    return explain(what, expected, got, "let what the model calls depend on its settings only")


def _as_type(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Stored values in the model's type; whole numbers stay, they may be looked up in an embedding."""
    return values if values is None or not values.is_floating_point() else values.to(dtype)


def _edge_places(block: Block, space: Space) -> tuple[Tensor, Tensor]:
    """Of every edge: its destination row and its number among that destination's edges; a self-loop has the last."""
    dst = block.edge_index()[1]
    places = torch.arange(block.num_edges, device=dst.device) - block.indptr[dst]
    if space == "edges":
        return dst, places
    kept = other_edges(block)
    loops = torch.arange(block.num_dst, device=dst.device)
    return torch.cat([dst[kept], loops]), torch.cat([places[kept], torch.full_like(loops, LOOP)])
