"""One life of a run under a soak: ``gsplit train`` as users type it, on one host or under torchrun on two."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gsplit.errors import CommError, explain
from gsplit_bench.fault_trials import OF_OTHERS
from gsplit_bench.soak_watch import Usage, find_ranks, processes_of, usage_of
from gsplit_bench.two_hosts import TwoHosts

__all__ = ["Life", "start"]

_WATCH_S = 2.0
_PORT = "29500"  # in a namespace of its own: nothing else listens there
_TELLING = ("rror", "rank", "expected", "resume")  # parts of lines that say why a run ended


@dataclass(slots=True)
class Life:
    """The launchers of one start, what they print, and what they hold from time to time."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    num_ranks: int
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

    def ranks(self) -> dict[int, int]:
        """The ranks that live, and their process ids."""
        return {rank: pid for launcher in self.launchers for rank, pid in find_ranks(launcher).items()}

    def members(self) -> list[int]:
        """Process ids of launchers, ranks and everything they have started."""
        return [process.pid for launcher in self.launchers for process in processes_of(launcher)]

    def watch(self, seconds: float) -> bool:
        """Let it train so long, or until it ends; whether it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.is_over():
            if not self.usages or time.monotonic() - self.started - self.usages[-1].at_s >= _WATCH_S:
                self.usages.append(usage_of(self.launchers, self.started))
            time.sleep(0.1)
        return self.is_over()

    def wait_for_ranks(self, seconds: float = 60.0) -> None:
        """Until every rank has been started."""
        end = time.monotonic() + seconds
        while len(self.ranks()) < self.num_ranks:
            if time.monotonic() > end or self.is_over():
                raise CommError(explain("soak", f"{self.num_ranks} ranks", self.message(), "see what the run printed"))
            time.sleep(0.1)

    def document(self) -> dict[str, object]:
        """What ``--json`` printed at the end."""
        text = (self.folder / "out-0").read_text()
        try:
            found: dict[str, object] = json.loads(text)
        except ValueError as error:
            raise CommError(explain("soak", "a finished run", self.message(), "see what the run printed")) from error
        return found

    def left_files(self) -> tuple[str, ...]:
        """Temporary files that nobody took away."""
        names = sorted(path.name for path in (self.folder / "tmp").iterdir())
        return tuple(name for name in names if not name.startswith(OF_OTHERS))

    def message(self) -> str:
        """The line that says most about why it ended."""
        lines = [
            line.strip()
            for place in range(len(self.processes))
            for name in (f"err-{place}", f"out-{place}")
            for line in (self.folder / name).read_text(errors="replace").splitlines()
        ]
        telling = [line for line in lines if any(part in line for part in _TELLING)]
        return next((line for line in (*telling, *lines) if line), "")[:500]

    def end(self, members: Sequence[int]) -> None:
        """End what should be gone and is not; only processes of this run."""
        for pid in {*members, *self.launchers}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def start(train: Sequence[str], num_ranks: int, folder: Path, network: TwoHosts | None) -> Life:
    """``train``: the arguments of ``gsplit train``."""
    (folder / "tmp").mkdir(parents=True)
    if network is None:
        commands = [[sys.executable, "-m", "gsplit", "train", *train, "--nproc", str(num_ranks)]]
        environments: list[dict[str, str]] = [{}]
    else:
        commands = [network.command(host, _torchrun(host, num_ranks // 2, network, train)) for host in (0, 1)]
        environments = [{"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"} for name in network.interfaces]
    processes = []
    for place, (command, more) in enumerate(zip(commands, environments, strict=True)):
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **more}
        with (folder / f"out-{place}").open("wb") as out, (folder / f"err-{place}").open("wb") as err:
            processes.append(
                subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment)
            )
    return Life(processes, folder, num_ranks)


def _torchrun(host: int, per_host: int, network: TwoHosts, train: Sequence[str]) -> list[str]:
    """One host's launcher; the first host's address is where all meet."""
    meeting = ["--master-addr", network.addresses[0], "--master-port", _PORT]
    place = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(per_host)]
    program = [sys.executable, "-m", "torch.distributed.run", *place, *meeting]
    return [*program, "--module", "gsplit", "train", *train]
