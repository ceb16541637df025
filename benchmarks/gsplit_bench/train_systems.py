"""The systems of a scenario on one rank: our strategies by name, and the peers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch.nn import Module

from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.cache import stored_row_bytes
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.batch import Batch
from gsplit.nn.parallelize import parallelize
from gsplit.run.models import make_model
from gsplit.store.reader import Store
from gsplit.telemetry import StepTelemetry
from gsplit.training.losses import resolve_loss
from gsplit.training.trainer import Trainer
from gsplit.training.training_step import TrainingStep
from gsplit_bench.peers.ddp import DdpSystem, System
from gsplit_bench.peers.dgl_ddp import DglPeer
from gsplit_bench.peers.p3 import P3System
from gsplit_bench.peers.pyg_ddp import BlockPeer, UnionPeer
from gsplit_bench.train_study import PEERS, Scenario, parse_system

__all__ = ["StrategySystem", "check_store", "is_ours", "make_system", "touch_pages"]

_PAGE = 4096


def is_ours(system: str) -> bool:
    """Whether a system trains by our loader and trainer: all of those with the same sampler compute the same steps."""
    return system == "quiver" or system not in PEERS


def make_system(name: str, scenario: Scenario, store: Store, mesh: Mesh) -> System:
    """A system by its name; what cannot be made is refused with the reason, on every rank. A collective."""
    if name == "dgl":
        return DdpSystem(DglPeer(scenario, store, mesh.device), scenario, store, mesh)
    if name == "pyg":
        return DdpSystem(UnionPeer(scenario, store), scenario, store, mesh)
    if name == "pyg_our_sampler":
        return DdpSystem(BlockPeer(scenario, store), scenario, store, mesh)
    if name == "p3":
        return P3System(scenario, store, mesh)
    if name == "quiver":
        return _quiver(scenario, store, mesh)
    return StrategySystem(name, scenario, store, mesh)


def _quiver(scenario: Scenario, store: Store, mesh: Mesh) -> System:
    """Data parallelism with a cache of Quiver's kind: the caches of all ranks are one, and misses are redundant.

    Quiver's GPUs read rows directly from the memory of the GPU that caches them. Here every rank has a copy of the
    whole cache, which costs the memory of all, and reads what it does not have from the file, as the other ranks do.
    Two things cost less than on GPUs: rows of other ranks' caches cross no link, and a row that one rank has read from
    disk is in the page cache for the others.
    """
    if scenario.features != "disk" or mesh.device.type != "cpu":
        got = f"features in {scenario.features}, on {mesh.device.type}"
        fix = "measure with --features disk on the CPU, or leave quiver out"
        raise InputError(explain("system quiver", "features on disk, so that there are misses, on CPU ranks", got, fix))
    return StrategySystem("data", replace(scenario, cache=min(1.0, scenario.cache * mesh.num_splits)), store, mesh)


class StrategySystem:
    """See ``peers.ddp.System``: our loader and the trainer's step, with the options that are the default."""

    def __init__(self, name: str, scenario: Scenario, store: Store, mesh: Mesh) -> None:
        strategy, sampler = parse_system(name)
        threads = scenario.threads
        self.note = f"our own kernels use one thread of a rank, torch's operations {threads}" if threads > 1 else ""
        torch.manual_seed(scenario.seed)
        model: Module = make_model(
            scenario.model,
            in_channels=store.num_features,
            hidden_channels=scenario.hidden,
            num_layers=len(scenario.fanout),
            out_channels=store.num_classes,
            heads=scenario.heads,
        )
        on_disk = scenario.features == "disk"
        cache = int(scenario.cache * store.num_vertices * stored_row_bytes(store, ["x"])) if on_disk else 0
        loader = NeighborLoader(
            store,
            list(scenario.fanout),
            scenario.targets,
            batch_size=scenario.batch_size,
            strategy=strategy,
            sampler=sampler,
            mesh=mesh,
            seed=scenario.seed,
            features_on_disk=on_disk,
            cache=cache,
            edge_attr=None,
            edge_weight=None,
        )
        loader.telemetry.times_devices = True
        model = parallelize(model, mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=scenario.learning_rate)
        self.trainer = Trainer(model, optimizer, loader)
        self._step = TrainingStep(self.trainer.state, resolve_loss("cross_entropy", of_pairs=False))
        self._batches: Iterator[Batch] = iter(())

    def train_step(self, epoch: int, step: int) -> StepTelemetry:
        """One step by its name."""
        batch = self._batch(epoch, step)
        self._step.add(batch)
        batch.telemetry.record("loss", self._step.finish(batch))
        return batch.telemetry

    def _batch(self, epoch: int, step: int) -> Batch:
        """The batch of a step. For a device it comes from an iterator, which makes the next ones ahead."""
        loader = self.trainer.state.loader
        if loader.mesh.device.type == "cpu":
            return cast(Batch, loader.make_batch(epoch, step))
        batch = next(self._batches, None)
        if batch is None or (batch.key.epoch, batch.key.step) != (epoch, step):
            loader.load_state_dict({"epoch": epoch, "step": step})
            self._batches = iter(loader)
            batch = next(self._batches)
        return batch


def check_store(store: Store, scenario: Scenario) -> None:
    """Refuse a store that the scenario cannot be measured on."""
    size = int(store.stored_array(f"targets/{scenario.targets}").size)
    if scenario.batch_size > size:
        fix = "choose a smaller --batch-size"
        raise InputError(explain(store.path, f"{scenario.batch_size} targets for a mini-batch", size, fix))
    if scenario.batch_size < scenario.ranks:
        raise InputError(explain("--batch-size", "a target for every rank", scenario.batch_size, "choose a larger one"))
    if store.num_features == 0 or store.num_classes == 0:
        raise InputError(explain(store.path, "features x and integer labels", "none", "import them with the graph"))


def touch_pages(store: Store) -> None:
    """Map every page of what all systems read, so that none of them pays for the first look at it."""
    for name in ("indptr", "indices", "features/x"):
        data = np.asarray(store.stored_array(name)).reshape(-1).view(np.uint8)
        data[::_PAGE].max(initial=0)
