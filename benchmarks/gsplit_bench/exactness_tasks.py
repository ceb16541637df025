"""The same results on every mesh (law 2) for every task: samplers, pairs, vertex types, pairs of types, and times.

Each case trains a small model in float64 for some steps of Adam on real ranks, and is compared with one process on
another numbering of the graph: the outputs of targets or of the endpoints of pairs, losses, gradients, weights at the
end (``exactness.compare``), and the in-edges that every destination of every layer has drawn. The latter must be equal
(law 1). ``python -m gsplit_bench exactness-tasks`` runs all cases; tests/dist run parts of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GAT, GraphSAGE

from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.graph.ownership import Ownership
from gsplit.keys.kernels_torch import mix
from gsplit.loading.batch_loader import BatchLoader
from gsplit.loading.link_loader import LinkNeighborLoader
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.typed_batch import TypedBatch, TypedLinkBatch
from gsplit.nn.parallelize import parallelize
from gsplit.progress import Progress, silent
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit.training.losses import LINK_LOSSES, loss_of_batch
from gsplit_bench import typed_models
from gsplit_bench.exactness import Differences, ExactnessReport, ExactnessRow, TrainedCase, compare
from gsplit_bench.machine import current_commit, installed_versions
from gsplit_bench.ranks import run_ranks

__all__ = [
    "TASKS",
    "TaskCase",
    "TaskDifferences",
    "TaskRun",
    "all_task_cases",
    "compare_tasks",
    "describe_tasks",
    "run_tasks",
    "train_tasks",
]

STEPS, VERTICES, WIDTH, CLASSES, EDGES = 3, 90, 5, 4, 900
STRATEGIES = ("split", "data", "data(owner)", "data_cached", "data_cached(strided)", "hybrid(1)", "hybrid(2)")
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform, layer_dependency": {"layer_dependency": True},
    "labor": {"sampler": "labor"},
    "labor, layer_dependency": {"sampler": "labor", "layer_dependency": True},
    "weighted": {"weight_attr": "weight"},
    "weighted labor": {"sampler": "labor", "weight_attr": "weight"},
    "replace": {"replace": True},
}
NEGATIVES: dict[str, dict[str, Any]] = {
    "binary": {"neg_sampling": {"mode": "binary", "amount": 2}},
    "binary, a fraction": {"neg_sampling": {"mode": "binary", "amount": 0.5}},
    "triplet": {"neg_sampling": {"mode": "triplet", "amount": 2}},
    "joint": {"neg_sampling": {"mode": "joint", "amount": 7}},
    "in_batch": {"neg_sampling": "in_batch"},
    "labels": {"neg_sampling": None},
}
EXCLUDED: dict[str, Any] = {"": "reverse", ", reverse edges kept": True, ", seed edges kept": False}
"""What is added to the name of the negatives, and ``exclude_seed_edges``."""
PAIRS: dict[str, dict[str, Any]] = {
    f"{mode}{text}": {**options, "exclude_seed_edges": exclude}
    for (mode, options), (text, exclude) in product(NEGATIVES.items(), EXCLUDED.items())
} | {f"binary, {name}": {**NEGATIVES["binary"], **SAMPLERS[name]} for name in ("labor", "weighted", "replace")}
TYPED_PAIRS = {
    f"{mode}{text}": PAIRS[f"{mode}{text}"]
    for mode, text in product(("binary", "triplet", "joint", "in_batch"), EXCLUDED)
}
TIMES = {name: {"temporal_strategy": name} for name in ("uniform", "last")}
TASKS: dict[str, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "samplers": {name: (options, ("sage", "gat")) for name, options in SAMPLERS.items()},
    "pairs": {
        name: (options, ("sage", "decoder") if name in NEGATIVES else ("sage",)) for name, options in PAIRS.items()
    },
    "types": {"": ({}, (*typed_models.MODELS, "rgat", "deep", "norm"))},
    "pairs of types": {name: (options, ("sage",)) for name, options in TYPED_PAIRS.items()},
    "times": {name: (options, ("sage", "gat")) for name, options in TIMES.items()},
}
"""The options of every task by name, with the models that are trained with them."""
DEEP = ("samplers", "deep")
"""Three layers, so that hybrid(2) is not split."""


@dataclass(frozen=True)
class TaskCase:
    """One training run. ``ownership``: at random, or nearly all on the first rank, and others have nothing."""

    task: str
    option: str
    model: str
    strategy: str
    dropout: bool
    prefetch: int
    ownership: str = "random"


@dataclass(frozen=True)
class TaskRun:
    """What one rank has seen, and for every step and layer its destinations, and a word for the in-edges of each."""

    trained: TrainedCase
    drawn: list[list[tuple[Any, Any]]]


@dataclass(frozen=True)
class TaskDifferences(Differences):
    """``draws``: destinations whose in-edges are other ones than in one process, or that no rank has, or two in split."""

    draws: int = 0

    @property
    def largest(self) -> float:
        """Of all; infinite if a draw differs."""
        return float("inf") if self.draws else super().largest


# ------------------------------------------------------------------------------------------------ graphs and loaders
@cache
def _edges() -> tuple[Any, Any, Any]:
    """Source, destination and time of every edge: hubs, self-loops, parallel edges, equal times."""
    rng = np.random.default_rng(3)
    src = (VERTICES * rng.random(EDGES) ** 2).astype(np.int64)
    dst = (VERTICES * rng.random(EDGES) ** 1.5).astype(np.int64)
    dst[:100], src[:100] = src[100:200], dst[100:200]  # some in both directions
    return src, dst, rng.integers(0, 60, EDGES)


@cache
def _plain_store(is_renumbered: bool) -> MemoryStore:
    rng = np.random.default_rng(1)
    src, dst, time = _edges()
    arrays: dict[str, Any] = {"features/x": (rng.normal(size=(VERTICES, WIDTH)), "float64")}
    arrays["y"] = (rng.integers(0, CLASSES, VERTICES), "int64")
    weight = rng.random(EDGES) * (rng.random(EDGES) > 0.2)
    values = {"time": (time, "int64"), "weight": (weight, "float64")}
    targets = {"train": rng.permutation(VERTICES)[:70]}
    order = rng.permutation(VERTICES) if is_renumbered else np.zeros(VERTICES, np.int64)
    store = renumbered_store(src, dst, order, arrays, targets, values)
    return MemoryStore(store.graph, [0, VERTICES], store.arrays, store.dtypes)


@cache
def _typed_store(num_parts: int) -> MemoryStore:
    return typed_models.make_store(num_parts)


def _owners(store: MemoryStore, case: TaskCase, num_splits: int) -> Ownership:
    """Ranges of any size. A rank may have none."""
    n = store.num_vertices
    if case.ownership != "random":
        return Ownership((0, *[n - 3] * (num_splits - 1), n)) if num_splits > 1 else Ownership((0, n))
    if store.types is not None:
        return Ownership((0, *(store.part_boundaries[2 + number] for number in range(num_splits - 1)), n))
    cuts = {1: (0, n), 2: (0, 33, n), 3: (0, 20, 61, n), 4: (0, 20, 20, 61, n)}
    return Ownership(cuts[num_splits])


def _pairs() -> Tensor:
    """Edges, pairs that are not edges, a vertex with itself, and a pair twice; by original id."""
    rng = np.random.default_rng(4)
    src, dst, _ = _edges()
    some = rng.permutation(EDGES)[:34]
    others = rng.integers(0, VERTICES, (2, 10))
    return torch.from_numpy(
        np.concatenate([np.stack([src[some], dst[some]]), others, [[7, 7, 3, 3], [7, 9, 4, 4]]], axis=1)
    )


def _timed_targets() -> tuple[Tensor, Tensor]:
    """Targets in no order, some at two times, some before all edges; and their times."""
    rng = np.random.default_rng(4)
    ids = np.concatenate([rng.permutation(VERTICES)[:60], np.arange(10)])
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate([rng.integers(-1, 60, 60), np.arange(100, 110)]))


def _make_loader(mesh: Mesh, case: TaskCase, store: MemoryStore, ownership: Ownership | None) -> BatchLoader[Any]:
    options = dict(TASKS[case.task][case.option][0])
    options |= {"mesh": mesh, "strategy": case.strategy, "prefetch": case.prefetch, "seed": 5, "ownership": ownership}
    if case.task == "samplers":
        return NeighborLoader(store, [4, 3, 5], "train", batch_size=24, **options)
    if case.task == "times":
        ids, times = _timed_targets()
        return NeighborLoader(store, [4, 3], ids, input_time=times, time_attr="time", batch_size=25, **options)
    if case.task == "pairs":
        pairs = _pairs()
        label = torch.arange(pairs.size(1)) % 2 if case.option.startswith("labels") else None
        return LinkNeighborLoader(store, [4, 3], pairs, edge_label=label, batch_size=16, **options)
    fanouts: Any = typed_models.FANOUTS
    if case.model == "deep":
        fanouts = {relation: [*numbers, 2] for relation, numbers in fanouts.items()}
    if case.task == "types":
        return NeighborLoader(store, fanouts, ("paper", "train"), batch_size=typed_models.BATCH, **options)
    writes = typed_models.WRITES
    pairs = typed_models.make_data()[writes].edge_index[:, ::7]
    reverse = {writes: typed_models.WRITTEN_BY}
    return LinkNeighborLoader(store, fanouts, (writes, pairs), reverse_edge_types=reverse, batch_size=20, **options)


# ----------------------------------------------------------------------------------------------- models and training
class _Decoder(Module):
    """Decodes pairs itself, with parameters, and dropout on the rows of endpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = GraphSAGE(WIDTH, 8, 2, 6, dropout=0.3)
        self.dropout = 0.3
        self.lin = torch.nn.Linear(6, 6)

    def forward(self, batch: LinkBatch) -> Tensor:
        z = batch.endpoints(self.encoder(batch.x, batch.edge_index))
        return self.lin(F.dropout(z, self.dropout, self.training))  # type: ignore[no-any-return]


