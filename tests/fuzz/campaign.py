"""A million damaged inputs on every surface that reads files: each is read or refused, nothing else may happen.

TMPDIR=/dev/shm python tests/fuzz/campaign.py --inputs 1000000 --out benchmarks/results/DATE-fuzz
python tests/fuzz/campaign.py --again "run settings" 4711        # one input, with what it does

Surfaces, mutations and what counts as a finding are those of tests/fuzz. Here inputs are tried in processes of their
own with a bound on memory; one that crashes or makes no progress is a finding, too, and the input after it goes on.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHARES: dict[str, float] = {
    "manifest": 27,
    "array": 24,
    "run settings": 20,
    "hardware": 13,
    "settings": 5,
    "records": 4,
    "checkpoint": 5,
    "run weights": 2,
    "npz": 0.8,
    "csv": 0.6,
    "parquet": 0.6,
    "snap": 0.6,
    "ogb csv": 0.4,
    "ogb npz": 0.4,
    "ogb typed": 0.4,
    "typed tables": 0.4,
    "store": 1.2,
    "typed store": 1.2,
    "timed store": 0.8,
    "shard": 1,
}
"""Of all inputs, in percent: what is cheap gets many."""
SLICE_SECONDS = 30.0
STALLED_S = 120.0
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Job:
    """Inputs ``first .. first + count - 1`` of a surface."""

    surface: str
    first: int
    count: int


@dataclass
class Result:
    """What came of some inputs of a surface."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0

    def add(self, other: "Result") -> None:
        self.inputs, self.refused = self.inputs + other.inputs, self.refused + other.refused
        self.seconds, self.peak_bytes = self.seconds + other.seconds, max(self.peak_bytes, other.peak_bytes)


