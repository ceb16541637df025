"""A small heterogeneous graph, models of every kind for it, and training on any mesh."""

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, ModuleDict, ModuleList
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HGTConv, RGATConv, RGCNConv, SAGEConv, to_hetero
from trainer_programs import EachStep

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.parallelize import parallelize
from gsplit.store.in_memory import MemoryStore, typed_store

CITES = ("paper", "cites", "paper")
CITED_BY = ("paper", "cited_by", "paper")
WRITES = ("author", "writes", "paper")
WRITTEN_BY = ("paper", "written_by", "author")
OF = ("field", "of", "paper")
HAS = ("paper", "has", "field")
NEVER = ("author", "never", "field")  # a relation without edges
RELATIONS = (CITES, CITED_BY, WRITES, WRITTEN_BY, OF, HAS, NEVER)
COUNTS = {"paper": 150, "author": 90, "field": 12}
WIDTHS = {"paper": 7, "author": 5, "field": 3}
FANOUTS = {
    CITES: [3, 2],
    CITED_BY: [2, 2],
    WRITES: [4, 3],
    WRITTEN_BY: [3, -1],
    OF: [0, 2],
    HAS: [2, 4],
    NEVER: [1, 1],
}
BATCH = 24
TRAINED = np.arange(0, COUNTS["paper"], 2)


def make_data() -> HeteroData:
    """Hubs, vertices without in-edges, and a relation without edges."""
    rng = np.random.default_rng(3)
    data = HeteroData()
    for name, count in COUNTS.items():
        data[name].x = torch.from_numpy(rng.normal(size=(count, WIDTHS[name])))
    data["paper"].y = torch.from_numpy(rng.integers(0, 4, COUNTS["paper"]))
    for relation in RELATIONS:
        size = 0 if relation == NEVER else 600
        src = rng.integers(0, COUNTS[relation[0]], size)
        dst = (rng.random(size) ** 2 * COUNTS[relation[2]]).astype(np.int64)
        kept = np.unique(np.stack([src, dst])[:, dst % 7 != 3], axis=1)
        data[relation].edge_index = torch.from_numpy(kept)
    return data


def make_store(num_parts: int) -> MemoryStore:
    """The graph in parts. The last part has no fields, so a rank may have none."""
    data = make_data()
    rng = np.random.default_rng(9)
    parts = {name: rng.integers(0, num_parts, count) for name, count in COUNTS.items()}
    parts["field"] = parts["field"] % max(1, num_parts - 1)
    edges = {relation: tuple(data[relation].edge_index.numpy()) for relation in RELATIONS}
    arrays: dict[str, Any] = {f"features/{name}/x": (data[name].x.numpy(), "float64") for name in COUNTS}
    arrays["y/paper"] = (data["paper"].y.numpy(), "int64")
    return typed_store(COUNTS, edges, parts, arrays, {"paper/train": TRAINED})


