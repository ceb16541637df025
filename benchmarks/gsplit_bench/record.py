"""``python -m gsplit_bench record``: everything that README.md and docs/measured.md state, measured at one commit.

    python -m gsplit_bench record --list                                # names, minutes, stores, what they show
    python -m gsplit_bench record --out /tmp/record                     # hours; can be continued
    python -m gsplit_bench record --out /tmp/record --minutes 90        # what fits, the most valuable first
    python -m gsplit_bench record --out /tmp/quick --quick              # tiny graphs: does everything run?

Every measurement (measurements.py) leaves its files in the folder, and an entry in record.json: commands, start, end,
load, versions and machine. What has an entry is not measured again. A folder belongs to one commit, and the checkout must
not have changes; hours of measurements may be continued on another machine. Real graphs are found through GSPLIT_TEST_DATA; DGL, and PyG with
its own sampler, take part where they are installed (benchmarks/README.md).
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from gsplit.cli.console import command
from gsplit.errors import InputError, explain
from gsplit.files.atomic import write_atomic
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.measured import ROWS
from gsplit_bench.measurements import GRAPHS, MEASUREMENTS, Measurement, split_field
from gsplit_bench.real_graphs import real_store

__all__ = ["INDEX", "choose", "record"]

INDEX = "record.json"
_ROOT = Path(__file__).resolve().parents[2]
_TINY = "--vertices 2000 --edges 20000 --features 8 --symmetrise --target-share 0.2"


def record(
    out: Annotated[Path, typer.Option(help="folder for the records")] = Path("record"),
    work: Annotated[Path, typer.Option(help="folder for stores and other files")] = Path("/tmp/gsplit-record"),
    only: Annotated[str | None, typer.Option(help="measurements [default: all]", metavar="NAMES")] = None,
    minutes: Annotated[float | None, typer.Option(help="measure what fits; stores take time besides")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny graphs and few steps: a trial")] = False,
    show: Annotated[bool, typer.Option("--list", help="list the measurements and their minutes")] = False,
) -> None:
    """Measure again what README.md and docs/measured.md state, at one commit.

    Hours on two idle cores. Measurements that the folder has are kept.
    """
    with command(as_json=False, lost="finished measurements are kept"):
        chosen = _named(only)
        if show:
            _list(chosen)
            return
        index = _open_index(out, quick=quick)
        failed = []
        for measurement in choose(chosen, index["measurements"], minutes, quick=quick):
            missing = [name for name in measurement.needs if name not in index["measurements"]]
            if missing:
                print(f"{measurement.name}: left out, needs {', '.join(missing)}", flush=True)
            elif (entry := _measure(measurement, out, work, quick=quick)) is None:
                failed.append(measurement.name)
            else:
                index["measurements"][measurement.name] = entry
                _write(out / INDEX, index)
        if failed:
            print(f"failed: {', '.join(failed)}", flush=True)
            raise typer.Exit(1)


def _named(only: str | None) -> list[Measurement]:
    known = {measurement.name: measurement for measurement in MEASUREMENTS}
    names = list(known) if only is None else only.split(",")
    for name in names:
        if name not in known:
            raise InputError(explain("--only", f"some of {', '.join(known)}", name, "choose among these"))
    return [known[name] for name in known if name in names]


def choose(
    chosen: Sequence[Measurement], done: dict[str, Any], minutes: float | None, *, quick: bool
) -> list[Measurement]:
    """Those that are not done and, if time is limited, fit into it, in the order of their value."""
    found = []
    for measurement in chosen:
        if measurement.name in done or (quick and measurement.quick is None):
            continue
        if minutes is not None and not quick:
            if measurement.minutes is None or measurement.minutes > minutes:
                continue
            minutes -= measurement.minutes
        found.append(measurement)
    return found


def _list(chosen: Sequence[Measurement]) -> None:
    for measurement in chosen:
        minutes = "?" if measurement.minutes is None else f"{measurement.minutes:g}"
        rows = sum(measurement.name in row.records for row in ROWS)
        stores = ", ".join(measurement.stores) or "none"
        print(f"{measurement.name}: {minutes} minutes; stores: {stores}; {rows} rows of docs/measured.md")
        for line in measurement.commands:
            print(f"    {line}")
    known = [measurement.minutes for measurement in chosen if measurement.minutes is not None]
    print(f"{sum(known):g} minutes, and {len(chosen) - len(known)} measurements of unknown length")


def _open_index(out: Path, *, quick: bool) -> dict[str, Any]:
    """The entries of a folder, or of a new one; refuses another commit, and changes."""
    commit = current_commit()
    if not quick and (commit is None or commit.endswith("-changed")):
        raise InputError(explain("record", "a checkout without changes", commit, "commit or stash them"))
    about = {"commit": commit, "quick": quick}
    path = out / INDEX
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        return about | {"measurements": {}}
    index: dict[str, Any] = json.loads(path.read_text())
    found = {name: index[name] for name in about}
    if found != about:
        raise InputError(explain(path, f"a record of {about}", found, "choose another --out"))
    return index


def _measure(measurement: Measurement, out: Path, work: Path, *, quick: bool) -> dict[str, Any] | None:
    """Run the commands in a folder of their own, and move its files to the records; None if one failed."""
    folder = work / ("quick" if quick else "full")
    fields = {field: str(_make_store(field, folder, quick=quick)) for field in measurement.stores}
    new = folder / "unfinished" / measurement.name
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    fields |= {
        "out": str(new.resolve() / measurement.name),
        "folder": str(out.resolve()),
        "work": str(folder.resolve()),
    }
    fields["quick"] = (measurement.quick or "") if quick else ""
    lines = [line.format(**fields) for line in measurement.commands]
    entry: dict[str, Any] = {"commands": list(measurement.commands), "started": _now(), "load_before": os.getloadavg()}
    entry |= {"versions": installed_versions(), "machine": describe_machine()}
    start = time.monotonic()
    for line in lines:
        if not _run(line):
            return None
    entry |= {"ended": _now(), "minutes": round((time.monotonic() - start) / 60, 2), "load_after": os.getloadavg()}
    entry["files"] = sorted(path.name for path in new.iterdir())
    for name in entry["files"]:
        shutil.move(new / name, out / name)
    return entry


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run(line: str) -> bool:
    """Run one command as it stands; what it prints goes to the file behind ``>``. Whether it succeeded."""
    print(line, flush=True)
    words, _, target = line.partition(" > ")
    program, *arguments = shlex.split(words)
    assert program == "python"
    stdout = subprocess.PIPE if target else None
    # without compiled modules every start takes three seconds longer, which measurements of whole commands contain
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, *arguments], stdout=stdout, cwd=_ROOT, env=environment, check=False)
    if done.returncode == 0 and target:
        _place(json.loads(done.stdout), target)
    return done.returncode == 0


def _place(found: Any, target: str) -> None:
    """Put what a command printed into a document: ``FILE``, ``FILE#key/key`` or, into a list, ``FILE#key[]``."""
    name, _, place = target.partition("#")
    path = Path(name)
    if not place:
        _write(path, found)
        return
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"commit": current_commit()}
    *outer, last = place.split("/")
    inside = document
    for key in outer:
        inside = inside.setdefault(key, {})
    if last.endswith("[]"):
        inside.setdefault(last.removesuffix("[]"), []).append(found)
    else:
        inside[last] = found
    _write(path, document)


def _write(path: Path, document: Any) -> None:
    write_atomic(path, [json.dumps(document, indent=1).encode(), b"\n"])


def _make_store(field: str, folder: Path, *, quick: bool) -> Path:
    """The store that a field names, made once: graphs/NAME.gsplit, and its partitions beside that folder."""
    graph, parts = split_field(field)
    source = folder / "graphs" / f"{graph}.gsplit"
    options = _TINY if quick else GRAPHS[graph]
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        if options.startswith("--"):
            _make(f"python -m gsplit import synthetic {source.resolve()} {options}")
        else:
            source.symlink_to(real_store(options, folder / "real").path.resolve())
    if parts == "raw":
        return source.resolve()
    store = folder / f"{field}.gsplit"
    if not store.exists():
        small = "--fanout 3,3 --epochs 1" if quick else ""
        _make(f"python -m gsplit partition {source.resolve()} {store.resolve()} --parts {parts} {small}")
    return store.resolve()


def _make(line: str) -> None:
    if not _run(line):
        raise InputError(explain("record", "a store", f"an error of {line}", "see the message above"))
