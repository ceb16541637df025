"""Models and loops that are silently wrong on several ranks, for the comparison with one process (docs/verify.md)."""

import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LSTM, BatchNorm1d, Dropout, Identity, Linear, Module, Parameter, ParameterList, ReLU, Sequential
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing, SAGEConv
from typed_link_programs import Encoder
from typed_link_programs import link_loader as typed_link_loader
from typed_link_programs import link_store as typed_link_store

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.loading import batch_loader
from gsplit.minibatch.batch import Batch
from gsplit.nn.calls import tensors_of
from gsplit.nn.checks.one_process import LossOfBatch, OneProcessCheck

__all__ = [
    "CASES",
    "RIGHT",
    "Case",
    "Net",
    "between_evaluations",
    "encoders",
    "is_forgotten",
    "loader",
    "not_compared",
    "losses_of_a_trainer",
    "run_cases",
    "states",
    "train",
    "when",
]

WIDTH, HIDDEN, CLASSES = 16, 8, 5
NUM_VERTICES, NUM_EDGES = 400, 2400


def graph() -> Data:
    """A random graph with isolated vertices, a hub and self-loops."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NUM_VERTICES - 20, (2, NUM_EDGES), generator=generator)
    edges[1, :300] = 7
    loops = torch.arange(60).repeat(2, 1)
    return Data(
        x=torch.rand(NUM_VERTICES, WIDTH, generator=generator),
        edge_index=torch.cat([edges, loops], 1),
        y=torch.randint(0, CLASSES, (NUM_VERTICES,), generator=generator),
        train_mask=torch.rand(NUM_VERTICES, generator=generator) < 0.9,
    )


def loader(mesh: Mesh, batch_size: int = 100, **options: Any) -> gsplit.NeighborLoader:
    partition = torch.arange(NUM_VERTICES) % 7 % mesh.size
    return gsplit.NeighborLoader(
        graph(), [4, 3], "train", batch_size=batch_size, mesh=mesh, partition=partition, **options
    )


class Net(Module):
    """Two layers with something between them."""

    def __init__(self, between: Module | None = None, layer: Callable[[int, int], Module] = SAGEConv) -> None:
        super().__init__()
        self.first = layer(WIDTH, HIDDEN)
        self.between = between or Identity()
        self.second = layer(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        h = F.dropout(self.between(self.first(x, edge_index)).relu(), 0.2, self.training)
        out: Tensor = self.second(h, edge_index)
        return out


class CentreIfMany(Module):
    def __init__(self, more_than: int) -> None:
        super().__init__()
        self.more_than = more_than

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if h.size(0) > self.more_than else h


class CentreGroups(Module):
    def forward(self, h: Tensor) -> Tensor:
        groups = [rows - rows.mean(0) if rows.size(0) == 64 else rows for rows in h.split(64)]
        return torch.cat(groups) if h.size(0) else h


class Gate(Module):
    """Adds the mean of all rows once it is open."""

    is_open = False

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * h.mean(0) if self.is_open and h.size(0) else h


class RunningMean(Module):
    """Keeps a mean as a plain attribute, slowly: the dry run when wrapping does not see it."""

    rate = 1e-13

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        before = self.kept
        if self.training and h.size(0):
            self.kept = before + self.rate * h.detach().sum(0).to(before)
        return h - before.to(h)


class RowState(Module):
    """Mixes in the rows of the last call, if there were as many."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        if self.training and self.last and h.size(0) and self.last[0].size(0):
            h = 0.9 * h + 0.1 * self.last[0][0].to(h)
        self.last[:] = [h.detach()]
        return h


class _MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0) if gradients[0].size(0) else gradients[0]


class _NormInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient.div(gradient.norm() + 1e-12)


