"""How fast, in how much memory: Parquet to store at several sizes, opening, and a billion generated edges.

Every import is the real command in a process of its own. Its anonymous memory (RssAnon) is read from /proc every
10 ms, the free space of the disk beside it; time is the wall time of the whole command. Sizes are interleaved and
repeated, because these machines are noisy.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
EDGES_PER_VERTEX = 20
OPEN = """
import json, os, sys, time
import gsplit, gsplit.store.reader
def rss():
    with open("/proc/self/status") as f:
        return {l.split(":")[0]: int(l.split()[1]) * 1024 for l in f if l.startswith(("VmRSS", "RssAnon"))}
before = rss(); start = time.perf_counter()
store = gsplit.open(sys.argv[1])
seconds = time.perf_counter() - start; after = rss()
print(json.dumps({"seconds": seconds, "rss_bytes": after["VmRSS"] - before["VmRSS"],
                  "anonymous_bytes": after["RssAnon"] - before["RssAnon"]}))
"""


def write_parquet(path: Path, num_edges: int) -> None:
    """The generator's edges as a Parquet file of 1 M rows per row group."""
    graph = PlantedGraph(num_edges // EDGES_PER_VERTEX, num_edges, num_features=0)
    schema = pa.schema([("src", pa.int64()), ("dst", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in synthetic_source(graph).edges():
            writer.write_table(pa.table({"src": chunk.src, "dst": chunk.dst}, schema=schema))


def run_import(arguments: list[str], out: Path) -> dict[str, Any]:
    """Run one import command to the end and watch it."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    free = shutil.disk_usage(out.parent).free
    command = [sys.executable, "-c", "from gsplit.cli.main import main; main()", "import", *arguments, "--json"]
    peak, disk = 0, 0
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            try:
                lines = status.read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                break
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))])
            disk = max(disk, free - shutil.disk_usage(out.parent).free)
            time.sleep(0.01)
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"import failed: {document}")
    edges = document["num_edges"]
    return {
        "edges": edges,
        "vertices": document["num_vertices"],
        "seconds": seconds,
        "edges_per_s": edges / seconds,
        "ns_per_edge": 1e9 * seconds / edges,
        "peak_anonymous_bytes": peak,
        "peak_disk_bytes": disk,
        "store_bytes": document["num_bytes"],
    }


def measure_open(store: Path) -> dict[str, Any]:
    """Open in a new process; memory beyond what the imports took."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(store)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def median(records: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(record[key] for record in records))


def report(result: dict[str, Any]) -> str:
    """The tables, from the records."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    fixed = median(result["fixed"], "seconds")
    text = f"""# Import speed, {result["date"]}

Command: `{result["command"]}`. Commit {result["commit"]}, Python {result["python"]}, {versions}; {result["cpu"]},
{result["cores"]} cores. Raw records in the `.json` beside this file.

Parquet (int64 ids, no vertex table) to store. Median of {len(result["fixed"])} interleaved repeats (smallest .. largest). Time is the
wall time of the whole command, start of Python included; memory is the largest RssAnon of the process. The same
command on a table of {2 * EDGES_PER_VERTEX} edges takes {fixed:.2f} s (Python, imports, loading compiled kernels); the net cost per edge leaves
that out.

| edges | vertices | seconds | M edges/s | ns per edge | net ns per edge | peak anonymous MB | peak disk MB | store MB |
|---|---|---|---|---|---|---|---|---|
"""
    net = []
    for size, records in result["parquet"].items():
        rates = sorted(r["edges_per_s"] / 1e6 for r in records)
        seconds = median(records, "seconds")
        net.append(1e9 * (seconds - fixed) / int(size))
        text += (
            f"| {int(size):,} | {records[0]['vertices']:,} | {seconds:.1f} "
            f"| {statistics.median(rates):.2f} ({rates[0]:.2f} .. {rates[-1]:.2f}) "
            f"| {1e9 * seconds / int(size):.0f} | {net[-1]:.0f} "
            f"| {max(r['peak_anonymous_bytes'] for r in records) / 1e6:.0f} "
            f"| {max(r['peak_disk_bytes'] for r in records) / 1e6:.0f} | {records[0]['store_bytes'] / 1e6:.0f} |\n"
        )
    opened = result["open"]
    sizes = [int(size) for size in result["parquet"]]
    seconds_of = [median(records, "seconds") for records in result["parquet"].values()]
    slopes = [
        f"{1e9 * (t1 - t0) / (n1 - n0):.0f} ns from {n0:,} to {n1:,}"
        for (n0, t0), (n1, t1) in pairwise(zip(sizes, seconds_of, strict=True))
    ]
    text += f"""
Net cost per edge over these sizes: {min(net):.0f} to {max(net):.0f} ns, {100 * (max(net) / min(net) - 1):.0f}% apart. Cost of each further edge: {", ".join(slopes)}.

Opening the largest of these stores in {len(opened)} new processes: median {1e3 * median(opened, "seconds"):.1f} ms (largest
{1e3 * max(r["seconds"] for r in opened):.1f}), resident memory up by at most {max(r["rss_bytes"] for r in opened) / 1e6:.1f} MB.
"""
    big = result["billion"]
    if big:
        text += f"""
From the generator, one run of `{big["arguments"]}`:
{big["edges"]:,} edges and {big["vertices"]:,} vertices in {big["seconds"]:.0f} s ({big["edges_per_s"] / 1e6:.2f} M edges/s), peak
anonymous memory {big["peak_anonymous_bytes"] / 1e6:.0f} MB, peak disk {big["peak_disk_bytes"] / 1e9:.1f} GB, store {big["store_bytes"] / 1e9:.1f} GB;
opened in {1e3 * big["open"]["seconds"]:.1f} ms; `gsplit inspect --verify` took {big["verify_seconds"]:.0f} s.
"""
    return text


def environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("gsplit", "numpy", "numba", "pyarrow")},
        "cpu": cpu,
        "cores": os.cpu_count(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edges", type=float, nargs="+", default=[1e7, 3e7, 1e8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--billion", action="store_true", help="also one run of 1e9 generated edges (30 GB of disk)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gsplit-import-speed"))
    parser.add_argument("--out", type=Path, required=True, help="where to write .json and .md")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    out = options.work / "g.gsplit"
    sizes = [int(e) for e in options.edges]
    for size in sizes:
        if not (options.work / f"{size}.parquet").exists():
            write_parquet(options.work / f"{size}.parquet", size)
    tiny = options.work / "tiny.parquet"
    write_parquet(tiny, 2 * EDGES_PER_VERTEX)
    fixed = []
    records: dict[str, list[dict[str, Any]]] = {str(size): [] for size in sizes}
    run_import(["tables", str(options.work / f"{sizes[0]}.parquet"), str(out)], out)  # compile, warm up
    for _ in range(options.repeats):
        fixed.append(run_import(["tables", str(tiny), str(out)], out))
        for size in sizes:
            records[str(size)].append(run_import(["tables", str(options.work / f"{size}.parquet"), str(out)], out))
            print(size, {k: round(v, 2) for k, v in records[str(size)][-1].items()}, flush=True)
    result = environment() | {
        "command": " ".join(["python -m gsplit_bench import-speed", *arguments]),
        "fixed": fixed,
        "parquet": records,
        "open": [measure_open(out) for _ in range(5)],
        "billion": None,
    }
    if options.billion:
        arguments = ["synthetic", "--vertices", "50000000", "--edges", "1000000000", "--features", "0"]
        big = run_import([*arguments, str(out)], out)
        start = time.perf_counter()
        inspect = [
            sys.executable,
            "-c",
            "from gsplit.cli.main import main; main()",
            "inspect",
            str(out),
            "--verify",
            "--json",
        ]
        subprocess.run(inspect, check=True, capture_output=True)
        verify_seconds = time.perf_counter() - start
        result["billion"] = big | {
            "arguments": "gsplit import " + " ".join(arguments),
            "open": measure_open(out),
            "verify_seconds": verify_seconds,
        }
    shutil.rmtree(out)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report(result))
    print(report(result))
