"""Training loops as users write them, around a wrapped model: right ones, and ones that are wrong on several ranks.

``CASES`` is one table. A right loop has on every number of ranks the losses and gradients of one process, to rounding;
a wrong one raises, on every rank, an error whose text has ``raises``. Everything is in float64.
"""

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Parameter, ReLU, Sequential
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAT, HeteroConv, SAGEConv

import gsplit
from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh

__all__ = ["CASES", "Case", "Record", "run_loops", "warned_once"]

WIDTH, CLASSES = 16, 5
NUM_VERTICES = 200
Step = tuple[float, dict[str, Tensor]]
"""The loss and the gradients of a step, and of its modules by number and name."""
Record = list[Step]


def graph(*, num_classes: int = CLASSES) -> Data:
    """Isolated vertices, a hub, self-loops, duplicates."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NUM_VERTICES - 10, (2, 1000), generator=generator)
    hub = torch.stack([torch.randint(0, NUM_VERTICES - 10, (60,), generator=generator), torch.full((60,), 7)])
    return Data(
        x=torch.rand(NUM_VERTICES, WIDTH, generator=generator).double() - 0.3,
        edge_index=torch.cat([edges, hub, torch.arange(30).repeat(2, 1), edges[:, :80]], 1),
        y=torch.randint(0, num_classes, (NUM_VERTICES,), generator=generator),
    )


_PARTS = torch.randint(0, 4, (NUM_VERTICES,), generator=torch.Generator().manual_seed(1))


def loader(mesh: Mesh, batch_size: int = 40, fanouts: Sequence[int] = (4, 3), **options: Any) -> gsplit.NeighborLoader:
    return gsplit.NeighborLoader(
        graph(), list(fanouts), batch_size=batch_size, mesh=mesh, partition=_PARTS % mesh.size, **options
    )


class Net(Module):
    """Two layers; ``change``: what forward does with its hidden rows and its output."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, 8), SAGEConv(8, CLASSES)
        self.change = change

    def forward(self, x: Tensor, edge_index: Any, scale: Tensor | None = None) -> Any:
        h = self.first(x, edge_index).tanh()
        out = self.second(h, edge_index)
        if scale is not None:
            out = out * scale
        return out if self.change is None else self.change(h, out)


class ByRows(Net):
    """Computes something else on ranks with few rows, which the trial runs at wrapping do not see."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor, edge_index: Any, scale: Tensor | None = None) -> Any:
        h = self.first(x, edge_index)
        out = self.second(h - h.mean(0) if h.size(0) > 60 else h, edge_index)
        return self.shape(out if scale is None else out * scale)


class Holder(Module):
    """A parameter as a module, to record it."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__()
        self.parameter = parameter


Modules = list[Any]
LossOf = Callable[[Module, Modules, Any], Tensor]
"""The loss from the wrapped model, the modules beside it, and a mini-batch."""


@dataclass(frozen=True)
class Case:
    """A loop: its loss, and what is different from the usual loop. ``raises``: None for a right one."""

    loss: LossOf | None = None
    raises: str | None = None
    build: Callable[[], Module] = Net
    beside: Callable[[], Modules] = list
    wrapped: bool = True
    """Whether the modules beside the model are wrapped."""
    backward: Callable[[Tensor], object] = Tensor.backward
    optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, 0.1)
    steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    """Of the loader."""
    program: Callable[[Mesh], Record] | None = None
    """A loop of its own."""


def record(modules: Sequence[Module], loss: Tensor) -> Step:
    found = {f"{n}.{name}": p for n, module in enumerate(modules) for name, p in module.named_parameters()}
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in found.items()}
    return float(loss.detach()), grads


def wrap(mesh: Mesh, build: Callable[[], Module] = Net) -> Module:
    torch.manual_seed(0)
    return gsplit.parallelize(build().double(), mesh)


def beside_of(case: Case, mesh: Mesh) -> tuple[Modules, list[Module]]:
    """The modules beside the model, of which other ranks start from other weights, and all as modules."""
    torch.manual_seed(1 + mesh.rank if case.wrapped else 1)
    made = [each.double() if isinstance(each, Module) else each for each in case.beside()]
    if case.wrapped:
        made = [gsplit.parallelize(each, mesh) for each in made]
    return made, [each if isinstance(each, Module) else Holder(each) for each in made]


def loop(mesh: Mesh, case: Case) -> Record:
    """The usual loop."""
    model = wrap(mesh, case.build)
    beside, held = beside_of(case, mesh)
    modules = [model, *held]
    optimizer = case.optimizer([p for module in modules for p in module.parameters()])
    assert case.loss is not None
    steps: Record = []
    for batch in islice(loader(mesh, **case.options), case.steps):
        batch = batch.cast(torch.float64)
        optimizer.zero_grad()
        loss = case.loss(model, beside, batch)
        case.backward(loss)
        steps.append(record(modules, loss))
        optimizer.step()
    steps.append(
        (0.0, {f"{n} {k}": p.detach().clone() for n, m in enumerate(modules) for k, p in m.named_parameters()})
    )
    return steps


