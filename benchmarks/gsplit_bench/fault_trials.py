"""Trials of faults: a command with a fault in one of its ranks, and what comes of it.

How long until every process of the trial is gone, what the command says and exits with, and what is left: processes,
ports, segments of shared memory, temporary files.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gsplit_bench import fault_injection
from gsplit_bench.fault_injection import FAULT

__all__ = ["OF_OTHERS", "PLACES", "Fault", "Outcome", "run_command", "run_mismatched"]

PLACES = {
    "start": "gsplit.distributed.process_groups:connect",
    "sampling": "gsplit.split:split_below",
    "backward": "gsplit.shuffle:merge_gradients",
    "evaluation": "gsplit.inference.layerwise:_run_layer",
    "saving": "gsplit.run.folder:finish_run",
    "inference": "gsplit.inference.layerwise:_run_layer",
}
"""Functions that a rank is in when it samples, computes gradients and so on."""

_MARK = "GSPLIT_TEST_TRIAL"
_LOOK_S = 0.1
OF_OTHERS = ("torch_geometric.", "torchinductor_", "__pycache__")
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
        codes = [process.wait(10) for process in self._started]
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


def run_command(words: Sequence[str], fault: Fault | None, folder: Path, *, timeout_s: float = 240.0) -> Outcome:
    """Run ``gsplit`` with these words and a fault in one of the ranks that it starts."""
    trial = _Trial(folder)
    variables = {}
    if fault is not None:
        details = {**asdict(fault), "function": PLACES[fault.place], "folder": str(folder)}
        variables[FAULT] = json.dumps(details)
    trial.start(words, variables)
    return trial.wait(timeout_s)


def run_mismatched(commands: Sequence[Sequence[str]], port: int, folder: Path, *, timeout_s: float = 240.0) -> Outcome:
    """Run one ``gsplit`` per rank, as a launcher would that gives every rank another command."""
    trial = _Trial(folder)
    for rank, words in enumerate(commands):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(commands))}
        trial.start(words, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"})
    return trial.wait(timeout_s)
