"""A long run under faults, resumed after each, against an undisturbed one; whether what it holds grows."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from gsplit.errors import CommError, InputError, explain
from gsplit.progress import Progress, silent
from gsplit.run.folder import checkpoint_folder, latest_checkpoint, training_folder
from gsplit.training.checkpoints.files import read_latest
from gsplit.training.checkpoints.names import num_steps_of
from gsplit_bench.host_network import HostNetwork
from gsplit_bench.small_disk import SmallDisk
from gsplit_bench.soak_faults import FAULTS, HOST_FAULTS, OF_CLOCK, OF_DISK, Fault, Run
from gsplit_bench.soak_life import Life, start
from gsplit_bench.soak_watch import Slope, lives, slopes_of
from gsplit_bench.wall_clock import WallClock

__all__ = ["SoakPlan", "SoakReport", "Trial", "run_soak"]

_LIFE_S = 4 * 3600.0  # longer than any life is meant to take
_START_S = 900.0  # to the first checkpoint of a start
_MAX_STARTS = 5  # without one that trains
_PRINTED = 4000  # characters at the end of what a run printed that did not do what it should


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What is trained, and what is done to it. ``every_s``: mean seconds between a start and its fault.

    ``options``: further arguments of ``gsplit train``. Faults go on for so many ``minutes``, or are ``num_faults``; a
    training that is over before is compared, and begun again. ``hosts``: 1, or 2 network namespaces with a cable of
    this ``rate``, delay and loss.
    """

    store: Path
    ranks: int = 4
    options: tuple[str, ...] = ()
    save_every: int = 20
    faults: tuple[str, ...] = tuple(FAULTS)
    num_faults: int = 20
    minutes: float | None = None
    every_s: float = 30.0
    seed: int = 0
    hosts: int = 1
    rate: str = "1gbit"
    delay_ms: float = 0.0
    loss_percent: float = 0.0

    def check(self) -> None:
        """Refuse faults that are not known, and ranks that cannot be shared out."""
        known = FAULTS if self.hosts == 1 else HOST_FAULTS
        if not set(self.faults) <= set(known) or self.hosts not in (1, 2) or self.ranks % self.hosts:
            got = f"{', '.join(self.faults)}, {self.hosts} hosts, {self.ranks} ranks"
            fix = "choose among these faults, and ranks that can be shared out equally"
            raise InputError(explain("bench soak", f"{', '.join(known)}, on 1 or 2 hosts", got, fix))

    def order(self, rng: random.Random) -> Iterator[Fault]:
        """Every fault once, in a random order, and again."""
        known = FAULTS if self.hosts == 1 else HOST_FAULTS
        end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        for number in count():
            if number % len(self.faults) == 0:
                shuffled = rng.sample(self.faults, len(self.faults))
            if number >= self.num_faults if end is None else time.monotonic() >= end:
                return
            yield known[shuffled[number % len(self.faults)]]

    def network(self) -> HostNetwork:
        """The hosts' network, new."""
        return HostNetwork(rate=self.rate, delay_ms=self.delay_ms, loss_percent=self.loss_percent)


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault. ``gone_s``: seconds until all processes were gone; None if the run went on.

    ``at_s``: since the first start under faults. ``num_steps``: of the newest checkpoint afterwards; ``losses_equal``:
    those in it, to the bit, to the undisturbed run's. ``left``: processes and temporary files of it that were still
    there; shared memory has no names and goes with them.
    """

    fault: str
    did: str
    at_s: float
    gone_s: float | None
    exit_codes: tuple[int, ...]
    message: str
    left: tuple[str, ...]
    num_steps: int
    losses_equal: bool
    as_it_should: bool


@dataclass(frozen=True, slots=True)
class SoakReport:
    """``losses_equal``: of every step of all trainings under faults, to the bit, to the undisturbed run's.

    ``slopes`` are those of the undisturbed run, ``slopes_under_faults`` those within all starts under faults. While the
    soak is at work it is not ``finished``, and the last training is compared as far as its newest checkpoint.
    """

    finished: bool
    trials: tuple[Trial, ...]
    lives: int
    trainings: int
    seconds: float
    num_losses: int
    losses_equal: bool
    slopes: dict[str, Slope]
    slopes_under_faults: dict[str, Slope]
    uninterrupted_s: float

    @property
    def passed(self) -> bool:
        """Every fault was met as it should be, nothing was lost, nothing grew."""
        met = all(trial.as_it_should for trial in self.trials)
        flat = all(slope.is_flat for slope in self.slopes.values())
        return self.finished and met and self.losses_equal and flat


def run_soak(
    plan: SoakPlan, *, progress: Progress = silent, save: Callable[[SoakReport], None] = lambda report: None
) -> SoakReport:
    """Train undisturbed; then, if the plan has faults, inflict them, resume after each, and compare.

    ``save``: takes the report so far, after the undisturbed run and after every fault, so that a soak that is cut off
    leaves what it found.
    """
    plan.check()
    rng = random.Random(plan.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as name, ExitStack() as things:
        plain = _Soak(plan, Path(name) / "plain", rng, things, expected=None)
        plain.finish()
        progress("undisturbed run", 1, 1)
        if plan.minutes is None and plan.num_faults == 0:
            return plain.report(plain, finished=True)
        disk = things.enter_context(SmallDisk(Path(name))) if OF_DISK & set(plan.faults) else None
        clock = WallClock(Path(name) / "clock") if OF_CLOCK & set(plan.faults) else None
        soak = _Soak(plan, Path(name) / "suffering", rng, things, expected=plain.losses, disk=disk, clock=clock)
        save(soak.report(plain, finished=False))
        for number, fault in enumerate(plan.order(rng)):
            soak.suffer(fault)
            save(soak.report(plain, finished=False))
            progress("faults", number + 1, 0 if plan.minutes is not None else plan.num_faults)
        soak.finish()
        return soak.report(plain, finished=True)


class _Soak:
    """A training and its lives; begun again when it is over.

    ``expected``: the losses that it must have; None if it makes them.
    """

    def __init__(
        self,
        plan: SoakPlan,
        folder: Path,
        rng: random.Random,
        things: ExitStack,
        *,
        expected: Sequence[float] | None,
        disk: SmallDisk | None = None,
        clock: WallClock | None = None,
    ) -> None:
        self._plan, self._folder, self._rng = plan, folder, rng
        self._expected, self._disk, self._clock = expected, disk, clock
        self._run = (disk.folder if disk else folder) / "run"
        self._living: Life | None = None
        self._network: HostNetwork | None = None
        self._things = things.enter_context(ExitStack())
        things.callback(self._abandon)
        self._started = time.monotonic()
        self.trials: list[Trial] = []
        self.ended: list[Life] = []
        self.losses: list[float] = []
        self.trainings = 0
        self.all_equal = True

    def suffer(self, fault: Fault) -> None:
        """Let the run train for a while, then inflict a fault."""
        life = self._train()
        members = life.members()
        at = time.monotonic()
        did = fault.inflict(Run(life.launchers, self._network, self._disk, self._clock), self._rng)
        goes_on = fault.then != "ends" and self._goes_on(life, fault.within_s)
        if not goes_on:
            life.wait_gone(members, fault.within_s)
        gone_s = None if goes_on else time.monotonic() - at
        has_finished = life.has_finished()
        right = has_finished or fault.then == "either" or (fault.then == "goes on") == goes_on
        self._note(fault.name, did, life, at, gone_s, members, right)
        if has_finished:
            self.finish()
        elif not goes_on:
            self._bury(members)

    def _train(self) -> Life:
        """For a random time, from a new start where there is none; a training that is over is begun again."""
        for _ in range(_MAX_STARTS):
            life = self._life()
            at = time.monotonic()
            has_started = life.wait_for_ranks()
            if has_started and self._plan.hosts > 1:  # that wait ten minutes for each other until they have met
                has_started = self._goes_on(life, _START_S)
            if has_started and not life.watch(self._rng.expovariate(1 / self._plan.every_s)):
                return life
            if life.has_finished():
                self.finish()
            else:
                members = life.members()
                self._note("none", "nothing", life, at, time.monotonic() - at, members, right=False)
                self._bury(members)
        got = f"{_MAX_STARTS} that ended by themselves; the last one printed {life.message() or 'nothing'}"
        raise CommError(explain("soak", "a start that trains", got, "see what the run printed"))

    def _goes_on(self, life: Life, within_s: float) -> bool:
        """Whether there is a newer checkpoint within a time."""
        before = self._count_steps()
        life.watch(within_s, until=lambda: self._count_steps() > before)
        return not life.is_over() and self._count_steps() > before

    def _note(
        self, fault: str, did: str, life: Life, at: float, gone_s: float | None, members: Sequence[int], right: bool
    ) -> None:
        left: tuple[str, ...] = ()
        if gone_s is not None:
            left = (*(f"process {pid}" for pid in members if lives(pid)), *life.temporary_files())
        steps, equal = self._compare_checkpoint()
        right = right and not left
        message = "" if gone_s is None else life.message() if right else life.printed()[-_PRINTED:]
        at_s = at - self._started
        self.trials.append(Trial(fault, did, at_s, gone_s, life.exit_codes, message, left, steps, equal, right))

    def finish(self) -> None:
        """Train to the end and compare, or keep, the losses."""
        life = self._life()
        try:
            life.watch(_LIFE_S)
            losses = life.losses()
        finally:
            self._bury(life.members())
        self.losses = losses
        self.all_equal &= self._expected is None or losses == self._expected
        self.trainings += 1
        shutil.rmtree(self._run)

    def report(self, plain: "_Soak", *, finished: bool) -> SoakReport:
        """So far."""
        seconds = time.monotonic() - self._started
        ended = [life.usages for life in (*self.ended, *([self._living] if self._living else []))]
        [undisturbed] = [life.usages for life in plain.ended]
        return SoakReport(
            finished,
            tuple(self.trials),
            len(ended),
            self.trainings,
            seconds,
            len(plain.losses),
            self.all_equal and all(trial.losses_equal for trial in self.trials),
            slopes_of([undisturbed]),
            slopes_of(ended),
            undisturbed[-1].at_s,
        )

    def _count_steps(self) -> int:
        """Of the newest checkpoint."""
        newest = latest_checkpoint(self._run)
        return 0 if newest is None else num_steps_of(newest.name)

    def _compare_checkpoint(self) -> tuple[int, bool]:
        """The steps of the newest checkpoint, and whether their losses are those of the undisturbed run."""
        if self._expected is None or latest_checkpoint(self._run) is None:
            return 0, True
        losses = read_latest(checkpoint_folder(training_folder(self._run))).state["history"]["losses"]
        return len(losses), losses.tolist() == list(self._expected[: len(losses)])

    def _life(self) -> Life:
        """The life at hand, or a new one that goes on where the last one ended."""
        if self._living is None:
            plan, going_on = self._plan, latest_checkpoint(self._run) is not None
            where = (
                ["--resume", str(self._run)] if going_on else ["--out", str(self._run), "--overwrite", *plan.options]
            )
            train = [str(plan.store), *where, "--save-every", str(plan.save_every), "--json"]
            self._network = self._things.enter_context(plan.network()) if plan.hosts > 1 else None
            folder = self._folder / f"life-{len(self.ended)}"
            variables = self._clock.environment if self._clock else {}
            self._living = start(train, plan.ranks, folder, self._network, variables)
            self._living.count_steps = self._count_steps
        return self._living

    def _abandon(self) -> None:
        """End the life at hand, if the soak is cut off."""
        if self._living is not None:
            self._bury(self._living.members())

    def _bury(self, members: Sequence[int]) -> None:
        """End what is left of a life, and what was done to its host."""
        assert self._living is not None
        if self._disk is not None:
            self._disk.repair()
        self._living.end(members)
        self._things.close()
        self.ended.append(self._living)
        self._living = None
