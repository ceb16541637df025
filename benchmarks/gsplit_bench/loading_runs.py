"""Real ranks that sample and load the same mini-batches from memory, from disk and from throttled sources."""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.cache import CachedRows, cached_order, expected_hit_rate, hotness_of, stored_row_bytes
from gsplit.features.protocol import HostSource, RowsRead
from gsplit.features.sources import MappedRows, read_to_device, torch_dtype
from gsplit.loading.loader import NeighborLoader
from gsplit.loading.tiers import open_features
from gsplit.minibatch.local_graph import LocalGraph
from gsplit.sampling.minibatch import StepKey
from gsplit.store.reader import open_store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.machine import forget_features
from gsplit_bench.ranks import run_ranks

__all__ = ["SOURCES", "LoadingRun", "ThrottledRows", "run_loading"]


class ThrottledRows:
    """See ``protocol.HostSource``. What ``source`` reads faster than ``bytes_per_s`` is waited for."""

    def __init__(self, source: HostSource, bytes_per_s: float) -> None:
        self._source, self._bytes_per_s = source, bytes_per_s
        self.row_shape, self.dtype = source.row_shape, source.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return read_to_device(self, ids, out)

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        start = time.perf_counter()
        read = self._source.place(ids, places, out)
        left = read.num_bytes / self._bytes_per_s - (time.perf_counter() - start)
        if left > 0:
            time.sleep(left)
        return read


SOURCES = ("memory", "map", "warm", "cold", "bus", "network", "indexed")
_COLD = ("cold", "indexed")
_RATES = {"bus": 12e9, "network": 1e9}
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class LoadingRun:
    """What real ranks are to do. ``cache_share``: bytes of every rank's cache, of those of all features."""

    store: str
    targets: str | None
    num_neighbors: list[int]
    batch_size: int
    steps: int
    seed: int
    source: str
    strategy: str
    cache_share: float


def run_loading(runs: Sequence[LoadingRun], ranks: int) -> list[dict[str, Any]]:
    """Load mini-batches on real ranks, one run after the other: rows, bytes, hits of all, seconds of the slowest."""
    for run in runs:
        if run.source not in SOURCES:
            raise InputError(explain("--source", f"one of {', '.join(SOURCES)}", run.source, "choose one of these"))
    found = run_ranks(_load_all, ranks, list(runs), timeout_s=_TIMEOUT_S) if runs else []
    return [{"ranks": ranks, **asdict(run), **_sum_up([rank[i] for rank in found])} for i, run in enumerate(runs)]


def _sum_up(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One run over all ranks."""
    names = ("rows_loaded", "cache_hits", "bytes_loaded", "rows_received", "edges")
    totals = {name: sum(rank["counts"].get(name, 0) for rank in found) for name in names}
    rows = max(1, totals["rows_loaded"])
    return {
        **totals,
        "hits_measured": totals["cache_hits"] / rows,
        "hits_predicted": sum(rank["hits_predicted"] * rank["counts"]["rows_loaded"] for rank in found) / rows,
        "seconds": max(rank["seconds"] for rank in found),
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in found),
        "load_seconds": max(rank["spans"]["load_features"] for rank in found),
        "spans_by_rank": [rank["spans"] for rank in found],
    }


def _load_all(mesh: Mesh, runs: list[LoadingRun]) -> list[dict[str, Any]]:
    return [load_steps(mesh, run) for run in runs]


def load_steps(mesh: Mesh, run: LoadingRun) -> dict[str, Any]:
    """One rank: the mini-batches of an epoch's first steps, after one that is not measured."""
    gc.collect()  # maps of the run before
    store = open_store(Path(run.store))
    loader = NeighborLoader(
        store,
        run.num_neighbors,
        run.targets,
        batch_size=run.batch_size,
        strategy=run.strategy,
        mesh=mesh,
        seed=run.seed,
        edge_attr=None,
        edge_weight=None,
        features_on_disk=True,  # so that owners read rows and exchange them; the source is replaced below
    )
    local = loader._graph.owned if loader.plan.strategy.reads_own_rows else loader._graph.sampled
    names = loader.arrays.stored_features
    cache_bytes = int(run.cache_share * store.num_vertices * stored_row_bytes(store, names))
    maker = loader._makers[0]
    maker.step_loader._features = _source(local, run.store, names, run.source, cache_bytes)
    seconds = cpu_seconds = 0.0
    counts: dict[str, int] = {}
    spans: dict[str, float] = {}
    for step in range(-1, run.steps):
        if run.source in _COLD:
            forget_features(store, names)
        telemetry = StepTelemetry(0, max(step, 0))
        mesh.control.gather_text(Call("start together", step + 1, long_wait=True), "")  # all ranks: before every step
        start, cpu = time.perf_counter(), time.process_time()
        maker.step_loader.load(loader._sample(maker.strategy, StepKey(run.seed, 0, max(step, 0)), telemetry))
        if step < 0:
            continue
        seconds, cpu_seconds = seconds + time.perf_counter() - start, cpu_seconds + time.process_time() - cpu
        counts = {name: counts.get(name, 0) + count for name, count in telemetry.counts.items()}
        spans = {name: spans.get(name, 0.0) + span for name, span in telemetry.seconds.items()}
    order = cached_order(store, local.first, local.stop, names, cache_bytes)
    predicted = expected_hit_rate(hotness_of(store, local.first, local.stop), order)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "counts": counts,
        "spans": spans,
        "hits_predicted": predicted,
    }


def _source(local: LocalGraph, path: str, names: Sequence[str], kind: str, cache_bytes: int) -> HostSource:
    """The rows of a rank's vertices from one kind of source, with a cache above it."""
    store = local.store
    if kind in ("map", "warm", "cold"):
        return open_features(local, names, cache=cache_bytes, on_disk=kind != "map")
    (name,), low = names, store.vertex_range[0]
    if kind == "indexed":
        return _IndexedRows(Path(path) / f"features/{name}.npy")
    held = np.array(store.stored_array(f"features/{name}")[local.first - low : local.stop - low])
    dtype = torch_dtype(store.dtype(f"features/{name}"))
    source: HostSource = MappedRows(name, held, dtype, local.first)
    if kind in _RATES:
        source = ThrottledRows(source, _RATES[kind])
    if not cache_bytes:
        return source
    return CachedRows(source, cached_order(store, local.first, local.stop, names, cache_bytes))


class _IndexedRows:
    """See ``protocol.HostSource``: rows of a whole file by torch's indexing, from a map that lives for one read."""

    def __init__(self, path: Path) -> None:
        self._path, rows = path, np.load(path, mmap_mode="r")
        self.row_shape, self.dtype = tuple(rows.shape[1:]), torch_dtype(str(rows.dtype))

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        return self.place(ids.numpy(), None, out)

    def place(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | None, out: Tensor) -> RowsRead:
        found = torch.from_numpy(np.load(self._path, mmap_mode="c"))[torch.from_numpy(ids)]
        out[slice(None) if places is None else torch.from_numpy(places)] = found
        return RowsRead(ids.size, found.nbytes)
