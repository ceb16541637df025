"""What ranks run in the tests of the simulated device."""

import contextlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from small_graph import CLASSES, WIDTH, Case, make_model, small_store
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GraphSAGE, SAGEConv
from trainer_programs import EachStep

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.doctor.device import gather_large_rows, measure_zero_copy
from gsplit.doctor.kernels import compare_kernels
from gsplit.doctor.programs import train_models
from gsplit.kernels.triton.launch import set_launcher
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.run.models import EDGE_WEIGHT_MODELS, MODELS
from gsplit.sampling.neighbor import make_sampler
from gsplit.training.callbacks import StepReport
from gsplit_bench import simulated
from gsplit_bench.simulated import switched_on


def simulated_cases(replicas: int, strategies: tuple[str, ...] = ("split", "data")) -> list[Case]:
    """Every model with dropout and jumping knowledge, with BatchNorm where it can be, and with edge values."""
    cases = []
    for strategy in strategies:
        norm = "batch_norm" if strategy == "split" and replicas == 1 else None
        cases += [Case(model, strategy, "random", 0.5, "max", norm) for model in MODELS if model != "gine"]
        edge_models = ("gat", "gatv2", "transformer", "pna", "gine", *EDGE_WEIGHT_MODELS)
        cases += [Case(model, strategy, "random", 0.5, None, None, edge_values=True) for model in edge_models]
    return cases


def _loader(
    mesh: Mesh, strategy: str = "split", num_neighbors: Sequence[int] = (4, 3, -1), batch_size: int = 12
) -> gsplit.NeighborLoader:
    store, ownership = small_store("random", mesh.num_splits)
    return gsplit.NeighborLoader(
        store,
        list(num_neighbors),
        "train",
        batch_size=batch_size,
        mesh=mesh,
        seed=3,
        strategy=strategy,
        ownership=ownership if mesh.size > 1 else None,
    )


def _edge_values(case: Case, batch: Batch) -> dict[str, Any]:
    if not case.edge_values:
        return {}
    return {"edge_weight": batch.edge_weight} if case.model in EDGE_WEIGHT_MODELS else {"edge_attr": batch.edge_attr}


