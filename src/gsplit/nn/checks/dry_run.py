"""The dry run: a model that is wrapped runs once on a toy batch, and its calls are recorded (``ForwardPlan``).

The run is in training mode. The frontiers, mixed frontiers and edges of the batch all differ in number, so the number
of rows of a tensor identifies its rows: which layer a conv is (also in parallel branches), how deep the model is, and
which rows every dropout and batch norm gets.
"""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsplit.device.devices import fork_random_states, random_states
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.adapters import Adapter, choose_adapter, run_pair, run_single_input
from gsplit.nn.calls import LayerCall, find_handle, input_rows, tensors_of
from gsplit.nn.checks.toy import ExampleInput, explain_rows
from gsplit.nn.forward_pass import ForwardPass, relation_rows
from gsplit.nn.forward_plan import ForwardPlan, RowSpace
from gsplit.nn.layers import edge_features_of, layers_of
from gsplit.nn.split_forward import SplitForward

__all__ = [
    "Recorder",
    "TooDeepError",
    "changed_buffers",
    "example_input",
    "explain_failure",
    "forbid_random_draws",
    "preserve_state",
]

_RELU = torch.ops.aten.relu.default


class TooDeepError(InputError):
    """The model has more layers than the toy batch."""


class OutputReaders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that read the outputs of layers, to find those that only a ReLU reads.

    A layer applies such a ReLU itself (``fused_layers.Activation``). If something else reads the output in a later
    forward, the layer computes it again: that is right, and slower, so it must not be the rule.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs: dict[str, ref[Tensor]] = {}
        self._readers: dict[str, list[Any]] = {}

    def watch(self, name: str, output: Any) -> None:
        """Record what reads a layer's output from now on."""
        if isinstance(output, Tensor):
            self._outputs[name] = ref(output)
            self._readers[name] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ids = {id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for name, output in self._outputs.items():
            tensor = output()
            if tensor is not None and id(tensor) in ids:
                self._readers[name].append(operator)
        return operator(*args, **(kwargs or {}))

    def activations(self) -> frozenset[str]:
        """The layers whose output a ReLU has read, nothing else has, and nothing keeps.

        Called when the forward is over and the model's output is still there.
        """
        return frozenset(
            name for name, readers in self._readers.items() if readers == [_RELU] and self._outputs[name]() is None
        )


class Recorder(ForwardPass):
    """A forward pass that records the rows that every layer, dropout and batch norm of the model gets."""

    allows_fused = False

    def __init__(self, batch: Batch, space_of: dict[int, RowSpace]) -> None:
        self._space_of = space_of
        self._layer_of: dict[str, int] = {}
        self._adapters: dict[str, Adapter] = {}
        self._layer_dropouts: dict[str, int] = {}
        self._dropouts: list[RowSpace] = []
        self._norms: list[RowSpace] = []
        self.readers = OutputReaders()
        super().__init__(batch, ForwardPlan(batch.num_layers, self._layer_of, self._adapters, (), ()))

    def _row_space(self, where: str, x: Tensor) -> RowSpace:
        if x.dim() == 0 or x.size(0) not in self._space_of:
            raise InputError(explain_rows(where, x))
        return self._space_of[x.size(0)]

    def _is_type(self, rows: RowSpace, of: str | None) -> bool:
        """Whether rows are of a type; None: of all types, which may be only one."""
        return rows.of == of or (isinstance(self.batch, TypedBatch) and self.batch.types.num_types == 1)

    def run_layer(self, split: SplitForward, call: LayerCall) -> Any:
        """Record which layer of the mini-batch this is, by the rows it gets, and which adapter it needs."""
        name = split.name
        if name in self._layer_of:
            fix = "give every layer a module of its own; weights can be shared by assigning parameters"
            raise InputError(explain(name, "one call per forward", "a second call", fix))
        for of, h in _given_rows(name, call):
            rows = self._row_space(f"the input of {name}", h)
            if rows.layer == self.batch.num_layers:
                fix = "pass the rows of all vertices of the batch to the first layer"
                got = "a layer on rows of the targets"
                raise TooDeepError(explain(name, f"at most {self.batch.num_layers} layers", got, fix))
            is_input = (rows.space == "mixed") == (rows.layer == 0) and rows.space in ("local", "mixed")
            if not is_input or not self._is_type(rows, of) or self._layer_of.setdefault(name, rows.layer) != rows.layer:
                raise InputError(explain_rows(f"the input of {name}", h))
        self._adapters[name] = choose_adapter(split)
        num_dropouts = len(self._dropouts)
        num_norms = len(self._norms)
        try:
            out = super().run_layer(split, call)
        except InputError:
            raise
        except Exception:
            if self._adapters[name] is not run_pair:
                raise
            # an unknown layer that fails on a pair may take one tensor of rows only
            del self._dropouts[num_dropouts:]
            del self._norms[num_norms:]
            self._adapters[name] = run_single_input
            out = super().run_layer(split, call)
        self._layer_dropouts[name] = len(self._dropouts) - num_dropouts
        self.readers.watch(name, out)
        return out

    def dropout(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Record the rows of a dropout call, also of one that drops nothing."""
        if training and p > 0:
            self._dropouts.append(self._row_space("dropout", x))
        else:
            self._dropouts.append(self._space_of.get(x.size(0) if x.dim() else -1, RowSpace("local", 0)))
        return x

    def batch_norm(
        self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> Tensor:
        """Record the rows of a batch norm, and refuse those that several ranks would hold."""
        if x.dim() != 2:
            fix = "flatten the rows' values before it"
            raise InputError(explain("batch norm", "a tensor [rows, features]", f"{list(x.shape)}", fix))
        rows = self._row_space("batch norm", x)
        if rows.space == "endpoints":
            got = "rows of endpoints, which several ranks hold"
            raise InputError(explain("batch norm", "rows that one rank holds", got, "put it before batch.endpoints"))
        if rows.space == "mixed":
            got = "the input rows, or rows inside a layer that takes one tensor of rows, which several ranks hold"
            raise InputError(explain("batch norm", "rows that one rank holds", got, "put it behind a layer"))
        self._norms.append(rows)
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)

    def plan(self, out: Any) -> ForwardPlan:
        """The recorded plan; ``out`` is the model's output, or the rows that it gave to ``batch.endpoints``."""
        if not self._layer_of:
            fix = "pass edge_index to PyG layers, or write the model against batch.shuffle"
            raise InputError(explain("the model", "message-passing layers called with edge_index", "0 such calls", fix))
        depth = max(self._layer_of.values()) + 1
        first = next(iter(tensors_of(out)), None)
        space = None if first is None else self._row_space("the model's output", first)
        if space is None or (space.space, space.layer) != ("local", depth):
            raise InputError(explain_rows("the model's output", torch.empty(0) if first is None else first))
        return ForwardPlan(
            depth,
            self._layer_of,
            self._adapters,
            tuple(self._dropouts),
            tuple(self._norms),
            self._layer_dropouts,
            self.readers.activations(),
        )


def _given_rows(name: str, call: LayerCall) -> list[tuple[str | None, Tensor]]:
    """The tensors of rows that a layer was called with, and the vertex type of each."""
    h = input_rows(call)
    handle = find_handle(call)
    if isinstance(h, dict):
        return [(of, rows) for of, rows in h.items() if isinstance(rows, Tensor)]
    if handle is not None and handle.relation is not None:
        src, dst = relation_rows(name, call, handle.relation)
        return [(handle.relation[0], src), (handle.relation[2], dst)]
    return [(None, h)] if isinstance(h, Tensor) else []


@contextmanager
def forbid_random_draws(device: torch.device) -> Iterator[None]:
    """Refuse a forward that draws from a random generator: every rank would draw other numbers."""

    def states() -> tuple[Any, ...]:
        _, keys, place, *_ = np.random.get_state()
        drawn = [state.tolist() for state in random_states(device)]
        return drawn, random.getstate(), np.asarray(keys).tolist(), place

    before = states()
    yield
    if states() != before:
        fix = (
            "use F.dropout or torch.nn.Dropout, whose masks are keyed here; dropout inside torch.nn's attention is not"
        )
        raise InputError(explain("the model", "no randomness of its own", "draws from a generator in forward", fix))


@contextmanager
def changed_buffers(model: Module) -> Iterator[list[str]]:
    """Adds the names of the buffers that a forward changes, at its end; batch norm's buffers are over all rows."""
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    watched = {name: buffer.clone() for name, buffer in model.named_buffers() if name.rpartition(".")[0] not in norms}
    changed: list[str] = []
    yield changed
    changed += [name for name, buffer in model.named_buffers() if name in watched and not _same(buffer, watched[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def example_input(model: Module, num_features: int | None, num_edge_features: int | None) -> ExampleInput:
    """An input like the model's; widths that are not given come from the first module that has one."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if num_features is None:
        for module in model.modules():
            width = getattr(module, "in_channels", getattr(module, "in_features", None))
            width = width[0] if isinstance(width, tuple | list) else width
            if isinstance(width, int) and width > 0:
                num_features = width
                break
    if num_features is None:
        fix = "give it: gsplit.parallelize(model, mesh, num_features=...)"
        raise InputError(explain("the model", "a number of input features", "no module that has one", fix))
    if num_edge_features is None:
        widths = (edge_features_of(layer) for layer in layers_of(model).values())
        num_edge_features = next((width for width in widths if width is not None), None)
    row = torch.empty(1, num_features, dtype=first.dtype, device=first.device)
    return ExampleInput(row, num_edge_features)


@contextmanager
def preserve_state(model: Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers and modes and torch's generators afterwards; no gradients inside."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = {id(buffer): buffer.clone() for buffer in model.buffers()}
    modes = {name: module.training for name, module in model.named_modules()}
    with fork_random_states(device), torch.no_grad():
        try:
            yield
        finally:
            for table, buffers in tables:
                table.update(buffers)
            for buffer in model.buffers():
                buffer.copy_(values[id(buffer)])
            for name, module in model.named_modules():
                module.training = modes[name]


_FIXES = {
    r"must match the size of tensor b .* dimension 0": (
        "a residual is x[:h.size(0)] + h, because a layer keeps its destinations only"
    ),
    r"TypeError: .*(positional|keyword|required) argument": (
        "forward takes (x, edge_index) or (batch), with edge_weight and edge_attr under these names"
    ),
    r"non-zero size|of 0 elements|with no elements|size 0": "a rank may have no rows at all",
    r"endpoints|edge_label": "rows of pairs are those of batch.endpoints(h)",
    r"cannot be multiplied|normalized_shape|mat1|expected input": (
        "widths that could not be found are given as num_features= and num_edge_features="
    ),
    r"scalar types: Long": "features are floating-point numbers: convert them in forward, as by x.long()",
}
"""What to do, by what the message of an exception matches."""


def explain_failure(run: Callable[[], Any]) -> Any:
    """Run the model on a toy batch; any exception becomes an ``InputError`` with the likely cause, or all of them."""
    try:
        return run()
    except InputError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        likely = [fix for pattern, fix in _FIXES.items() if re.search(pattern, got)]
        fix = "; ".join(likely or _FIXES.values())
        raise InputError(explain("the model", "to run on a mini-batch of blocks", got, fix)) from error
