"""What ranks run in the tests of training on simulated devices: precision, waits, memory and operations."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from simulated_programs import count_steps
from small_graph import BATCH, VERTICES, Case, make_model, small_store
from trainer_programs import EachStep

import gsplit
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.store.in_memory import MemoryStore
from gsplit_bench.simulated import switched_on

Operations = set[tuple[str, str, tuple[str, ...]]]


def _store(mesh: Mesh) -> tuple[MemoryStore, Ownership | None]:
    """A small graph that says which of its rows are hot, as a partitioned one does, and who owns what."""
    store, ownership = small_store("random", mesh.num_splits)
    hotness = np.arange(VERTICES, 0, -1)
    arrays, dtypes = {**store.arrays, "hotness": hotness}, {**store.dtypes, "hotness": "int64"}
    return MemoryStore(store.graph, [0, VERTICES], arrays, dtypes), ownership if mesh.size > 1 else None


def _loader(mesh: Mesh, **options: Any) -> gsplit.NeighborLoader:
    store, ownership = _store(mesh)
    return gsplit.NeighborLoader(
        store, [4, 3, -1], "train", batch_size=BATCH, mesh=mesh, seed=3, ownership=ownership, **options
    )


def _trainer(
    mesh: Mesh, case: Case, *, loading: dict[str, Any] | None = None, foreach: bool | None = None, **options: Any
) -> gsplit.Trainer:
    model = gsplit.parallelize(make_model(case).float(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=foreach)
    return gsplit.Trainer(model, optimizer, _loader(mesh, **(loading or {})), **options)


def train_in_bf16(
    mesh: Mesh, cases: list[Case], precisions: list[str]
) -> tuple[list[dict[str, list[float]]], Operations]:
    """The losses of three steps of every case by precision, and on a device the operations of bf16."""
    found = []
    seen: Operations = set()
    for case in cases:
        losses = {}
        for precision in precisions:
            trainer = _trainer(mesh, case, precision=precision)
            with _operations_to(seen) if precision == "bf16" and mesh.device.type != "cpu" else nullcontext():
                losses[precision] = trainer.train_epoch(3)
        found.append(losses)
    return found, seen


@contextmanager
def _operations_to(seen: Operations) -> Iterator[None]:
    """Keep the operations on the device."""
    state = switched_on().state
    state.operations = seen
    try:
        yield
    finally:
        state.operations = None


def count_waits(mesh: Mesh, case: Case, prefetches: list[int]) -> list[tuple[int, dict[str, int]]]:
    """Steps of an epoch of a trainer that reports every step, and where the host waited in it, per depth."""
    log = switched_on().log
    found = []
    for prefetch in prefetches:
        ignore = EachStep(lambda report: None)
        trainer = _trainer(mesh, case, loading={"prefetch": prefetch}, max_grad_norm=1.0, callbacks=[ignore])
        trainer.train_epoch()
        before = log.counts()
        losses = trainer.train_epoch()
        found.append((len(losses), dict((log.counts() - before).waits)))
    return found


def operations_used(mesh: Mesh, cases: list[Case]) -> Operations:
    """Every operation of training on the device: sampling there and on the host, tasks of a trainer, and bf16."""
    seen: Operations = set()
    with _operations_to(seen):
        count_steps(mesh, cases)
        trainer = _trainer(mesh, cases[0], max_grad_norm=1.0, precision="bf16", foreach=True)
        trainer.train_epoch(2)
        store, ownership = _store(mesh)
        trainer.evaluate(store, ["train"], ownership=ownership)
        alone = solo_mesh(mesh.device, "cpu")
        for cache in ("0", "1KB"):
            _trainer(alone, cases[0], loading={"prefetch": 1, "device_cache": cache}).train_epoch(1)
    return seen
