"""Whole stores and shards: a file or the manifest is damaged, with checksums that fit or not, and the store is used."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from fuzz_guard import Surface
from fuzz_mutations import mutate_array, mutate_bytes, mutate_document, mutate_text
from graphs import sample_store
from rich.console import Console
from typed_graphs import academic

import gsplit
from gsplit.cli.store_view import describe, describe_memory, show, show_memory, show_partition
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import GSplitError
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.partitioning.presample import Workload, presample
from gsplit.run.choices import check_degrees, check_labels, fitting_loss
from gsplit.run.config import TrainSettings
from gsplit.run.memory import MemoryPlan, forecast_memory
from gsplit.run.recipe import shape_of
from gsplit.store.conversion import as_graph_store
from gsplit.store.feature_types import write_with_features, write_with_time_order
from gsplit.store.importers.pyg import to_pyg
from gsplit.store.propagate import write_propagated
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.verify import verify_store

__all__ = ["STORES"]


def _inspect(store: Store) -> None:
    document = describe(store)
    json.dumps(document, allow_nan=False)
    console = Console(file=io.StringIO(), width=80)
    show(document, console)
    show_partition(document, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "\0" not in text, text


def _forecast(store: Store) -> None:
    for plan in (MemoryPlan(), MemoryPlan(ranks=2, cache_bytes=200, copies_bytes=100, hidden=8)):
        found = forecast_memory(store, plan)
        json.dumps(describe_memory(found), allow_nan=False)
        show_memory(found, Console(file=io.StringIO()))


def _load(store: Store, **options: Any) -> None:
    targets = options.pop("targets", "train")
    loader = gsplit.NeighborLoader(store, [3, 2], targets, batch_size=6, mesh=solo_mesh(), **options)
    for batch in loader:
        assert batch.x.size(0) >= batch.num_targets


def _train(store: Store) -> None:
    shape = shape_of(store, TrainSettings(features="x"))
    check_labels(store, "train", fitting_loss(store, "train"))
    check_degrees(store.graph)
    for batch in gsplit.NeighborLoader(store, [2], "train", batch_size=8, mesh=solo_mesh()):
        labels = batch.y
        assert int(labels.min()) >= 0 and int(labels.max()) < shape.num_classes
        torch.nn.functional.one_hot(labels.long(), min(shape.num_classes, 100)) if shape.num_classes <= 100 else None


def _read(store: Store) -> None:
    for name in store.names:
        for act in (store.array, store.stored_array, lambda name: store.rows(name, [0, 3])):
            try:
                np.asarray(act(name)).sum()
            except GSplitError:
                continue
    _read_pairs(store)
    if "name_bytes" in store.names:
        assert len(store.vertex_names()) == store.num_vertices


def _read_pairs(store: Store) -> None:
    """Everything that link prediction reads, all of which has a row per pair or per vertex of the graph."""
    assert store.internal_ids.shape == (store.num_vertices,)
    for name in store.pair_names:
        pairs = store.pairs(name)
        assert pairs.shape[1] == 2
        for array in (store.pair_labels(name), store.pair_negatives(name)):
            assert array is None or array.shape[0] == pairs.shape[0]


def _add_pairs(store: Store) -> None:
    """Add a list to a copy of the store."""
    path = store.path.with_name("copied.gsplit")
    try:
        shutil.copytree(store.path, path, symlinks=True)
        gsplit.add_pairs(open_store(path), "added", np.array([[0, 1], [2, 3]]))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _write(store: Store, act: Callable[[Path], object]) -> None:
    path = store.path.with_name("written.gsplit")
    try:
        act(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _presample(store: Store) -> None:
    presample(Workload.of_store(store, "train", [2, 2], 4), epochs=1, threads=1)


USES: tuple[Callable[[Store], object], ...] = (
    verify_store,
    _inspect,
    _inspect,
    _forecast,
    _load,
    lambda store: _load(store, targets=None),
    lambda store: _load(store, features_on_disk=True, edge_attr="weight"),
    lambda store: _load(store, cache=100),
    lambda store: _load(store, shuffle=False, strategy="data"),
    _train,
    _read,
    to_pyg,
    _presample,
    _add_pairs,
    lambda store: _write(store, lambda path: write_shard(store, path, 0, 20)),
    lambda store: _write(store, lambda path: write_with_features(store, path, "float16")),
)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)


class Stores:
    """A partitioned store, damaged in one or two places, opened, and used in one way."""

    def __init__(self, folder: Path) -> None:
        plain = sample_store(folder / "plain.gsplit", 40, 200)
        partitioned = folder / "s.gsplit"
        gsplit.partition(
            plain, partitioned, 4, [2, 2], "train", batch_size=8, solver="random", objective="random", epochs=2
        )
        self.begin(folder, partitioned)

    def begin(self, folder: Path, sound: Path) -> None:
        """Keep what is sound, and use it in every way once."""
        self._folder, self._path, self._outside = folder, sound, folder / "outside.npy"
        self._outside.write_bytes((sound / "indptr.npy").read_bytes())
        self._sound = {path: path.read_bytes() for path in sorted(sound.rglob("*")) if path.is_file()}
        self._manifest = (sound / "manifest.json").read_text()
        for use in self.uses():
            use(open_store(sound))

    def uses(self) -> tuple[Callable[[Store], object], ...]:
        """What is done to a store that could be opened."""
        return USES

    def attempt(self, random: Random) -> None:
        try:
            for _ in range(random.choice((1, 1, 2))):
                self._damage(random)
            random.choice(self.uses())(open_store(self._path))
        finally:
            self._restore()

    def _damage(self, random: Random) -> None:
        kind = random.randrange(10)
        if kind < 3:
            self._write_manifest(mutate_text(random, self._manifest))
            return
        path = random.choice([path for path in self._sound if path.suffix == ".npy"])
        _remove(path)
        if kind == 3:
            path.write_bytes(mutate_bytes(random, self._sound[path]))
        elif kind == 4:
            self._replace(random, path)
        else:
            self._change_values(random, path, honest=kind == 5)

    def _change_values(self, random: Random, path: Path, *, honest: bool) -> None:
        """Other elements, mostly with a checksum that fits: only the meaning is wrong."""
        array = mutate_array(random, np.load(io.BytesIO(self._sound[path])))
        path.write_bytes(self._sound[path][:128] + array.tobytes())
        if not honest:
            manifest = json.loads(self._manifest)
            name = str(path.relative_to(self._path).with_suffix(""))
            manifest["arrays"][name]["sha256"] = hashlib.sha256(array.tobytes()).hexdigest()
            if random.random() < 0.2:
                manifest["statistics"] = mutate_document(random, json.dumps(manifest["statistics"]))
            self._write_manifest(json.dumps(manifest).encode("utf-8", "surrogatepass"))

    def _write_manifest(self, data: bytes) -> None:
        _remove(self._path / "manifest.json")
        (self._path / "manifest.json").write_bytes(data)

    def _replace(self, random: Random, path: Path) -> None:
        path = random.choice((path, self._path / "manifest.json"))
        _remove(path)
        kind = random.randrange(5)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to(self._outside)
        elif kind == 2:
            path.mkdir()
        elif kind == 3:
            path.symlink_to("/dev/zero")

    def _restore(self) -> None:
        for path, data in self._sound.items():
            if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
                _remove(path)
                path.write_bytes(data)


class Shards(Stores):
    """A host's shard of it."""

    def __init__(self, folder: Path) -> None:
        (folder / "whole").mkdir()
        plain = sample_store(folder / "whole" / "plain.gsplit", 40, 200)
        whole = folder / "whole" / "partitioned.gsplit"
        parts = gsplit.partition(plain, whole, 2, [2], batch_size=8, solver="random", objective="random", epochs=1)
        shard = folder / "shard.gsplit"
        write_shard(parts, shard, 0, 20)
        self.begin(folder, shard)

    def uses(self) -> tuple[Callable[[Store], object], ...]:
        """What can be done to a shard."""
        return (verify_store, _inspect, _use_shard, _use_shard, _read_pairs)