class _TypedEncoder(typed_models.Hetero):
    """Rows of all types."""

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Any:
        return self.encode(x_dict, edge_index_dict)


def _make_model(case: TaskCase) -> Module:
    torch.manual_seed(0)
    layers = 3 if case.task == "samplers" else 2
    width = 6 if case.task == "pairs" else CLASSES
    model: Module
    if case.task == "types":
        model = typed_models.make_model(case.model)
    elif case.task == "pairs of types":
        model = _TypedEncoder("sage")
    elif case.model == "decoder":
        model = _Decoder()
    elif case.model == "gat":
        model = GAT(WIDTH, 8, layers, width, dropout=0.3, heads=2)
    else:
        model = GraphSAGE(WIDTH, 8, layers, width, dropout=0.3)
    if not case.dropout:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0  # type: ignore[assignment]
    return model.double()


def train_tasks(mesh: Mesh, cases: list[TaskCase], is_reference: bool = False) -> list[TaskRun]:
    """Train every case on this mesh. A model is wrapped once, which takes longer than its training.

    ``is_reference``: on the graph in its original order, and with the equal ranges of a graph without parts.
    """
    models: dict[Any, tuple[Module, dict[str, Tensor]]] = {}
    runs = []
    for case in cases:
        is_typed = "types" in case.task
        store = _typed_store(1 if is_reference else 6) if is_typed else _plain_store(not is_reference)
        ownership = None if is_reference else _owners(store, case, mesh.num_splits)
        name = (case.task, case.model, case.dropout)
        if name not in models:
            model = _make_model(case)
            if case.model == "to_hetero" and mesh.device.type != "cpu":
                parallelize(model, solo_mesh(), graph=_typed_store(2))  # the simulated device cannot make sizes of -1
            parallelize(model, mesh, graph=_typed_store(2) if is_typed else None, verify_every=0)
            models[name] = model, {key: value.clone() for key, value in model.state_dict().items()}
        model, weights = models[name]
        model.load_state_dict(weights)
        runs.append(_train(model, case, _make_loader(mesh, case, store, ownership)))
    return runs