class Hetero(Module):
    """HeteroConv as in PyG's documentation, with dropout on inputs, hidden rows and attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hidden = dict.fromkeys(WIDTHS, 8)

        def conv(widths: tuple[int, int]) -> Module:
            if kind == "sage":
                return SAGEConv(widths, 8)  # type: ignore[no-any-return]
            return GATConv(widths, 4, heads=2, dropout=0.4, add_self_loops=False)  # type: ignore[no-any-return]

        self.convs = ModuleList(
            HeteroConv({relation: conv((w[relation[0]], w[relation[2]])) for relation in RELATIONS}, aggr="sum")
            for w in (WIDTHS, hidden)
        )
        self.lin = Linear(8, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x_dict = {name: F.dropout(x, 0.2, self.training) for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {
                name: F.dropout(x.relu(), 0.5, self.training) for name, x in conv(x_dict, edge_index_dict).items()
            }
        return self.lin(x_dict["paper"])  # type: ignore[no-any-return]


class Deep(Module):
    """Three layers: at a boundary in the middle, destinations are not the first local rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = ModuleDict({name: Linear(width, 6) for name, width in WIDTHS.items()})
        self.convs = ModuleList(
            HeteroConv({relation: SAGEConv((6, 6), 6) for relation in RELATIONS}, aggr="mean") for _ in range(3)
        )
        self.lin = Linear(6, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x_dict = {name: self.lins[name](x) for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {
                name: F.dropout(x.tanh(), 0.3, self.training) for name, x in conv(x_dict, edge_index_dict).items()
            }
        return self.lin(x_dict["paper"])  # type: ignore[no-any-return]


class _Homogeneous(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.conv2 = SAGEConv((-1, -1), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.dropout(self.conv1(x, edge_index).relu()), edge_index)  # type: ignore[no-any-return]


class Hgt(Module):
    """HGTConv with encoders by type, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = ModuleDict({name: Linear(width, 8) for name, width in WIDTHS.items()})
        self.convs = ModuleList(HGTConv(8, 8, (list(COUNTS), list(RELATIONS)), heads=2) for _ in range(2))
        self.lin = Linear(8, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x_dict = {name: self.lins[name](x).relu() for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {name: F.dropout(x, 0.5, self.training) for name, x in conv(x_dict, edge_index_dict).items()}
        return self.lin(x_dict["paper"])  # type: ignore[no-any-return]


class Fused(Module):
    """Encoders by type, then layers on one tensor of all rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lins = ModuleDict({name: Linear(width, 8) for name, width in WIDTHS.items()})
        layer: Any = RGCNConv if kind == "rgcn" else RGATConv
        options = {} if kind == "rgcn" else {"dropout": 0.3}
        self.conv1 = layer(8, 8, len(RELATIONS), **options)
        self.conv2 = layer(8, 4, len(RELATIONS), **options)

    def encode(self, x_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.lins[name](x) for name, x in x_dict.items()}

    def run(self, x: Tensor, edge_index: Any, edge_type: Any) -> Tensor:
        x = F.dropout(self.conv1(x, edge_index, edge_type).relu(), 0.5, self.training)
        return self.conv2(x, edge_index, edge_type)  # type: ignore[no-any-return]

    def forward(self, batch: TypedBatch) -> Tensor:
        return self.run(batch.to_homogeneous(self.encode(batch.x_dict)), batch.edge_index, batch.edge_type)


class Normed(Module):
    """BatchNorm by type between layers, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Hetero("sage").convs[0]
        self.norms = ModuleDict({name: BatchNorm1d(8) for name in COUNTS})
        self.second = HeteroConv({relation: SAGEConv(8, 8) for relation in RELATIONS}, aggr="mean")
        self.lin = Linear(8, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        h_dict = {name: self.norms[name](h).relu() for name, h in self.first(x_dict, edge_index_dict).items()}
        out = self.second(h_dict, edge_index_dict)["paper"]
        return self.lin(out + h_dict["paper"][: out.size(0)])  # type: ignore[no-any-return]


def make_model(kind: str) -> Module:
    """A model with the same weights in every process, in float64. That of "to_hetero" has sizes to be found."""
    torch.manual_seed(1)
    if kind in ("sage", "gat"):
        return Hetero(kind).double()
    if kind == "hgt":
        return Hgt().double()
    if kind == "norm":
        return Normed().double()
    if kind == "deep":
        return Deep().double()
    if kind == "to_hetero":
        return to_hetero(_Homogeneous(), (list(COUNTS), list(RELATIONS))).double()  # type: ignore[no-any-return]
    return Fused(kind).double()


MODELS = ("sage", "gat", "to_hetero", "rgcn", "hgt")


def run_model(model: Module, batch: TypedBatch) -> Tensor:
    """The model's outputs for this rank's targets."""
    out = model(batch) if isinstance(model, Fused) else model(batch.x_dict, batch.edge_index_dict)
    found: Tensor = out["paper"] if isinstance(out, dict) else out
    return found


@dataclass(frozen=True)
class TypedCase:
    """One training run."""

    kind: str
    strategy: str
    num_parts: int = 6
    fanouts: Any = None
    prefetch: int = 0
    first_step: int = 0


@dataclass
class TypedRun:
    """Losses and gradients of every step, the number of sampled edges, the local input rows of every type, warnings."""

    losses: list[float]
    gradients: list[np.ndarray[Any, Any]]
    num_edges: int
    counts: list[dict[str, int]]
    warnings: list[str]


def train_typed(mesh: Mesh, model: Module, case: TypedCase, steps: int = 3) -> TypedRun:
    """Gradient descent of some steps."""
    store = make_store(case.num_parts)
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gsplit.loading.batch_loader").addHandler(listener)
    loader = NeighborLoader(
        store,
        case.fanouts or FANOUTS,
        ("paper", "train"),
        batch_size=BATCH,
        strategy=case.strategy,
        mesh=mesh,
        seed=2,
        prefetch=case.prefetch,
    )
    logging.getLogger("gsplit.loading.batch_loader").removeHandler(listener)
    loader.load_state_dict({"epoch": 0, "step": case.first_step})
    run = TypedRun([], [], 0, [], warnings)
    for batch in _steps(loader, steps):
        loss = batch.mean(F.cross_entropy(run_model(model, batch), batch.y, reduction="none"))
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.num_edges += sum(block.num_edges for block in batch.blocks)
        run.counts.append({name: batch.part(name).layers[0].num_local for name in COUNTS})
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                run.gradients.append(gradient.to("cpu", copy=True).numpy())
                parameter -= 0.05 * gradient  # type: ignore[misc]
        model.zero_grad()
    return run


def _steps(loader: NeighborLoader, steps: int) -> Iterator[TypedBatch]:
    batches = iter(loader)
    for _ in range(steps):
        batch = next(batches)
        assert isinstance(batch, TypedBatch)
        yield batch


def train_all(mesh: Mesh, cases: list[TypedCase]) -> list[TypedRun]:
    """Every case on one start of ranks. Wrapping takes longer than training, so it is done once per model."""
    models: dict[str, tuple[Module, dict[str, Tensor]]] = {}
    runs = []
    for case in cases:
        if case.kind not in models:
            model = parallelize(make_model(case.kind), mesh, graph=make_store(2))
            models[case.kind] = model, {name: value.clone() for name, value in model.state_dict().items()}
        model, weights = models[case.kind]
        model.load_state_dict(weights)
        runs.append(train_typed(mesh, model, case))
    return runs


@dataclass(frozen=True)
class TypedTraining:
    """Losses and weights of a training, exact scores after it, and how many steps were made before it began."""

    losses: list[float]
    weights: dict[str, np.ndarray[Any, Any]]
    scores: dict[str, float]
    num_before: int


def train_and_save(mesh: Mesh, folder: Path, steps: int, killed_at: int | None = None) -> TypedTraining:
    """Train with dropout and Adam from the newest checkpoint of a folder, if any. Rank 1 may end itself on the way."""
    store = make_store(6)
    model = parallelize(make_model("sage"), mesh, graph=make_store(2))
    loader = NeighborLoader(store, FANOUTS, ("paper", "train"), batch_size=BATCH, mesh=mesh, seed=2, prefetch=1)

    def end_rank() -> None:
        if mesh.rank == 1 and trainer.state.num_steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = gsplit.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        loader,
        save_to=folder,
        save_every=2,
        callbacks=[EachStep(lambda report: end_rank())],
    )
    if folder.is_dir() and any(folder.iterdir()):
        trainer.load(folder)
    before = trainer.state.num_steps
    while trainer.state.num_steps < steps:
        trainer.train_epoch(steps - trainer.state.num_steps)
    scores = trainer.evaluate(store, ["paper/train"], keep_best="paper/train")
    weights = {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}
    return TypedTraining(list(trainer.state.history.losses), weights, scores, before)


def infer_all(mesh: Mesh, kinds: tuple[str, ...], folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of models for every paper, and the score of one of them."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for kind in kinds:
        model = parallelize(make_model(kind), mesh, graph=make_store(2))
        found[kind] = np.array(gsplit.infer(model, make_store(6), folder / f"{kind}.npy", vertex_type="paper"))
        score = gsplit.evaluate(model, make_store(6), ["paper/train"])["paper/train"]
        found[f"{kind} score"] = np.array(score)
    return found


def load_from_tiers(mesh: Mesh, path: Path, tiers: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Whether batches have the stored rows whatever they are read from: wrong rows, cache hits and rows read."""
    store = gsplit.open(path)
    found = []
    for options in tiers:
        loader = NeighborLoader(store, [3, 2], ("paper", "train"), batch_size=12, mesh=mesh, **options)
        wrong = hits = rows = 0
        for batch in loader:
            assert isinstance(batch, TypedBatch)
            for name, x in batch.x_dict.items():
                stored = torch.from_numpy(store.rows(f"features/{name}/x", batch.n_id_dict[name]))
                wrong += int((x != stored).any(1).sum())
            hits += batch.telemetry.counts["cache_hits"]
            rows += batch.telemetry.counts["rows_loaded"]
        found.append((wrong, hits, rows))
    return found


def largest_error(one: TypedRun, other: TypedRun) -> float:
    """The largest difference of losses and gradients."""
    errors = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    errors += [float(np.abs(a - b).max()) for a, b in zip(one.gradients, other.gradients, strict=True) if a.size]
    return max(errors)


def stored_in_parts(folder: Path, num_parts: int) -> Path:
    """The graph as a partitioned store on disk, whose fields have no features."""
    data = make_data()
    data["paper"].train_mask = torch.arange(COUNTS["paper"]) % 2 == 0
    data["field"].num_nodes = COUNTS["field"]
    del data["field"].x
    store = gsplit.from_pyg(data, folder / "plain.gsplit")
    options: dict[str, Any] = {"batch_size": BATCH, "solver": "random", "objective": "random", "epochs": 2}
    return gsplit.partition(store, folder / "parted.gsplit", num_parts, [3, 2], "paper/train", **options).path


def count_typed(mesh: Mesh, path: Path, strategies: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """For every strategy, what this rank did in two steps: by layer, by type and by relation, and its telemetry."""
    store = gsplit.open(path)
    found = []
    for strategy in strategies:
        loader = NeighborLoader(
            store, FANOUTS, "paper/train", batch_size=BATCH, mesh=mesh, strategy=strategy, cache=500
        )
        steps = []
        for batch in _steps(loader, 2):
            layers = range(len(batch.blocks))
            steps.append(
                {
                    "edges": [[batch.part(r).blocks[layer].num_edges for r in RELATIONS] for layer in layers],
                    "destinations": [[batch.part(t).blocks[layer].num_dst for t in COUNTS] for layer in layers],
                    "sources": [[batch.part(t).blocks[layer].num_src for t in COUNTS] for layer in layers],
                    **{name: batch.telemetry.counts[name] for name in ("rows_loaded", "bytes_loaded")},
                    "rows_sent": _input_rows_sent(batch),
                }
            )
        found.append(steps)
    return found


def _input_rows_sent(batch: TypedBatch) -> list[int]:
    """The input rows of every type that this rank has sent to other ranks while the batch was made."""
    if batch.requested is None:
        return [0 if route is None else route.num_sent for route in (batch.part(t).layers[0].route for t in COUNTS)]
    ids, exchanged = batch.requested  # data_cached: the loader has exchanged the rows
    assert exchanged is not None
    sent: list[int] = torch.bincount(batch.types.of(ids[exchanged.send_rows]), minlength=len(COUNTS)).tolist()
    return sent
