"""Stores whose damage opening cannot see, with checksums that fit: refused in the usual form where they are used."""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import sample_store
from rich.console import Console

import gsplit
from gsplit.cli.store_view import describe, show, show_partition
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import StoreError
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.partitioning.presample import Workload
from gsplit.run.choices import check_degrees, check_labels
from gsplit.run.memory import MemoryPlan, forecast_memory
from gsplit.store.manifest import parse_manifest
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard

N, E = 20_000, 60_000  # large enough that opening looks at a sample only
HIDDEN = 5_003  # a place that it does not look at


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "s.gsplit"
    sample_store(path, N, E)
    return path


def _edited(sound: Path, folder: Path, array: str, change: Callable[[Any], None]) -> Store:
    """A copy of a store with other elements, by hard links but for what is changed."""
    copy = folder / "copy.gsplit"
    for path in sound.rglob("*.npy"):
        place = copy / path.relative_to(sound)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.hardlink_to(path)
    values = np.load(sound / f"{array}.npy")
    change(values)
    (copy / f"{array}.npy").unlink()
    np.save(copy / f"{array}.npy", values)
    manifest = json.loads((sound / "manifest.json").read_text())
    manifest["arrays"][array]["sha256"] = hashlib.sha256(values.tobytes()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return open_store(copy)


def _set(place: int, value: int) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        values[place] = value

    return change


def _load(store: Store, targets: str | None = "train") -> None:
    next(iter(gsplit.NeighborLoader(store, [2], targets, batch_size=64, mesh=solo_mesh())))


@pytest.mark.parametrize("value", [-1, N, 1 << 60])
@pytest.mark.parametrize(
    "use",
    [
        _load,
        lambda store: check_labels(store, "train", "cross_entropy"),
        lambda store: Workload.of_store(store, "train", [2], 8),
    ],
)
def test_targets_out_of_range(sound: Path, tmp_path: Path, use: Callable[[Store], object], value: int) -> None:
    store = _edited(sound, tmp_path, "targets/train", _set(HIDDEN, value))
    with pytest.raises(StoreError, match=rf"targets.*: expected ids in 0..{N - 1} .got .*Fix: run gsplit inspect"):
        use(store)


@pytest.mark.parametrize("use", [_load, lambda store: Workload.of_store(store, "train", [2], 8)])
def test_targets_twice(sound: Path, tmp_path: Path, use: Callable[[Store], object]) -> None:
    store = _edited(sound, tmp_path, "targets/train", lambda ids: _set(HIDDEN, int(ids[HIDDEN - 1]))(ids))
    with pytest.raises(StoreError, match="targets.*: expected every target once, ordered by original id"):
        use(store)


@pytest.mark.parametrize("value, message", [(4, "y: expected classes 0..3 .got 4"), (1 << 40, "y: expected classes")])
def test_labels_beyond_the_classes(sound: Path, tmp_path: Path, value: int, message: str) -> None:
    store = _edited(sound, tmp_path, "y", _set(2 * HIDDEN, value))
    with pytest.raises(StoreError, match=message):
        check_labels(store, "train", "cross_entropy")
    check_labels(store, "test", "cross_entropy")  # that vertex is none of these


def test_degrees_of_damaged_offsets(sound: Path, tmp_path: Path) -> None:
    store = _edited(sound, tmp_path, "indptr", _set(HIDDEN, -(1 << 50)))
    with pytest.raises(StoreError, match="indptr: expected in-degrees of 0..60000 .got -"):
        check_degrees(store.graph)


@pytest.mark.parametrize("value", [-1, 1 << 40])
def test_positions_of_a_shard_beyond_its_list(sound: Path, tmp_path: Path, value: int) -> None:
    """Walking the cycle of an epoch's permutation from such a place never came back."""
    shard = write_shard(open_store(sound), tmp_path / "shard.gsplit", 0, N // 2)
    damaged = _edited(shard.path, tmp_path, "target_positions/train", _set(HIDDEN // 2, value))
    local = LocalGraph(damaged, solo_mesh(), Ownership((0, N // 2, N)))
    with pytest.raises(StoreError, match="targets/train: expected rising positions"):
        local.targets("train")
    damaged.manifest.shard.num_targets["train"] = N  # type: ignore[union-attr]
    last = np.array([N])
    with pytest.raises(StoreError, match="targets/train: expected positions in the list of"):
        _last_position(damaged, last).targets("train")


def _last_position(store: Store, last: Any) -> LocalGraph:
    """The same store with a last position that is one too large, and otherwise sound ones."""
    positions = np.arange(store.stored_array("targets/train").size)
    positions[-1] = last[0]
    arrays = dict(store.arrays) | {"target_positions/train": positions}
    return LocalGraph(Store(store.path, store.manifest, arrays), solo_mesh(), Ownership((0, N // 2, N)))


@pytest.fixture(scope="module")
def partitioned(sound: Path) -> Path:
    path = sound.with_name("p.gsplit")
    gsplit.partition(open_store(sound), path, 2, [2], batch_size=64, objective="random", epochs=1)
    return path


def test_original_ids_out_of_range_or_twice(partitioned: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    damaged = _edited(partitioned, tmp_path / "a", "original_ids", _set(HIDDEN, 1 << 50))
    for use in (_load, lambda store: _load(store, None)):  # the second walked a cycle for ever
        with pytest.raises(StoreError, match="original_ids: expected ids in 0..19999"):
            use(damaged)
    (tmp_path / "b").mkdir()
    twice = _edited(partitioned, tmp_path / "b", "original_ids", lambda ids: _set(HIDDEN, int(ids[HIDDEN + 1]))(ids))
    with pytest.raises(StoreError, match="original_ids: expected every id once"):
        _load(twice, None)
    with pytest.raises(StoreError, match="every id once|ordered by original id|SHA"):
        gsplit.to_pyg(twice)
    (tmp_path / "c").mkdir()
    targets = _edited(partitioned, tmp_path / "c", "targets/train", _set(HIDDEN, 1 << 50))
    with pytest.raises(StoreError, match="targets/train: expected ids in 0..19999"):
        targets.array("targets/train")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda step: step.settings.update(c_v="much"), "settings.c_v: expected"),
        (lambda step: step.settings.update(c_e=-1.0), "settings.c_e: expected"),
        (lambda step: step.settings.pop("batch_size"), "settings.batch_size: expected Field required"),
        (lambda step: step.settings.update(num_neighbors=[[1]]), "settings.num_neighbors.0: expected"),
        (lambda step: step.settings.update(num_neighbors=[]), "settings.num_neighbors: expected"),
        (lambda step: step.counts.update(mini_batches=0), "counts.mini_batches: expected"),
        (lambda step: step.counts.pop("mini_batches"), "counts.mini_batches: expected Field required"),
    ],
)
def test_broken_records_of_a_partition(partitioned: Path, change: Callable[[Any], None], message: str) -> None:
    store = open_store(partitioned)
    change(store.manifest.provenance[-1])
    with pytest.raises(StoreError, match=message):
        forecast_memory(store, MemoryPlan(ranks=2))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: found["statistics"].update(max_in_degree=1 << 80), "statistics.max_in_degree"),
        (lambda found: found["statistics"].update(in_degree_histogram=[10**400]), "in_degree_histogram"),
        (lambda found: found["part_statistics"].update(num_batches=1 << 70), "part_statistics.num_batches"),
        (lambda found: found["part_statistics"]["loads"].pop(), "loads must be those of 2 parts, links of 2 groups"),
        (lambda found: found["provenance"][0]["settings"].update(a=float("inf")), "settings hold inf in a"),
        (lambda found: found["provenance"][0]["settings"].update(a=10**30), "settings hold a number beyond 64 bits"),
        (lambda found: found["provenance"][0].update(step="x" * 2000), "at most 1000 characters"),
        (lambda found: found.update(num_classes=1 << 70), "num_classes"),
    ],
)
def test_broken_statistics_are_refused_with_their_manifest(
    partitioned: Path, change: Callable[[Any], None], message: str
) -> None:
    manifest = json.loads((partitioned / "manifest.json").read_text())
    change(manifest)
    with pytest.raises(StoreError, match=message):
        parse_manifest(json.dumps(manifest).encode())


def test_what_a_manifest_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "s.gsplit", 30, 60)
    manifest = json.loads((store.path / "manifest.json").read_text())
    manifest["provenance"][0] |= {"step": "\x1b[2Jcleared", "counts": {"\x1b[31mdropped": 3}}
    (store.path / "manifest.json").write_text(json.dumps(manifest))
    console = Console(file=io.StringIO(), width=120)
    document = describe(open_store(store.path))
    show(document, console)
    show_partition(document, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert r"\x1b[2Jcleared" in said and "\x1b" not in said


def test_no_label_at_all_is_no_class(tmp_path: Path) -> None:
    from gsplit.store.statistics import count_classes

    assert count_classes(np.array([-5, -1]), "int64") == 0
    assert count_classes(np.array([-1, 3]), "int64") == 4
