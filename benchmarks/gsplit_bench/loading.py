"""Loading: what ranks load, counted for many of them without ranks, and how long real ranks take.

The counts say what split parallelism saves. The sampler and the split are those of training; nothing is loaded and
nothing sent. One pass over the mini-batches counts, for every vertex, how often its row is read and how often it is
sent between ranks at layer 0, so that any cache and any set of copies can be judged afterwards. Real ranks
(``loading_runs``) make the same mini-batches from memory, from disk and from throttled sources.
``python -m gsplit_bench loading-record OUT NAME=FILE.json ...`` puts documents of several graphs together.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import SoloComm
from gsplit.features.copies import choose_prefixes
from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership, own_parts
from gsplit.keys.kernels_numba import mix_array
from gsplit.minibatch.split import split_in_one_process
from gsplit.partitioning.presample import Workload
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import StepKey, sample_minibatch
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.targets import LocalTargets
from gsplit.store.reader import Store
from gsplit_bench.loading_runs import LoadingRun, run_loading
from gsplit_bench.machine import current_commit

__all__ = [
    "BUDGETS",
    "COPY_BUDGETS",
    "STRATEGIES",
    "LoadingCounts",
    "Orders",
    "copies_table",
    "count_data",
    "count_loading",
    "count_split",
    "hits_table",
    "received_with_copies",
    "record",
    "redundancy_row",
    "time_loading",
]

_NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class LoadingCounts:
    """Over all ranks and ``num_batches`` mini-batches.

    ``loaded``: for every vertex, how often its row was read. ``received``: how often a rank received it at layer 0.
    ``edges``: edges computed, of all layers.
    """

    num_batches: int
    edges: int
    loaded: npt.NDArray[np.int64]
    received: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        """Input rows read."""
        return int(self.loaded.sum())

    @property
    def rows_received(self) -> int:
        """Input rows that cross between ranks."""
        return int(self.received.sum())


def count_split(
    workload: Workload, ownership: Ownership, epoch: int = 0, *, steps: int | None = None, progress: Progress = silent
) -> LoadingCounts:
    """Split parallelism: every rank samples and loads what it owns. ``steps``: of the epoch, all unless given."""
    graph, original = workload.graph, workload.original_ids
    samplers = [
        HostNeighborSampler(graph.restrict(first, stop), original[first:stop] if original.size else _NO_IDS)
        for first, stop in map(ownership.range_of, range(ownership.num_ranks))
    ]
    counts, edges, steps = _Counter(workload), 0, steps or workload.steps_per_epoch
    for key, targets in _steps(workload, epoch, steps, 0, 1):
        for split in split_in_one_process(samplers, targets, workload.num_neighbors, key, ownership):
            edges += sum(layer.block.num_edges for layer in split.layers)
            counts.add(split.input_ids, split.layers[0].foreign_ids)
        progress(f"split, {ownership.num_ranks} ranks", key.step + 1, steps)
    return counts.finish(steps, edges)


def count_data(
    workload: Workload, num_ranks: int, epoch: int = 0, *, steps: int | None = None, progress: Progress = silent
) -> LoadingCounts:
    """Data parallelism: every rank takes a strided cut of the targets and its whole neighbourhood.

    On one rank this is the mini-batch itself.
    """
    sampler = HostNeighborSampler(workload.graph, workload.original_ids)
    counts, edges, nothing = _Counter(workload), 0, torch.empty(0, dtype=torch.int64)
    steps = steps or workload.steps_per_epoch
    for rank in range(num_ranks):
        for key, targets in _steps(workload, epoch, steps, rank, num_ranks):
            sample = sample_minibatch(sampler, targets, workload.num_neighbors, key)
            edges += sum(block.num_edges for block in sample.blocks)
            counts.add(sample.input_ids, nothing)
        progress(f"data, {num_ranks} ranks", rank + 1, num_ranks)
    return counts.finish(steps, edges)


def _steps(workload: Workload, epoch: int, steps: int, rank: int, num_ranks: int) -> Iterator[tuple[StepKey, Tensor]]:
    """Every step's key, and the targets in a rank's strided cut of it."""
    targets, size, seed = workload.targets, workload.batch_size, workload.seed
    local = LocalTargets(np.arange(targets.size), targets, targets.size)
    for step in range(steps):
        yield (
            StepKey(seed, epoch, step),
            local.for_step(seed, epoch, step, size, shuffle=True, stride=(rank, num_ranks)),
        )


class _Counter:
    """Ids come once per rank and step, so they are added by indexing."""

    def __init__(self, workload: Workload) -> None:
        self._loaded, self._received = (np.zeros(workload.graph.num_vertices, np.int64) for _ in range(2))

    def add(self, loaded_ids: Tensor, received_ids: Tensor) -> None:
        self._loaded[loaded_ids.numpy()] += 1
        self._received[received_ids.numpy()] += 1

    def finish(self, num_batches: int, edges: int) -> LoadingCounts:
        return LoadingCounts(num_batches, edges, self._loaded, self._received)


BUDGETS = (0.05, 0.10, 0.25, 0.50)
COPY_BUDGETS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.25)
_PIECE = 1 << 24
_RANDOM = 12


def redundancy_row(mini: LoadingCounts, data: LoadingCounts, split: LoadingCounts) -> dict[str, Any]:
    """One line of the paper's Table 1."""
    return {
        "num_batches": mini.num_batches,
        "edges": {"mini": mini.edges, "data": data.edges, "split": split.edges},
        "rows": {"mini": mini.rows, "data": data.rows, "split": split.rows},
        "edges_data_to_mini": data.edges / mini.edges,
        "edges_split_to_mini": split.edges / mini.edges,
        "rows_data_to_mini": data.rows / mini.rows,
        "rows_split_to_mini": split.rows / mini.rows,
        "rows_received": split.rows_received,
    }


