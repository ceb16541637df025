"""One start of a run under observation: its launchers, what they print, and what they hold from time to time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from gsplit.errors import CommError, explain
from gsplit_bench.faults import OF_OTHERS
from gsplit_bench.host_network import HostNetwork
from gsplit_bench.soak_watch import Usage, find_ranks, lives, processes_of, usage_of

__all__ = ["Life", "start"]

_WATCH_S = 2.0
_TELLING = ("rror", "rank", "expected", "resume")  # parts of lines that say why a run ended


@dataclass(slots=True)
class Life:
    """The launchers of one start, what they print, and what they hold from time to time.

    ``count_steps``: of the newest checkpoint.
    """

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    num_ranks: int
    count_steps: Callable[[], int] = lambda: 0
    started: float = field(default_factory=time.monotonic)
    usages: list[Usage] = field(default_factory=list)

    @property
    def launchers(self) -> list[int]:
        """Their process ids, one per host."""
        return [process.pid for process in self.processes]

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Of launchers that have ended."""
        return tuple(process.returncode for process in self.processes if process.poll() is not None)

    def is_over(self) -> bool:
        """Whether all launchers have ended; what they started may live on."""
        return len(self.exit_codes) == len(self.processes)

    def has_finished(self) -> bool:
        """Whether the training is over and all went well."""
        return self.is_over() and not any(self.exit_codes)

    def ranks(self) -> dict[int, int]:
        """The ranks that live, and their process ids."""
        return {rank: pid for launcher in self.launchers for rank, pid in find_ranks(launcher).items()}

    def members(self) -> list[int]:
        """Process ids of launchers, ranks and everything they have started."""
        return [process.pid for launcher in self.launchers for process in processes_of(launcher)]

    def watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let it train so long, or until it ends or ``until``; whether it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.is_over() and not until():
            if not self.usages or time.monotonic() - self.started - self.usages[-1].at_s >= _WATCH_S:
                held = {"num_steps": self.count_steps(), "temporary_files": len(self.temporary_files())}
                self.usages.append(usage_of(self.launchers, self.started, **held))
            time.sleep(0.1)
        return self.is_over()

    def wait_gone(self, members: Sequence[int], seconds: float) -> bool:
        """Whether all of these processes, and the launchers, are gone within a time."""
        end = time.monotonic() + seconds
        while not self.is_over() or any(lives(pid) for pid in members):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def wait_for_ranks(self, seconds: float = 600.0) -> bool:
        """Whether every rank has been started, which takes minutes on a busy machine."""
        end = time.monotonic() + seconds
        while len(self.ranks()) < self.num_ranks:
            if self.is_over() or time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def losses(self) -> list[float]:
        """Of every step, from what ``--json`` printed at the end."""
        try:
            return [float(loss) for loss in json.loads((self.folder / "out-0").read_text())["losses"]]
        except ValueError as error:
            raise CommError(explain("soak", "a finished run", self.message(), "see what the run printed")) from error

    def temporary_files(self) -> tuple[str, ...]:
        """Those of the run; what PyG and torch leave there is not counted."""
        names = sorted(path.name for path in (self.folder / "tmp").iterdir())
        return tuple(name for name in names if not name.startswith(OF_OTHERS))

    def printed(self) -> str:
        """Everything that the launchers and ranks printed."""
        names = [f"{kind}-{place}" for place in range(len(self.processes)) for kind in ("err", "out")]
        return "\n".join((self.folder / name).read_text(errors="replace") for name in names)

    def message(self) -> str:
        """The line that says most about why it ended."""
        lines = [line.strip() for line in self.printed().splitlines()]
        telling = [line for line in lines if any(part in line for part in _TELLING)]
        return next((line for line in (*telling, *lines) if line), "")[:500]

    def end(self, members: Sequence[int]) -> None:
        """End what should be gone and is not; only processes of this run."""
        for pid in {*members, *self.launchers}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def start(
    train: Sequence[str],
    num_ranks: int,
    folder: Path,
    network: HostNetwork | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Life:
    """``train``: the arguments of ``gsplit train``; ``environment``: variables on top of ours."""
    (folder / "tmp").mkdir(parents=True)
    if network is None:
        commands = [[sys.executable, "-m", "gsplit", "train", *train, "--nproc", str(num_ranks)]]
        environments: list[dict[str, str]] = [{}]
    else:
        program = ["gsplit", "train", *train]
        per_host = num_ranks // len(network.names)
        commands = [network.torchrun(host, per_host, program) for host in range(len(network.names))]
        environments = [{"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"} for name in network.interfaces]
    processes = []
    for place, (command, more) in enumerate(zip(commands, environments, strict=True)):
        variables = {**os.environ, "TMPDIR": str(folder / "tmp"), **environment, **more}
        with (folder / f"out-{place}").open("wb") as out, (folder / f"err-{place}").open("wb") as err:
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=variables))
    return Life(processes, folder, num_ranks)
