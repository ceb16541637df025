"""The same results on every mesh (law 2), measured: every model, strategy, mesh and ownership against one process.

Each case trains a small model in float64 for a few steps of Adam on one process and on W real ranks, and compares the
outputs of every target in every step, the gradient of every parameter in every step and the weights at the end.
``python -m gsplit_bench exactness`` runs the whole matrix; the tests run a part that covers every option.
"""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.graph.ownership import Ownership
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.batch import Batch
from gsplit.nn.parallelize import parallelize
from gsplit.progress import Progress, silent
from gsplit.run import models
from gsplit.run.models import EDGE_FEATURE_MODELS, EDGE_WEIGHT_MODELS, MODELS
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit_bench.machine import current_commit, installed_versions
from gsplit_bench.ranks import run_ranks

__all__ = [
    "BATCH",
    "CLASSES",
    "EDGE_MODELS",
    "EDGE_WIDTH",
    "MESHES",
    "OTHER_STRATEGIES",
    "PLAIN_MODELS",
    "TOLERANCE",
    "VERTICES",
    "WIDTH",
    "Case",
    "Differences",
    "ExactnessReport",
    "ExactnessRow",
    "TrainedCase",
    "all_cases",
    "compare",
    "describe_models",
    "make_model",
    "run_exactness",
    "small_store",
    "tolerance_of",
    "train_cases",
    "worst_of",
    "write_record",
]

TOLERANCE = 1e-9
_OWN_SUMS = ("gat", "gatv2", "transformer", "sage", "sage_max", "graphconv", "gin", "gcn")


def tolerance_of(case: "Case", device: str) -> float:
    """How far a case may be from what it is compared with.

    The simulated device runs the host's kernels, so nothing may differ; but attention is computed by kernels of ours on
    the host and by PyG's layers, or by Triton's, on a device, and sums over edges are our own there.
    """
    return 0.0 if device.startswith("sim") and case.model not in _OWN_SUMS else TOLERANCE


@dataclass(frozen=True)
class Case:
    """One model on one graph, and how it is run."""

    model: str
    strategy: str
    ownership: str
    dropout: float
    jk: str | None
    norm: str | None
    edge_values: bool = False
    """Whether the model takes the stored features or weights of edges."""


@dataclass(frozen=True)
class TrainedCase:
    """What one rank has seen of a case: outputs of its targets by original id, losses and gradients of every step."""

    outputs: list[dict[int, Any]]
    losses: list[float]
    gradients: list[list[Any]]
    state: dict[str, Any]


@dataclass(frozen=True)
class Differences:
    """The largest differences of a case, or of all, from one process."""

    output: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    weights: float = 0.0

    @property
    def largest(self) -> float:
        """Of all four."""
        return max(self.output, self.loss, self.gradient, self.weights)


def worst_of(found: list[Differences]) -> Differences:
    """The largest of each kind."""
    found = found or [Differences()]
    kind = type(found[0])
    return kind(*(max(getattr(each, field.name) for each in found) for field in fields(kind)))


