"""One forward of a wrapped model on one batch: which edges a layer gets, and what dropout and batch norm do.

While the model's forward runs, a ``ForwardPass`` knows the batch; hooks on the layers ask it for their inputs, and a
torch function mode sends every ``F.dropout`` and ``F.batch_norm`` to it, however deep inside the model they are
called. Other randomness inside the forward is refused: it would differ between ranks.

Which rows a dropout call or a batch norm sees (vertices of which frontier, or edges of which layer) is not guessed from
the shape, which can be ambiguous, but was learned by the dry run (``ForwardPlan``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from gsplit.batch import Batch, WeightHandle
from gsplit.blocks import Block
from gsplit.errors import InputError, explain
from gsplit.keys import kernels_torch
from gsplit.nn.calls import LayerCall, rows_of, substitute
from gsplit.nn.dropout import keyed_dropout
from gsplit.nn.layers import normalised_edges, takes_csr, to_csr
from gsplit.nn.norm import global_batch_norm

__all__ = ["ForwardPlan", "RowSpace", "ForwardPass", "ForwardPassMode"]

Space = Literal["local", "mixed", "edges", "looped edges"]


@dataclass(frozen=True)
class RowSpace:
    """What the rows of a tensor are: a local frontier (level l counts from the input), a mixed one, or edges of a
    layer; looped edges are those without self-loops and then one self-loop per destination, as GAT makes them.
    """

    space: Space
    layer: int


@dataclass(frozen=True)
class ForwardPlan:
    """What the dry run found out about a model."""

    depth: int
    layer_of: dict[str, int]
    single_input: frozenset[str]
    dropouts: tuple[RowSpace, ...]
    norms: tuple[RowSpace, ...]


def num_rows(batch: Batch, rows: RowSpace) -> int:
    """How many rows of a kind a batch has."""
    if rows.space == "local":
        return batch.batch_size if rows.layer == batch.num_layers else batch.indices[rows.layer].num_local
    block = batch.blocks[rows.layer]
    if rows.space == "mixed":
        return block.num_src
    if rows.space == "edges":
        return block.num_edges
    src, dst = block.edge_index()
    return int((src != dst).sum()) + block.num_dst  # device sync


class ForwardPass:
    """See the module. ``layer`` calls are made by the hooks, the others by the mode."""

    def __init__(self, batch: Batch, plan: ForwardPlan) -> None:
        if plan.depth != batch.num_layers:
            got = f"{batch.num_layers} in the loader's num_neighbors"
            fix = f"give num_neighbors {plan.depth} numbers, one per layer"
            raise InputError(explain("the model", f"as many layers as sampled, {plan.depth}", got, fix))
        self.batch, self._plan = batch, plan
        self._num_dropouts, self._num_norms = 0, 0
        self.inside: str | None = None
        self._made: dict[Any, Any] = {}

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
            fix = "edge features and positions are not in the mini-batches"
            raise InputError(explain(name, "a call with rows and batch.edge_index", got, fix))
        if name not in self._plan.layer_of:
            fix = "let which layers are called depend on the model's settings only"
            raise InputError(explain(name, "the same layers in every forward, as in the dry run", "a new one", fix))
        index = self._plan.layer_of[name]
        mixed, dst = self.batch.shuffle(index, h)
        weighted = any(isinstance(value, WeightHandle) for value in values)
        edges, weights = self._edges(index, layer, h.dtype, weighted)
        self.inside = name
        return substitute(call, mixed if name in self._plan.single_input else (mixed, dst), edges, weights)

    def leave_layer(self, out: Any) -> Any:
        """Keep the destinations of a layer that knows no others."""
        name, self.inside = self.inside, None
        assert name is not None
        if name not in self._plan.single_input:
            return out
        return out[: self.batch.indices[self._plan.layer_of[name]].num_dst]

    def _edges(self, index: int, layer: Module, dtype: torch.dtype, weighted: bool) -> tuple[Any, Tensor | None]:
        """The edges of a layer in the fastest form that is exact for it, and their weights if they stand apart."""
        block, weights = self.batch.blocks[index], None
        if weighted:
            scales = self.batch.scales
            assert scales is not None
            block, weights = self._once(("gcn", index), lambda: normalised_edges(block, scales[index].to(dtype)))
        if takes_csr(layer, dtype):
            values = (
                weights if weights is not None else torch.ones(block.num_edges, dtype=dtype, device=block.indptr.device)
            )
            return self._once(("csr", index, weighted, dtype), lambda: to_csr(block, values)), None
        return self._once(("edge_index", index, weighted), block.edge_index), weights

    def _check(self, what: str, call: int, known: tuple[RowSpace, ...], x: Tensor) -> RowSpace:
        if call >= len(known) or x.size(0) != self._once(known[call], lambda: num_rows(self.batch, known[call])):
            expected = "the same calls in every forward, as in the dry run"
            got = f"call {call} on {list(x.shape)}"
            fix = "let what the model calls depend on its settings only"
            raise InputError(explain(what, expected, got, fix))
        return known[call]

    def drop(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout keyed by step, call, and the vertex or edge of each row."""
        call, self._num_dropouts = self._num_dropouts, self._num_dropouts + 1
        if not training or p == 0.0:
            return x
        rows = self._check("dropout", call, self._plan.dropouts, x)
        return keyed_dropout(x, self._row_keys(rows, self.batch.key.dropout(call)), p)

    def _row_keys(self, rows: RowSpace, key: int) -> Tensor:
        batch = self.batch
        if rows.space == "mixed":
            ids = self._once(("ids", rows.layer), lambda: batch.mixed_ids(rows.layer))
            return kernels_torch.mix(key, ids)
        if rows.space == "local":
            return kernels_torch.mix(key, batch.n_id[: num_rows(batch, rows)])
        dst_rows, places = self._once(
            (rows.space, rows.layer), lambda: _edge_places(batch.blocks[rows.layer], rows.space)
        )
        dst_keys = kernels_torch.mix(key, batch.n_id[: batch.blocks[rows.layer].num_dst])
        return kernels_torch.mix(dst_keys[dst_rows], places)

    def normalise(
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
        if not self.batch.each_vertex_once:
            fix = "use strategy='split' with one replica, or a row-wise norm such as LayerNorm"
            got = f"strategy={self.batch.strategy!r} on {self.batch.world.size} ranks"
            raise InputError(explain("batch norm", "each vertex computed on one rank", got, fix))
        step = self.batch.key.step
        return global_batch_norm(x, mean, var, weight, bias, momentum, eps, self.batch.world, step)


def _edge_places(block: Block, space: Space) -> tuple[Tensor, Tensor]:
    """Of every edge: its destination row and its number among that destination's edges; a self-loop has the last."""
    src, dst = block.edge_index()
    places = torch.arange(block.num_edges, device=dst.device) - block.indptr[dst]
    if space == "edges":
        return dst, places
    kept = src != dst
    loops = torch.arange(block.num_dst, device=dst.device)
    return torch.cat([dst[kept], loops]), torch.cat([places[kept], torch.full_like(loops, 1 << 62)])


def _dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    """``F.dropout``'s arguments by name."""
    return x, p, training, inplace


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """``F.batch_norm``'s arguments by name."""
    return x, running_mean, running_var, weight, bias, training, momentum, eps


_RANDOM = {
    *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm),
    *(
        torch.bernoulli,
        torch.normal,
        torch.multinomial,
        torch.poisson,
        torch.dropout,
        torch.alpha_dropout,
        torch.native_dropout,
    ),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_),
    *(Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_, Tensor.multinomial, F.gumbel_softmax),
    *(F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
}
_MIXING = {torch.batch_norm, torch.native_batch_norm, torch.instance_norm, F.instance_norm}
_RANDOM_AT = {F.scaled_dot_product_attention: (4, "dropout_p"), F.rrelu: (3, "training")}
"""Functions that draw if one argument says so: its place and name."""


class ForwardPassMode(TorchFunctionMode):
    """Sends dropout and batch norm to the step while a wrapped forward runs."""

    def __init__(self, step: ForwardPass) -> None:
        super().__init__()
        self._step = step

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            x, p, training, inplace = _dropout(*args, **kwargs)
            out = self._step.drop(x, p, training)
            return x.copy_(out) if inplace and out is not x else out
        if function is F.batch_norm:
            return self._step.normalise(*_batch_norm(*args, **kwargs))
        if function in _MIXING:
            fix = "use torch.nn.BatchNorm1d, which is made exact here, or a row-wise norm"
            raise InputError(explain(f"{function.__name__} in the model", "rows that are not mixed", "a norm", fix))
        if function in _RANDOM or (function in _RANDOM_AT and _draws(*_RANDOM_AT[function], args, kwargs)):
            fix = "use F.dropout or torch.nn.Dropout, whose masks are keyed here"
            raise InputError(explain(f"{function.__name__} in the model", "no randomness of its own", "a draw", fix))
        return function(*args, **kwargs)


def _draws(place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get(name, False))
