"""Trial steps: the planner's best candidates train a few real steps in turn, and their times decide.

An estimate is exact in its counts, but its seconds come from constants, and candidates are often close. Before a run
with ``strategy="auto"`` its own ranks take the trial steps (``choose_strategy``); for ``gsplit plan`` ranks are started
for it (``time_on_ranks``), each of which runs this module:

    python -m gsplit.run.trial FOLDER

The candidates take turns, so that other work on the machine affects all of them, and every turn trains another
mini-batch, so that none finds the rows of the one before in a cache. The weights are thrown away. All ranks compute the
choice from the same times. Only ranks on CPUs are timed: on devices, the caches of several candidates would not fit.
A run that is not much longer than its trial would lose more by it than a better strategy saves: it takes the estimate.
"""

import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, init, solo_mesh
from gsplit.distributed.launch import launcher
from gsplit.errors import InputError
from gsplit.files.host_limits import usable_cores
from gsplit.files.objects import as_url, shown_place
from gsplit.minibatch.strategy_names import AUTO
from gsplit.planner.plan import Setup, StepTime, explain_times, find_fastest
from gsplit.run.choices import choose_loss, make_loss, plan_strategy
from gsplit.run.config import TrainSettings
from gsplit.run.recipe import make_loader, shape_of, wrap_model
from gsplit.run.results import ModelShape, RunView
from gsplit.store.reader import Store, open_store
from gsplit.training.trainer import Trainer

__all__ = ["TimedSteps", "choose_strategy", "describe_trial", "medians", "time_on_ranks", "time_setups"]

TimedSteps = dict[Setup, list[tuple[float, float]]]
"""Wall time of the slowest rank and CPU time of all ranks, of every step of a setup."""

_LIMIT_S = 30.0
_LEAST_RATIO = 10
"""A run takes trial steps only if it has at least this many times as many steps itself."""


def choose_strategy(
    settings: TrainSettings, shape: ModelShape, store: Store, mesh: Mesh, view: RunView | None = None
) -> TrainSettings:
    """The settings with a strategy in place of "auto"; the view shows the choice. A collective for "auto"."""
    if settings.strategy != AUTO:
        return settings
    choice = plan_strategy(settings, shape, store, mesh)
    strategy = choice.strategy
    reason = choice.reason
    num_tried = (settings.trial_steps + 1) * len(choice.shortlist)
    is_long = settings.num_steps(store) >= _LEAST_RATIO * num_tried
    if settings.trial_steps and is_long and len(choice.shortlist) > 1 and mesh.device.type == "cpu":
        start = time.perf_counter()
        setups = [Setup(name, mesh.size, mesh.num_replicas) for name in choice.shortlist]
        times = medians(time_setups(setups, settings, shape, store, mesh))
        if times:
            strategy = find_fastest(times).strategy
            reason = f"{explain_times(times)} {describe_trial(start)} Estimated: {reason}"
    (view or RunView()).note(f"strategy {strategy}: {reason}")
    return settings.model_copy(update={"strategy": strategy})


def describe_trial(start_s: float) -> str:
    """How long the trial took, since ``start_s``."""
    return f"The trial took {time.perf_counter() - start_s:.0f} s."


def medians(found: TimedSteps) -> dict[Setup, StepTime]:
    """The times of the setups that were timed."""
    return {
        setup: StepTime(median(wall for wall, _ in steps), median(cpu for _, cpu in steps), len(steps))
        for setup, steps in found.items()
        if steps
    }


def time_setups(
    setups: Sequence[Setup],
    settings: TrainSettings,
    shape: ModelShape,
    store: Store,
    mesh: Mesh,
    *,
    limit_s: float = _LIMIT_S,
) -> TimedSteps:
    """Train ``settings.trial_steps`` steps of every setup in turn, on CPUs. A collective; equal on all ranks.

    After ``limit_s`` no further turn begins, but a first turn, which is not counted, and one more are always taken. A
    setup has all ranks of ``mesh``, or is one process, which is rank 0 while the others wait. A setup without steps was
    refused, for example because the model cannot run its strategy.
    """
    start = time.perf_counter()
    meshes = {mesh.num_replicas: mesh}
    for setup in setups:
        if setup.ranks > 1 and setup.replicas not in meshes:
            meshes[setup.replicas] = init(mesh.device, replicas=setup.replicas)  # all ranks: they have the same setups
    trials = []
    for setup in setups:
        on_ranks = meshes[setup.replicas] if setup.ranks == mesh.size else None
        alone = solo_mesh() if mesh.rank == 0 else None
        trials.append(_Trial(setup, settings, shape, store, on_ranks or alone))
    for turn in range(settings.trial_steps + 1):
        # all ranks: the clock of rank 0 decides for all
        passed = mesh.control.gather_text(Call("begin turn", turn, long_wait=True), str(time.perf_counter() - start))
        if turn > 1 and float(passed[0]) > limit_s:
            break
        for place, trial in enumerate(trials):
            mesh.control.gather_text(Call("begin trial step", turn, long_wait=True), "")  # all ranks: start together
            trial.step(turn * len(trials) + place, warm_up=turn == 0)
    texts = mesh.control.gather_text(
        Call("gather times", long_wait=True), json.dumps([trial.times for trial in trials])
    )
    of_ranks = [json.loads(text) for text in texts]
    del trials
    gc.collect()  # models and loaders, before those of the run are made
    for other in reversed(list(meshes.values())[1:]):
        other.close()
    return {setup: _join([times[place] for times in of_ranks]) for place, setup in enumerate(setups)}


