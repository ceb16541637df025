"""Several processes import one store, against one process: seconds, CPU seconds, memory, and whether bytes are equal.

The edges of the generator as a folder of Parquet files, in the order in which they are drawn and sorted by
destination. Every import is the real command in processes of its own; the order is one process, N processes, and again.
A process's memory is the largest RssAnon seen every 10 ms, its CPU seconds are what the system counted. The shards are
compared with those that ``write_shard`` cuts from the store of one process: every array file byte for byte, and the
manifests but for times.
"""

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.sharded_import import shard_paths
from gsplit_bench.import_speed import EDGES_PER_VERTEX, environment

__all__ = ["main"]

SCHEMA = pa.schema([("src", pa.int64()), ("dst", pa.int64())])
FILES, GROUP = 16, 1 << 20


def write_unsorted(folder: Path, num_edges: int) -> None:
    """The generator's edges as they are drawn, over several files."""
    folder.mkdir()
    graph = PlantedGraph(num_edges // EDGES_PER_VERTEX, num_edges, num_features=0)
    writers = [pq.ParquetWriter(folder / f"part-{file:02}.parquet", SCHEMA) for file in range(FILES)]
    for number, chunk in enumerate(synthetic_source(graph).edges()):
        writers[number % FILES].write_table(pa.table({"src": chunk.src, "dst": chunk.dst}, schema=SCHEMA))
    for writer in writers:
        writer.close()


def write_sorted(folder: Path, store: Store) -> None:
    """The edges of a store, which are ordered by destination, over several files."""
    folder.mkdir()
    graph = store.graph
    for file in range(FILES):
        first, stop = (store.num_vertices * at // FILES for at in (file, file + 1))
        part = graph.restrict(first, stop)
        with pq.ParquetWriter(folder / f"part-{file:02}.parquet", SCHEMA) as writer:
            dst = np.repeat(np.arange(first, stop), np.diff(part.indptr))
            src = part.indices[part.indptr[0] : part.indptr[-1]]
            for row in range(0, dst.size, GROUP):
                rows = slice(row, row + GROUP)
                columns = {"src": np.asarray(src[rows], np.int64), "dst": dst[rows]}
                writer.write_table(pa.table(columns, schema=SCHEMA))


def run_together(commands: list[list[str]]) -> tuple[float, list[dict[str, float]]]:
    """Run commands at the same time; return the wall seconds of all and what each took."""
    start = time.perf_counter()
    found: list[dict[str, float]] = [{} for _ in commands]

    def watch(number: int, words: list[str]) -> None:
        command = [sys.executable, "-c", "from gsplit.cli.main import main; main()", *words, "--json"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        status, peak = Path(f"/proc/{process.pid}/status"), 0
        done, code, usage = os.wait4(process.pid, os.WNOHANG)
        while not done:
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.01)
            done, code, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = code
        if code:
            raise SystemExit(f"{' '.join(words)} ended with {code}")
        found[number] = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_anonymous_bytes": peak,
        }

    threads = [threading.Thread(target=watch, args=pair) for pair in enumerate(commands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(found):
        raise SystemExit("an import failed")
    return time.perf_counter() - start, found


def measure(edges: Path, out: Path, hosts: int, *, in_turn: bool = False) -> dict[str, Any]:
    """One import by one process (``hosts`` 0) or by several, at the same time or one after the other."""
    for left in [out, *shard_paths(out, max(1, hosts))]:
        shutil.rmtree(left, ignore_errors=True)
    words = ["import", "tables", str(edges), str(out)]
    commands = [[*words, "--host", str(host), "--hosts", str(hosts)] for host in range(hosts)] or [words]
    load = os.getloadavg()[0]
    groups = [run_together([command]) for command in commands] if in_turn else [run_together(commands)]
    seconds, processes = sum(wall for wall, _ in groups), [process for _, found in groups for process in found]
    return {"hosts": hosts, "in_turn": in_turn, "seconds": seconds, "load_before": load, "processes": processes}


def measure_start(work: Path) -> list[float]:
    """CPU seconds of an import of two edges: Python, imports, kernels from their cache."""
    tiny = work / "tiny.parquet"
    pq.write_table(pa.table({"src": [0, 1], "dst": [1, 0]}, schema=SCHEMA), tiny)
    runs = [measure(tiny, work / "tiny.gsplit", 0) for _ in range(3)]
    return [run["processes"][0]["cpu_seconds"] for run in runs]


def are_equal(whole: Store, shards: list[Path], work: Path) -> bool:
    """Whether shards are those cut from a store."""
    for path in shards:
        made = open_store(path)
        cut = write_shard(whole, work / "cut.gsplit", *made.vertex_range, overwrite=True)
        said = [store.manifest.model_dump() for store in (made, cut)]
        for manifest in said:
            for step in manifest["provenance"]:
                step["time"] = step["settings"].pop("edges", None) and None
        files = [str(file.relative_to(path)) for file in path.rglob("*.npy")]
        _, different, missing = filecmp.cmpfiles(path, cut.path, files, shallow=False)
        if said[0] != said[1] or different or missing or len(files) != len(list(cut.path.rglob("*.npy"))):
            return False
    return True


def report(result: dict[str, Any]) -> str:
    """The table, from the records."""
    hosts, start = result["hosts"], statistics.median(result["start_cpu_seconds"])
    text = f"""# Import by several processes, {result["date"]}

Command: `{result["command"]}`. Commit {result["commit"]}, Python {result["python"]}; {result["cpu"]}, {result["cores"]} cores, shared with other work
while this ran (load before each run in the records), so wall seconds are noisy: compare CPU seconds.

{result["num_edges"]:,} edges, {result["num_vertices"]:,} vertices, {FILES} Parquet files with row groups of {GROUP:,}, dense ids, no vertex table. {hosts} processes at the same
time on {result["cores"]} cores, or one after the other. Means of the runs listed. CPU seconds include the start of Python, {start:.1f} s in this load (an import of two edges); "slowest" is the process with the most,
what would be waited for on {hosts} hosts; net leaves the start out. {result.get("note", "")}

| input | processes | wall s | CPU s of all | CPU s of the slowest | speed-up on {hosts} hosts by CPU s | net | peak anonymous MB per process | bytes equal |
|---|---|---|---|---|---|---|---|---|
"""
    for order in ("unsorted", "sorted"):
        runs = result[order]
        slowest = {}
        for count, in_turn in ((0, False), (hosts, False), (hosts, True)):
            chosen = [run for run in runs if run["hosts"] == count and run.get("in_turn", False) == in_turn]
            if not chosen:
                continue
            total = statistics.mean(sum(p["cpu_seconds"] for p in run["processes"]) for run in chosen)
            slowest[count] = statistics.mean(max(p["cpu_seconds"] for p in run["processes"]) for run in chosen)
            peak = max(p["peak_anonymous_bytes"] for run in chosen for p in run["processes"]) / 1e6
            wall = ", ".join(f"{run['seconds']:.1f}" for run in chosen)
            speed = f"{slowest[0] / slowest[count]:.2f}" if count else "1"
            net = f"{(slowest[0] - start) / (slowest[count] - start):.2f}" if count else "1"
            equal = ("yes" if result["equal"][order] else "NO") if count and not in_turn else "-"
            text += f"| {order} | {count or 1}{', in turn' if in_turn else ''} | {wall} | {total:.1f} | {slowest[count]:.1f} | {speed} | {net} | {peak:.0f} | {equal} |\n"
    return text


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edges", type=float, default=1e8)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--work", type=Path, required=True, help="about 60 bytes per edge; its contents are left there")
    parser.add_argument("--out", type=Path, required=True, help="where to write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    work, size, hosts = options.work, int(options.edges), options.hosts
    work.mkdir(parents=True, exist_ok=True)
    out, whole = work / "g.gsplit", work / "whole.gsplit"
    if not whole.exists():
        write_unsorted(work / "unsorted", size)
        run_together([["import", "tables", str(work / "unsorted"), str(whole)]])
        write_sorted(work / "sorted", open_store(whole))
    result: dict[str, Any] = environment() | {
        "command": f"python -m gsplit_bench sharded-import --edges {size} --hosts {hosts}",
        "hosts": hosts,
        "repeats": options.repeats,
        "num_edges": open_store(whole).num_edges,
        "num_vertices": open_store(whole).num_vertices,
        "unsorted": [],
        "sorted": [],
        "start_cpu_seconds": measure_start(work),
        "equal": {},
    }
    for repeat in range(options.repeats):
        for order in ("unsorted", "sorted"):
            for count, in_turn in ((0, False), (hosts, True), (hosts, False)):
                run = measure(work / order, out, count, in_turn=in_turn)
                result[order].append(run)
                print(order, count, round(run["seconds"], 1), flush=True)
            if not repeat:
                result["equal"][order] = are_equal(open_store(whole), shard_paths(out, hosts), work)
        options.out.with_suffix(".json").write_text(json.dumps(result | {"repeats": repeat + 1}, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(report(result | {"repeats": repeat + 1}))
