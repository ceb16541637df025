"""The whole report by one command: graphs, partitions, measurements, the planner's check, and the page made of them.

python -m gsplit_bench study --work /tmp/study                    # hours on two cores; what is there already is kept
python -m gsplit_bench study --work /tmp/study --only arxiv,debian --ranks 2

Real graphs are used where their files are found (GSPLIT_TEST_DATA); planted ones are made. DGL, and PyG with its own
sampler, take part where they are installed (benchmarks/README.md).
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gsplit_bench.real_graphs import real_store

__all__ = ["main"]

REAL = {"arxiv": "ogbn_arxiv_nofeat", "debian": "debian_packages", "ego": "ego_twitter_topology"}
PLANTED = {"planted1m": (1_000_000, 15_000_000, 0.1), "planted5m": (5_000_000, 50_000_000, 0.02)}
OURS = "split,hybrid(2),hybrid(1),data_cached,data(owner),data"


def run(module: str, *words: object) -> None:
    """Run a command, shown as it is."""
    print("python -m", module, *words, flush=True)
    subprocess.run([sys.executable, "-m", module, *map(str, words)], check=True)


def make_store(name: str, work: Path) -> Path:
    """A partitioned store; made once."""
    out, raw = work / f"{name}.gsplit", work / "raw"
    if out.exists():
        return out
    solver = "metis"
    if name in REAL:
        source = real_store(REAL[name], raw).path
    else:
        source, (vertices, edges, share) = raw / f"{name}.gsplit", PLANTED[name]
        solver = "restream" if edges > 20_000_000 else "metis"
        if not source.exists():
            raw.mkdir(parents=True, exist_ok=True)
            size = ("--vertices", vertices, "--edges", edges, "--features", 128)
            run("gsplit", "import", "synthetic", source, *size, "--symmetrise", "--target-share", share)
    run("gsplit", "partition", source, out, "--parts", 64 if name in REAL else 4, "--solver", solver)
    return out


def measure(name: str, stores: list[Path], work: Path, *options: object) -> Path:
    """One document of ``python -m gsplit_bench train``; made once."""
    out = work / f"{name}.json"
    if not out.exists():
        run("gsplit_bench", "train", *stores, *options, "--out", out)
    return out


def main(arguments: Sequence[str]) -> int:
    """Make what is missing, then the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default=",".join([*REAL, *PLANTED]), help="graphs, by name")
    parser.add_argument("--ranks", default="2,4")
    given = parser.parse_args(arguments)
    names, ranks = given.only.split(","), ("--ranks", given.ranks)
    stores = [make_store(name, given.work) for name in names]
    real = [store for store in stores if store.stem in REAL]
    quick = ("--steps", 1, "--repeats", 3)
    found = [
        measure("main", stores, given.work, "--systems", f"{OURS},dgl,pyg,pyg_our_sampler,p3", *ranks, *quick),
        measure(
            "as-users",
            stores,
            given.work,
            "--systems",
            "split,dgl,pyg,pyg_our_sampler",
            "--allocator",
            "default",
            *ranks,
            *quick,
        ),
        measure("small", stores, given.work, "--systems", OURS, "--batch-size", 256, *ranks, *quick),
        measure(
            "disk",
            stores,
            given.work,
            "--systems",
            OURS,
            "--batch-size",
            "256,1024",
            "--features",
            "disk",
            *ranks,
            *quick,
        ),
    ]
    if real:
        found.append(measure("counted", real, given.work, "--preset", "ranks", "--models", "sage", "--ranks", "1"))
    check = given.work / "planner.json"
    script = [sys.executable, "-m", "gsplit_bench", "planner-check", *map(str, found[:4])]
    done = subprocess.run(
        [*script, "--stores", str(given.work), "--by", "cpu", "--json"], stdout=subprocess.PIPE, check=True
    )
    check.write_bytes(done.stdout)
    pages = ("--out", given.work / "report.html", "--png", given.work / "figures", "--markdown", given.work / "when.md")
    run("gsplit_bench", "report", *found, check, *pages, "--overwrite")
    return 0
