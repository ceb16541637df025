"""Losses, class weights, metrics, accumulation and bf16 on real ranks: what one process computes."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from small_graph import VERTICES, WIDTH, small_store
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GAT, GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.store.in_memory import MemoryStore
from gsplit.training.losses import LossFunction, weighted_cross_entropy
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

CLASSES, COLUMNS = 3, 4
METRICS = {
    "classes": ["accuracy", "f1_micro", "f1_macro", "roc_auc"],
    "entries": ["roc_auc", "f1_micro", "f1_macro", "accuracy"],
    "values": ["rmse", "mae"],
}
CASES: dict[str, tuple[str, str | LossFunction]] = {
    "cross_entropy": ("classes", "cross_entropy"),
    "class weights": ("classes", weighted_cross_entropy([1.0, 0.2, 5.0])),
    "bce": ("entries", "bce"),
    "mse": ("values", "mse"),
}
_CUTS = {1: (0, 90), 2: (0, 20, 90), 3: (0, 20, 21, 90), 4: (0, 20, 20, 60, 90)}  # a rank without vertices, too


def make_labels(kind: str) -> Any:
    rng = np.random.default_rng(5)
    if kind == "classes":
        return rng.integers(0, CLASSES, VERTICES)
    missing = rng.random((VERTICES, COLUMNS)) < 0.3
    missing[:, 0] = False  # a label for every target
    values = rng.integers(0, 2, missing.shape) if kind == "entries" else rng.normal(size=missing.shape)
    return np.where(missing, np.nan, values.astype(np.float64))


def make_store(kind: str) -> MemoryStore:
    store, _ = small_store("random", 1)
    y = make_labels(kind)
    return MemoryStore(store.graph, store.part_boundaries, store.arrays | {"y": y}, store.dtypes | {"y": y.dtype.name})


def _trainer(mesh: Mesh, kind: str, loss_fn: str | LossFunction, **options: Any) -> gsplit.Trainer:
    make, dtype = options.pop("make", GraphSAGE), options.pop("dtype", torch.float64)
    loader = gsplit.NeighborLoader(
        make_store(kind),
        options.pop("fanout", [3, 3]),
        "train",
        batch_size=options.pop("batch_size", 12),
        mesh=mesh,
        ownership=Ownership(_CUTS[mesh.size]),
    )
    torch.manual_seed(0)
    plain = make(WIDTH, 8, 2, CLASSES if kind == "classes" else COLUMNS, dropout=options.pop("dropout", 0.5))
    model = gsplit.parallelize(plain.to(dtype), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return gsplit.Trainer(model, optimizer, loader, loss_fn=loss_fn, **options)


def _weights(trainer: gsplit.Trainer) -> Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in trainer.state.model.parameters()])


def learn(mesh: Mesh) -> dict[str, tuple[list[float], Tensor, dict[str, float]]]:
    """Losses, weights and scores after an epoch of every loss."""
    found = {}
    for name, (kind, loss_fn) in CASES.items():
        trainer = _trainer(mesh, kind, loss_fn, metrics=METRICS[kind])
        losses = trainer.train_epoch()
        scores = trainer.evaluate(make_store(kind), ["train"], ownership=Ownership(_CUTS[mesh.size]))
        found[name] = losses, _weights(trainer), scores
    return found


def accumulate(mesh: Mesh) -> dict[str, tuple[list[float], Tensor]]:
    """The same epoch in large mini-batches, and in small ones that are accumulated; all neighbours, no dropout."""
    found = {}
    for name, (kind, loss_fn) in {name: CASES[name] for name in ("class weights", "bce")}.items():
        for how, options in {"large": {"batch_size": 18}, "small": {"batch_size": 6, "accumulate": 3}}.items():
            trainer = _trainer(mesh, kind, loss_fn, fanout=[-1, -1], dropout=0.0, max_grad_norm=0.5, **options)
            found[f"{name}, {how}"] = trainer.train_epoch(), _weights(trainer)
    return found


def _follow_types(model: Module) -> set[str]:
    """The types of the rows that layers are given, filled in while the model runs."""
    types: set[str] = set()
    for layer in model.get_submodule("convs").children():
        layer.register_forward_pre_hook(lambda _, args: types.add(str(args[0].dtype)))
    return types


def train_in_bf16(mesh: Mesh) -> dict[str, tuple[list[float], list[float], list[str]]]:
    """Losses under autocast and in float32, and the types of the hidden rows that travelled under autocast."""
    found = {}
    for name, make in (("sage", GraphSAGE), ("gat", GAT)):
        options: dict[str, Any] = {"make": make, "dtype": torch.float32, "dropout": 0.2}
        plain = _trainer(mesh, "classes", "cross_entropy", **options)
        # without the comparison with one process, which is in float64
        cast = _trainer(mesh, "classes", "cross_entropy", precision="bf16", verify_every=0, **options)
        types = _follow_types(cast.state.model)
        found[name] = cast.train_epoch(), plain.train_epoch(), sorted(types)
        assert all(parameter.dtype == torch.float32 for parameter in cast.state.model.parameters())
    return found


def shuffle_bf16(mesh: Mesh) -> list[float]:
    """Losses of a model whose weights and rows are bfloat16 throughout: every row that travels is."""
    trainer = _trainer(mesh, "classes", "cross_entropy", dtype=torch.bfloat16, dropout=0.0)
    return trainer.train_epoch(2)


def learn_everything(mesh: Mesh) -> tuple[Any, Any, Any]:
    """All of the above in one start."""
    return learn(mesh), accumulate(mesh), train_in_bf16(mesh)


DISTANCE_BF16 = 0.02
"""Of the losses of W ranks from those of one process: bfloat16 has 8 bits, and sums run in another order."""


@functools.cache
def _one_process() -> tuple[Any, Any, Any]:
    return learn_everything(solo_mesh())


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.weekly) for n in (3, 4))])
def test_ranks_learn_what_one_process_learns(num_ranks: int) -> None:
    """In one start: processes are what costs."""
    want, want_accumulated, want_bf16 = _one_process()
    for found, accumulated, bf16 in run_ranks(learn_everything, num_ranks):
        for name, (losses, weights, scores) in found.items():
            assert losses == pytest.approx(want[name][0], abs=1e-12), name
            torch.testing.assert_close(weights, want[name][1], rtol=0, atol=1e-9)
            assert scores == pytest.approx(want[name][2], abs=1e-12), name
        for name, (losses, weights) in accumulated.items():
            assert losses == pytest.approx(want_accumulated[name][0], abs=1e-12), name
            torch.testing.assert_close(weights, want_accumulated[name][1], rtol=0, atol=1e-9)
        for name, (losses, plain, types) in bf16.items():
            assert types == want_bf16[name][2], name
            assert losses == pytest.approx(want_bf16[name][0], abs=DISTANCE_BF16), name
            assert plain == pytest.approx(want_bf16[name][1], abs=1e-4), name


def test_one_process_tells_the_cases_apart() -> None:
    """What the ranks are compared with is not the same for all: weights, scores and types do something."""
    found, accumulated, bf16 = _one_process()
    assert found["cross_entropy"][0] != pytest.approx(found["class weights"][0], abs=1e-3)
    assert list(found["bce"][2]) == ["train", *(f"train {name}" for name in METRICS["entries"][1:])]
    for name in ("class weights", "bce"):
        large, small = accumulated[f"{name}, large"], accumulated[f"{name}, small"]
        assert len(large[0]) == 4 and large[0] == pytest.approx(small[0], abs=1e-13)
        torch.testing.assert_close(large[1], small[1], rtol=0, atol=1e-11)
    assert "torch.bfloat16" in bf16["sage"][2]  # hidden rows travel as they are
    for losses, plain, _ in bf16.values():
        assert losses != plain and losses == pytest.approx(plain, abs=DISTANCE_BF16)


@pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
def test_rows_of_bfloat16_are_shuffled_on_the_host_and_on_devices() -> None:
    want = shuffle_bf16(solo_mesh())
    for device in ("cpu", "sim"):
        for losses in run_ranks(shuffle_bf16, 2, device=device):
            assert losses == pytest.approx(want, abs=0.05)