def _train(model: Module, case: TaskCase, loader: BatchLoader[Any]) -> TaskRun:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = TaskRun(TrainedCase([], [], [], {}), [])
    trained = run.trained
    batches = iter(loader)
    for _ in range(STEPS):
        batch = next(batches)
        out = _forward(model, batch)
        loss = _loss(case, out, batch)
        loss.backward()
        trained.outputs.append(_outputs(out, batch))
        trained.losses.append(float(loss.detach()))
        trained.gradients.append(
            [None if p.grad is None else p.grad.numpy(force=True).copy() for p in model.parameters()]
        )
        optimizer.step()
        optimizer.zero_grad()
        run.drawn.append(_draws(batch))
    batches.close()  # type: ignore[attr-defined]
    trained.state.update({name: value.numpy(force=True).copy() for name, value in model.state_dict().items()})
    return run


def _forward(model: Module, batch: Any) -> Any:
    if isinstance(model, _Decoder):
        return model(batch)
    if isinstance(batch, TypedLinkBatch):
        return model(batch.x_dict, batch.edge_index_dict)
    if isinstance(batch, TypedBatch):
        return typed_models.run_model(model, batch)
    return model(batch.x, batch.edge_index)


def _loss(case: TaskCase, out: Any, batch: Any) -> Tensor:
    if isinstance(batch, LinkBatch):
        name = "bpr" if batch.pair_rows.mode in ("triplet", "joint") else "cross_entropy"
        return batch.mean(*loss_of_batch(LINK_LOSSES[name], out, batch))
    return batch.mean(F.cross_entropy(out, batch.y, reduction="none"))  # type: ignore[no-any-return]


