"""What ranks run in the tests of owned embeddings: steps of training, and the same with ``torch.nn.Embedding``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typed_models as typed
from torch import Tensor
from torch.nn import Embedding, Module
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.array_types import Array
from gsplit.distributed.comm.mesh import Mesh
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.store.conversion import as_graph_store
from gsplit.store.in_memory import MemoryStore, typed_store

__all__ = [
    "EmbeddingCase",
    "EmbeddingRun",
    "infer_in_replicas",
    "infer_outputs",
    "largest_difference",
    "plain_store",
    "refusals",
    "resume_all",
    "train_embeddings",
    "typed_graph",
]

VERTICES = 110
WIDTH = 6
NO_FEATURES = ("author", "field")
STEPS = 5
Rows = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class EmbeddingCase:
    """``kind``: a model of ``typed_models``, or "untyped" or "links". ``num_parts``: 1 for equal ranges of ids."""

    kind: str
    strategy: str = "split"
    num_parts: int = 6
    prefetch: int = 0

    @property
    def is_typed(self) -> bool:
        return self.kind not in ("untyped", "links")


@dataclass
class EmbeddingRun:
    """Losses, the weights of the model, and the rows of this rank by original id: (ids, rows) of every embedding."""

    losses: list[float]
    weights: list[Array]
    tables: list[tuple[Array, Array]]


def typed_graph(num_parts: int) -> MemoryStore:
    """The graph of ``typed_models``, in which authors and fields have no features. The last part has no fields."""
    store = typed.make_data()
    rng = np.random.default_rng(9)
    parts = {name: rng.integers(0, num_parts, count) for name, count in typed.COUNTS.items()}
    parts["field"] = parts["field"] % max(1, num_parts - 1)
    edges = {relation: tuple(store[relation].edge_index.numpy()) for relation in typed.RELATIONS}
    arrays: dict[str, Any] = {
        "features/paper/x": (store["paper"].x.numpy(), "float64"),
        "y/paper": (store["paper"].y.numpy(), "int64"),
    }
    return typed_store(typed.COUNTS, edges, parts, arrays, {"paper/train": typed.TRAINED})


def plain_store(num_parts: int) -> MemoryStore:
    """A graph without types and without features."""
    rng = np.random.default_rng(4)
    edges = np.unique(rng.integers(0, VERTICES, (2, 900)), axis=1)
    data = Data(edge_index=torch.from_numpy(edges), num_nodes=VERTICES)
    data.y = torch.from_numpy(rng.integers(0, 4, VERTICES))
    data.train_mask = torch.arange(VERTICES) % 3 > 0
    partition = None if num_parts == 1 else torch.from_numpy(rng.integers(0, num_parts, VERTICES))
    store = as_graph_store(data, partition)
    assert isinstance(store, MemoryStore)
    return store


class FusedWithRows(typed.Fused):
    """RGCN with encoders by type, which takes the rows of embeddings beside the batch."""

    def forward(self, batch: TypedBatch, rows_of: dict[str, Tensor] | None = None) -> Tensor:
        x_dict = self.encode({**batch.x_dict, **(rows_of or {})})
        return self.run(batch.to_homogeneous(x_dict), batch.edge_index, batch.edge_type)


def make_model(case: EmbeddingCase, mesh: Mesh) -> Module:
    """A wrapped model with the same weights in every process, in float64."""
    torch.manual_seed(1)
    if not case.is_typed:
        model: Module = GraphSAGE(WIDTH, 8, 2, 4, dropout=0.4).double()
        return gsplit.parallelize(model, mesh)
    model = FusedWithRows("rgcn").double() if case.kind == "rgcn" else typed.make_model(case.kind)
    return gsplit.parallelize(model, mesh, graph=typed_graph(2), num_features=typed.WIDTHS)


def make_loader(case: EmbeddingCase, store: MemoryStore, mesh: Mesh) -> Any:
    """A loader of five steps."""
    options: dict[str, Any] = {"strategy": case.strategy, "mesh": mesh, "seed": 2, "prefetch": case.prefetch}
    if case.is_typed:
        depth = 3 if case.kind == "deep" else 2
        return gsplit.NeighborLoader(store, [3] * depth, ("paper", "train"), batch_size=15, **options)
    if case.kind == "links":
        pairs = torch.from_numpy(np.random.default_rng(8).integers(0, VERTICES, (2, 60)))
        return gsplit.LinkNeighborLoader(
            store, [3, 3], pairs, neg_sampling={"mode": "binary", "amount": 1}, batch_size=12, features=None, **options
        )
    return gsplit.NeighborLoader(store, [3, 3], "train", batch_size=14, features=None, **options)


def _owned(case: EmbeddingCase, store: MemoryStore, mesh: Mesh) -> dict[str, gsplit.OwnedEmbedding]:
    if not case.is_typed:
        return {"": gsplit.OwnedEmbedding(store, WIDTH, mesh=mesh, seed=7, dtype=torch.float64)}
    return {
        name: gsplit.OwnedEmbedding(store, typed.WIDTHS[name], name, mesh=mesh, seed=7, dtype=torch.float64)
        for name in NO_FEATURES
    }


def _torch_embeddings(case: EmbeddingCase, mesh: Mesh) -> tuple[dict[str, Embedding], dict[str, Rows]]:
    """``torch.nn.Embedding`` with the same first rows, and what they return for a batch of one process."""
    store = typed_graph(1) if case.is_typed else plain_store(1)  # not renumbered: rows are in the original order
    tables = {}
    rows_of: dict[str, Rows] = {}
    for name, owned in _owned(case, store, mesh).items():
        table = Embedding.from_pretrained(owned.weight.detach().clone(), freeze=False, sparse=True)  # type: ignore[no-untyped-call]
        tables[name] = table
        rows_of[name] = _reader(table, name)
    return tables, rows_of


def _reader(table: Embedding, name: str) -> Rows:
    def read(batch: Batch) -> Tensor:
        ids = batch.n_id_dict[name] if isinstance(batch, TypedBatch) else batch.n_id
        found: Tensor = table(ids)
        return found

    return read


def loss_of(model: Module, batch: Batch, rows_of: dict[str, Rows]) -> Tensor:
    """The loss of a step, with the rows of embeddings."""
    rows = {name: read(batch) for name, read in rows_of.items()}
    if isinstance(batch, TypedBatch):
        fused = isinstance(model, FusedWithRows)
        out = model(batch, rows) if fused else model({**batch.x_dict, **rows}, batch.edge_index_dict)
        return batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
    z = model(rows[""], batch.edge_index)
    if isinstance(batch, LinkBatch):
        score = (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1)
        return batch.mean(F.binary_cross_entropy_with_logits(score, batch.edge_label.to(score.dtype), reduction="none"))
    return batch.mean(F.cross_entropy(z, batch.y, reduction="none"))


@dataclass
class _Training:
    """One training: its loader, model and embeddings with their optimizers."""

    loader: Any
    model: Module
    tables: dict[str, Any]
    rows_of: dict[str, Rows]
    dense: torch.optim.Optimizer
    sparse: dict[str, torch.optim.SparseAdam]

    def run(self, steps: int) -> list[float]:
        losses = []
        batches = iter(self.loader)
        for _ in range(steps):
            loss = loss_of(self.model, next(batches), self.rows_of)
            loss.backward()
            for optimizer in (self.dense, *self.sparse.values()):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def start(mesh: Mesh, case: EmbeddingCase, model: Module, *, by_torch: bool) -> _Training:
    """A training at its first step. ``by_torch``: with ``torch.nn.Embedding``, for one process."""
    store = typed_graph(case.num_parts) if case.is_typed else plain_store(case.num_parts)
    tables: dict[str, Any]
    if by_torch:
        tables, rows_of = _torch_embeddings(case, mesh)
    else:
        tables = _owned(case, store, mesh)
        rows_of = dict(tables)
    sparse = {name: torch.optim.SparseAdam(table.parameters(), lr=0.05) for name, table in tables.items()}
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    return _Training(make_loader(case, store, mesh), model, tables, rows_of, dense, sparse)


def finished(training: _Training, losses: list[float], *, by_torch: bool) -> EmbeddingRun:
    """The result of a training on this rank."""
    found = []
    for table in training.tables.values():
        rows = table.weight.detach().to("cpu", copy=True).numpy()
        found.append((np.arange(rows.shape[0]) if by_torch else table.row_ids, rows))
    return EmbeddingRun(losses, [p.detach().to("cpu", copy=True).numpy() for p in training.model.parameters()], found)


def train_embeddings(mesh: Mesh, cases: list[EmbeddingCase], by_torch: bool = False) -> list[EmbeddingRun]:
    """Every case on one start of ranks, from the same weights. Wrapping is done once per model."""
    models: dict[str, tuple[Module, dict[str, Tensor]]] = {}
    runs = []
    for case in cases:
        kind = case.kind if case.is_typed else "untyped"
        if kind not in models:
            model = make_model(case, mesh)
            models[kind] = model, {name: value.clone() for name, value in model.state_dict().items()}
        model, weights = models[kind]
        model.load_state_dict(weights)
        training = start(mesh, case, model, by_torch=by_torch)
        runs.append(finished(training, training.run(STEPS), by_torch=by_torch))
    return runs


def resume_all(mesh: Mesh, case: EmbeddingCase, folder: Path, first: int, steps: int) -> EmbeddingRun:
    """Steps ``first`` to ``first + steps`` of a training, from what another number of ranks has saved there."""
    training = start(mesh, case, make_model(case, mesh), by_torch=False)
    if first:
        training.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        training.loader.load_state_dict({"epoch": 0, "step": first})
        for name, table in training.tables.items():
            table.load(folder / f"rows-{name}", training.sparse[name])
    losses = training.run(steps)
    for name, table in training.tables.items():
        table.save(folder / f"rows-{name}", training.sparse[name])
    if mesh.rank == 0:
        torch.save(training.model.state_dict(), folder / "model.pt")
    return finished(training, losses, by_torch=False)


def refusals(mesh: Mesh) -> list[str]:
    """The messages of what is not supported on several ranks."""
    found = []
    for case in (EmbeddingCase("untyped", "data"), EmbeddingCase("sage", "data(owner)")):
        training = start(mesh, case, make_model(case, mesh), by_torch=False)
        with pytest.raises(gsplit.InputError) as error:
            training.run(1)
        found.append(str(error.value))
    store = plain_store(6)
    with pytest.raises(gsplit.InputError) as error:
        gsplit.OwnedEmbedding(store, WIDTH + mesh.rank, mesh=mesh)
    return [*found, str(error.value)]


def infer_in_replicas(mesh: Mesh, folder: Path) -> None:
    """Refused: in inference all ranks own vertices, and the rows of a vertex are on its owner of each replica."""
    case = EmbeddingCase("untyped")
    embedding = start(mesh, case, make_model(case, mesh), by_torch=False).tables[""]
    gsplit.infer(make_model(case, mesh), plain_store(6), folder / "out.npy", features=embedding)


def infer_outputs(mesh: Mesh, folder: Path) -> tuple[Array, float, float]:
    """Exact outputs, accuracy and MRR with the rows of an embedding as features."""
    case = EmbeddingCase("untyped")
    training = start(mesh, case, make_model(case, mesh), by_torch=False)
    store = plain_store(case.num_parts)
    embedding = training.tables[""]
    training.run(2)
    out = gsplit.infer(training.model, store, folder / f"{mesh.size}.npy", features=embedding)
    scores = gsplit.evaluate(training.model, store, ["train"], features=embedding)
    pairs = torch.from_numpy(np.random.default_rng(6).integers(0, VERTICES, (2, 20)))
    ranks = gsplit.evaluate_links(training.model, store, pairs, num_negatives=9, features=embedding)
    return np.array(out), scores["train"], ranks["mrr"]


def largest_difference(one: EmbeddingRun, ranks: list[EmbeddingRun]) -> float:
    """The largest difference of losses, weights and rows of some ranks and of one process."""
    errors = [0.0]
    for run in ranks:
        errors += [abs(a - b) for a, b in zip(one.losses, run.losses, strict=True)]
        errors += [float(np.abs(a - b).max()) for a, b in zip(one.weights, run.weights, strict=True) if a.size]
        for (_, whole), (ids, rows) in zip(one.tables, run.tables, strict=True):
            errors.append(float(np.abs(whole[ids] - rows).max(initial=0.0)))
    return max(errors)