def _join(of_ranks: list[list[list[float]]]) -> list[tuple[float, float]]:
    """The times of every step, from those of the ranks that took part."""
    steps = zip(*(times for times in of_ranks if times), strict=True)
    return [(max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)) for ranks in steps]


class _Trial:
    """The steps of one setup on one rank; ``mesh`` is None if the rank does not take part.

    ``times``: wall and CPU seconds of every step after the first.
    """

    def __init__(
        self, setup: Setup, settings: TrainSettings, shape: ModelShape, store: Store, mesh: Mesh | None
    ) -> None:
        self.times: list[tuple[float, float]] = []
        self._settings = settings.model_copy(update={"strategy": setup.strategy})
        self._shape = shape
        self._store = store
        self._mesh = mesh
        self._threads = usable_cores() if setup.ranks == 1 else torch.get_num_threads()
        self._whole_batches = max(1, settings.count_targets(store) // settings.batch_size)
        self._trainer: Trainer | None = None

    def step(self, number: int, *, warm_up: bool) -> None:
        """Train on the mini-batch of this number; ``warm_up``: the first step, which is not timed. A collective."""
        if warm_up and self._mesh is not None:
            try:
                self._trainer = self._make_trainer(self._mesh)
                self._train(self._trainer, number)
            except InputError:  # on all ranks, because it is about settings
                self._trainer = None
        elif self._trainer is not None:
            self.times.append(self._train(self._trainer, number))

    def _train(self, trainer: Trainer, number: int) -> tuple[float, float]:
        """Wall and CPU seconds of a step."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        wall_s = time.perf_counter()
        cpu_s = time.process_time()
        trainer.train_step(trainer.state.loader.make_batch(*divmod(number, self._whole_batches)))
        wall_s = time.perf_counter() - wall_s
        cpu_s = time.process_time() - cpu_s
        torch.set_num_threads(before)
        return wall_s, cpu_s

    def _make_trainer(self, mesh: Mesh) -> Trainer:
        settings = self._settings
        model = wrap_model(settings, self._shape, self._store, mesh)
        return Trainer(
            model,
            torch.optim.Adam(model.parameters(), settings.lr),
            make_loader(settings, self._store, mesh),
            loss_fn=make_loss(settings, self._store, mesh),
            max_grad_norm=settings.max_grad_norm,
            precision="bf16" if settings.precision == "bf16" else "float32",
            verify_every=0,
        )


def time_on_ranks(
    setups: Sequence[Setup], settings: TrainSettings, store: Path, num_ranks: int, *, limit_s: float = _LIMIT_S
) -> TimedSteps:
    """See ``time_setups``: the same on ranks that are started for it on this host."""
    with tempfile.TemporaryDirectory(prefix="gsplit-trial-") as name:
        folder = Path(name)
        trial = {
            "store": str(store.resolve()) if as_url(store) is None else shown_place(store),
            "settings": settings.model_dump(),
            "setups": list(map(asdict, setups)),
            "limit_s": limit_s,
        }
        (folder / "trial.json").write_text(json.dumps(trial))
        launcher.launch([sys.executable, "-P", "-m", "gsplit.run.trial", name], num_ranks)
        times = json.loads((folder / "times.json").read_text())
    return {setup: [(wall, cpu) for wall, cpu in steps] for setup, steps in zip(setups, times, strict=True)}


def _main(folder: Path) -> None:
    """The program of one rank."""
    logging.getLogger("gsplit").setLevel(logging.ERROR)
    trial: dict[str, Any] = json.loads((folder / "trial.json").read_text())
    mesh = init("cpu")
    store = open_store(Path(trial["store"]))
    settings = choose_loss(TrainSettings.model_validate(trial["settings"]), store, mesh)
    setups = [Setup(**setup) for setup in trial["setups"]]
    times = time_setups(setups, settings, shape_of(store, settings), store, mesh, limit_s=trial["limit_s"])
    if mesh.rank == 0:
        (folder / "times.json").write_text(json.dumps([times[setup] for setup in setups]))
    mesh.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