def ce(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def on_outputs(values: Callable[[Tensor, Any], Tensor], **options: Any) -> Case:
    """A loop whose loss is computed from the outputs and the batch."""
    return Case(lambda model, beside, b: values(model(b.x, b.edge_index), b), **options)


def mean_of(values: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Case:
    """A loop whose loss is ``batch.mean`` of values from the outputs and the labels."""
    return on_outputs(lambda out, b: b.mean(values(out, b.y)), **options)


# ---------------------------------------------------------------- losses of a rank's rows

PARAMETERS = "parameters whose gradients are averaged"
TERMS = "a loss whose terms are from batch.mean, batch.sum or batch.gather"
INPUT = "input rows that depend on their own vertex only"
VALUES = "values of targets that depend on no other target"
NUMBERS = "the same numbers in the loss on every rank"
MASKS = "a loss without random numbers of its own"
STEP = "the loss and the gradients of one process"
WEIGHTS = "the weights before backward"


def class_weights(y: Tensor) -> Tensor:
    return (1.0 / (torch.bincount(y, minlength=CLASSES) + 1.0))[y]


def hard_half(out: Tensor, y: Tensor) -> Tensor:
    values = ce(out, y)
    return values * (values.detach() >= values.detach().topk(max(1, len(y) // 2)).values.min()) if len(y) else values


def entropy_of_mean(out: Tensor) -> Tensor:
    shares = out.softmax(1).mean(0)
    return (shares * shares.log()).sum()


def triplets(out: Tensor, y: Tensor) -> Tensor:
    distances = torch.cdist(out, out)
    return F.relu(1 + distances.max(1).values - distances.min(1).values) if len(out) else out.sum(1)


def contrast(out: Tensor, y: Tensor) -> Tensor:
    same = (y[:, None] == y[None]).to(out.dtype)
    return -((F.normalize(out) @ F.normalize(out).t()).log_softmax(1) * same).sum(1)


def centred(out: Tensor) -> Tensor:
    return out - out.mean(0) if len(out) else out


def sinkhorn(out: Tensor) -> Tensor:
    shares = (out / 0.5).exp()
    for _ in range(3):
        shares = shares / shares.sum(0, keepdim=True).clamp(min=1e-9)
        shares = shares / shares.sum(1, keepdim=True)
    return shares


def accuracy(out: Tensor, y: Tensor) -> Any:
    return (out.argmax(1) == y).double().mean() if len(y) else 1


def positive_weight(out: Tensor, y: Tensor) -> Tensor:
    label = (y > 2).double()
    weight = ((label == 0).sum() / label.sum().clamp(min=1)).double()
    return F.binary_cross_entropy_with_logits(out[:, 0], label, pos_weight=weight, reduction="none")


def confident_half(out: Tensor, b: Any) -> Tensor:
    confidence = out.softmax(1).max(1).values.detach()
    weight = (confidence >= confidence.median()).double() if len(out) else confidence
    loss: Tensor = b.mean(ce(out, out.argmax(1)), weight)
    return loss


def random_targets(out: Tensor, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(out, b.y), (torch.rand(len(out)) < 0.5).double())
    return loss


def mixed_labels(out: Tensor, b: Any) -> Tensor:
    order = torch.randperm(len(out))
    loss: Tensor = b.mean(0.5 * ce(out, b.y) + 0.5 * ce(out, b.y[order]))
    return loss


WRONG_LOSSES = {
    "weights of the rank's classes": mean_of(lambda o, y: ce(o, y) * class_weights(y), raises=VALUES),
    "divided by the rank's loss, detached": mean_of(lambda o, y: ce(o, y) / ce(o, y).detach().sum(), raises=VALUES),
    "the hardest targets of the rank": mean_of(hard_half, raises=VALUES),
    "an entropy of the rank's rows beside batch.mean": on_outputs(
        lambda o, b: b.mean(ce(o, b.y)) + 0.1 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean(), raises=TERMS
    ),
    "an entropy of the rank's mean": on_outputs(lambda o, b: b.mean(ce(o, b.y)) + entropy_of_mean(o), raises=TERMS),
    "a margin to the next row": mean_of(lambda o, y: F.relu(0.5 + o[:, 0] - o.roll(1, 0)[:, 0]), raises=VALUES),
    "triplets of the rank": mean_of(triplets, raises=VALUES),
    "a contrastive loss of the rank": mean_of(contrast, raises=VALUES),
    "logits centred over the rank": mean_of(lambda o, y: ce(centred(o), y), raises=VALUES),
    "weighted by the rank's accuracy": mean_of(lambda o, y: ce(o, y) * (1 + accuracy(o, y)), raises=VALUES),
    "logits divided by the rank's largest": mean_of(
        lambda o, y: ce(o / (o.abs().max().detach() if o.numel() else 1), y), raises=VALUES
    ),
    "pos_weight of the rank": mean_of(positive_weight, raises=VALUES),
    "pseudo-labels above the rank's median": on_outputs(confident_half, raises=VALUES),
    "Sinkhorn over the rank": mean_of(lambda o, y: -(sinkhorn(o.detach()) * o.log_softmax(1)).sum(1), raises=VALUES),
    "a variance over the rank": mean_of(
        lambda o, y: ((o - o.mean(0)) ** 2).sum(1) if len(o) else o.sum(1), raises=VALUES
    ),
    "dropout of the outputs": mean_of(lambda o, y: ce(F.dropout(o, 0.3), y), raises=MASKS),
    "mixed labels in a random order": on_outputs(mixed_labels, raises=VALUES),
    "random targets": on_outputs(random_targets, raises=MASKS),
    "random targets of a generator": on_outputs(
        lambda o, b: b.mean(ce(o, b.y), (torch.rand(len(o), generator=torch.Generator()) < 0.5).double()), raises=MASKS
    ),
    "a mean of the rank, expanded": on_outputs(lambda o, b: b.mean(ce(o, b.y).mean().expand(len(b.y))), raises=VALUES),
    "batch norm behind the model": Case(
        lambda m, beside, b: b.mean(ce(beside[0](m(b.x, b.edge_index)), b.y)),
        beside=lambda: [BatchNorm1d(CLASSES, affine=False)],
        wrapped=False,
        raises=VALUES,
    ),
    "a number of the rank, read by item()": on_outputs(
        lambda o, b: b.mean(ce(o, b.y) / (1 + int((b.y == 1).sum()))), raises=NUMBERS
    ),
    "divided by the rank's number of targets": on_outputs(lambda o, b: b.mean(ce(o, b.y) / len(b.y)), raises=NUMBERS),
    "batch.sum divided by the rank's number of targets": on_outputs(
        lambda o, b: b.sum(ce(o, b.y)) / max(1, len(b.y)), raises="the same gradient of the loss"
    ),
    "a penalty that is zero now": on_outputs(
        lambda o, b: b.mean(ce(o, b.y)) + F.relu(o.pow(2).mean() - 1e6), raises=TERMS
    ),
    "a mean of the rank without batch.mean": on_outputs(
        lambda o, b: F.cross_entropy(o, b.y), raises="a loss from batch.mean or batch.sum"
    ),
    "a compiled loss that mixes rows": Case(
        program=lambda mesh: loop(mesh, mean_of(torch.compile(lambda o, y: ce(centred(o), y), backend="aot_eager"))),
        raises=VALUES,
    ),
}

# ---------------------------------------------------------------- what is trained beside the model


def with_head(model: Module, beside: Modules, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(beside[0](model(b.x, b.edge_index)), b.y))
    return loss


def with_encoder(model: Module, beside: Modules, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(model(beside[0](b.x), b.edge_index), b.y))
    return loss


def with_temperature(model: Module, beside: Modules, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(model(b.x, b.edge_index) * beside[0], b.y))
    return loss


def of_one_class(model: Module, beside: Modules, b: Any) -> Tensor:
    """A head that sees the targets of one class, of which a rank may have none."""
    out = model(b.x, b.edge_index)
    rows = (b.y == 1).nonzero()[:, 0]
    extra = out.new_zeros(len(out)).index_put((rows,), beside[0](out[rows]).pow(2).sum(1)) if len(rows) else 0
    loss: Tensor = b.mean(ce(out, b.y) + extra)
    return loss


def three_heads(model: Module, beside: Modules, b: Any) -> Tensor:
    out = model(b.x, b.edge_index)
    loss: Tensor = b.mean(ce(beside[0](out) * beside[2], b.y)) + b.mean(beside[1](out).pow(2).sum(1))
    return loss


def head() -> Modules:
    return [Linear(CLASSES, CLASSES)]


def network() -> Module:
    return Sequential(Linear(CLASSES, 8), ReLU(), Linear(8, 1)).double()


def one() -> Modules:
    return [Parameter(torch.ones(1, dtype=torch.float64))]


def gan(mesh: Mesh, *, wrapped: bool, adam: bool = False) -> Record:
    """Two models and two optimizers: a backward through the discriminator alone, then through both."""
    generator = wrap(mesh)
    torch.manual_seed(1)
    other = gsplit.parallelize(network(), mesh) if wrapped else network()
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizers = [kind(module.parameters(), 0.01) for module in (generator, other)]
    steps: Record = []
    for batch in islice(loader(mesh), 3):
        b = batch.cast(torch.float64)
        made, real = generator(b.x, b.edge_index), F.one_hot(b.y, CLASSES).double()
        optimizers[1].zero_grad()
        loss = b.mean(F.softplus(other(made.detach())[:, 0]) + F.softplus(-other(real)[:, 0]))
        loss.backward()
        steps.append(record([other], loss))
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = b.mean(F.softplus(-other(made)[:, 0]))
        loss.backward()
        steps.append(record([generator], loss))
        optimizers[0].step()
    return steps


def accumulated(mesh: Mesh) -> Record:
    """Several backwards, one of them without a loss of rows."""
    model = wrap(mesh)
    torch.manual_seed(1 + mesh.rank)
    beside = gsplit.parallelize(head()[0].double(), mesh)
    steps: Record = []
    for batch in islice(loader(mesh), 3):
        loss = with_head(model, [beside], batch.cast(torch.float64))
        (loss / 3).backward()
        steps.append(record([model, beside], loss))
    loss = 0.1 * beside.weight.pow(2).sum()
    loss.backward()
    return [*steps, record([model, beside], loss)]


def two_models(mesh: Mesh) -> Record:
    models = [wrap(mesh), wrap(mesh)]
    torch.manual_seed(1 + mesh.rank)
    beside = gsplit.parallelize(Linear(2 * CLASSES, CLASSES).double(), mesh)
    steps: Record = []
    for batch in islice(loader(mesh), 3):
        b = batch.cast(torch.float64)
        for module in (*models, beside):
            module.zero_grad()
        out = torch.cat([model(b.x, b.edge_index) for model in models], 1)
        loss = b.mean(ce(beside(out), b.y))
        loss.backward()
        steps.append(record([*models, beside], loss))
    return steps


class Outer(Module):
    """A module around a wrapped one."""

    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner, self.head = inner, Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out: Tensor = self.head(self.inner(x, edge_index))
        return out


def in_outer_module(mesh: Mesh) -> Record:
    torch.manual_seed(0)
    model = Outer(wrap(mesh)).double()
    for batch in loader(mesh):
        b = batch.cast(torch.float64)
        b.mean(ce(model(b.x, b.edge_index), b.y)).backward()
    return []


def sometimes_frozen(
    mesh: Mesh, loss_of: LossOf, is_trained: Callable[[int], bool], batch_size: int, steps: int
) -> Record:
    """A head that is trained in some steps only."""
    model = wrap(mesh)
    torch.manual_seed(1 + mesh.rank)
    beside = gsplit.parallelize(head()[0].double(), mesh)
    record_of: Record = []
    for number, batch in enumerate(islice(loader(mesh, batch_size), steps)):
        beside.requires_grad_(is_trained(number))
        model.zero_grad()
        beside.zero_grad()
        loss = loss_of(model, [beside], batch.cast(torch.float64))
        loss.backward()
        record_of.append(record([model, beside], loss))
    return record_of


def wrapped_twice(mesh: Mesh) -> Record:
    model = wrap(mesh)
    gsplit.parallelize(next(module for module in model.modules() if isinstance(module, SAGEConv)).lin_l, mesh)
    return []


def scaled(loss: Tensor) -> None:
    torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss).backward()


BESIDE = {
    "a head": Case(with_head, beside=head, wrapped=False, raises=PARAMETERS),
    "a temperature": Case(with_temperature, beside=one, wrapped=False, raises=PARAMETERS),
    "an encoder": Case(with_encoder, beside=lambda: [Linear(WIDTH, WIDTH)], wrapped=False, raises=PARAMETERS),
    "a discriminator": Case(program=lambda mesh: gan(mesh, wrapped=False), raises=PARAMETERS),
    "a head in a module around the model": Case(program=in_outer_module, raises=PARAMETERS),
    "a head, many steps": Case(with_head, beside=head, wrapped=False, raises=PARAMETERS, steps=12),
    "a head in a scaled backward": Case(with_head, beside=head, wrapped=False, raises=PARAMETERS, backward=scaled),
    "a wrapped head": Case(with_head, beside=head),
    "a wrapped encoder": Case(with_encoder, beside=lambda: [Linear(WIDTH, WIDTH)]),
    "a wrapped temperature": Case(with_temperature, beside=one),
    "a wrapped uncertainty outside of the mean": Case(
        lambda m, beside, b: b.mean(ce(m(b.x, b.edge_index), b.y)) * (-beside[0]).exp().sum() + beside[0].sum(),
        beside=one,
    ),
    "three wrapped heads": Case(
        three_heads, beside=lambda: [Linear(5, 5), Linear(5, 3), Parameter(torch.ones(5, dtype=torch.float64))]
    ),
    "a wrapped head that some ranks do not use": Case(of_one_class, beside=head, steps=6, options={"batch_size": 3}),
    "a wrapped head without targets on some ranks": Case(
        lambda m, beside, b: b.mean(ce(beside[0](o) if len(o := m(b.x, b.edge_index)) else o, b.y)),
        beside=head,
        steps=6,
        options={"batch_size": 2},
    ),
    "a wrapped head and a penalty on its weights": Case(
        lambda m, beside, b: with_head(m, beside, b) + 0.1 * beside[0].weight.pow(2).sum(), beside=head
    ),
    "a wrapped head in a scaled backward": Case(with_head, beside=head, backward=scaled),
    "a wrapped head in a checkpoint": Case(
        lambda m, beside, b: b.mean(ce(checkpoint(beside[0], m(b.x, b.edge_index), use_reentrant=False), b.y)),
        beside=head,
    ),
    "a wrapped head in a reentrant checkpoint": Case(
        lambda m, beside, b: b.mean(ce(checkpoint(beside[0], m(b.x, b.edge_index), use_reentrant=True), b.y)),
        beside=head,
    ),
    "a wrapped discriminator": Case(program=lambda mesh: gan(mesh, wrapped=True)),
    "a wrapped discriminator, Adam": Case(program=lambda mesh: gan(mesh, wrapped=True, adam=True)),
    "accumulation, and a penalty alone": Case(program=accumulated),
    "two models and a wrapped head": Case(program=two_models),
    "a wrapped head that is frozen in between": Case(
        program=lambda mesh: sometimes_frozen(mesh, with_head, lambda number: number % 2 == 0, 40, 4)
    ),
    "a wrapped head, unfrozen where a rank does not call it": Case(
        program=lambda mesh: sometimes_frozen(mesh, of_one_class, lambda number: number > 1, 3, 6)
    ),
    "a wrapped head with batch norm": Case(
        with_head, beside=lambda: [BatchNorm1d(CLASSES)], raises="a head whose rows do not depend on the rank"
    ),
    "a wrapped head with dropout": Case(
        with_head, beside=lambda: [torch.nn.Dropout(0.5)], raises="a head whose rows do not depend on the rank"
    ),
    "a part of the model, wrapped again": Case(
        program=wrapped_twice,
        raises="parameters that are not wrapped yet",
    ),
}

# ---------------------------------------------------------------- rows of all ranks


def supervised_contrast(z: Tensor, y: Tensor, all_z: Tensor, all_y: Tensor, positions: Tensor) -> Tensor:
    """SupCon: one value per own target, against the targets of all ranks."""
    scores = F.normalize(z) @ F.normalize(all_z).t() / 0.3
    own = F.one_hot(positions, len(all_z)).bool()
    scores = scores.masked_fill(own, float("-inf"))
    same = (y[:, None] == all_y[None]) & ~own
    chances = scores - scores.logsumexp(1, keepdim=True)
    return -(chances.masked_fill(~same, 0).sum(1) / same.sum(1).clamp(min=1))


def of_gathered(b: Any, out: Tensor) -> Tensor:
    return supervised_contrast(out, b.y, b.gather(out), b.gather(b.y), b.positions)


def of_all_rows(b: Any, out: Tensor) -> Tensor:
    """The same loss, computed whole on every rank."""
    rows, labels = b.gather(out), b.gather(b.y)
    return supervised_contrast(rows, labels, rows, labels, torch.arange(len(rows))).mean()


def without_gather(out: Tensor, b: Any) -> Tensor:
    """What the loss is on one process, in plain torch."""
    if b.context.mesh.size > 1:
        loss: Tensor = b.mean(of_gathered(b, out))
        return loss
    loss = supervised_contrast(out, b.y, out, b.y, torch.arange(len(out))).mean()
    nothing: Tensor = 0 * b.mean(out.sum(1))  # backward asks for a sum of all ranks
    return loss + nothing


def two_views(out: Tensor, b: Any) -> Tensor:
    one_view, other = F.normalize(out), F.normalize(out.tanh() + out.roll(1, 1))
    ones, others = b.gather(one_view), b.gather(other)
    values = ce(one_view @ others.t() / 0.2, b.positions) + ce(other @ ones.t() / 0.2, b.positions)
    loss: Tensor = b.mean(values)
    return loss


def hard_triplets(out: Tensor, b: Any) -> Tensor:
    rows, labels = b.gather(out), b.gather(b.y)
    distances = (out[:, None] - rows[None]).pow(2).sum(-1)
    same = b.y[:, None] == labels[None]
    far, near = distances.masked_fill(~same, -1).max(1).values, distances.masked_fill(same, 1e9).min(1).values
    loss: Tensor = b.mean(F.relu(1 + far - near))
    return loss


def barlow(out: Tensor, b: Any) -> Tensor:
    rows = b.gather(out)
    rows = (rows - rows.mean(0)) / rows.std(0)
    correlations: Tensor = rows.t() @ rows / len(rows)
    return (correlations - torch.eye(CLASSES, dtype=rows.dtype)).pow(2).sum()


def projected_contrast(mesh: Mesh) -> Record:
    """SupCon of a wrapped projection head, with an optimizer of its own."""
    model = wrap(mesh)
    torch.manual_seed(1 + mesh.rank)
    project = gsplit.parallelize(Sequential(Linear(CLASSES, 8), ReLU(), Linear(8, 4)).double(), mesh)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(project.parameters(), 0.01)]
    steps: Record = []
    for batch in islice(loader(mesh), 4):
        b = batch.cast(torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = b.mean(of_gathered(b, project(model(b.x, b.edge_index))))
        loss.backward()
        steps.append(record([model, project], loss))
        for optimizer in optimizers:
            optimizer.step()
    return steps


def hardest_of_all(out: Tensor, b: Any) -> Tensor:
    values = ce(out, b.y)
    loss: Tensor = b.mean(values * (values.detach() >= b.gather(values.detach()).median()))
    return loss


GATHERED = {
    "SupCon": on_outputs(lambda o, b: b.mean(of_gathered(b, o))),
    "SupCon as one process writes it": on_outputs(without_gather, raises=None),
    "SupCon with ranks without targets": on_outputs(
        lambda o, b: b.mean(of_gathered(b, o)), steps=6, options={"batch_size": 3}
    ),
    "SupCon computed whole on every rank": on_outputs(lambda o, b: of_all_rows(b, o)),
    "SupCon and a cross-entropy": on_outputs(lambda o, b: b.mean(ce(o, b.y)) + 0.3 * of_all_rows(b, o)),
    "SupCon of a wrapped head": Case(program=projected_contrast),
    "InfoNCE of two views": on_outputs(two_views),
    "triplets of all ranks": on_outputs(hard_triplets),
    "Barlow": on_outputs(barlow),
    "weights of all ranks' classes": on_outputs(
        lambda o, b: b.mean(ce(o, b.y) / (torch.bincount(b.gather(b.y), minlength=5) + 1.0)[b.y])
    ),
    "the hardest targets of all ranks": on_outputs(hardest_of_all),
    "a soft ranking": on_outputs(
        lambda o, b: b.mean(torch.sigmoid(4 * (b.gather(o[:, 0])[None] - o[:, :1])).square().mean(1))
    ),
    "logits centred over all ranks": on_outputs(lambda o, b: b.mean(ce(o - b.gather(o).mean(0), b.y))),
    "an entropy of the mean of all ranks": on_outputs(lambda o, b: b.mean(ce(o, b.y)) + entropy_of_mean(b.gather(o))),
    "a number from batch.sum": on_outputs(lambda o, b: b.mean(ce(o, b.y) / (1 + float(b.sum((b.y == 1).double()))))),
    "gathered rows of hybrid(1)": on_outputs(lambda o, b: b.mean(of_gathered(b, o)), options={"strategy": "hybrid(1)"}),
    "gathered rows of data": on_outputs(lambda o, b: b.mean(of_gathered(b, o)), options={"strategy": "data"}),
    "gathered flags": on_outputs(lambda o, b: b.mean(ce(o, b.y) * (1 + b.gather(b.y > 1).double().mean()))),
    "rows of another number": on_outputs(
        lambda o, b: b.mean(ce(o, b.y) + b.gather(o[:0]).sum()), raises="batch.gather: expected ["
    ),
}

# ---------------------------------------------------------------- what the model keeps, and its inputs and outputs

KEPT: dict[str, Tensor] = {}


def keep(h: Tensor, out: Tensor) -> Tensor:
    KEPT["penalty"] = h.pow(2).mean()
    return out


def beside_mean(out: Tensor, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(out, b.y)) + 0.1 * KEPT["penalty"]
    return loss


class Keeping(Net):
    """Keeps a mean of its rows; ``where``: how it keeps it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.kept: dict[str, Tensor] = {}
        self.listed: list[Tensor] = []
        if where == "hook":
            self.first.register_forward_hook(lambda module, args, out: KEPT.__setitem__("penalty", out.abs().mean()))

    def forward(self, x: Tensor, edge_index: Any, scale: Tensor | None = None) -> Any:
        h = self.first(x, edge_index)
        out = self.second(h.tanh(), edge_index)
        if self.where != "hook":
            self.listed.append(h.pow(2).mean())
            self.kept["penalty"] = KEPT["penalty"] = self.listed[-1]
        return out


def noisy(model: Module, beside: Modules, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(model(b.x + 0.1 * torch.randn_like(b.x), b.edge_index), b.y))
    return loss


def standardised(model: Module, beside: Modules, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(model((b.x - b.x.mean(0)) / b.x.std(0), b.edge_index), b.y))
    return loss


def dropped(model: Module, beside: Modules, b: Any) -> Tensor:
    loss: Tensor = b.mean(ce(model(F.dropout(b.x, 0.3), b.edge_index), b.y))
    return loss


def adversarial(model: Module, beside: Modules, b: Any) -> Tensor:
    """The fast gradient sign method: a gradient of this rank's copies of the input rows."""
    x = b.x.clone().requires_grad_(True)
    b.mean(ce(model(x, b.edge_index), b.y)).backward()
    assert x.grad is not None
    loss: Tensor = b.mean(ce(model((x + 0.1 * x.grad.sign()).detach(), b.edge_index), b.y))
    return loss


def perturbed(model: Module, beside: Modules, b: Any) -> Tensor:
    """FLAG: a trained perturbation that starts random."""
    shift = torch.zeros_like(b.x).uniform_(-0.1, 0.1).requires_grad_()
    loss: Tensor = b.mean(ce(model(b.x + shift, b.edge_index), b.y))
    return loss


def listed_batches(mesh: Mesh) -> Record:
    """The loader is gone, and with it what small mini-batches are made of."""
    model = wrap(mesh, lambda: ByRows(lambda out: out))
    steps: Record = []
    for batch in [each.cast(torch.float64) for each in loader(mesh, 80, (8, 8))][:2]:
        model.zero_grad()
        loss = batch.mean(ce(model(batch.x, batch.edge_index), batch.y))
        loss.backward()
        steps.append(record([model], loss))
    return steps


def other_learning_rates(mesh: Mesh, *, by_loss: bool) -> Record:
    """A schedule that follows the loss of a rank, or its number."""
    model = wrap(mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps: Record = []
    for batch in list(loader(mesh))[:4]:
        b = batch.cast(torch.float64)
        optimizer.zero_grad()
        values = ce(model(b.x, b.edge_index), b.y)
        loss = b.mean(values)
        loss.backward()
        steps.append(record([model], loss))
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 1 / (1 + float(values.detach().sum())) if by_loss else 0.5 + 0.1 * mesh.rank
    return steps


def of_verify_step(
    values: Callable[[Tensor, Any], Tensor], raises: str, *, beside: Callable[[], Modules] = list
) -> Case:
    """What ``verify_step`` says of a loss."""

    def program(mesh: Mesh) -> Record:
        model = wrap(mesh)
        torch.manual_seed(1)
        modules = [each.double() for each in beside()]

        def loss_of(model: Module, b: Any) -> Tensor:
            out = model(b.x, b.edge_index)
            for module in modules:
                out = module(out)
            return values(out, b)

        batches = loader(mesh)  # kept: verify_step makes small mini-batches with it
        gsplit.verify_step(model, loss_of, next(iter(batches)))
        return []

    return Case(program=program, raises=raises)


def trainer(values: Callable[[Tensor, Tensor], Tensor], beside: Sequence[Module] = ()) -> Callable[[Mesh], Record]:
    """A ``gsplit.Trainer`` with a loss function, and an optimizer of other modules."""

    def program(mesh: Mesh) -> Record:
        model = wrap(mesh)
        modules = [copy.deepcopy(module).double() for module in beside]

        def loss_fn(out: Tensor, y: Tensor) -> Tensor:
            for module in modules:
                out = module(out)
            return values(out, y)

        made = gsplit.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader(mesh), loss_fn=loss_fn)
        made.train_epoch(3)
        return [(0.0, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})]

    return program


AROUND = {
    "a kept penalty in a global": on_outputs(beside_mean, build=lambda: Net(keep), raises=TERMS),
    "a kept penalty in a list": on_outputs(beside_mean, build=lambda: Keeping("list"), raises=TERMS),
    "a kept penalty in a dict": on_outputs(beside_mean, build=lambda: Keeping("dict"), raises=TERMS),
    "a kept penalty from a forward hook": on_outputs(beside_mean, build=lambda: Keeping("hook"), raises=TERMS),
    "a kept number, detached": on_outputs(
        lambda o, b: b.mean(ce(o, b.y) * KEPT["penalty"].detach()), build=lambda: Net(keep), raises=NUMBERS
    ),
    "a loss that is only a kept penalty": on_outputs(
        lambda o, b: KEPT["penalty"], build=lambda: Net(keep), raises=TERMS
    ),
    "noise on the input": Case(noisy, raises=INPUT),
    "standardised by the rank's rows": Case(standardised, raises=INPUT),
    "dropout of the input": Case(dropped, raises=INPUT),
    "an adversarial input": Case(adversarial, raises=PARAMETERS),
    "a trained perturbation": Case(perturbed, raises=PARAMETERS),
    "a learning rate by rank": Case(program=lambda mesh: other_learning_rates(mesh, by_loss=False), raises=WEIGHTS),
    "a learning rate by the rank's loss": Case(
        program=lambda mesh: other_learning_rates(mesh, by_loss=True), raises=WEIGHTS
    ),
    "verify_step: weights of the rank's classes": of_verify_step(
        lambda o, b: b.mean(ce(o, b.y) * class_weights(b.y)), VALUES
    ),
    "verify_step: a head": of_verify_step(lambda o, b: b.mean(ce(o, b.y)), PARAMETERS, beside=head),
    "Trainer: a head with an optimizer of its own": Case(
        program=trainer(ce, [Linear(CLASSES, CLASSES)]), raises=PARAMETERS
    ),
    "Trainer: weights of the rank's classes": Case(
        program=trainer(lambda o, y: ce(o, y) * class_weights(y)), raises=VALUES
    ),
    "Trainer": Case(program=trainer(ce)),
}

# ---------------------------------------------------------------- outputs


def of_output(pick: Callable[[Any], Tensor], shape: Callable[[Tensor], Any], **options: Any) -> Case:
    """A model that is wrong on ranks with few rows, and returns its outputs in some form."""
    return Case(
        lambda model, beside, b: b.mean(ce(pick(model(b.x, b.edge_index)), b.y)),
        build=lambda: ByRows(shape),
        options={"batch_size": 80, "fanouts": (8, 8)},
        **options,
    )


OUTPUTS = {
    "a tensor": of_output(lambda out: out, lambda out: out, raises=STEP),
    "a dict": of_output(lambda out: out["logits"], lambda out: {"logits": out}, raises=STEP),
    "a tuple whose first has no gradient": of_output(
        lambda out: out[1], lambda out: (out.detach() * 0 + 1, out), raises=STEP
    ),
}
NOT_COMPARED = {
    "an extra tensor": Case(
        lambda m, beside, b: b.mean(ce(m(b.x, b.edge_index, torch.ones(1, dtype=torch.float64)), b.y)),
        build=lambda: ByRows(lambda out: out),
        options={"batch_size": 80, "fanouts": (8, 8)},
    ),
    "a loader that is gone": Case(program=listed_batches),
}
"""Wrong, and not found: the first step is not compared, and one line says so (docs/verify.md)."""

# ---------------------------------------------------------------- right loops


def focal(out: Tensor, y: Tensor) -> Tensor:
    return (1 - (-ce(out, y)).exp()) ** 2 * ce(out, y)


def f1_of_sums(out: Tensor, b: Any) -> Tensor:
    shares = out.softmax(1)
    loss: Tensor = 1 - 2 * b.sum(shares.gather(1, b.y[:, None])[:, 0]) / (b.sum(shares.sum(1)) + 40)
    return loss


def two_roots(model: Module, beside: Modules, b: Any) -> Tensor:
    """A backward of two losses at once; the returned one adds nothing."""
    out = model(b.x, b.edge_index)
    torch.autograd.backward([b.mean(ce(out, b.y)), b.mean(out.pow(2).sum(1))], retain_graph=True)
    loss: Tensor = b.mean(out.sum(1)) * 0.0
    return loss


def lbfgs(mesh: Mesh) -> Record:
    model = wrap(mesh)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
    steps: Record = []
    for batch in islice(loader(mesh), 2):
        b = batch.cast(torch.float64)

        def closure(b: Any = b) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = b.mean(ce(model(b.x, b.edge_index), b.y))
            loss.backward()
            return loss

        steps.append(record([model], optimizer.step(closure)))  # type: ignore[no-untyped-call]
    return steps


def teacher(mesh: Mesh) -> Record:
    model, other = wrap(mesh), wrap(mesh).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps: Record = []
    for batch in islice(loader(mesh), 3):
        b = batch.cast(torch.float64)
        with torch.no_grad():
            shares = other(b.x, b.edge_index).softmax(1)
        optimizer.zero_grad()
        loss = b.mean(-(shares * model(b.x, b.edge_index).log_softmax(1)).sum(1) + ce(model(b.x, b.edge_index), b.y))
        loss.backward()
        steps.append(record([model], loss))
        optimizer.step()
    return steps


def two_loaders(mesh: Mesh) -> Record:
    model = wrap(mesh)
    labelled = loader(mesh, input_nodes=torch.arange(100))
    others = loader(mesh, 20, input_nodes=torch.arange(100, 160), seed=5)
    steps: Record = []
    for one_batch, other in zip(labelled, others, strict=False):
        a, b = one_batch.cast(torch.float64), other.cast(torch.float64)
        model.zero_grad()
        loss = a.mean(ce(model(a.x, a.edge_index), a.y)) + 0.5 * b.mean(model(b.x, b.edge_index).pow(2).mean(1))
        loss.backward()
        steps.append(record([model], loss))
    return steps


def sharpness_aware(mesh: Mesh) -> Record:
    """Two forwards and backwards on one batch, the second with moved weights."""
    model = wrap(mesh)
    steps: Record = []
    for batch in islice(loader(mesh), 2):
        b = batch.cast(torch.float64)
        model.zero_grad()
        b.mean(ce(model(b.x, b.edge_index), b.y)).backward()
        moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        model.zero_grad()
        loss = b.mean(ce(model(b.x, b.edge_index), b.y))
        loss.backward()
        steps.append(record([model], loss))
    return steps


def weights_by_vertex(model: Module, beside: Modules, b: Any) -> Tensor:
    weight = torch.rand(NUM_VERTICES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loss: Tensor = b.mean(ce(model(b.x, b.edge_index), b.y), weight[b.n_id[: b.num_targets]])
    return loss


def reads_before_backward(model: Module, beside: Modules, b: Any) -> Tensor:
    """Numbers of the rank for a log line, which are not in the loss."""
    out = model(b.x, b.edge_index)
    values = ce(out, b.y)
    _ = float(values.mean()) if len(values) else 0.0, accuracy(out, b.y)
    loss: Tensor = b.mean(values)
    return loss


def logged(model: Module, beside: Modules, b: Any) -> Tensor:
    """Scores and totals of the rank for a log line, kept as tensors, which are not in the loss."""
    out = model(b.x, b.edge_index)
    values = ce(out, b.y)
    right = (out.argmax(1) == b.y).sum() / max(1, len(b.y))
    KEPT["total"] = KEPT.get("total", torch.zeros(())) + values.detach().sum() / max(1, b.batch_size) + right
    KEPT.setdefault("counts", torch.zeros(CLASSES)).add_(torch.bincount(out.argmax(1), minlength=CLASSES))
    loss: Tensor = b.mean(values)
    return loss


def by_vertex(out: Tensor, b: Any, width: int) -> tuple[Tensor, Tensor]:
    """The ids of this rank's targets, and a table of all vertices with classes."""
    generator = torch.Generator().manual_seed(width)
    table = torch.randint(0, CLASSES, (NUM_VERTICES, width), generator=generator)
    return b.n_id[: b.num_targets], table


def masked_by_vertex(out: Tensor, b: Any) -> Tensor:
    """Another label for some of the targets."""
    ids, table = by_vertex(out, b, 1)
    some = table[ids][:, 0] > 1
    values = ce(out, b.y)
    values[some] = ce(out[some], table[ids][some][:, 0]) * (1.0 + table[ids][some][:, 0])
    loss: Tensor = b.mean(values)
    return loss


def several_labels(out: Tensor, b: Any) -> Tensor:
    """Three labels for each target, in one call."""
    ids, table = by_vertex(out, b, 3)
    rows = out.repeat_interleave(3, 0).view(len(ids) * 3, CLASSES)
    loss: Tensor = b.mean(ce(rows, table[ids].reshape(-1)).view(-1, 3).mean(1))
    return loss


def remembered(out: Tensor, b: Any) -> Tensor:
    """The last outputs of every vertex, which keeps its owner."""
    ids = b.n_id[: b.num_targets]
    bank = KEPT.setdefault("bank", torch.zeros(NUM_VERTICES, CLASSES, dtype=torch.float64))
    loss: Tensor = b.mean(ce(out, b.y) + (out - bank[ids]).pow(2).sum(1))
    bank[ids] = out.detach()
    return loss


def of_scores(out: Tensor, b: Any) -> Tensor:
    """A loss that takes numbers between 0 and 1 only."""
    label = (b.y > 2).double()
    loss: Tensor = b.mean(F.binary_cross_entropy(out[:, 0].sigmoid(), label, reduction="none"))
    return loss


def permuted(out: Tensor, y: Tensor) -> Tensor:
    order = torch.arange(len(y)).flip(0)
    return ce(out[order], y[order])


def compiled(backend: str) -> Callable[[Mesh], Record]:
    return lambda mesh: loop(mesh, mean_of(torch.compile(lambda o, y: ce(2 * o, y), backend=backend)))


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return 2 * out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def in_device_context(model: Module, beside: Modules, b: Any) -> Tensor:
    with torch.device("cpu"):
        out = model(b.x, b.edge_index)
    loss: Tensor = b.mean(ce(out, b.y))
    return loss


def nothing_alike(out: Tensor, b: Any) -> Tensor:
    """The loss of regression, with labels that are missing."""
    y = torch.where(b.y == 2, float("nan"), b.y.double())
    loss: Tensor = b.mean(torch.where(y.isnan(), 0.0, (out[:, 0] - y.nan_to_num()) ** 2), (~y.isnan()).double())
    return loss


_CLASS_WEIGHT = torch.arange(1.0, 6.0).double()
RIGHT_LOSSES = {
    "cross-entropy": mean_of(ce),
    "focal": mean_of(focal),
    "smoothed labels": mean_of(lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1)),
    "weights of classes, as torch divides": on_outputs(
        lambda o, b: b.mean(
            F.cross_entropy(o, b.y, weight=_CLASS_WEIGHT, reduction="none") / _CLASS_WEIGHT[b.y], _CLASS_WEIGHT[b.y]
        )
    ),
    "weights of classes": mean_of(lambda o, y: F.cross_entropy(o, y, weight=_CLASS_WEIGHT, reduction="none")),
    "a subset by weight": on_outputs(lambda o, b: b.mean(ce(o, b.y), (b.y > 1).double())),
    "a subset by weight without targets": on_outputs(lambda o, b: b.mean(ce(o, b.y), (b.y > 9).double())),
    "an entropy per target": mean_of(lambda o, y: ce(o, y) + 0.1 * (o.softmax(1) * o.log_softmax(1)).sum(1)),
    "a function of a mean": on_outputs(lambda o, b: b.mean(ce(o, b.y)).exp()),
    "a product of means": on_outputs(lambda o, b: b.mean(ce(o, b.y)) * b.mean(o.pow(2).mean(1))),
    "a deviation from means": on_outputs(
        lambda o, b: b.mean(ce(o, b.y)) + (b.mean(o.pow(2).sum(1)) + 1 - b.mean(o[:, 0]) ** 2).sqrt()
    ),
    "F1 from sums": on_outputs(f1_of_sums),
    "batch.sum over the global batch size": on_outputs(lambda o, b: b.sum(ce(o, b.y)) / b.global_batch_size),
    "a weight that is a loss": on_outputs(lambda o, b: b.mean(ce(o, b.y), ce(o, b.y).detach())),
    "BCE of columns": mean_of(
        lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 5).double(), reduction="none").mean(1)
    ),
    "missing labels": on_outputs(nothing_alike),
    "twice the mean": on_outputs(lambda o, b: 2 * b.mean(ce(o, b.y))),
    "a permuted loss": mean_of(permuted),
    "layer norm behind the model": mean_of(lambda o, y: ce(F.layer_norm(o, (CLASSES,)), y)),
    "an own function": mean_of(lambda o, y: ce(OwnFunction.apply(o), y)),  # type: ignore[no-untyped-call]
    "weights by vertex": Case(weights_by_vertex),
    "numbers that are only read": Case(reads_before_backward),
    "scores and totals that are only logged": Case(logged),
    "other labels after a mask": on_outputs(masked_by_vertex),
    "several labels in one call": on_outputs(several_labels),
    "outputs remembered by vertex": on_outputs(remembered),
    "a loss of scores": on_outputs(of_scores),
    "batches of 2 with weights by vertex": Case(weights_by_vertex, options={"batch_size": 2}),
    "a penalty on weights": Case(
        lambda m, beside, b: b.mean(ce(m(b.x, b.edge_index), b.y)) + 0.1 * sum(p.pow(2).sum() for p in m.parameters())
    ),
    "vmap": mean_of(lambda o, y: torch.func.vmap(lambda row, label: F.cross_entropy(row, label))(o, y)),
    "a compiled loss": Case(program=compiled("aot_eager")),
    "in a device context": Case(in_device_context),
    "two roots": Case(two_roots),
    "a scaled backward": mean_of(ce, backward=scaled),
    "a retained graph": mean_of(ce, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward())),
    "backward in create_graph": mean_of(ce, backward=lambda loss: _with_graph(loss)),
    "rows computed in the loop": mean_of(lambda o, y: ce(o.clamp(-5, 5).tanh() * 3, y)),
    "a dict of outputs": Case(
        lambda m, beside, b: b.mean(ce(m(b.x, b.edge_index)["logits"], b.y)),
        build=lambda: Net(lambda h, out: {"logits": out, "hidden": None}),
    ),
    "LBFGS": Case(program=lbfgs),
    "a teacher": Case(program=teacher),
    "two loaders": Case(program=two_loaders),
    "two steps on a batch": Case(program=sharpness_aware),
    "dropout inside": mean_of(ce, build=lambda: GAT(WIDTH, 8, 2, CLASSES, heads=2, dropout=0.3)),
}


