"""A long run under faults, resumed after each, against an undisturbed one; whether memory, threads and files grow."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gsplit.errors import CommError, InputError, explain
from gsplit.progress import Progress, silent
from gsplit.run.folder import latest_checkpoint
from gsplit_bench.faults import OF_OTHERS
from gsplit_bench.host_network import HostNetwork
from gsplit_bench.soak_faults import FAULTS, HOST_FAULTS, Fault, Run
from gsplit_bench.soak_watch import Slope, Usage, find_ranks, lives, processes_of, slopes_of, usage_of

__all__ = ["Life", "SoakPlan", "SoakReport", "Trial", "run_soak", "start"]

_WATCH_S = 2.0
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

    def wait_for_ranks(self, seconds: float = 600.0) -> None:
        """Until every rank has been started, which takes minutes on a busy machine, or the run has finished."""
        end = time.monotonic() + seconds
        while (count := len(self.ranks())) < self.num_ranks:
            is_over = self.is_over()
            if is_over and not any(self.exit_codes):
                return
            if is_over or time.monotonic() > end:
                state = f"exit codes {self.exit_codes}" if is_over else f"{count} after {seconds:g} s"
                got = f"{state}; it printed {self.message() or 'nothing'}"
                raise CommError(explain("soak", f"{self.num_ranks} ranks", got, "see what the run printed"))
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


def start(train: Sequence[str], num_ranks: int, folder: Path, network: HostNetwork | None) -> Life:
    """``train``: the arguments of ``gsplit train``."""
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
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **more}
        with (folder / f"out-{place}").open("wb") as out, (folder / f"err-{place}").open("wb") as err:
            processes.append(
                subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment)
            )
    return Life(processes, folder, num_ranks)


_LIFE_S = 4 * 3600.0  # longer than any life is meant to take


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What is trained, and what is done to it. ``every_s``: mean seconds between a start and its fault.

    ``options``: further arguments of ``gsplit train``. ``hosts``: 1, or 2 network namespaces with a cable of this
    ``rate``, delay and loss.
    """

    store: Path
    ranks: int = 4
    options: tuple[str, ...] = ()
    save_every: int = 20
    faults: tuple[str, ...] = tuple(FAULTS)
    num_faults: int = 20
    every_s: float = 30.0
    seed: int = 0
    hosts: int = 1
    rate: str = "1gbit"
    delay_ms: float = 0.0
    loss_percent: float = 0.0

    def network(self) -> AbstractContextManager[HostNetwork | None]:
        """The hosts' network, new; None for one host."""
        if self.hosts == 1:
            return nullcontext()
        return HostNetwork(rate=self.rate, delay_ms=self.delay_ms, loss_percent=self.loss_percent)


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault. ``gone_s``: seconds until all processes were gone; None if the run went on.

    ``left``: processes and temporary files of it that were still there; shared memory has no names and goes with them.
    """

    fault: str
    did: str
    gone_s: float | None
    exit_codes: tuple[int, ...]
    message: str
    left: tuple[str, ...]
    as_it_should: bool


@dataclass(frozen=True, slots=True)
class SoakReport:
    """``losses_equal``: of every step, to the bit, to those of the uninterrupted run.

    There are fewer trials than ``num_planned`` where the run was over before its faults were.
    """

    trials: tuple[Trial, ...]
    num_planned: int
    lives: int
    seconds: float
    num_losses: int
    losses_equal: bool
    slopes: dict[str, Slope]
    uninterrupted_s: float

    @property
    def passed(self) -> bool:
        """Every fault was met as it should be, nothing was lost, nothing grew."""
        met = all(trial.as_it_should for trial in self.trials)
        return met and self.losses_equal and all(slope.is_flat for slope in self.slopes.values())


def run_soak(plan: SoakPlan, *, progress: Progress = silent) -> SoakReport:
    """Inflict every fault of the plan, resume after each, and compare with an uninterrupted run."""
    known = FAULTS if plan.hosts == 1 else HOST_FAULTS
    if not set(plan.faults) <= set(known) or plan.hosts not in (1, 2) or plan.ranks % plan.hosts:
        got = f"{', '.join(plan.faults)}, {plan.hosts} hosts, {plan.ranks} ranks"
        fix = "choose among these faults, and ranks that can be shared out equally"
        raise InputError(explain("bench soak", f"{', '.join(known)}, on 1 or 2 hosts", got, fix))
    rng = random.Random(plan.seed)
    order = [known[plan.faults[number % len(plan.faults)]] for number in range(plan.num_faults)]
    rng.shuffle(order)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        soak = _Soak(plan, Path(name), rng)
        started = time.monotonic()
        for number, fault in enumerate(order):
            if not soak.suffer(fault):
                break
            progress("faults", number + 1, len(order))
        suffered = soak.finish()
        seconds = time.monotonic() - started
        plain = _Soak(plan, Path(name) / "plain", rng)
        reference = plain.finish()
        progress("uninterrupted run", 1, 1)
        found, expected = _losses(suffered), _losses(reference)
        took = reference.usages[-1].at_s
    slopes = slopes_of(reference.usages)
    same = bool(expected) and found == expected
    return SoakReport(tuple(soak.trials), len(order), soak.lives, seconds, len(expected), same, slopes, took)


class _Soak:
    """A run and its lives."""

    def __init__(self, plan: SoakPlan, folder: Path, rng: random.Random) -> None:
        self._plan, self._folder, self._rng = plan, folder, rng
        self._run = folder / "run"
        self._life: tuple[Life, HostNetwork | None] | None = None
        self._open = ExitStack()
        self.trials: list[Trial] = []
        self.lives = 0

    def suffer(self, fault: Fault) -> bool:
        """Let the run train for a while, then inflict a fault; False if the run was over before."""
        life, network = self._living()
        life.wait_for_ranks()
        if life.watch(self._rng.expovariate(1 / self._plan.every_s)):
            return False
        members = life.members()
        at = time.monotonic()
        did = fault.inflict(Run(life.launchers, network), self._rng)
        if fault.survives:
            gone = life.watch(10.0)
            self._note(fault, did, life, time.monotonic() - at if gone else None, (), not gone)
            if gone:
                self._bury()
            return True
        in_time = _wait_gone(members, fault.within_s)
        took = time.monotonic() - at
        left = tuple(f"process {pid}" for pid in members if lives(pid))
        life.end(members)
        self._bury()
        left += life.left_files()
        self._note(fault, did, life, took, left, in_time and not left)
        return True

    def finish(self) -> Life:
        """Train to the end; returns the last life."""
        life, _ = self._living()
        try:
            life.watch(_LIFE_S)
            life.document()
        finally:
            life.end(life.members())
            self._bury()
        return life

    def _living(self) -> tuple[Life, HostNetwork | None]:
        """The life at hand, or a new one that goes on where the last one ended."""
        if self._life is None:
            plan, going_on = self._plan, latest_checkpoint(self._run) is not None
            where = (
                ["--resume", str(self._run)] if going_on else ["--out", str(self._run), "--overwrite", *plan.options]
            )
            train = [str(plan.store), *where, "--save-every", str(plan.save_every), "--json"]
            network = self._open.enter_context(plan.network())
            self._life = (start(train, plan.ranks, self._folder / f"life-{self.lives}", network), network)
            self.lives += 1
        return self._life

    def _bury(self) -> None:
        self._open.close()
        self._life = None

    def _note(
        self, fault: Fault, did: str, life: Life, gone: float | None, left: tuple[str, ...], as_it_should: bool
    ) -> None:
        message = "" if gone is None else life.message()
        self.trials.append(Trial(fault.name, did, gone, life.exit_codes, message, left, as_it_should))


def _wait_gone(members: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(lives(pid) for pid in members):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _losses(life: Life) -> list[float]:
    """Of every step, from what ``--json`` printed."""
    document = life.document()
    losses = document["losses"]
    assert isinstance(losses, list)
    return [float(loss) for loss in losses]
