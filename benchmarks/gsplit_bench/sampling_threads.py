"""Sampling on the host in several threads: the loader with ``sampling_threads``, and presampling with ``threads``.

    python -m gsplit_bench sampling-threads --out benchmarks/results/DATE-sampling-threads

One rank draws an epoch of a real graph, without features and without training; numbers of threads are taken in turn,
repeatedly. CPU seconds per edge can be trusted also on a busy machine; wall time needs a free core per thread.

The serial share is the CPU time that cannot be spread over threads, over all: that of the thread which takes the
batches, and that of the interpreter, of which one thread at a time runs. The latter is the CPU time of a step of one
target and one edge per hop: the same calls, with next to nothing in their kernels. It is too high rather than too low,
because some of these calls release the interpreter lock.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

import gsplit
from gsplit.partitioning.presample import Workload, presample
from gsplit.store.reader import Store
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.real_graphs import real_store

__all__ = ["main"]

FANOUT = [15, 10, 5]
BATCH = 1024
TINY_STEPS = 400


def draw_epoch(store: Store, threads: int, fanout: list[int], batch_size: int, steps: int) -> dict[str, Any]:
    """Draw some steps with a loader: edges, and wall and CPU seconds, also of every thread."""
    loader = gsplit.NeighborLoader(
        store, fanout, "train", batch_size=batch_size, features=None, prefetch=2 * threads, sampling_threads=threads
    )
    load = loader._load
    of_threads: dict[str, float] = {}

    def timed(epoch: int, step: int) -> Any:
        start = time.thread_time()
        batch = load(epoch, step)
        name = threading.current_thread().name
        of_threads[name] = of_threads.get(name, 0.0) + time.thread_time() - start
        return batch

    edges = 0
    with patch.object(loader, "_load", timed):
        loader.load_state_dict({"epoch": 0, "step": max(0, len(loader) - steps)})
        start, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        for batch in loader:
            edges += sum(block.num_edges for block in batch.blocks)
        seconds = time.perf_counter() - start
    return {
        "threads": threads,
        "steps": min(steps, len(loader)),
        "edges": edges,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "main_cpu_seconds": time.thread_time() - own,
        "thread_cpu_seconds": list(of_threads.values()),
    }


def count_epoch(workload: Workload, threads: int) -> dict[str, Any]:
    """Presample an epoch: edges, and wall and CPU seconds, also of the thread that waits for the others."""
    start, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    counts = presample(workload, epochs=1, threads=threads)
    return {
        "threads": threads,
        "edges": int(counts.edges_drawn.sum()),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "main_cpu_seconds": time.thread_time() - own,
    }


def _row(found: list[dict[str, Any]], serial_s: float) -> list[str]:
    """A line of the table: medians over the rounds. ``serial_s``: serial CPU seconds of a round, from elsewhere."""
    edges = found[0]["edges"]
    cpu_s = median(each["cpu_seconds"] for each in found)
    main_s = median(each["main_cpu_seconds"] for each in found)
    of_threads = [max(each.get("thread_cpu_seconds", [0.0])) for each in found]
    return [
        str(found[0]["threads"]),
        f"{edges / median(each['seconds'] for each in found) / 1e6:.1f}",
        f"{1e9 * cpu_s / edges:.0f}",
        f"{median(of_threads):.2f}" if any(of_threads) else "-",
        f"{cpu_s:.2f}",
        f"{(main_s + serial_s) / cpu_s:.1%}",
    ]


def _table(title: str, records: list[dict[str, Any]], serial_s: float) -> list[str]:
    heads = ["threads", "M edges/s, wall", "CPU ns per edge", "CPU s of the busiest thread", "CPU s", "serial share"]
    lines = [f"\n{title}\n", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for threads in sorted({each["threads"] for each in records}):
        found = [each for each in records if each["threads"] == threads]
        lines.append("| " + " | ".join(_row(found, serial_s)) + " |")
    return lines


def _measure(store: Store, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    draw_epoch(store, 2, FANOUT, BATCH, 4)  # compiles
    ones = [1] * len(FANOUT)
    workload = Workload.of_store(store, "train", FANOUT, BATCH)
    tiny = replace(workload, targets=workload.targets[:TINY_STEPS], num_neighbors=ones, batch_size=1)
    count_epoch(workload, 2)
    tiny_steps = [draw_epoch(store, 1, ones, 1, TINY_STEPS) for _ in range(options.rounds)]
    tiny_counts = [count_epoch(tiny, 1) for _ in range(options.rounds)]
    python_s = median(each["thread_cpu_seconds"][0] for each in tiny_steps) / TINY_STEPS
    counting_s = median(each["cpu_seconds"] - each["main_cpu_seconds"] for each in tiny_counts) / TINY_STEPS
    drawn, counted = [], []
    for _ in range(options.rounds):
        for threads in options.threads:
            drawn.append(draw_epoch(store, threads, FANOUT, BATCH, 1 << 30))
            counted.append(count_epoch(workload, threads))
    steps = drawn[0]["steps"]
    size = f"{steps} steps of {drawn[0]['edges'] / steps:,.0f} edges"
    of_one = f"{1e3 * python_s:.2f} ms of CPU in the loader, {1e3 * counting_s:.2f} ms in presampling"
    lines = [
        f"\n## {options.graph}, {store.num_vertices:,} vertices, {store.num_edges:,} edges",
        f"Fanouts {FANOUT}, batches of {BATCH}, {size}; medians of {options.rounds}.",
        f"A step of one target takes {of_one}.",
        *_table("The loader:", drawn, steps * python_s),
        *_table("Presampling, which also counts:", counted, steps * counting_s),
    ]
    records = {"tiny_steps": tiny_steps, "tiny_counts": tiny_counts, "loader": drawn, "presampling": counted}
    return records, lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="ogbn_arxiv_nofeat", help="a graph of GSPLIT_TEST_DATA, with targets train")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write .json and .md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    with TemporaryDirectory() as folder:
        records, lines = _measure(real_store(options.graph, Path(folder)), options)
    machine = describe_machine()
    loads = [load_before, os.getloadavg()[0]]
    about = {
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": machine,
        "load_average": loads,
        "settings": {"graph": options.graph, "threads": options.threads, "rounds": options.rounds},
    }
    where = f"{machine['cores']} cores, load average {loads[0]:.1f} before and {loads[1]:.1f} after"
    lines = ["# Sampling on the host in threads", f"Commit {about['commit']}, {where}.", *lines]
    print("\n".join(lines))
    if options.out is not None:
        options.out.with_suffix(".json").write_text(json.dumps(about | records, indent=1) + "\n")
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