def _with_graph(loss: Tensor) -> None:
    """A gradient penalty without its second derivative; .grad is detached, as one does against its cycle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: parameters and gradients refer to each other
        loss.backward(create_graph=True)


SETTINGS = {
    **{
        f"{name}, {strategy}": mean_of(ce, build=build, options={"strategy": strategy})
        for strategy in ("data", "data(owner)", "data_cached", "hybrid(1)", "split")
        for name, build in {
            "SAGE": Net,
            "GAT with dropout": lambda: GAT(WIDTH, 8, 2, CLASSES, heads=2, dropout=0.3),
        }.items()
    },
    **{
        f"batches of {size}": mean_of(ce, options={"batch_size": size}, steps=min(3, 200 // size))
        for size in (1, 2, 37, 200)
    },
    **{f"fanouts {fanouts}": mean_of(ce, options={"fanouts": fanouts}) for fanouts in ((1, 1), (-1, -1), (1000, 1000))},
    "prefetched": mean_of(ce, options={"prefetch": 2}),
    **{
        f"{optimizer.__name__}": mean_of(ce, optimizer=lambda parameters, kind=optimizer: kind(parameters, lr=0.01))
        for optimizer in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad)
    },
}

# ---------------------------------------------------------------- vertex types, and pairs


def typed_graph() -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["a"].x = torch.rand(120, 8, generator=generator).double()
    data["p"].x = torch.rand(150, 8, generator=generator).double()
    data["p"].y = torch.randint(0, CLASSES, (150,), generator=generator)
    ends = (torch.randint(0, size, (600,), generator=generator) for size in (120, 150))
    data["a", "w", "p"].edge_index = torch.stack(list(ends))
    data["p", "r", "a"].edge_index = data["a", "w", "p"].edge_index.flip(0)
    return data


class TypedNet(Module):
    def __init__(self) -> None:
        super().__init__()

        def layer(columns: int) -> HeteroConv:
            return HeteroConv({of: SAGEConv((8, 8), columns) for of in (("a", "w", "p"), ("p", "r", "a"))})

        self.first, self.second = layer(8), layer(CLASSES)

    def forward(self, x: Any, edges: Any) -> Any:
        return self.second({of: h.tanh() for of, h in self.first(x, edges).items()}, edges)


def typed(values: Callable[[Tensor, Any, Module], Tensor], raises: str | None = None) -> Case:
    def program(mesh: Mesh) -> Record:
        torch.manual_seed(0)
        data = typed_graph()
        model = gsplit.parallelize(TypedNet().double(), mesh, graph=data)
        other = Linear(CLASSES, CLASSES).double()
        steps: Record = []
        batches = gsplit.NeighborLoader(data, [4, 4], ("p", None), batch_size=40, mesh=mesh)
        for batch in islice(batches, 2):
            b: Any = batch.cast(torch.float64)
            model.zero_grad()
            loss = values(model(b.x_dict, b.edge_index_dict)["p"], b, other)
            loss.backward()
            steps.append(record([model], loss))
        return steps

    return Case(program=program, raises=raises)


def pairs(values: Callable[[Tensor, Any], Tensor], raises: str | None = None, **options: Any) -> Case:
    def program(mesh: Mesh) -> Record:
        model = wrap(mesh)
        generator = torch.Generator().manual_seed(5)
        ends = torch.randint(0, NUM_VERTICES, (2, 120), generator=generator)
        given = options or {"edge_label": torch.randint(0, 2, (120,), generator=generator).double()}
        steps: Record = []
        batches = gsplit.LinkNeighborLoader(
            graph(),
            [4, 3],
            ends,
            batch_size=40,
            mesh=mesh,
            partition=_PARTS % mesh.size,
            exclude_seed_edges=False,
            **given,
        )
        for batch in islice(batches, 3):
            b = batch.cast(torch.float64)
            model.zero_grad()
            loss = values(model(b.x, b.edge_index), b)
            loss.backward()
            steps.append(record([model], loss))
        return steps

    return Case(program=program, raises=raises)


def score(z: Tensor, b: Any) -> Tensor:
    src, dst = b.edge_label_index
    return (z[src] * z[dst]).sum(-1)


def bce(z: Tensor, b: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(score(z, b), b.edge_label, reduction="none")


def ranked(z: Tensor, b: Any) -> Tensor:
    src, dst, others = z[b.src_index], z[b.dst_pos_index], z[b.dst_neg_index]
    return -F.logsigmoid((src * dst).sum(-1) - (src * others.view_as(src)).sum(-1))


def in_batch(z: Tensor, b: Any) -> Tensor:
    return ce(z[b.src_index] @ z[b.candidates].t(), b.own_columns)


def among_own_pairs(z: Tensor, b: Any) -> Tensor:
    src, dst = b.edge_label_index
    return ce(z[src] @ z[dst].t(), torch.arange(len(src)))


OTHER_TASKS = {
    "types": typed(lambda out, b, other: b.mean(ce(out, b["p"].y))),
    "types, a head": typed(lambda out, b, other: b.mean(ce(other(out), b["p"].y)), PARAMETERS),
    "types, centred": typed(lambda out, b, other: b.mean(ce(centred(out), b["p"].y)), VALUES),
    "types, weights of the rank's classes": typed(
        lambda out, b, other: b.mean(ce(out, b["p"].y) * class_weights(b["p"].y)), VALUES
    ),
    "types, a term beside": typed(lambda out, b, other: b.mean(ce(out, b["p"].y)) + out.pow(2).mean(), TERMS),
    "types, gathered": typed(lambda out, b, other: b.mean(ce(out - b.gather(out).mean(0), b["p"].y))),
    "pairs": pairs(lambda z, b: b.mean(bce(z, b))),
    "pairs, a penalty per pair": pairs(lambda z, b: b.mean(bce(z, b) + 0.1 * z[b.edge_label_index[0]].pow(2).sum(1))),
    "pairs, triplets": pairs(lambda z, b: b.mean(ranked(z, b)), neg_sampling="triplet"),
    "pairs, in-batch negatives": pairs(lambda z, b: b.mean(in_batch(z, b)), neg_sampling="in_batch"),
    "pairs, the rank's pairs as negatives": pairs(lambda z, b: b.mean(among_own_pairs(z, b)), VALUES),
    "pairs, weighted by the rank's labels": pairs(lambda z, b: b.mean(bce(z, b) * (1 + b.edge_label.mean())), VALUES),
    "pairs, a term beside": pairs(lambda z, b: b.mean(bce(z, b)) + 0.1 * z.pow(2).mean(), TERMS),
    "pairs, gathered": pairs(lambda z, b: b.mean(bce(z, b) - 0.1 * b.gather(score(z, b)).mean())),
}

GROUPS = {
    "loss": WRONG_LOSSES,
    "beside": BESIDE,
    "gathered": GATHERED,
    "around": AROUND,
    "output": OUTPUTS,
    "right": RIGHT_LOSSES,
    "settings": SETTINGS,
    "task": OTHER_TASKS,
}
CASES: dict[str, Case] = {f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}


def run_loops(mesh: Mesh, names: Sequence[str]) -> dict[str, Record | str]:
    """The record of every loop, or what it raised."""
    found: dict[str, Record | str] = {}
    for name in names:
        case = CASES[name]
        KEPT.clear()
        try:
            found[name] = loop(mesh, case) if case.program is None else case.program(mesh)
        except gsplit.errors.GSplitError as error:
            found[name] = str(error)
        mesh.control.gather_text(Call("end of a loop"), name)
        gc.collect()
    return found


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def warned_once(mesh: Mesh) -> list[list[str]]:
    """The lines that are logged for loops whose first step is not compared."""
    lines: list[list[str]] = []
    for case in NOT_COMPARED.values():
        handler = _Lines()
        logging.getLogger("gsplit").addHandler(handler)
        try:
            if case.program is not None:
                case.program(mesh)
            else:
                loop(mesh, case)
        finally:
            logging.getLogger("gsplit").removeHandler(handler)
        lines.append([line for line in handler.lines if "verify_step" in line])
    return lines
