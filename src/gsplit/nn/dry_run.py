"""What is learned about a model when it is wrapped, by running it on a toy batch instead of guessing.

The first run, in training mode, is on a batch whose frontiers, mixed frontiers and edges all differ in number, so that
the number of rows of any tensor says what its rows are: which layer a conv is (also in parallel branches), how deep the
model is, and which rows every dropout and batch norm sees. The second is a check: in evaluation mode the outputs of
some targets must not depend on which other targets are in the mini-batch. A model that fails it mixes rows that are not
neighbours, in a layer we do not know or in its own code, and would be silently wrong when it is split.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.blocks import Block, ShuffleIndex
from gsplit.buffers import BufferPool
from gsplit.comm import SoloComm
from gsplit.errors import InputError, explain
from gsplit.graph import Graph
from gsplit.nn.calls import LayerCall, rows_of
from gsplit.nn.step import Plan, Rows, Step, num_rows
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import TorchNeighborSampler
from gsplit.strategies.batch import Batch
from gsplit.telemetry import Telemetry

__all__ = [
    "Recorder",
    "ToyBatch",
    "check_rows",
    "example_input",
    "explain_failure",
    "toy_batch",
    "toy_tangle",
    "untouched",
]

_PAIRS = 4
_TRIES = 200


class ToyBatch(Batch):
    """A batch whose mixed frontiers have rows from nowhere, to tell them from local ones."""

    def shuffle(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """The shapes of ``Batch.shuffle``; rows that would be received are zero."""
        index = self.indices[layer]
        missing = index.num_mixed - h.size(0)
        if missing not in (0, index.num_received):
            raise InputError(_stray_rows(f"layer {layer}", h))
        return torch.cat([h, h.new_zeros(missing, *h.shape[1:])]), h[: index.num_dst]


def _stray_rows(where: str, x: Tensor) -> str:
    fix = (
        "hand batch.x and the layers' outputs on as they are; a residual is x[:h.size(0)] + h, "
        "because a layer keeps its destinations only"
    )
    return explain(where, "rows of one frontier of the mini-batch", f"{list(x.shape)}", fix)


def _toy_graph(num_layers: int, seed: int) -> tuple[Graph, Tensor]:
    """Chains with side edges, self-loops and vertices without in-edges; targets in neighbouring pairs."""
    rng = np.random.default_rng(seed)
    spacing = 4 * num_layers + 8
    n = _PAIRS * spacing
    sources: list[list[int]] = []
    for v in range(n):
        near = [v + 1, v + 2, v + 3] if v % 5 else [v, v + 1]
        sources.append([u for u in near[: 1 + int(rng.integers(0, 3))] if u < n and (v + 1) % spacing])
    indptr = np.concatenate([[0], np.cumsum([len(s) for s in sources])]).astype(np.int64)
    graph = Graph(indptr, np.array([u for s in sources for u in s], np.int64), n)
    firsts = spacing * np.arange(_PAIRS)
    return graph, torch.from_numpy(np.stack([firsts, firsts + 1]).reshape(-1))


def _batch_of(graph: Graph, targets: Tensor, num_layers: int, x: Tensor, extra: list[int], cls: type[Batch]) -> Batch:
    """A mini-batch of the toy graph on one process; layer l has ``extra[l]`` rows from nowhere."""
    device = x.device
    sampler = TorchNeighborSampler(graph, np.empty(0, np.int64), device)
    sample = sample_minibatch(sampler, targets.to(device), [-1] * num_layers, StepKey(0, 0, 0))
    ids = sample.input_ids
    blocks = [Block(b.indptr, b.src_rows, b.num_src + more) for b, more in zip(sample.blocks, extra, strict=True)]
    indices = [
        ShuffleIndex(ids[:0], (0,), (more,), b.num_src, b.num_dst) for b, more in zip(sample.blocks, extra, strict=True)
    ]
    rows = torch.cat([x[ids], x.new_zeros(extra[0], *x.shape[1:])])
    return cls(
        x=rows,
        labels=None,
        n_id=ids,
        blocks=tuple(blocks),
        indices=tuple(indices),
        batch_size=targets.numel(),
        global_batch_size=targets.numel(),
        key=StepKey(0, 0, 0),
        comm=SoloComm(),
        world=SoloComm(),
        strategy="split",
        telemetry=Telemetry(),
        pool=BufferPool(device),
        scales=tuple(torch.full((b.num_src,), 0.5, dtype=x.dtype, device=device) for b in blocks),
    )


def _features(graph: Graph, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(graph.num_vertices, *like.shape[1:], generator=generator, dtype=torch.float64)
    return x.to(like.device, like.dtype)


def _kinds(num_layers: int) -> list[Rows]:
    spaces = [Rows(space, layer) for layer in range(num_layers) for space in ("mixed", "edges", "looped edges")]
    return [*(Rows("local", level) for level in range(num_layers + 1)), *spaces]


def toy_batch(num_layers: int, like: Tensor) -> tuple[Batch, dict[int, Rows]]:
    """A batch in which a number of rows has one meaning only, and those meanings."""
    for seed in range(_TRIES):
        rng = np.random.default_rng(1000 + seed)
        graph, targets = _toy_graph(num_layers, seed)
        extra = [int(more) for more in rng.integers(1, 40 * num_layers, num_layers)]
        batch = _batch_of(graph, targets, num_layers, _features(graph, like), extra, ToyBatch)
        meanings = {num_rows(batch, kind): kind for kind in _kinds(num_layers)}
        if len(meanings) == len(_kinds(num_layers)):
            return batch, meanings
    raise AssertionError(f"no toy batch of {num_layers} layers found")


class Recorder(Step):
    """A step that takes notes: what every layer, dropout and batch norm of the model sees."""

    def __init__(self, batch: Batch, meanings: dict[int, Rows], square: frozenset[str]) -> None:
        super().__init__(batch, Plan(batch.num_layers, {}, square, (), ()))
        self._meanings = meanings
        self._layer_of: dict[str, int] = {}
        self._dropouts: list[Rows] = []
        self._norms: list[Rows] = []

    def _meaning(self, where: str, x: Tensor) -> Rows:
        if x.dim() == 0 or x.size(0) not in self._meanings:
            raise InputError(_stray_rows(where, x))
        return self._meanings[x.size(0)]

    def enter_layer(self, name: str, layer: Module, call: LayerCall) -> LayerCall:
        """Learn which layer this is from the rows it is given."""
        if name in self._layer_of:
            fix = "give every layer a module of its own; weights can be shared by assigning parameters"
            raise InputError(explain(name, "one call per forward", "a second one", fix))
        h = rows_of(call)
        if isinstance(h, Tensor):
            rows = self._meaning(f"the input of {name}", h)
            if rows.space not in ("local", "mixed") or (rows.space == "mixed") != (rows.layer == 0):
                raise InputError(_stray_rows(f"the input of {name}", h))
            self._layer_of[name] = rows.layer
            self._plan = replace(self._plan, layer_of=self._layer_of)
        return super().enter_layer(name, layer, call)

    def drop(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Note the rows of a dropout call; calls that drop nothing count as well."""
        if training and p > 0:
            self._dropouts.append(self._meaning("dropout", x))
        else:
            self._dropouts.append(self._meanings.get(x.size(0) if x.dim() else -1, Rows("local", 0)))
        return x

    def normalise(self, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float) -> Tensor:
        """Note the rows of a batch norm, and refuse those that several ranks would hold."""
        rows = self._meaning("batch norm", x)
        if rows.space == "mixed":
            got = "the input rows, or rows inside a square layer, which several ranks hold"
            raise InputError(explain("batch norm", "rows that one rank holds", got, "put it behind a layer"))
        self._norms.append(rows)
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)

    def plan(self, out: Any) -> Plan:
        """What was learned; ``out`` is what the model returned."""
        if not self._layer_of:
            fix = "pass edge_index to PyG layers, or write the model against batch.shuffle"
            raise InputError(explain("the model", "message-passing layers that are called with it", "none", fix))
        depth = max(self._layer_of.values()) + 1
        if isinstance(out, Tensor) and self._meaning("the model's output", out) != Rows("local", depth):
            raise InputError(_stray_rows("the model's output", out))
        return Plan(depth, self._layer_of, self._plan.square, tuple(self._dropouts), tuple(self._norms))