def _outputs(out: Any, batch: Any) -> dict[int, Any]:
    """The outputs of targets by id, of targets with times by position, and of both endpoints of pairs by position."""
    if isinstance(batch, LinkBatch):
        index = batch.pair_rows.index[:, : batch.input_id.numel()]
        ends = (out, out) if isinstance(out, Tensor) else (out[batch.pair_type[0]], out[batch.pair_type[2]])  # type: ignore[attr-defined]
        rows = torch.cat([ends[0][index[0]], ends[1][index[1]]], dim=1)
        keys = batch.input_id
    else:
        rows = out
        keys = batch.n_id[: batch.num_targets] if batch.seeds is None else batch.input_id
    return dict(zip(keys.tolist(), rows.numpy(force=True).copy(), strict=True))


def _draws(batch: Batch) -> list[tuple[Any, Any]]:
    """For every layer, the destinations by original id (and time), and a hash of the sources and relations of each."""
    found = []
    for layer, block in enumerate(batch.blocks):
        src, dst = block.edge_index().cpu()
        names = batch.mixed_names(layer).cpu()[src]  # all ranks: once per layer
        kinds = batch.kinds[layer].cpu().long() if isinstance(batch, TypedBatch) else torch.zeros_like(src)
        words = torch.zeros(block.num_dst, dtype=torch.int64).index_add_(0, dst, mix(names, kinds))
        found.append((batch.destinations(layer).names[: block.num_dst].cpu().numpy(), words.numpy()))
    return found


# ------------------------------------------------------------------------------------------------------- comparison
def compare_tasks(one: TaskRun, ranks: list[TaskRun], *, is_split: bool) -> TaskDifferences:
    """The largest differences between one process and all ranks. ``is_split``: a destination is on one rank only."""
    found = compare(one.trained, [rank.trained for rank in ranks])
    draws = 0
    for step, layers in enumerate(one.drawn):
        for layer, (ids, words) in enumerate(layers):
            wanted = dict(zip(ids.tolist(), words.tolist(), strict=True))
            got = [
                pair
                for rank in ranks
                for pair in zip(*(each.tolist() for each in rank.drawn[step][layer]), strict=True)
            ]
            draws += sum(wanted.get(vertex) != word for vertex, word in got)
            draws += len(wanted.keys() - dict(got).keys())
            draws += is_split and len(got) != len(wanted)
    return TaskDifferences(found.output, found.loss, found.gradient, found.weights, draws)


def all_task_cases(replicas: int, splits: int, tasks: list[str]) -> Iterator[TaskCase]:
    """Every case that can run on a mesh: every option, model and strategy, with and without dropout and prefetching.

    Pairs whose edges are not excluded, which is not the default, only with both.
    """
    alone = replicas * splits == 1
    for task in tasks:
        for option, (_, models) in TASKS[task].items():
            ways = [(True, 2)] if option.endswith("kept") else list(product((False, True), (0, 2)))
            for model, strategy, (dropout, prefetch) in product(models, STRATEGIES, ways):
                if strategy == "hybrid(2)" and task not in DEEP and model not in DEEP:
                    continue
                if model == "norm" and not alone and (strategy != "split" or replicas > 1):
                    continue  # BatchNorm is refused where a vertex may be computed twice
                yield TaskCase(task, option, model, strategy, dropout, prefetch)
            if not alone and not option.endswith("kept"):
                for strategy in ("split", "data_cached", "hybrid(1)"):
                    yield TaskCase(task, option, models[0], strategy, True, 0, "nearly all on rank 0")


