"""One rank of ``python -m gsplit_bench profile``: CPU seconds of training steps by category, and their limit.

Steps are taken twice. The first time nothing but the clocks of telemetry runs: these are the CPU seconds that are
reported, whole and by stage. The second time torch.profiler runs: the CPU seconds of forward, backward and optimizer are
divided by its operators' own times. Compiled kernels do not show there, so those that run inside of these stages are
wrapped in this process, and in this pass only, and timed by the CPU clock of the thread: training itself has no such
wrappers, and pays nothing. Operators are timed by wall time, so if the ranks had to wait for a core they are scaled to
the CPU seconds of the stages. "other" is what is left: Python, autograd, and operators without a category.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter
from torch.profiler import ProfilerActivity, profile, record_function

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh, init
from gsplit.distributed.launch.launched_rank import fail
from gsplit.errors import GSplitError
from gsplit.kernels import attention_numba, sums_numba
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.shuffle import RowExchange, _Exchange
from gsplit.nn import fused_layers
from gsplit.store.reader import Store, open_store
from gsplit_bench.machine import read_clocks
from gsplit_bench.step_limit import Limit, measure_limit
from gsplit_bench.train_study import Scenario
from gsplit_bench.train_systems import StrategySystem, check_store, touch_pages

__all__ = ["CATEGORIES", "RankProfile", "category_of", "profile_strategy"]

_OPERATORS = {
    "dense products": ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul", "linear"),
    "sums over edges": (
        "_sparse_mm_reduce_impl",
        "_sparse_mm_reduce_impl_backward",
        "_sparse_mm",
        "_sparse_addmm",
        "scatter_add_",
        "scatter_add",
        "scatter_reduce_",
        "scatter_reduce",
        "index_add_",
        "index_add",
    ),
    "activations": (
        "relu",
        "relu_",
        "clamp_min",
        "clamp_min_",
        "threshold_backward",
        "elu",
        "elu_backward",
        "gelu",
        "gelu_backward",
        "leaky_relu",
        "leaky_relu_backward",
        "native_dropout",
        "native_dropout_backward",
        "bernoulli_",
    ),
    "copies": ("copy_", "clone", "contiguous", "cat", "_to_copy"),
    "fills": ("fill_", "zero_", "zeros", "ones", "full", "new_zeros"),
    "adds": ("add", "add_", "sum"),
    "gather of rows": ("index_select", "index", "gather"),
}
CATEGORIES = (*_OPERATORS, "attention", "optimizer", "sampling", "exchange", "other")
_STAGES = {
    "sample": "sampling",
    "split": "sampling",
    "exchange_ids": "exchange",
    "exchange_features": "exchange",
    "load_features": "gather of rows",
}
"""Stages before the forward pass, each as a whole."""
_WARM_UP = 8
_PROFILED = ("forward", "backward", "optimizer")
_WRAPPED = "gsplit::"


@dataclass(frozen=True)
class RankProfile:
    """Seconds per step of one rank; ``categories`` are CPU seconds, which add up to ``cpu_s``."""

    strategy: str
    cpu_s: float
    wall_s: float
    categories: dict[str, float]
    limit: Limit
    loss: float


def category_of(names: list[str]) -> str:
    """The category of an operator, from its name and those of the operators and functions that it runs in.

    >>> category_of(["aten::mm", "AddmmBackward0"]), category_of(["aten::add_", "Optimizer.step#Adam.step"])
    ('dense products', 'optimizer')
    """
    for name in names:
        if name.startswith("Optimizer."):
            return "optimizer"
    operator = names[0].removeprefix("aten::")
    return next((category for category, operators in _OPERATORS.items() if operator in operators), "other")


@contextmanager
def _wrapped_kernels(spent: dict[str, float]) -> Iterator[None]:
    """Time compiled kernels that run inside of the profiled stages, by category."""

    def timed(category: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                with record_function(_WRAPPED + category):
                    return function(*args, **options)
            finally:
                spent[category] += time.thread_time() - start

        return run

    places: list[tuple[str, Any, str]] = [
        *(("exchange", _Exchange, name) for name in ("forward", "backward")),
        *(("exchange", RowExchange, name) for name in ("receive", "send_back")),
        *(("attention", attention_numba, name) for name in ("forward", "backward")),
        *(("sums over edges", sums_numba, name) for name in ("sum_rows", "max_rows", "sum_max_gradients")),
        *(("activations", sums_numba, name) for name in ("add_bias", "mask_gradient")),
        ("copies", fused_layers, "_copy_destinations"),
    ]
    before = [(owner, name, vars(owner)[name]) for _, owner, name in places]
    for category, owner, name in places:
        function = timed(category, getattr(owner, name))
        setattr(owner, name, staticmethod(function) if owner is _Exchange else function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def profile_strategy(strategy: str, scenario: Scenario, store: Store, mesh: Mesh) -> RankProfile:
    """Train, profile and measure the limit, on all ranks at the same time. A collective."""
    check_store(store, scenario)
    system = StrategySystem(strategy, scenario, store, mesh)
    touch_pages(store)
    steps_per_epoch = int(store.stored_array(f"targets/{scenario.targets}").size) // scenario.batch_size
    for step in range(_WARM_UP):
        system.train_step(*divmod(step, steps_per_epoch))

    def train() -> tuple[dict[str, float], float]:
        """CPU seconds of ``scenario.steps`` steps by stage, and the last loss."""
        stages: dict[str, float] = defaultdict(float)
        loss = 0.0
        mesh.control.gather_text(Call("start together", long_wait=True), "")  # all ranks: before the same steps
        for step in range(scenario.steps):
            telemetry = system.train_step(*divmod(step, steps_per_epoch))
            telemetry.synchronize()
            for stage, seconds in telemetry.cpu_seconds.items():
                stages[stage] += seconds
            loss = telemetry.values["loss"]
        return stages, loss

    start = read_clocks()
    stages, loss = train()
    passed = read_clocks().since(start)
    spent: dict[str, float] = defaultdict(float)
    with _wrapped_kernels(spent), profile(activities=[ProfilerActivity.CPU]) as profiler:
        slower, _ = train()
    operators: dict[str, float] = defaultdict(float)
    for event in cast(Any, profiler.events()):
        names = [event.name]
        parent = event.cpu_parent
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        if not any(name.startswith(_WRAPPED) for name in names):
            operators[category_of(names)] += event.self_cpu_time_total / 1e6
    categories = divide(passed.cpu_s, stages, slower, spent, operators)
    batch = cast(Batch, system.trainer.state.loader.make_batch(0, 0))  # all ranks: a step has the same number
    widths = (store.num_features, *(scenario.hidden,) * (len(scenario.fanout) - 1), store.num_classes)
    return RankProfile(
        strategy=strategy,
        cpu_s=passed.cpu_s / scenario.steps,
        wall_s=passed.wall_s / scenario.steps,
        categories={name: seconds / scenario.steps for name, seconds in categories.items()},
        limit=measure_limit(scenario.model, batch.blocks, widths, scenario.heads),
        loss=loss,
    )


def divide(
    cpu_s: float,
    stages: dict[str, float],
    profiled_stages: dict[str, float],
    kernels: dict[str, float],
    operators: dict[str, float],
) -> dict[str, float]:
    """CPU seconds by category, which add up to ``cpu_s``: whole stages, and profiled ones by operators and kernels."""
    found = dict.fromkeys(CATEGORIES, 0.0)
    for stage, category in _STAGES.items():
        found[category] += stages.get(stage, 0.0)
    computed_s = sum(stages.get(stage, 0.0) for stage in _PROFILED)
    profiled_s = sum(profiled_stages.get(stage, 0.0) for stage in _PROFILED)
    in_kernels_s = sum(kernels.values())
    in_operators_s = sum(operators.values())
    rest_s = max(0.0, profiled_s - in_kernels_s)
    scale = computed_s / max(profiled_s, in_kernels_s)
    for category, seconds in kernels.items():
        found[category] += scale * seconds
    for category, seconds in operators.items():
        found[category] += scale * seconds * rest_s / max(rest_s, in_operators_s)
    found["other"] += cpu_s - sum(found.values())
    return found


def _main(folder: Path, rank: int) -> None:
    logging.getLogger("gsplit").setLevel(logging.ERROR)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    try:
        scenario = TypeAdapter(Scenario).validate_json((folder / "scenario.json").read_bytes())
        mesh = init("cpu", timeout_s=600.0)  # a rank is on one core, which it may share
        store = open_store(Path(scenario.graph))
        found = [asdict(profile_strategy(strategy, scenario, store, mesh)) for strategy in scenario.systems]
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))
        mesh.close()
    except Exception as error:
        if not isinstance(error, GSplitError):
            traceback.print_exc()
        fail(error, 2)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(os.environ["RANK"]))