def count_steps(mesh: Mesh, cases: list[Case]) -> list[dict[str, simulated.DeviceCounts]]:
    """What the third step of every case costs the host, the first one without checks: loading, then all behind it."""
    log, found = switched_on().log, []
    for case in cases:
        model = gsplit.parallelize(make_model(case), mesh)
        optimizer = torch.optim.Adam(model.parameters())
        loader = _loader(mesh, case.strategy)
        for step in range(3):
            start = log.counts()
            batch = loader.make_batch(*divmod(step, len(loader)))
            loaded = log.counts()
            out = model(batch.x, batch.edge_index, **_edge_values(case, batch))
            batch.mean(F.cross_entropy(out, batch.y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({"loading": loaded - start, "step": log.counts() - loaded})
    return found


class _Gated(Module):
    """A model whose last parameter takes part only where it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(Case("sage", "split", "random", 0.5, None, None))
        self.gate = torch.nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))
        self.is_on = True

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out: Tensor = self.inner(x, edge_index)
        return out * self.gate if self.is_on else out


def checked_training(mesh: Mesh, unused_on: int | None, check_races: bool) -> tuple[list[str], list[list[float]], int]:
    """Two steps under NCCL's rules: the order of all collectives, gradients, and launches checked for races."""
    device = switched_on()
    device.tracker.check = check_races
    rules = simulated.CollectiveRules(device.tracker)
    mesh = simulated.checked_mesh(mesh, rules)
    model = gsplit.parallelize(_Gated(), mesh, num_features=WIDTH, verify_every=0)
    loader = _loader(mesh)
    model.is_on = mesh.rank != unused_on
    for step in range(2):
        model.zero_grad()
        batch = loader.make_batch(0, step)
        out = model(batch.x, batch.edge_index)
        batch.mean(F.cross_entropy(out, batch.y, reduction="none")).backward()
    rules.compare_ranks(mesh.control)
    assert device.tracker.errors == []
    gradients = [p.grad.reshape(-1).tolist() for p in model.parameters() if p.grad is not None]
    return rules.order, gradients, device.tracker.num_launches


@contextlib.contextmanager
def _slow_host_tasks(rules: simulated.CollectiveRules) -> Iterator[None]:
    """Whatever one rank's host does alone takes ten minutes less a second of the simulated clocks."""
    tasks = [
        "gsplit.inference.infer._create",  # by rank 0, as verification's one process
        "gsplit.training.verification.solo_mesh",
        "gsplit.loading.batch_loader.open_features",
    ]

    def slowly(name: str) -> Any:
        task = pkgutil.resolve_name(name)

        def act(*args: Any, **options: Any) -> Any:
            if not name.endswith("open_features") or args[0].first > 0:  # of one rank's loader only
                rules.work_alone(599)
            return task(*args, **options)

        return act

    with contextlib.ExitStack() as patches:
        for name in tasks:
            patches.enter_context(patch(name, slowly(name)))
        rules.start_clocks()
        yield


def use_everything(mesh: Mesh, folder: str) -> dict[str, Any]:
    """The trainer, inference, evaluation and verification of one small model; on devices with slow hosts."""
    if mesh.device.type == "cpu":
        return _use_everything(mesh, folder)
    rules = simulated.CollectiveRules(switched_on().tracker)
    with _slow_host_tasks(rules):
        return _use_everything(simulated.checked_mesh(mesh, rules), folder)


def _use_everything(mesh: Mesh, folder: str) -> dict[str, Any]:
    store, ownership = small_store("random", mesh.num_splits)
    own = ownership if mesh.size > 1 else None
    torch.manual_seed(0)
    model = gsplit.parallelize(make_model(Case("pna", "split", "random", 0.5, None, None)), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: list[tuple[int, float]] = []
    trainer = gsplit.Trainer(
        model,
        optimizer,
        _loader(mesh),
        max_grad_norm=1.0,
        callbacks=[EachStep(lambda report: seen.append((report.step, report.loss)))],
    )
    losses = trainer.train_epoch()
    records = trainer.state.loader.telemetry.records
    assert [(step, loss) for step, loss in seen] == list(enumerate(losses))
    assert [record.values["loss"] for record in records] == losses
    assert all({"forward", "backward", "optimizer", "sample"} <= set(record.seconds) for record in records)
    assert all(record.values["gradient_norm"] > 0 for record in records)
    path = Path(folder) / "out.npy"
    rows = gsplit.infer(model, store, out=path, ownership=own)
    found = gsplit.verify(
        make_model(Case("pna", "split", "random", 0.5, None, None)),
        store,
        [4, 3, -1],
        "train",
        batch_size=12,
        mesh=mesh,
    )
    return {
        "losses": losses,
        "rows": np.array(rows),
        "scores": trainer.evaluate(store, ["train"], ownership=own),
        "verified": (found.max_loss_error, found.max_grad_error),
    }


def edges_held(mesh: Mesh) -> tuple[int, int]:
    """Edges of this rank, and those its sampler has on the device."""
    store, ownership = small_store("random", mesh.num_splits)
    local = LocalGraph(store, mesh, ownership)
    sampler: Any = make_sampler(local.graph, local.original_ids, mesh.sample_device)
    return int(local.graph.indptr[-1] - local.graph.indptr[0]), sampler.indices.numel()


SmallStep = tuple[list[Any], Counter[str], set[str]]


def small_steps(mesh: Mesh, cases: list[Case]) -> list[SmallStep]:
    """Outputs, loss and gradients of a step of few edges, its waits, and its kernels."""
    return [_small_step(mesh, case) for case in cases]


def _small_step(mesh: Mesh, case: Case) -> SmallStep:
    kernels: set[str] = set()

    def watch(kernel: Any, grid: Any, args: Any, constants: Any, writes: Any) -> None:
        kernels.add(kernel.__name__)
        launcher(kernel, grid, args, constants, writes)

    launcher = set_launcher(watch)
    model = gsplit.parallelize(make_model(case), mesh, verify_every=0)
    batch = _loader(mesh, num_neighbors=[2, 2, 2], batch_size=4).make_batch(0, 0)
    log = switched_on().log if mesh.device.type == "sim" else None
    before = log.counts() if log is not None else simulated.DeviceCounts()
    out = model(batch.x, batch.edge_index)
    loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
    loss.backward()
    waits = (log.counts() - before).waits if log is not None else Counter[str]()
    set_launcher(launcher)
    found = [out.detach(), loss.detach(), *(p.grad for p in model.parameters())]
    return [None if tensor is None else tensor.numpy(force=True) for tensor in found], waits, kernels


def share_a_device(mesh: Mesh) -> None:
    """Two ranks on what says it is one device."""
    with simulated.simulated_device(uuid="one for all"):
        gsplit.init("sim")


def violate_late(mesh: Mesh) -> dict[str, str]:
    """What a device tells later: one row in a batch norm, and a loss that is no number; both in the last step."""
    said = {}
    for name, model in (("batch norm", _one_row_model()), ("loss", _nan_model())):
        store, _ = small_store("random", 1)
        loader = gsplit.NeighborLoader(store, [2], torch.tensor([3, 5]), batch_size=1, shuffle=False, mesh=mesh)
        wrapped = gsplit.parallelize(model, mesh, num_features=WIDTH)
        for parameter in wrapped.parameters() if name == "loss" else ():
            parameter.data.fill_(float("nan"))
        trainer = gsplit.Trainer(wrapped, torch.optim.Adam(wrapped.parameters()), loader)
        try:
            trainer.train_epoch(1)
        except gsplit.InputError as error:
            said[name] = str(error)
    return said


def _one_row_model() -> Module:
    class Normed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = SAGEConv(WIDTH, CLASSES), torch.nn.BatchNorm1d(CLASSES)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            out: Tensor = self.norm(self.conv(x, edge_index))
            return out

    return Normed().double()


def _nan_model() -> Module:
    model: Module = GraphSAGE(WIDTH, 4, 1, CLASSES).double()
    return model


def callback_fails(mesh: Mesh) -> tuple[int, int]:
    """Steps in the optimizer and losses in the history after an error in a callback."""
    torch.manual_seed(0)
    model = gsplit.parallelize(make_model(Case("sage", "split", "random", 0.0, None, None)), mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def fail(report: StepReport) -> None:
        if report.step == 1:
            raise RuntimeError("on purpose")

    trainer = gsplit.Trainer(model, optimizer, _loader(mesh), callbacks=[EachStep(fail)])
    with contextlib.suppress(RuntimeError):
        trainer.train_epoch()
    steps = next(iter(optimizer.state.values()))["step"]
    return int(steps), trainer.state.num_steps


def mixed_kinds(mesh: Mesh) -> str:
    """What is said where one rank is on a device and the other is not."""
    try:
        if mesh.rank == 0:
            gsplit.init("cpu")
        else:
            with simulated.simulated_device():
                gsplit.init("sim")
    except gsplit.InputError as error:
        return str(error)
    return "nothing"


def train_without_races(mesh: Mesh, models: list[str]) -> int:
    """Train as the doctor does, with every launch checked for races; how many there were."""
    device = switched_on()
    device.tracker.check = True
    rules = simulated.CollectiveRules(device.tracker)
    train_models(simulated.checked_mesh(mesh, rules), models)
    rules.compare_ranks(mesh.control)
    assert device.tracker.errors == []
    return device.tracker.num_launches


def use_kernels_as_the_doctor(
    mesh: Mesh,
) -> tuple[dict[str, float], list[tuple[str, int, bool]], list[dict[str, float]]]:
    """How far kernels are from the host's; zero-copy's launches (kernel, size of the cache, whether the host's rows are
    pinned); rates of large arrays, and those of a kernel that writes nothing."""
    units = compare_kernels(mesh)
    launches: list[tuple[str, int, bool]] = []
    rows = torch.randn(11, 128)

    def record(kernel: Any, grid: Any, args: Any, constants: Any, writes: Any) -> None:
        launcher(kernel, grid, args, constants, writes)
        launches.append((kernel.__name__, args[0].numel(), args[1].is_pinned()))
        assert torch.equal(args[7].cpu().view(rows.shape), rows.view(torch.int32)[args[3].cpu()])

    launcher = set_launcher(record)
    assert measure_zero_copy(rows, mesh.device) > 0
    set_launcher(launcher)
    rates = [gather_large_rows(mesh, 128 * 24, num_gathered=7)]
    set_launcher(lambda *args: None)
    rates.append(gather_large_rows(mesh, 128 * 24, num_gathered=7))
    set_launcher(launcher)
    return units, launches, rates
