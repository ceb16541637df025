"""Every kind of end of a rank, of the launcher and of agreement, at every place of a run.

    python -m gsplit_bench faults --out benchmarks/results/DATE-faults

A trial runs a command with a fault in one of its ranks. Measured are how long until every process of the trial is gone,
what the command prints and exits with, and what is left: processes, ports, segments of shared memory, temporary files.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench import fault_injection
from gsplit_bench.fault_injection import FAULT
from gsplit_bench.machine import current_commit, describe_machine, installed_versions

__all__ = ["OF_OTHERS", "PLACES", "Fault", "Outcome", "main", "run_command", "run_mismatched"]

PLACES = {
    "start": "gsplit.distributed.comm.process_groups:connect",
    "sampling": "gsplit.minibatch.split:split_below",
    "backward": "gsplit.nn.fused_layers:_gradient_of_rows",
    "evaluation": "gsplit.inference.layerwise:write_rows",
    "saving": "gsplit.run.folder:finish_run",
    "inference": "gsplit.inference.layerwise:write_rows",
}
"""Functions that a rank is in when it samples, computes gradients and so on."""

_MARK = "GSPLIT_TEST_TRIAL"
_LOOK_S = 0.1
_TIMEOUT_S = 900.0  # a machine without free cores starts two ranks in minutes

OF_OTHERS = ("torch_geometric.", "torchinductor_", "torchelastic_", "__pycache__")
"""Temporary files that PyG and torch leave behind however a process ends."""


@dataclass(frozen=True)
class Fault:
    """What happens in which rank, at which call of a place; ``repeat``: in every process of that rank."""

    place: str
    kind: str
    rank: int = 1
    call: int = 1
    repeat: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a trial. ``seconds`` from the fault (or the start) until no process was left; None if some were."""

    reached: bool
    seconds: float | None
    exit_codes: list[int | None]
    message: str
    left: list[str]

    @property
    def clean(self) -> bool:
        """Whether everything ended and nothing is left."""
        return self.seconds is not None and not self.left