@dataclass(frozen=True)
class ExactnessRow:
    """A case, of ``exactness`` or of ``exactness_tasks``, on a mesh, and how far it is from one process."""

    replicas: int
    splits: int
    case: Any
    differences: Differences
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class ExactnessReport:
    """Every case with its differences, and whether all are within the tolerance."""

    rows: list[ExactnessRow]

    @property
    def worst(self) -> Differences:
        """The largest differences of all cases."""
        return worst_of([row.differences for row in self.rows])

    @property
    def tolerance(self) -> float:
        """The largest of all cases."""
        return max((row.tolerance for row in self.rows), default=TOLERANCE)

    @property
    def ok(self) -> bool:
        """Whether there are cases and all are within the tolerance."""
        return bool(self.rows) and all(row.differences.largest <= row.tolerance for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``: a flat row per case."""
        rows = [
            {"replicas": row.replicas, "splits": row.splits, **asdict(row.case), **asdict(row.differences)}
            for row in self.rows
        ]
        return {
            "cases": len(rows),
            "tolerance": self.tolerance,
            "worst": asdict(self.worst),
            "ok": self.ok,
            "rows": rows,
        }


def _distance(a: Any, b: Any) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    distance = float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def compare(one: TrainedCase, ranks: list[TrainedCase]) -> Differences:
    """The largest differences between one process and all ranks; infinite if something is missing."""
    assert all(rank.state.keys() == one.state.keys() for rank in ranks)
    pairs = [(rank.gradients[step], want) for rank in ranks for step, want in enumerate(one.gradients)]
    return Differences(
        output=_compare_outputs(one, ranks),
        loss=max(_distance(rank.losses, one.losses) for rank in ranks),
        gradient=max(_distance(g, w) for got, want in pairs for g, w in zip(got, want, strict=True)),
        weights=max(_distance(rank.state[name], want) for rank in ranks for name, want in one.state.items()),
    )


def _compare_outputs(one: TrainedCase, ranks: list[TrainedCase]) -> float:
    """Infinite if a target is computed by no rank or by two."""
    worst = 0.0
    for step, want in enumerate(one.outputs):
        computed = [vertex for rank in ranks for vertex in rank.outputs[step]]
        if sorted(computed) != sorted(want):
            return float("inf")
        got = {vertex: row for rank in ranks for vertex, row in rank.outputs[step].items()}
        worst = max([worst, *(_distance(got[vertex], row) for vertex, row in want.items())])
    return worst


OWNERSHIPS = ("random", "all on rank 0", "no targets on rank 1", "original order")
"""Who owns what; in original order the graph is not renumbered."""
MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))
"""Replicas and splits."""
STEPS, BATCH, VERTICES, WIDTH, CLASSES, EDGE_WIDTH = 5, 12, 90, 6, 5, 3
OTHER_STRATEGIES = ("data(owner)", "data_cached", "data_cached(strided)", "hybrid(1)", "hybrid(2)")
"""Beside split and data; none of them computes each vertex once."""
PLAIN_MODELS = tuple(model for model in MODELS if model != "gine")
EDGE_MODELS = (*EDGE_FEATURE_MODELS, *EDGE_WEIGHT_MODELS)


def make_model(case: Case) -> Module:
    """The case's model, three layers, in float64, the same on every rank."""
    torch.manual_seed(0)
    return models.make_model(
        case.model,
        in_channels=WIDTH,
        hidden_channels=8,
        num_layers=3,
        out_channels=CLASSES,
        dropout=case.dropout,
        jk=case.jk,
        norm=case.norm,
        heads=2,
        degrees=torch.arange(1, 6),
        edge_dim=EDGE_WIDTH if case.edge_values and case.model in models.EDGE_FEATURE_MODELS else None,
    ).double()


def small_store(ownership: str, num_splits: int) -> tuple[MemoryStore, Ownership]:
    """A small graph with hubs, self-loops, duplicates and isolated vertices, renumbered at random."""
    rng = np.random.default_rng(7)
    n, edges = VERTICES, 6 * VERTICES
    src, dst = (n * rng.random(edges) ** 2).astype(np.int64), (n * rng.random(edges) ** 1.5).astype(np.int64)
    src[: n // 9] = dst[: n // 9]  # self-loops
    order = rng.permutation(n) if ownership != "original order" else np.zeros(n, np.int64)
    cuts = (0, *sorted(rng.integers(1, n, num_splits - 1).tolist()), n)
    if ownership == "all on rank 0":
        cuts = (0, *[n] * num_splits)
    targets = rng.permutation(n)
    if ownership == "no targets on rank 1" and num_splits > 1:
        targets = targets[(order[targets] < cuts[1]) | (order[targets] >= cuts[2])]
    targets = targets[: STEPS * BATCH - 3]
    targets = targets[: targets.size - (targets.size % BATCH == 1)]  # batch norm needs two rows
    arrays = {"features/x": (rng.normal(size=(n, WIDTH)), "float64"), "y": (rng.integers(0, CLASSES, n), "int64")}
    edge_arrays = {
        "edge_attr": (rng.normal(size=(edges, EDGE_WIDTH)), "float64"),
        "edge_weight": (rng.random(edges) + 0.1, "float64"),
    }
    store = renumbered_store(src, dst, order, arrays, {"train": targets}, edge_arrays)
    return MemoryStore(store.graph, [0, n], store.arrays, store.dtypes), Ownership(cuts)


def train_cases(mesh: Mesh, cases: list[Case], num_splits: int, steps: int = STEPS) -> list[TrainedCase]:
    """Train every case on this mesh. A model is wrapped once, which takes longer than its training."""
    models: dict[Case, tuple[Module, dict[str, Tensor]]] = {}
    found = []
    for case in cases:
        name = replace(case, strategy="", ownership="")
        if name not in models:
            model = parallelize(make_model(case), mesh, verify_every=0)
            models[name] = model, {key: value.clone() for key, value in model.state_dict().items()}
        model, weights = models[name]
        model.load_state_dict(weights)
        found.append(_train(model, mesh, case, num_splits, steps))
    return found


def _train(model: Module, mesh: Mesh, case: Case, num_splits: int, steps: int) -> TrainedCase:
    store, ownership = small_store(case.ownership, num_splits)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = NeighborLoader(
        store,
        [4, 3, -1],
        "train",
        batch_size=BATCH,
        strategy=case.strategy,
        mesh=mesh,
        seed=3,
        ownership=ownership if mesh.size > 1 else None,
    )
    outputs: list[dict[int, Any]] = []
    losses: list[float] = []
    gradients: list[list[Any]] = []
    while len(losses) < steps:
        for batch in loader:
            out = model(batch.x, batch.edge_index, **_edge_values(case, batch))
            loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
            loss.backward()
            ids = batch.n_id[: batch.batch_size].tolist()
            outputs.append(dict(zip(ids, out.detach().numpy(force=True).copy(), strict=True)))
            losses.append(float(loss.detach()))
            gradients.append([None if p.grad is None else p.grad.numpy(force=True).copy() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) == steps:
                break
    state = {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}
    return TrainedCase(outputs, losses, gradients, state)


def _edge_values(case: Case, batch: Batch) -> dict[str, Any]:
    """What the case's model takes of edges, as a training loop passes it."""
    if not case.edge_values:
        return {}
    if case.model in models.EDGE_WEIGHT_MODELS:
        return {"edge_weight": batch.edge_weight}
    return {"edge_attr": batch.edge_attr}


def all_cases(replicas: int, splits: int) -> Iterator[Case]:
    """Every case that can run on a mesh: batch norm only where each vertex is computed once."""
    alone = replicas * splits == 1
    for model, strategy, dropout, jk, norm in product(
        PLAIN_MODELS, ("split", "data"), (0.0, 0.5), (None, "max"), (None, "batch_norm")
    ):
        if norm is not None and not alone and (strategy == "data" or replicas > 1):
            continue
        for ownership in OWNERSHIPS[:3] if strategy == "split" and not alone else OWNERSHIPS[:1]:
            yield Case(model, strategy, ownership, dropout, jk, norm)
    for model, strategy, dropout, jk, ownership in product(
        PLAIN_MODELS, OTHER_STRATEGIES, (0.0, 0.5), (None, "max"), OWNERSHIPS[:1] if alone else OWNERSHIPS[:3]
    ):
        yield Case(model, strategy, ownership, dropout, jk, None)
    for model, strategy, dropout, ownership in product(
        EDGE_MODELS,
        ("split", "data", *OTHER_STRATEGIES),
        (0.0, 0.5),
        ("random", "no targets on rank 1", "original order"),
    ):
        yield Case(model, strategy, ownership, dropout, None, None, edge_values=True)


def run_exactness(
    meshes: list[tuple[int, int]], models: list[str], progress: Progress = silent, *, device: str = "cpu"
) -> ExactnessReport:
    """The matrix on some meshes: every case with its largest differences.

    Ranks on the CPU are compared with one process; ranks on a device with the same ranks on the CPU, one by one.
    """
    for model in models:
        if model not in MODELS:
            raise InputError(explain("model", f"one of {', '.join(MODELS)}", model, "choose one of these"))
    rows: list[ExactnessRow] = []
    for number, (replicas, splits) in enumerate(meshes):
        progress("meshes", number, len(meshes))
        cases = [case for case in all_cases(replicas, splits) if case.model in models]
        run = functools.partial(
            run_ranks, train_cases, replicas * splits, cases, splits, replicas=replicas, timeout_s=6000.0
        )
        many = run(device=device)
        one = train_cases(solo_mesh(), cases, splits) if device == "cpu" else []
        on_host = [] if device == "cpu" else run()
        for place, case in enumerate(cases):
            found = [rank[place] for rank in many]
            if device == "cpu":
                differences = compare(one[place], found)
            else:
                pairs = zip(on_host, found, strict=True)
                differences = worst_of([compare(rank[place], [there]) for rank, there in pairs])
            rows.append(ExactnessRow(replicas, splits, case, differences, tolerance_of(case, device)))
    progress("meshes", len(meshes), len(meshes))
    return ExactnessReport(rows)


def _largest(rows: list[dict[str, Any]], *keys: str) -> str:
    return f"{max(row[key] for row in rows for key in keys):.1e}" if rows else "-"


def _model_line(model: str, rows: list[dict[str, Any]]) -> str:
    plain = [row for row in rows if not row["edge_values"] and row["norm"] is None]
    norm = [row for row in rows if row["norm"] is not None]
    edges = [row for row in rows if row["edge_values"]]
    parts = [plain, norm, edges]
    cells = [
        cell
        for part in parts
        for cell in (str(len(part) or "-"), *(_largest(part, k) for k in ("output", "gradient", "weights")))
    ]
    return f"| {model} | {' | '.join(cells)} |"


def _summarize(document: dict[str, Any]) -> str:
    rows: list[dict[str, Any]] = document["rows"]
    alone = sum(row["replicas"] * row["splits"] == 1 for row in rows)
    edges = [row for row in rows if row["edge_values"]]
    keys = ("output", "loss", "gradient", "weights")
    return (
        f"{len(rows):,} cases, {alone} of them one process against itself; largest difference {_largest(rows, *keys)}. "
        f"{len(edges)} of them with features or weights of edges: {_largest(edges, *keys)}"
    )


def describe_models(document: dict[str, Any]) -> str:
    """The page of a record: a line per kind of model."""
    rows: list[dict[str, Any]] = document["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    num_plain = len({row["model"] for row in rows if not row["edge_values"]})
    edge_models = len({row["model"] for row in rows if row["edge_values"]})
    strategies = ", ".join(f"`{name}`" for name in dict.fromkeys(row["strategy"] for row in rows))
    meshes = ", ".join(
        f"{splits} rank{'s' * (splits > 1)}" if replicas == 1 else f"{replicas} replicas x {splits}"
        for replicas, splits in sorted({(row["replicas"], row["splits"]) for row in rows})
    )
    worst = {name: f"{value:.1e}" for name, value in document["worst"].items()}
    installed = installed_versions()
    versions = ", ".join(f"{name} {installed.get(name)}" for name in ("python", "torch", "torch_geometric"))
    return "\n".join(
        [
            "# Same answer everywhere\n",
            f"Command: `python -m gsplit_bench exactness`. Commit {current_commit()}, {versions}, two cores. Rows in the `.json` beside this file.\n",
            f"{_summarize(document)}.\n",
            f"{num_plain} kinds of models x dropout x jumping knowledge x BatchNorm, and {edge_models} with features or weights of edges, x the strategies {strategies}.",
            f"Vertices owned at random, all by rank 0, no targets on rank 1, and in original order. On {meshes}. Graphs have duplicate edges with values of their own,",
            "self-loops and isolated vertices. 3 layers, fanouts 4, 3 and all, float64, 5 steps of Adam 1e-3, real gloo ranks against one process. BatchNorm only under `split` with one replica; elsewhere it is refused.\n",
            f"Largest difference of all cases: outputs {worst['output']}, losses {worst['loss']}, gradients {worst['gradient']}, weights after 5 steps {worst['weights']} (asked for: {document['tolerance']:.0e}).\n",
            "| model | cases | outputs | gradients | weights | with BatchNorm: cases | outputs | gradients | weights | with edge values: cases | outputs | gradients | weights |",
            f"|{'---|' * 13}",
            *(_model_line(model, [row for row in rows if row["model"] == model]) for model in models),
            "\nWeights differ more behind BatchNorm because a bias in front of it has a gradient of zero but for rounding, which Adam divides by its own size.\n",
        ]
    )


def write_record(
    report: ExactnessReport, out: Path, describe: Callable[[dict[str, Any]], str] = describe_models
) -> None:
    """Write the cases to OUT.json, and a page about them to OUT.md."""
    document = report.as_dict()
    lines = ",\n".join(json.dumps(row) for row in document["rows"])
    head = json.dumps({name: value for name, value in document.items() if name != "rows"})
    out.with_suffix(".json").write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')
    out.with_suffix(".md").write_text(describe(document))