def _use_shard(store: Store) -> None:
    """Targets and rows of its vertices, as the rank that owns them would read them."""
    local = LocalGraph(as_graph_store(store), solo_mesh(), Ownership((0, 20, 40)))
    targets = local.targets("train")
    for step in range(3):
        ids = targets.for_step(0, 0, step, 8, shuffle=True)
        local.rows("y").read(ids, torch.empty(ids.numel(), dtype=torch.int64))


class TypedStores(Stores):
    """A partitioned store of a heterogeneous graph."""

    def __init__(self, folder: Path) -> None:
        plain = academic().build(folder / "plain.gsplit")
        partitioned = folder / "s.gsplit"
        options: dict[str, Any] = {"batch_size": 8, "solver": "random", "objective": "random", "epochs": 1}
        gsplit.partition(plain, partitioned, 3, [2, 2], "paper/train", **options)
        self.begin(folder, partitioned)

    def uses(self) -> tuple[Callable[[Store], object], ...]:
        """What is done to a store with types that could be opened."""
        return (
            verify_store,
            _inspect,
            _read,
            to_pyg,
            _load_typed,
            lambda store: presample(Workload.of_store(store, "paper/train", [2, 2], 4), epochs=1, threads=1),
            lambda store: _write(store, lambda path: write_with_features(store, path, "float16")),
        )


def _load_typed(store: Store) -> None:
    for batch in gsplit.NeighborLoader(store, [3, 2], ("paper", "train"), batch_size=6, mesh=solo_mesh()):
        assert isinstance(batch, TypedBatch)
        assert batch.x_dict["paper"].size(0) >= batch.num_targets


class TimedStores(Stores):
    """A partitioned store with times of edges and their order."""

    def __init__(self, folder: Path) -> None:
        plain = sample_store(folder / "plain.gsplit", 40, 200)
        data = to_pyg(plain)
        data.time = torch.arange(200) * 7 % 50
        timed = gsplit.from_pyg(data, folder / "timed.gsplit")
        ordered = write_with_time_order(timed, folder / "ordered.gsplit", "time")
        partitioned = folder / "s.gsplit"
        gsplit.partition(ordered, partitioned, 3, [2], batch_size=8, solver="random", objective="random", epochs=1)
        self.begin(folder, partitioned)

    def uses(self) -> tuple[Callable[[Store], object], ...]:
        """What is done to a store with times that could be opened."""
        times = torch.arange(20) * 3 % 50
        return (
            verify_store,
            _inspect,
            lambda store: _load(store, time_attr="time", input_time=times),
            lambda store: _load(store, time_attr="time", input_time=times, temporal_strategy="last", strategy="data"),
            lambda store: _write(store, lambda path: write_shard(store, path, 0, 20)),
            lambda store: _write(store, lambda path: write_propagated(store, path, 1)),
        )


STORES: dict[str, Callable[[Path], Surface]] = {
    "store": Stores,
    "typed store": TypedStores,
    "timed store": TimedStores,
    "shard": Shards,
}