class _Trial:
    """Processes with a mark in their environment, by which their descendants are found too, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder, secrets.token_hex(8)
        self._temporary, self._site = folder / "tmp", folder / "site"
        for made in (folder, self._temporary, self._site):
            made.mkdir(exist_ok=True)
        shutil.copy(fault_injection.__file__, self._site / "sitecustomize.py")
        self._started: list[subprocess.Popen[bytes]] = []
        self._segments: set[str] = set()
        self._begin = time.time()

    def start(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        path = os.pathsep.join([str(self._site), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, _MARK: self._mark, "TMPDIR": str(self._temporary)}
        with (self.folder / f"err-{len(self._started)}").open("wb") as err:
            command = [sys.executable, "-m", "gsplit", *words]
            environment = {**os.environ, **own, **variables}
            self._started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=err))

    def wait(self, timeout_s: float) -> Outcome:
        """Until all are gone, but not longer than this from the start, and from the fault."""
        reached = self.folder / "reached"
        while running := self._find_running():
            since = reached.stat().st_mtime if reached.exists() else self._begin
            if time.time() - since > timeout_s:
                break
            self._note_segments(running)
            time.sleep(_LOOK_S)
        end = time.time()
        ports = _listening_ports(running)
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        codes = [process.wait(60) for process in self._started]
        since = reached.stat().st_mtime if reached.exists() else self._begin
        left = [*(f"process {pid}" for pid in running), *(f"port {port}" for port in ports)]
        left += [segment for segment in sorted(self._segments) if Path(segment).exists()]
        left += [file.name for file in sorted(self._temporary.iterdir()) if not file.name.startswith(OF_OTHERS)]
        return Outcome(reached.exists(), None if running else round(end - since, 1), list(codes), self._said(), left)

    def _find_running(self) -> list[int]:
        for process in self._started:
            process.poll()  # what has ended is not there any more
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has just ended, or is another user's
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def _note_segments(self, running: Sequence[int]) -> None:
        for pid in running:
            with suppress(OSError):
                links = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
                shared = [link for link in links if link.startswith("/dev/shm/")]
                self._segments.update(link for link in shared if not link.startswith(tempfile.gettempdir()))

    def _said(self) -> str:
        """The errors and restarts that the processes told of, one line each."""
        lines = [line for file in sorted(self.folder.glob("err-*")) for line in file.read_text().splitlines()]
        return "\n".join(line for line in lines if line.startswith(("error: ", "restart ")))


def _listening_ports(pids: Sequence[int]) -> list[int]:
    sockets: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            sockets.update(str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted({int(w[1].split(":")[1], 16) for w in lines if w[3] == "0A" and f"socket:[{w[9]}]" in sockets})


def run_command(words: Sequence[str], fault: Fault | None, folder: Path, *, timeout_s: float = _TIMEOUT_S) -> Outcome:
    """Run ``gsplit`` with these words and a fault in one of the ranks that it starts."""
    trial = _Trial(folder)
    variables = {}
    if fault is not None:
        details = {**asdict(fault), "function": PLACES[fault.place], "folder": str(folder)}
        variables[FAULT] = json.dumps(details)
    trial.start(words, variables)
    return trial.wait(timeout_s)


def run_mismatched(
    commands: Sequence[Sequence[str]], port: int, folder: Path, *, timeout_s: float = _TIMEOUT_S
) -> Outcome:
    """Run one ``gsplit`` per rank, as a launcher would that gives every rank another command."""
    trial = _Trial(folder)
    for rank, words in enumerate(commands):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(commands))}
        trial.start(words, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"})
    return trial.wait(timeout_s)


OF_LAUNCHER = ("SIGTERM to the launcher", "SIGTERM to the launcher, SIGSTOP", "SIGKILL of the launcher")
KINDS = ("SIGKILL", "exception", "exit 0", OF_LAUNCHER[0], "SIGSTOP")
MORE_KINDS = {
    "start": OF_LAUNCHER[2:],
    "sampling": ("out of memory",),
    "backward": ("out of memory", "SIGSEGV", *OF_LAUNCHER[1:]),
}
TRIED_PLACES = ("start", "sampling", "prefetch", "backward", "evaluation", "saving", "inference")
MODEL = ("--hidden", "16", "--fanout", "5,5", "--batch-size", "256")


@dataclass(frozen=True)
class Trial:
    name: str
    limit_s: float
    fault: Fault | None = None
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Material:
    """What trials run on: a store, another one, and a trained model."""

    store: str
    other: str
    trained: str


def make_material(folder: Path) -> Material:
    stores = []
    for seed in (0, 1):
        graph = PlantedGraph(4000, 60_000, num_features=16, seed=seed)
        stores.append(str(build_store(synthetic_source(graph), folder / f"graph-{seed}.gsplit").path))
    trained = folder / "trained"
    done = run_command(("train", stores[0], *MODEL, "--steps", "3", "--out", str(trained)), None, folder / "training")
    assert done.exit_codes == [0] and done.clean, done
    return Material(stores[0], stores[1], str(trained))


def all_trials(material: Material) -> list[Trial]:
    """Every trial; in an order in which a run that is cut short has seen many places and kinds."""
    table = [
        (row + column, fault_trial(place, kind, material))
        for row, place in enumerate(TRIED_PLACES)
        for column, kind in enumerate((*KINDS, *MORE_KINDS.get(place, ())))
    ]
    diagonals = [trial for _, trial in sorted(table, key=lambda entry: entry[0] % len(TRIED_PLACES))]
    return [trial for pair in zip_longest(diagonals, mismatches(material)) for trial in pair if trial is not None]


def fault_trial(place: str, kind: str, material: Material) -> Trial:
    call = {"sampling": 4, "prefetch": 4, "backward": 4, "evaluation": 2, "inference": 2}.get(place, 1)
    fault = Fault("sampling" if place == "prefetch" else place, kind, rank=0 if place == "saving" else 1, call=call)
    return Trial(f"{place}: {kind}", 60.0 if kind == "SIGSTOP" else 10.0, fault, (words_of(place, material),))


def mismatches(material: Material) -> list[Trial]:
    train = ("train", material.store, *MODEL, "--epochs", "2")
    changed = {
        "settings": (*train, "--lr", "0.5"),
        "seed": (*train, "--seed", "7"),
        "model": (*train, "--model", "gat"),
        "store": ("train", material.other, *MODEL, "--epochs", "2"),
        "steps": (*train[:-1], "3"),
    }
    return [Trial(f"mismatched {name}", 60.0, None, (train, words)) for name, words in changed.items()]


def words_of(place: str, material: Material) -> tuple[str, ...]:
    if place == "inference":
        return ("infer", material.store, "--weights", material.trained, "--out", "OUT/out.npy", "--nproc", "2")
    long = ("--epochs", "1", "--evaluate-every", "1") if place in ("evaluation", "saving") else ("--epochs", "1000")
    ahead = ("--prefetch", "2") if place == "prefetch" else ()
    return ("train", material.store, *MODEL, *long, *ahead, "--out", "OUT/run", "--nproc", "2")


def run_trial(trial: Trial, folder: Path) -> Outcome:
    commands = [[word.replace("OUT/", f"{folder}/") for word in words] for words in trial.commands]
    if trial.fault is not None:
        return run_command(commands[0], trial.fault, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_mismatched(commands, port, folder)


def verdict(trial: Trial, outcome: Outcome) -> str:
    if trial.fault is not None and not outcome.reached:
        return "the fault never came"
    if outcome.seconds is None:
        return "did not end"
    if trial.fault is None:
        if not outcome.message:
            return "said nothing"
        since_start = outcome.seconds  # ranks also start in this time
        return "late" if since_start > trial.limit_s else "ok"
    if outcome.seconds > trial.limit_s:
        return "late"
    if outcome.left:
        return "left something"
    named = trial.fault.kind in OF_LAUNCHER or f"rank {trial.fault.rank}" in outcome.message
    return "ok" if named else "not named"


def as_markdown(records: list[dict[str, object]], command: str) -> str:
    lines = [
        "# Trials of faults",
        f"`{command}`: two ranks on a small graph; per trial a fault in rank 1 (rank 0 where it saves), seconds from it until no process of the",
        "command is left, what the command exits with and says, and what is left (processes, ports, segments, temporary files).",
        "Ranks that disagree are started by hand, one command each; their seconds are from the start, imports included. Load: processes that wanted",
        "this machine's cores at the end of the trial; seconds grow with it, as ending a process that has imported torch takes a second of a core.",
        "",
        "| trial | verdict | s | load | exit | left | said |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        said = str(record["message"]).replace("\n", " / ").replace("|", "\\|").removeprefix("error: ")
        left = ", ".join(record["left"]) if isinstance(record["left"], list) else ""
        exits = ", ".join(map(str, record["exit_codes"])) if isinstance(record["exit_codes"], list) else ""
        lines.append(
            f"| {record['trial']} | {record['verdict']} | {record['seconds']} | {record['load']} | {exits} | {left or '-'} | {said or '-'} |"
        )
    return "\n".join(lines) + "\n"


def write(out: Path, records: list[dict[str, object]], command: str, folder: str) -> None:
    out.with_suffix(".md").write_text(as_markdown(records, command).replace(folder, "FOLDER"))
    document = {
        "kind": "faults",
        "command": command,
        "commit": current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "records": records,
    }
    out.with_suffix(".json").write_text(json.dumps(document, indent=1).replace(folder, "FOLDER") + "\n")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="results are written to OUT.json and OUT.md")
    parser.add_argument("--only", default="", help="run the trials whose name has this text")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    options = parser.parse_args(arguments)
    command = (
        "python -m gsplit_bench faults"
        + (f" --only '{options.only}'" if options.only else "")
        + (f" --jobs {options.jobs}" if options.jobs > 1 else "")
    )
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="gsplit-faults-") as name, ThreadPoolExecutor(options.jobs) as pool:
        material = make_material(Path(name))
        trials = [trial for trial in all_trials(material) if options.only in trial.name]
        folders = [Path(name) / f"trial-{number}" for number in range(len(trials))]
        for trial, outcome in zip(trials, pool.map(run_trial, trials, folders), strict=True):
            load = round(os.getloadavg()[0], 1)
            records.append(
                {
                    "trial": trial.name,
                    "limit_s": trial.limit_s,
                    "verdict": verdict(trial, outcome),
                    "load": load,
                    **asdict(outcome),
                }
            )
            print(
                f"{trial.name:48} {records[-1]['verdict']:14} {outcome.seconds} s  {outcome.exit_codes}  {outcome.left}  {outcome.message}",
                flush=True,
            )
            if options.out is not None:
                write(options.out, records, command, name)
    print(f"{sum(record['verdict'] == 'ok' for record in records)} of {len(records)} ok")
