"""Trials of faults: every kind of end of a rank, of the launcher and of agreement, at every place of a run.

    python benchmarks/faults.py --out benchmarks/results/DATE-faults

Two ranks of ``gsplit train`` and ``gsplit infer`` on a small graph; a quarter of an hour on two idle cores. Each trial has
a limit in seconds from the fault until no process is left: 10 for exceptions, kills and signals, 60 for a rank that is
stopped and for ranks that disagree. Written after every trial; ``--only TEXT`` runs those whose name has it, ``--jobs N``
so many at a time.
"""

import argparse
import json
import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.fault_trials import Fault, Outcome, run_command, run_mismatched
from gsplit_bench.provenance import current_commit, describe_machine, installed_versions

OF_LAUNCHER = ("SIGTERM to the launcher", "SIGTERM to the launcher, SIGSTOP", "SIGKILL of the launcher")
KINDS = ("SIGKILL", "exception", "exit 0", OF_LAUNCHER[0], "SIGSTOP")
MORE_KINDS = {
    "start": OF_LAUNCHER[2:],
    "sampling": ("out of memory",),
    "backward": ("out of memory", "SIGSEGV", *OF_LAUNCHER[1:]),
}
PLACES = ("start", "sampling", "prefetch", "backward", "evaluation", "saving", "inference")
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
        for row, place in enumerate(PLACES)
        for column, kind in enumerate((*KINDS, *MORE_KINDS.get(place, ())))
    ]
    diagonals = [trial for _, trial in sorted(table, key=lambda entry: entry[0] % len(PLACES))]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="results are written to OUT.json and OUT.md")
    parser.add_argument("--only", default="", help="run the trials whose name has this text")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    options = parser.parse_args()
    command = (
        "python benchmarks/faults.py"
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


if __name__ == "__main__":
    main()