@dataclass(frozen=True)
class Orders:
    """Ways to fill a cache. ``keys[name]``: a number for every vertex, those with the smallest are cached first."""

    keys: dict[str, Ids]

    @classmethod
    def of_store(cls, store: Store) -> "Orders":
        """By hotness, by degree, at random, and by original id."""
        hotness = np.asarray(store.stored_array("hotness"))
        original = np.asarray(store.original_ids())
        random = (mix_array(_RANDOM, original) >> np.uint64(1)).astype(np.int64)
        return cls({"hot": -hotness, "degree": -_out_degrees(store.graph), "random": random, "id": original})

    def cached(self, name: str, first: int, stop: int, rows: int) -> Ids:
        """The vertices of a range that are cached: the first so many of an order."""
        return first + np.argsort(self.keys[name][first:stop], kind="stable")[:rows]


def _out_degrees(graph: Graph) -> Ids:
    """How often each vertex is a source."""
    degrees = np.zeros(graph.num_vertices, np.int64)
    for start in range(0, graph.indices.size, _PIECE):
        degrees += np.bincount(graph.indices[start : start + _PIECE], minlength=graph.num_vertices)
    return degrees


def hits_table(orders: Orders, hotness: Ids, ownership: Ownership, split: LoadingCounts) -> list[dict[str, Any]]:
    """Measured and predicted share of reads that hit, per rank and over all, by order and budget."""
    rows: list[dict[str, Any]] = []
    ranges = [ownership.range_of(rank) for rank in range(ownership.num_ranks)]
    for name in orders.keys:
        for budget in BUDGETS:
            cached = [orders.cached(name, low, high, int(budget * (high - low))) for low, high in ranges]
            measured = [_share(split.loaded, ids, *span) for ids, span in zip(cached, ranges, strict=True)]
            predicted = [_share(hotness, ids, *span) for ids, span in zip(cached, ranges, strict=True)]
            everything = np.concatenate(cached)
            rows.append(
                {
                    "ranks": ownership.num_ranks,
                    "order": name,
                    "budget": budget,
                    "measured": _share(split.loaded, everything, 0, hotness.size),
                    "predicted": _share(hotness, everything, 0, hotness.size),
                    "measured_by_rank": measured,
                    "predicted_by_rank": predicted,
                    "most_off": max(abs(m - p) for m, p in zip(measured, predicted, strict=True)),
                }
            )
    return rows


def _share(counts: Ids, ids: Ids, low: int, high: int) -> float:
    return float(counts[ids].sum() / max(1, counts[low:high].sum()))