def toy_tangle(num_layers: int, like: Tensor) -> tuple[Batch, Batch, int]:
    """A toy mini-batch, the same with fewer targets, and how many: the first ones of both are the same."""
    graph, targets = _toy_graph(num_layers, 0)
    x, none = _features(graph, like), [0] * num_layers
    some = targets[:_PAIRS]
    return (
        _batch_of(graph, targets, num_layers, x, none, Batch),
        _batch_of(graph, some, num_layers, x, none, Batch),
        _PAIRS,
    )


def check_rows(whole: Any, part: Any, count: int) -> None:
    """Refuse a model whose outputs of the same targets differ with the company they are in."""
    if not isinstance(whole, Tensor) or not whole.is_floating_point():
        return
    tolerance = 1e-3 if whole.dtype != torch.float64 else 1e-8
    if not torch.allclose(whole[:count], part[:count], rtol=tolerance, atol=tolerance * float(whole.abs().max() + 1)):
        fix = "use layers and norms that look at a vertex and its in-neighbours only; gsplit verify finds the step"
        got = "outputs that change with the other targets of the mini-batch"
        raise InputError(explain("the model", "every target's output to depend on its neighbourhood only", got, fix))


def example_input(model: Module, num_features: int | None) -> Tensor:
    """One row like the model's input: its width from the model's first module that says so."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if num_features is None:
        for module in model.modules():
            width = getattr(module, "in_channels", getattr(module, "in_features", None))
            width = width[0] if isinstance(width, tuple | list) else width
            if isinstance(width, int) and width > 0:
                num_features = width
                break
    if num_features is None:
        fix = "say it: gsplit.parallelize(model, mesh, num_features=...)"
        raise InputError(explain("the model", "a number of input features", "no module that has one", fix))
    return torch.empty(1, num_features, dtype=first.dtype, device=first.device)


@contextmanager
def untouched(model: Module) -> Iterator[None]:
    """Put the model's buffers, modes and torch's generator back as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = {name: module.training for name, module in model.named_modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            for name, module in model.named_modules():
                module.training = modes[name]


def explain_failure(run: Callable[[], Any]) -> Any:
    """Run the model on the toy batch; what it cannot do there becomes a message."""
    try:
        return run()
    except InputError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        AssertionError,
        NotImplementedError,
    ) as error:
        fix = (
            "a residual is x[:h.size(0)] + h, because a layer keeps its destinations only; forward takes "
            "(x, edge_index) or (batch); a width that could not be found is given as num_features="
        )
        got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise InputError(explain("the model", "to run on a mini-batch of blocks", got, fix)) from error