class Campaign:
    """All surfaces, set up once in this process; inputs are tried in children that are forked from it."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        from fuzz_guard import Guard
        from fuzz_surfaces import SURFACES

        self.folder, self._guard, self._surfaces = folder, Guard(), {}
        for name in SHARES:
            (folder / name).mkdir()
            self._surfaces[name] = SURFACES[name](folder / name)

    def work(self, job: Job, note: Path, results: Path) -> None:
        """In a child: try inputs for a while, and leave what came of them."""
        from fuzz_guard import attempt, limit_memory

        findings, result, surface = list[dict[str, Any]](), Result(), self._surfaces[job.surface]
        before = Path("/proc/self/statm").read_text().split()
        limit_memory(MEMORY_BYTES)
        start = time.perf_counter()
        with note.open("wb", buffering=0) as stream, self._guard.watch(self.folder / job.surface):
            for number in range(job.first, job.first + job.count):
                os.pwrite(stream.fileno(), struct.pack("<q", number), 0)
                refused, finding = attempt(job.surface, surface, number, self._guard)
                result.inputs += 1
                result.refused += refused
                if finding is not None:
                    findings.append(asdict(finding))
                if time.perf_counter() - start > SLICE_SECONDS:
                    break
        result.seconds = time.perf_counter() - start
        resident = resource.getpagesize() * int(before[1])
        result.peak_bytes = max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident)
        results.write_text(json.dumps({"result": asdict(result), "findings": findings}))


class Worker:
    """A job that is running in a child."""

    def __init__(self, job: Job, campaign: Campaign) -> None:
        self.job = job
        self._note, self._results = (campaign.folder / f"{job.surface}.{kind}" for kind in ("note", "results"))
        for path in (self._note, self._results):
            path.unlink(missing_ok=True)
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=campaign.work, args=(job, self._note, self._results))
        self.process.start()
        self._seen, self._since = -1, time.monotonic()

    @property
    def number(self) -> int:
        """The input that is being tried."""
        data = self._note.read_bytes() if self._note.exists() else b""
        return int(struct.unpack("<q", data)[0]) if len(data) == 8 else self.job.first

    def is_done(self) -> bool:
        """Whether it has ended; one that stands still is ended."""
        if self.process.exitcode is not None:
            return True
        if self.number != self._seen:
            self._seen, self._since = self.number, time.monotonic()
        if time.monotonic() - self._since > STALLED_S:
            self.process.kill()
            self.process.join()
            return True
        return False

    def collect(self) -> tuple[Result, list[dict[str, Any]], int]:
        """What came of it, and the first input that is still to be tried."""
        if self.process.exitcode == 0:
            said = json.loads(self._results.read_text())
            result = Result(**said["result"])
            return result, said["findings"], self.job.first + result.inputs
        number, what = self.number, f"the process ended with {self.process.exitcode}"
        done = Result(inputs=number - self.job.first + 1)
        return done, [{"surface": self.job.surface, "number": number, "what": what}], number + 1


def run(
    num_inputs: int, first: int, num_workers: int, seconds: float
) -> tuple[dict[str, Result], list[dict[str, Any]]]:
    """All surfaces by turns, several at a time, until all inputs are tried or the time is over."""
    shares = sum(SHARES.values())
    pending = [Job(name, first, max(1, round(num_inputs * share / shares))) for name, share in SHARES.items()]
    running, results, findings = list[Worker](), {name: Result() for name in SHARES}, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="gsplit-fuzz-") as folder:
        campaign, start = Campaign(Path(folder)), time.monotonic()
        while (pending and time.monotonic() - start < seconds) or running:
            while pending and len(running) < num_workers and time.monotonic() - start < seconds:
                running.append(Worker(pending.pop(0), campaign))
            time.sleep(0.2)
            for worker in [worker for worker in running if worker.is_done()]:
                running.remove(worker)
                result, found, following = worker.collect()
                job = worker.job
                results[job.surface].add(result)
                findings += found
                for finding in found:
                    print(f"{finding['surface']} {finding['number']}:\n{finding['what']}", file=sys.stderr)
                left = job.first + job.count - following
                if left > 0:
                    pending.append(Job(job.surface, following, left))
                total = sum(r.inputs for r in results.values())
                print(f"{total:>9,} inputs, {len(findings)} findings; {job.surface}", file=sys.stderr, flush=True)
    return results, findings


def table(results: dict[str, Result], findings: list[dict[str, Any]]) -> str:
    found = Counter(finding["surface"] for finding in findings)
    lines = [
        "| surface | inputs | refused | findings | inputs/s of a process | memory it grew by |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        rate, grown = result.inputs / max(result.seconds, 1e-9), result.peak_bytes / 1e6
        share = result.refused / max(1, result.inputs)
        lines.append(f"| {name} | {result.inputs:,} | {share:.0%} | {found[name]} | {rate:,.0f} | {grown:.0f} MB |")
    total = sum(result.inputs for result in results.values())
    lines.append(f"| all | {total:,} | | {len(findings)} | | |")
    return "\n".join(lines)


def again(name: str, number: int) -> int:
    """Try one input and show what it does."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from fuzz_guard import Guard, attempt
    from fuzz_surfaces import SURFACES

    with tempfile.TemporaryDirectory(prefix="gsplit-fuzz-") as folder:
        surface = SURFACES[name](Path(folder))
        guard = Guard()
        with guard.watch(Path(folder)):
            refused, finding = attempt(name, surface, number, guard)
    print(finding.what if finding else "refused" if refused else "read")
    return finding is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the first number; others make other inputs")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--again", nargs=2, metavar=("SURFACE", "NUMBER"))
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then, whatever is left")
    options = parser.parse_args()
    if options.again:
        return again(options.again[0], int(options.again[1]))
    start, commit = time.perf_counter(), _commit()
    results, findings = run(options.inputs, options.first, options.workers, 60 * options.minutes)
    seconds = time.perf_counter() - start
    print(table(results, findings))
    if options.out is not None:
        write_record(options.out, results, findings, seconds, options.workers, commit)
    return 1 if findings else 0


def _commit() -> str:
    """What is being tried; asked for at the start."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def write_record(
    out: Path,
    results: dict[str, Result],
    findings: list[dict[str, Any]],
    seconds: float,
    workers: int,
    commit: str,
) -> None:
    from fuzz_guard import SECONDS

    document: dict[str, Any] = {
        "kind": "fuzz",
        "command": " ".join(["python", "tests/fuzz/campaign.py", *sys.argv[1:]]),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "workers": workers,
        "bounds": {"memory_bytes": MEMORY_BYTES, "seconds_per_input": SECONDS},
        "versions": {name: version(name) for name in ("gsplit", "numpy", "pydantic", "pyarrow", "torch")},
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "surfaces": {name: asdict(result) for name, result in results.items()},
        "findings": findings,
    }
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = (
        f"# Fuzzing, {document['date']}\n\n`{document['command']}` at commit {document['commit'][:10]}, {workers} processes, "
        f"{seconds / 60:.0f} minutes, machine shared.\n\n{table(results, findings)}\n\n"
        "A finding is an error that is not ours, a refusal in another form, "
        f"more than {SECONDS:.0f} s or 1 GiB for an input, a file opened outside the given folder, "
        "or the end of the process. Refused: the share of inputs with an error of ours; "
        "the others were read, changed but valid.\n"
    )
    out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