def received_with_copies(
    hotness: Ids, part_boundaries: list[int], ownership: Ownership, split: LoadingCounts, capacity: int
) -> tuple[int, int]:
    """Rows that a rank holds copies of, at most, and rows that still cross, if so many may be copied."""
    prefixes = choose_prefixes(hotness, 0, part_boundaries, ownership, capacity, SoloComm())
    held = max(prefixes.num_held(ownership, rank) for rank in range(ownership.num_ranks))
    copied = [slice(first, first + n) for first, n in zip(prefixes.boundaries, prefixes.lengths, strict=False)]
    return held, split.rows_received - sum(int(split.received[rows].sum()) for rows in copied)


def copies_table(
    hotness: Ids, part_boundaries: list[int], ownership: Ownership, split: LoadingCounts
) -> list[dict[str, Any]]:
    """Rows exchanged at layer 0, against rows copied to every rank, as a share of the graph's."""
    table: list[dict[str, Any]] = []
    for budget in COPY_BUDGETS:
        capacity = int(budget * hotness.size)
        held, received = received_with_copies(hotness, part_boundaries, ownership, split, capacity)
        table.append(
            {
                "ranks": ownership.num_ranks,
                "budget": budget,
                "rows_per_rank": held,
                "rows_received": received,
                "of_no_copies": received / max(1, split.rows_received),
            }
        )
    return table


STRATEGIES = ("split", "data")


def count_loading(
    store: Store,
    workload: Workload,
    ranks: Sequence[int],
    *,
    steps: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The tables of a partitioned store for some numbers of ranks, over one epoch or its first ``steps``.

    The workload's seed should not be that of the partition: hits are predicted from what was presampled.
    """
    hotness, orders = np.asarray(store.stored_array("hotness")), Orders.of_store(store)
    steps = min(steps or workload.steps_per_epoch, workload.steps_per_epoch)
    mini = count_data(workload, 1, steps=steps, progress=progress)
    redundancy, hits, copies = [], [], []
    for number in ranks:
        ownership = own_parts(store.part_boundaries, number, store.part_loads)
        split = count_split(workload, ownership, steps=steps, progress=progress)
        data = count_data(workload, number, steps=steps, progress=progress)
        redundancy.append({"ranks": number, **redundancy_row(mini, data, split)})
        hits += hits_table(orders, hotness, ownership, split)
        copies += copies_table(hotness, store.part_boundaries, ownership, split)
    return {
        "num_vertices": store.num_vertices,
        "num_edges": store.num_edges,
        "num_targets": int(workload.targets.size),
        "num_parts": len(store.part_boundaries) - 1,
        "num_neighbors": workload.num_neighbors,
        "batch_size": workload.batch_size,
        "seed": workload.seed,
        "num_batches": steps,
        "redundancy": redundancy,
        "hits": hits,
        "copies": copies,
    }


def time_loading(
    store: Store,
    targets: str | None,
    workload: Workload,
    ranks: Sequence[int],
    sources: Sequence[str],
    *,
    steps: int,
    cache_share: float,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Real ranks of both strategies, from every source, on the first ``steps`` mini-batches of an epoch."""
    steps = min(steps, workload.steps_per_epoch)
    runs = [
        LoadingRun(
            store=str(store.path),
            targets=targets,
            num_neighbors=workload.num_neighbors,
            batch_size=workload.batch_size,
            steps=steps,
            seed=workload.seed,
            source=source,
            strategy=strategy,
            cache_share=cache_share,
        )
        for source in sources
        for strategy in STRATEGIES
    ]
    rows: list[dict[str, Any]] = []
    for done, number in enumerate(ranks):
        rows += run_loading(runs, number)
        progress("load on ranks", done + 1, len(ranks))
    return rows


Documents = list[tuple[str, dict[str, Any]]]


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*names: str) -> list[str]:
    return [_line(*names), _line(*("---" for _ in names))]


def _redundancy_lines(documents: Documents) -> list[str]:
    lines = _head(
        "graph", "batch", "mini-batches", "ranks", "edges", "data", "split", "rows", "data", "split", "rows exchanged"
    )
    for name, doc in documents:
        for row in doc["redundancy"]:
            cells: list[object] = [name, doc["batch_size"], doc["num_batches"], row["ranks"]]
            for what in ("edges", "rows"):
                cells.append(f"{row[what]['mini'] / 1e6:.1f} M")
                cells += [f"{row[f'{what}_{who}_to_mini']:.2f}" for who in ("data", "split")]
            lines.append(_line(*cells, f"{row['rows_received'] / row['rows']['mini']:.3f}"))
    return lines


