"""What ranks run in the tests of training on simulated devices: precision, waits, memory and operations."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from trainer_programs import EachStep

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit_bench.exactness import BATCH, Case, make_model, small_store
from gsplit_bench.simulated import switched_on

Operations = set[tuple[str, str, tuple[str, ...]]]


def _trainer(mesh: Mesh, case: Case, prefetch: int = 0, **options: Any) -> gsplit.Trainer:
    store, ownership = small_store("random", mesh.num_splits)
    loader = gsplit.NeighborLoader(
        store,
        [4, 3, -1],
        "train",
        batch_size=BATCH,
        mesh=mesh,
        seed=3,
        strategy=case.strategy,
        prefetch=prefetch,
        ownership=ownership if mesh.size > 1 else None,
    )
    model = gsplit.parallelize(make_model(case).float(), mesh)
    return gsplit.Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), loader, **options)


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
        trainer = _trainer(mesh, case, prefetch=prefetch, max_grad_norm=1.0, callbacks=[EachStep(lambda report: None)])
        trainer.train_epoch()
        before = log.counts()
        losses = trainer.train_epoch()
        found.append((len(losses), dict((log.counts() - before).waits)))
    return found