@cache
def _reference(case: TaskCase) -> TaskRun:
    return train_tasks(solo_mesh(), [case], is_reference=True)[0]


def run_tasks(
    meshes: list[tuple[int, int]], tasks: list[str], progress: Progress = silent, *, device: str = "cpu"
) -> ExactnessReport:
    """All cases of some tasks on some meshes, each with its largest differences from one process on the CPU.

    On a device, heterogeneous graphs are sampled there, and others on the host, with prefetching; all with dropout.
    """
    for task in tasks:
        if task not in TASKS:
            raise InputError(explain("task", f"one of {', '.join(TASKS)}", task, "choose one of these"))
    rows: list[ExactnessRow] = []
    starts = [(mesh, task) for mesh in meshes for task in tasks]
    for number, ((replicas, splits), task) in enumerate(starts):
        progress("starts of ranks", number, len(starts))
        cases = list(all_task_cases(replicas, splits, [task]))
        options: dict[str, Any] = {}
        if device != "cpu":
            options = {"device": device, "sample_device": device if "types" in task else None}
            cases = [case for case in cases if case.dropout and case.prefetch == (0 if "types" in task else 2)]
        many = run_ranks(train_tasks, replicas * splits, cases, replicas=replicas, timeout_s=6000.0, **options)
        for place, case in enumerate(cases):
            one = _reference(TaskCase(case.task, case.option, case.model, "split", case.dropout, 0))
            is_split = case.strategy == "split" and replicas == 1
            found = compare_tasks(one, [rank[place] for rank in many], is_split=is_split)
            rows.append(ExactnessRow(replicas, splits, case, found))
    progress("starts of ranks", len(starts), len(starts))
    return ExactnessReport(rows)


# ----------------------------------------------------------------------------------------------------------- record
def describe_tasks(document: dict[str, Any]) -> str:
    """The page of a record: a line per option and model."""
    rows: list[dict[str, Any]] = document["rows"]
    kinds = ("output", "loss", "gradient", "weights")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["option"] or "-", row["model"]), []).append(row)
    lines = [
        f"| {' | '.join(name)} | {len(found)} | {' | '.join(f'{max(row[kind] for row in found):.1e}' for kind in kinds)} |"
        for name, found in groups.items()
    ]
    installed = installed_versions()
    versions = ", ".join(f"{name} {installed.get(name)}" for name in ("python", "torch", "torch_geometric"))
    ways = " x dropout on and off x prefetch 0 and 2 (seed edges kept: only with both)"
    if all(row["dropout"] for row in rows):
        ways = " with dropout and prefetch 2, on the simulated device (heterogeneous graphs: sampled there, prefetch 0)"
    unequal = ""
    if len({row["ownership"] for row in rows}) > 1:
        unequal = "; and split, data_cached and hybrid(1) with nearly all vertices on rank 0"
    meshes = ", ".join(dict.fromkeys(f"{row['replicas']} x {row['splits']}" for row in rows))
    strategies = ", ".join(f"`{name}`" for name in dict.fromkeys(row["strategy"] for row in rows))
    return "\n".join(
        [
            "# Same answer everywhere, other tasks\n",
            f"Command: `python -m gsplit_bench exactness-tasks`. Commit {current_commit()}, {versions}, two cores. Rows in the `.json` beside this file.\n",
            f"{len(rows):,} cases, largest difference {max(row[kind] for row in rows for kind in kinds):.1e} (asked for: {document['tolerance']:.0e}); destinations whose in-edges differ from those of one process: {sum(row['draws'] for row in rows)}.\n",
            f"Every option and model below x the strategies {strategies}{ways}, on {meshes} replicas x ranks{unequal}.",
            f"float64, {STEPS} steps of Adam 1e-3, real gloo ranks against one process on the graph in its original order, where vertices have other internal ids. Compared: outputs of all targets or endpoints of pairs, losses, gradients of every step,",
            "weights at the end, and for every layer and destination on every rank the in-edges drawn, by a hash of original ids (and times, and relations). Graphs have hubs, self-loops, duplicate edges, weights of zero, equal times, relations without edges, ranks without vertices.\n",
            "| task | option | model | cases | outputs | losses | gradients | weights |",
            f"|{'---|' * 8}",
            *lines,
            "",
        ]
    )