def _hits_lines(documents: Documents, batch_size: int) -> list[str]:
    shown = [(name, doc) for name, doc in documents if doc["batch_size"] == batch_size and doc["hits"]]
    lines = _head("graph", "ranks", "order", "5 %", "10 %", "25 %", "50 %", "most off, points")
    for name, doc in shown:
        for ranks in (2, 4):
            for order in ("hot", "degree", "random", "id"):
                found = [row for row in doc["hits"] if (row["ranks"], row["order"]) == (ranks, order)]
                cells = [f"{100 * row['measured']:.1f} ({100 * row['predicted']:.1f})" for row in found]
                if cells:
                    worst = 100 * max(row["most_off"] for row in found)
                    lines.append(_line(name, ranks, order, *cells, f"{worst:.2f}"))
    return lines


def _copies_lines(documents: Documents, batch_size: int) -> list[str]:
    lines = _head("graph", "ranks", "rows exchanged per input row", "1 %", "2 %", "5 %", "10 %", "25 %")
    for name, doc in documents:
        if doc["batch_size"] != batch_size:
            continue
        for row in doc["redundancy"]:
            curve = [c for c in doc["copies"] if c["ranks"] == row["ranks"] and c["budget"] > 0]
            exchanged = row["rows_received"] / row["rows"]["mini"]
            if curve and row["ranks"] <= 8:
                lines.append(
                    _line(name, row["ranks"], f"{exchanged:.3f}", *(f"{c['of_no_copies']:.2f}" for c in curve))
                )
    return lines


def _runs_lines(documents: Documents) -> list[str]:
    lines = _head(
        "graph",
        "ranks",
        "source",
        "strategy",
        "rows",
        "read below the cache",
        "hits (predicted)",
        "s",
        "of it loading",
        "CPU s",
    )
    for name, doc in documents:
        for run in doc.get("runs", []):
            row_bytes = run["bytes_loaded"] / max(1, run["rows_loaded"])
            below = row_bytes * (run["rows_loaded"] - run["cache_hits"]) / 1e6
            hit = (
                f"{100 * run['hits_measured']:.1f} ({100 * run['hits_predicted']:.1f})"
                if run["cache_hits"]
                else "no cache"
            )
            what = (
                run["ranks"],
                run["source"],
                run["strategy"],
                f"{run['rows_loaded'] / 1e6:.2f} M",
                f"{below:.0f} MB",
            )
            times = (f"{run['seconds']:.2f}", f"{run['load_seconds']:.2f}", f"{run['cpu_seconds']:.2f}")
            lines.append(_line(name, *what, hit, *times))
    return lines


def record(arguments: Sequence[str]) -> None:
    """Write the records of several documents, and their tables as Markdown; those without rows are left out."""
    parser = argparse.ArgumentParser("loading-record")
    parser.add_argument("out", type=Path, help="path without suffix, such as benchmarks/results/DATE-loading")
    parser.add_argument("documents", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--batch-size", type=int, default=1024, help="of the partition: hits are predicted for it")
    given = parser.parse_args(arguments)
    pairs = [text.split("=", 1) for text in given.documents]
    documents: Documents = [(name, json.loads(Path(path).read_text())) for name, path in pairs]
    documents_of_all = {"commit": current_commit(), "documents": [{"graph": name, **doc} for name, doc in documents]}
    given.out.with_suffix(".json").write_text(json.dumps(documents_of_all) + "\n")
    tables = {
        "Edges computed and rows loaded": _redundancy_lines([d for d in documents if not d[1].get("runs")]),
        "Cache hits, measured (predicted), per cent": _hits_lines(
            [d for d in documents if not d[1].get("runs")], given.batch_size
        ),
        "Rows exchanged at layer 0 with copies, of those without": _copies_lines(
            [d for d in documents if not d[1].get("runs")], given.batch_size
        ),
        "Real ranks, sampling and loading": _runs_lines(documents),
    }
    parts = [["# Edges computed, rows loaded and hits of caches, counted", ""]]
    parts += [[f"## {title}", *lines, ""] for title, lines in tables.items() if len(lines) > len(_head())]
    given.out.with_suffix(".md").write_text("\n".join(line for part in parts for line in part))