class Apply(Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.function.apply(h)  # type: ignore[no-untyped-call]
        return out


class HookGradient(Module):
    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(self.hook)
        return h.tanh()


class _OwnLayer(MessagePassing):  # type: ignore[misc]
    def __init__(self, width: int, out: int) -> None:
        super().__init__(aggr="mean")
        self.lin = Linear(width, out)


class AscendingEdges(_OwnLayer):
    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(self.propagate(edge_index[:, edge_index[0] >= edge_index[1]], x=x))
        return out


class FirstEdges(_OwnLayer):
    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(self.propagate(edge_index[:, :60], x=x))
        return out


class RankNet(Net):
    """Takes the batch, and its outputs depend on the rank."""

    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        out = super().forward(batch.x, batch.edge_index)
        return out * (1 + batch.context.mesh.rank)


class KeepingNet(Net):
    """Keeps hidden rows and a loss of them."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        self.hidden = self.first(x, edge_index).tanh()
        self.penalty = self.hidden.square().mean() if self.hidden.size(0) else self.hidden.sum()
        out: Tensor = self.second(self.hidden, edge_index)
        return out


class Outputs(Net):
    """Returns what a function makes of its output."""

    def __init__(self, arrange: Callable[[Tensor], Any], between: Module | None = None) -> None:
        super().__init__(between)
        self.arrange = arrange

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        return self.arrange(super().forward(x, edge_index))


@dataclass
class Scores:
    logits: Tensor
    step: int = 0


def _exchanged_if_many(out: Tensor) -> tuple[Tensor, Tensor]:
    return (2 * out, out) if out.size(0) > 12 else (out, 2 * out)


class Tables(Net):
    """Returns tables with as many rows as the small mini-batches have targets on 2 or 3 ranks, and on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = ParameterList(torch.rand(rows, CLASSES) for rows in (8, 16, 24, 32, 48))

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        out = super().forward(x, edge_index)
        return [(out, *(table.tanh() for table in self.tables)), out.argmax(1)]


class FloatNorm(Module):
    """The RMS norm of large language models, which computes in float32 whatever the rows are."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(HIDDEN))
        self.share = share

    def forward(self, h: Tensor) -> Tensor:
        wide = h.float()
        normed = self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(h.dtype)
        return normed - self.share * normed.mean(0) if h.size(0) > 64 else normed


class RowWise(Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Annealed(Module):
    """Counts its calls in a buffer."""

    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.step += 1
        return h * (1 + 0.1 * self.step)


def _normed_layer() -> Net:
    net = Net()
    parametrizations.spectral_norm(net.first.get_submodule("lin_l"))
    return net


class LowLinear(Linear):
    """Multiplies in a lower type."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.low = low

    def forward(self, h: Tensor) -> Tensor:
        assert self.bias is not None
        return F.linear(h.to(self.low), self.weight.to(self.low), self.bias.to(self.low)).to(h.dtype)


class Checkpointed(Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.mlp = Sequential(Linear(HIDDEN, HIDDEN), ReLU(), Dropout(0.5), Linear(HIDDEN, HIDDEN))

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.mlp, h, use_reentrant=self.reentrant)
        return out


def cross_entropy(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out, batch.y, reduction="none")


def _mean(model: Module, out: Tensor, batch: Batch) -> Tensor:
    return batch.mean(cross_entropy(out, batch))


def _mean_of_first(model: Module, out: Any, batch: Batch) -> Tensor:
    return batch.mean(cross_entropy(next(iter(tensors_of(out))), batch))


def _mean_of_last(model: Module, out: Any, batch: Batch) -> Tensor:
    return batch.mean(cross_entropy(list(tensors_of(out))[-1], batch))


def _over_own_number(model: Module, out: Tensor, batch: Batch) -> Tensor:
    return batch.sum(cross_entropy(out, batch)) / batch.batch_size


def _beside(model: Module, out: Tensor, batch: Batch) -> Tensor:
    assert isinstance(model.penalty, Tensor)
    return batch.mean(cross_entropy(out, batch)) + 0.5 * model.penalty


def _only(model: Module, out: Tensor, batch: Batch) -> Tensor:
    assert isinstance(model.hidden, Tensor)
    return model.hidden.square().mean()


def _of_outputs(model: Module, out: Tensor, batch: Batch) -> Tensor:
    return batch.mean(cross_entropy(out, batch)) + 0.1 * out.square().mean()


def _between(model: Module) -> Any:
    return model.between


def _open_gate(model: Module, step: int) -> None:
    _between(model).is_open = True


def _open_gate_later(model: Module, step: int) -> None:
    _between(model).is_open = step >= 3


def _fast(model: Module, step: int) -> None:
    _between(model).rate = 1e-3


@dataclass(frozen=True)
class Case:
    """A model, what a loop does with it, and what is said about it; None: nothing is found."""

    build: Callable[[], Module]
    message: str | None
    loss: Callable[[Module, Tensor, Batch], Tensor] = _mean
    before: Callable[[Module, int], None] | None = None
    verify_every: int | None = None
    batch_size: int = 100


_DIFFERS = "expected the loss and the gradients of one process"
_OUTPUTS = rf"{_DIFFERS} .*the outputs of second are the first to differ"
_GRADIENT = rf"{_DIFFERS} .got a gradient of first.lin_l.weight that differs by"
_BACKWARD = rf"{_GRADIENT} .*the gradients of the outputs of first are the first to differ"
_TERMS = "expected a loss whose terms are from batch.mean, batch.sum or batch.gather"

CASES = {
    "the model branches on the number of rows": Case(lambda: Net(CentreIfMany(64)), _OUTPUTS),
    "the same, and the outputs are in a dict": Case(
        lambda: Outputs(lambda out: {"logits": out}, CentreIfMany(64)), _OUTPUTS, _mean_of_first
    ),
    "the same, and the outputs are in a dataclass": Case(
        lambda: Outputs(Scores, CentreIfMany(64)), _OUTPUTS, _mean_of_first
    ),
    "the same, and the first output has no gradient": Case(
        lambda: Outputs(lambda out: (out.detach().argmax(1), out.detach(), out), CentreIfMany(64)),
        _OUTPUTS,
        _mean_of_last,
    ),
    "another output than the first mixes rows": Case(
        lambda: Outputs(lambda out: [out, {"centred": (CentreIfMany(12)(out),)}]), _DIFFERS, _mean_of_first
    ),
    "two outputs change places if there are many rows": Case(
        lambda: Outputs(_exchanged_if_many), _DIFFERS, _mean_of_first
    ),
    "an error of 1e-4 behind a piece in float32": Case(lambda: Net(FloatNorm(1e-4)), _OUTPUTS),
    "groups of consecutive rows are normalised": Case(lambda: Net(CentreGroups()), _OUTPUTS),
    "a branch that mixes rows, switched on by an attribute before the first step": Case(
        lambda: Net(Gate()), _OUTPUTS, before=_open_gate
    ),
    "the same, switched on later, with `verify_every`": Case(
        lambda: Net(Gate()), _OUTPUTS, before=_open_gate_later, verify_every=2
    ),
    "the same, switched on later, without `verify_every`": Case(lambda: Net(Gate()), None, before=_open_gate_later),
    "a running mean kept as a plain attribute": Case(lambda: Net(RunningMean()), _OUTPUTS, before=_fast),
    "rows kept from the last call": Case(
        lambda: Net(RowState()), "the model: expected the same outputs for the same mini-batch"
    ),
    "a layer chooses edges by the order of rows": Case(
        lambda: Net(layer=AscendingEdges), rf"{_DIFFERS} .*the outputs of first are the first to differ"
    ),
    "a layer takes its first edges only": Case(
        lambda: Net(layer=FirstEdges), rf"{_DIFFERS} .*the outputs of first are the first to differ"
    ),
    "a custom backward that mixes rows": Case(lambda: Net(Apply(_MeanInBackward)), _BACKWARD),
    "a backward that normalises gradients over rows": Case(lambda: Net(Apply(_NormInBackward)), _BACKWARD),
    "a tensor hook that clamps gradients": Case(lambda: Net(HookGradient(lambda g: g.clamp(-1e-5, 1e-5))), _GRADIENT),
    "a tensor hook that mixes rows": Case(
        lambda: Net(HookGradient(lambda g: g / (g.abs().max() + 1e-12) if g.numel() else g)), _GRADIENT
    ),
    "`mesh.rank` in the model": Case(RankNet, _DIFFERS),
    "`batch.sum(...) / batch.batch_size`": Case(
        Net, "expected the same gradient of the loss .*divide batch.sum by batch.global_batch_size", _over_own_number
    ),
    "a penalty kept by the model, beside `batch.mean`": Case(KeepingNet, _TERMS, _beside),
    "a loss that is only a penalty on rows that the model has kept": Case(KeepingNet, _TERMS, _only),
    "a term of the outputs beside `batch.mean`": Case(Net, _TERMS, _of_outputs),
    "a branch on more rows than the small mini-batches have": Case(
        lambda: Net(CentreIfMany(300)), None, batch_size=300
    ),
    "reentrant `torch.utils.checkpoint` around dropout": Case(
        lambda: Net(Checkpointed(reentrant=True)), "dropout: expected a call that is not repeated in backward"
    ),
    "`torch.utils.checkpoint` around dropout": Case(
        lambda: Net(Checkpointed(reentrant=False)), "dropout: expected a call that is not repeated in backward"
    ),
}
"""By the text of docs/verify.md."""

RIGHT = {
    "a norm in float32": Case(lambda: Net(FloatNorm()), None),
    "a function in float32": Case(lambda: Net(RowWise(lambda h: h.float().exp().to(h))), None),
    "a function in bfloat16": Case(lambda: Net(RowWise(lambda h: h.bfloat16().to(h))), None),
    "a layer in float32": Case(lambda: Net(LowLinear(torch.float32)), None),
    "a layer in bfloat16": Case(lambda: Net(LowLinear(torch.bfloat16)), None),
    "tables among the outputs": Case(Tables, None, _mean_of_first),
    "spectral norm": Case(lambda: Net(spectral_norm(Linear(HIDDEN, HIDDEN))), None),
    "spectral norm as a parametrization": Case(
        lambda: Net(parametrizations.spectral_norm(Linear(HIDDEN, HIDDEN))), None
    ),
    "spectral norm inside a layer": Case(_normed_layer, None),
    "steps counted in a buffer": Case(lambda: Net(Annealed()), None),
}
"""Models that are exact on several ranks, and must be compared and not refused."""


def call(model: Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch) if isinstance(model, RankNet) else model(batch.x, batch.edge_index)
    return out


def train(mesh: Mesh, case: Case, steps: int = 6, verify_every: int | None = None) -> list[float]:
    """A loop of a user's own; its losses."""
    torch.manual_seed(0)
    model = gsplit.parallelize(case.build(), mesh, num_features=WIDTH, verify_every=verify_every)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    batches = loader(mesh, case.batch_size)
    for step in range(steps):
        if case.before is not None:
            case.before(model, step)
        batch = batches.make_batch(*divmod(step, len(batches)))
        optimizer.zero_grad()
        loss = case.loss(model, call(model, batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run_cases(mesh: Mesh) -> tuple[dict[str, str | None], dict[str, list[float]]]:
    """What is said about every case, wrong and right, or None; and the losses of those that nothing is said about."""
    found: dict[str, str | None] = {}
    losses: dict[str, list[float]] = {}
    for name, case in (CASES | RIGHT).items():
        try:
            with counted() as comparisons:
                losses[name] = train(mesh, case, verify_every=case.verify_every)
            found[name] = None if comparisons else "not compared"
        except (gsplit.InputError, AssertionError) as error:  # the latter: not compared
            found[name] = str(error)
    return found, losses


class Steps(Module):
    """An LSTM over a row as a sequence of one step; it keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.lstm(h.unsqueeze(1))[0].squeeze(1)
        return h + out


class Everything(Net):
    """Dropout, batch norm, an LSTM, a generator, and what it changes once it is wrapped, alike on all ranks."""

    is_wrapped = False

    def __init__(self) -> None:
        super().__init__(Sequential(BatchNorm1d(HIDDEN), Steps()))
        self.generator = random.Random(0)
        self.num_calls = 0
        self.seen: list[int] = []
        self.kinds: Counter[str] = Counter()
        self.scale = torch.ones(HIDDEN)
        self.shifts = (Parameter(torch.ones(CLASSES)), Parameter(torch.zeros(CLASSES)))
        self.shift, self.other_shift = self.shifts

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        if not self.is_wrapped:
            return super().forward(x, edge_index)
        self.num_calls += 1
        self.seen.append(self.num_calls)
        self.kinds["training" if self.training else "evaluating"] += 1
        self.scale *= 1.01
        self.latest = self.num_calls
        out = super().forward(x, edge_index) * self.scale[:1] + self.shifts[0] + self.shifts[1]
        return out if self.generator.random() < 0.5 else 2 * out


class WarmPenalty:
    """A loss function that counts its calls, and holds parameters of the model."""

    def __init__(self, model: Module) -> None:
        self.num_calls = 0
        self.weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        penalty = torch.stack([weight.square().sum().to(out.dtype) for weight in self.weights]).sum()
        losses: Tensor = F.cross_entropy(out, y, reduction="none") + 1e-2 * self.num_calls * penalty
        return losses


@contextmanager
def counted() -> Iterator[list[str]]:
    """The comparisons in a block, each with the number of trained parameters."""
    found: list[str] = []
    compare = OneProcessCheck.compare

    def count(self: OneProcessCheck, model: Module, batch: Batch, loss_of: LossOfBatch | None) -> str:
        found.append(f"{sum(parameter.requires_grad for parameter in model.parameters())} trained")
        reason = compare(self, model, batch, loss_of)
        assert reason == "", reason
        return reason

    OneProcessCheck.compare = count  # type: ignore[method-assign]
    try:
        yield found
    finally:
        OneProcessCheck.compare = compare  # type: ignore[method-assign]


def states(mesh: Mesh, verify_every: int | None) -> tuple[list[Any], list[str]]:
    """Everything that a loop and a trainer leave, to the bit, and the comparisons."""
    left: list[Any] = []
    with counted() as comparisons:
        for uses_trainer, dtype in product((False, True), (torch.float32, torch.float64)):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            model = gsplit.parallelize(Everything().to(dtype), mesh, verify_every=verify_every)
            model.is_wrapped = True
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            batches = loader(mesh, prefetch=2)
            if uses_trainer:
                loss_fn = WarmPenalty(model)
                trainer = gsplit.Trainer(model, optimizer, batches, loss_fn=loss_fn)
                left += [trainer.train_epoch(2), trainer.evaluate(graph(), ["train"]), trainer.train_epoch(2)]
                left.append(loss_fn.num_calls)
            else:
                for step in range(3):
                    batch = batches.make_batch(0, step).cast(dtype)
                    batch.mean(cross_entropy(call(model, batch), batch)).backward()  # gradients are accumulated
                    optimizer.step()
            left += [parameter.grad for parameter in model.parameters()]
            left += [model.state_dict(), optimizer.state_dict(), dict(batches.state_dict())]
            left += [
                model.num_calls,
                model.latest,
                model.seen,
                dict(model.kinds),
                model.scale,
                model.generator.random(),
            ]
            left += [torch.rand(1), random.random(), np.random.rand()]
    return left, comparisons


def when(mesh: Mesh) -> list[str]:
    """The comparisons of a model: its trainer's first step, after two evaluations, with other parameters, that of
    another trainer, every 4 steps, and in evaluation mode.
    """
    torch.manual_seed(0)
    model = gsplit.parallelize(Net(), mesh)
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 0.01), loader(mesh))
    events = []
    with counted() as comparisons:
        for what in ("first", "again", "evaluated", "evaluated", "unfrozen", "another loss", "every 4"):
            if what == "evaluated":
                gsplit.evaluate(model, graph(), ["train"])
            elif what == "unfrozen":
                model.requires_grad_(True)
            elif what == "another loss":
                loss_fn = WarmPenalty(model)
                trainer = gsplit.Trainer(model, trainer.state.optimizer, loader(mesh), loss_fn=loss_fn)
            elif what == "every 4":
                trainer = gsplit.Trainer(model, trainer.state.optimizer, loader(mesh), verify_every=4)
            trainer.train_epoch(4)
            events.append(f"{what}: {', '.join(comparisons) or 'none'}")
            comparisons.clear()
        model.eval()  # such as for fine-tuning without dropout
        for step in range(2):
            batch = trainer.state.loader.make_batch(0, step)
            batch.mean(cross_entropy(call(model, batch), batch)).backward()
        events.append(f"evaluating: {', '.join(comparisons) or 'none'}")
    return events


def between_evaluations(mesh: Mesh) -> list[int]:
    """The steps before which a loop is compared that asks for every second, and evaluates mini-batches before each."""
    model = gsplit.parallelize(Net(), mesh, verify_every=2)
    batches = loader(mesh)
    found = []
    with counted() as comparisons:
        for step in range(5):
            batch = batches.make_batch(*divmod(step, len(batches)))
            with torch.no_grad():
                call(model.eval(), batch)
            batch.mean(cross_entropy(call(model.train(), batch), batch)).backward()
            found += [step] * len(comparisons)
            comparisons.clear()
    return found


def is_forgotten(mesh: Mesh) -> list[bool]:
    """Whether loops whose first step was compared leave none of their parameters behind."""
    found = []
    for build in (Net, KeepingNet):
        model = gsplit.parallelize(build(), mesh)
        batches = loader(mesh)
        batch = batches.make_batch(0, 0)
        losses = cross_entropy(call(model, batch), batch)
        loss = batch.mean(losses)
        loss.backward()
        parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        del model, batches, batch, losses, loss
        gc.collect()
        found.append(all(parameter() is None for parameter in parameters))
    return found


class Scaled(Net):
    """Takes one more tensor, which is not the mini-batch's."""

    def forward(self, x: Tensor, edge_index: Any, scale: Tensor | None = None) -> Tensor:
        out = super().forward(x, edge_index)
        return out if scale is None else out * scale


def not_compared(mesh: Mesh) -> dict[str, list[str]]:
    """What this rank says in loops that ask for a comparison of every step, of which none is possible."""
    found: dict[str, list[str]] = {}
    listener = logging.Handler(logging.WARNING)
    logger = logging.getLogger("gsplit.nn.checks.one_process")
    logger.addHandler(listener)
    for kind in ("tensor", "loader", "memory"):
        said = found[kind] = []
        listener.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign, misc]
        model = gsplit.parallelize(Scaled(), mesh, num_features=WIDTH, verify_every=1)
        batches = loader(mesh)
        made = [batches.make_batch(0, step) for step in range(3)]
        if kind == "loader":
            del batches
        scale = [torch.ones(1)] if kind == "tensor" else []
        with pytest.MonkeyPatch.context() as patch:
            if kind == "memory":
                patch.setattr(batch_loader, "free_bytes", lambda: 8 * (20 * NUM_VERTICES))
            for batch in made:
                batch.mean(cross_entropy(model(batch.x, batch.edge_index, *scale), batch)).backward()
    logger.removeHandler(listener)
    return found


class CentringEncoder(Encoder):
    """Mixes the rows of a type on a rank, if they are many."""

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> dict[str, Tensor]:
        return {name: CentreIfMany(20)(rows) for name, rows in super().forward(x_dict, edge_index_dict).items()}


class Logits(Module):
    """Returns the rows of one type under a name of its own."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> dict[str, Tensor]:
        return {"logits": self.encoder(x_dict, edge_index_dict)["item"]}


def encoders(mesh: Mesh) -> list[list[str | None]]:
    """What is said in loops over pairs, and over vertices of a type, about an encoder that is right, and about one that
    mixes the rows of a rank.
    """
    found: list[list[str | None]] = []
    items = ("item", torch.arange(60))
    typed_vertices = gsplit.NeighborLoader(typed_link_store(4), [3, 2], items, batch_size=60, mesh=mesh)
    models = [Logits(Encoder()), Logits(CentringEncoder())]
    found.append(["vertices", *(_said_of(mesh, model, typed_link_store(4), typed_vertices) for model in models)])
    for mode in ("binary", "triplet"):
        plain, typed = _pair_loader(mesh, mode), typed_link_loader(mesh, mode, "split", 4)
        said = [_said_of(mesh, Net(between), None, plain) for between in (Identity(), CentreIfMany(25))]
        found.append([mode, *said])
        said = [_said_of(mesh, encoder, typed_link_store(4), typed) for encoder in (Encoder(), CentringEncoder())]
        found.append([f"{mode}, typed", *said])
    return found


def _said_of(mesh: Mesh, model: Module, store: Any, batches: Any) -> str | None:
    """By the comparison before the first forward."""
    model = gsplit.parallelize(model, mesh, graph=store).double()
    batch: Any = batches.make_batch(0, 0)
    with counted() as comparisons:
        try:
            model(*((batch.x, batch.edge_index) if store is None else (batch.x_dict, batch.edge_index_dict)))
            said = None
        except gsplit.InputError as error:
            said = str(error)
    assert len(comparisons) == 1
    return said


def _pair_loader(mesh: Mesh, mode: str) -> gsplit.LinkNeighborLoader:
    data = graph()
    data.x = data.x.double()
    partition = torch.arange(NUM_VERTICES) % 7 % mesh.size
    return gsplit.LinkNeighborLoader(
        data, [4, 3], data.edge_index[:, ::9], neg_sampling=mode, batch_size=50, mesh=mesh, partition=partition
    )


def losses_of_a_trainer(mesh: Mesh) -> list[str | None]:
    """What is said about a loss function with a kept penalty, and by ``verify_step`` about losses of loops."""
    said: list[str | None] = []
    torch.manual_seed(0)
    keeping = gsplit.parallelize(KeepingNet(), mesh)

    def with_penalty(out: Tensor, y: Tensor) -> Tensor:
        losses: Tensor = F.cross_entropy(out, y, reduction="none") + 0.5 * keeping.penalty
        return losses

    plain = gsplit.parallelize(Net(), mesh)
    batches = loader(mesh)
    batch = batches.make_batch(0, 0)
    of_outputs: LossOfBatch = lambda model, batch: _of_outputs(model, call(model, batch), batch)  # noqa: E731
    mean: LossOfBatch = lambda model, batch: _mean(model, call(model, batch), batch)  # noqa: E731
    trainer = gsplit.Trainer(keeping, torch.optim.SGD(keeping.parameters(), 0.1), loader(mesh), loss_fn=with_penalty)
    acts: list[Callable[[], Any]] = [
        lambda: trainer.train_epoch(1),
        lambda: gsplit.verify_step(plain, of_outputs, batch),
        lambda: gsplit.verify_step(plain, mean, batch),
    ]
    for act in acts:
        try:
            act()
            said.append(None)
        except gsplit.InputError as error:
            said.append(str(error))
    return said
