"""Training on a device in the ways that users run it, on ranks of this host, against one process on its CPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gsplit.doctor.finding import SEND_BACK, Finding
from gsplit.doctor.programs import (
    FANOUTS,
    STEP_MODELS,
    TYPICAL_FANOUTS,
    compare_bf16,
    compare_inference,
    compare_models,
    compare_options,
    compare_sizes,
    die,
    find_waits,
    time_stages,
    train_models,
)
from gsplit.doctor.ranks import RunRanks
from gsplit.errors import CommError
from gsplit.partitioning.partition import partition
from gsplit.run.models import MODELS
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

__all__ = ["training_checks"]

_PLAIN_MODELS = tuple(model for model in MODELS if model != "gine")  # it needs edge features
_SMALL = PlantedGraph(300, 2400, num_features=8, num_classes=5)
_TYPICAL = PlantedGraph(200_000, 4_000_000, num_features=128)
_TOLERANCE = 1e-9
_BF16_TOLERANCE = 0.05  # of losses of 1 to 2


def training_checks(
    device: str,
    nproc: int,
    run: RunRanks,
    *,
    models: tuple[str, ...] = _PLAIN_MODELS,
    typical: PlantedGraph = _TYPICAL,
    num_steps: int = 100,
) -> dict[str, Callable[[], Finding]]:
    """The checks that train, by name. ``typical``: the graph of the times. ``num_steps``: those of changing sizes."""
    return {
        "models": lambda: check_models(device, nproc, run, models),
        "options": lambda: check_options(device, nproc, run),
        "bf16": lambda: check_bf16(device, nproc, run),
        "inference": lambda: check_inference(device, nproc, run),
        "changing sizes": lambda: check_sizes(device, nproc, run, num_steps),
        "times of a step": lambda: check_times(device, nproc, run, typical),
        "waits for the device": lambda: check_waits(device, nproc, run),
        "races": lambda: check_races(device, run),
        "a killed rank": lambda: check_killed_rank(device, nproc, run),
    }


@contextmanager
def partitioned(graph: PlantedGraph, num_parts: int, num_neighbors: list[int]) -> Iterator[Path]:
    """A generated graph, imported and partitioned as users do it, in a temporary folder."""
    with TemporaryDirectory(prefix="gsplit-doctor-") as name:
        folder = Path(name)
        raw = build_store(synthetic_source(graph), folder / "raw.gsplit")
        partition(raw, folder / "parts.gsplit", num_parts, num_neighbors, batch_size=100, epochs=1)
        yield folder / "parts.gsplit"


def check_models(
    device: str, nproc: int, run: RunRanks, models: tuple[str, ...] = _PLAIN_MODELS, tolerance: float = _TOLERANCE
) -> Finding:
    """Compare training on 1 and on ``nproc`` ranks of the device with one process on the host."""
    worst: dict[str, float] = {}
    sizes = sorted({1, nproc})
    for size in sizes:
        try:
            found = run(compare_models, size, device, models=list(models))
        except CommError as error:
            return Finding("models", "error", str(error), SEND_BACK)
        worst |= {f"{model} on {size}": error for model, error in found.items()}
    which = f"{len(models)} models on {' and '.join(map(str, sizes))} rank(s)"
    return _compared("models", which, worst, tolerance)


def check_options(device: str, nproc: int, run: RunRanks) -> Finding:
    """Compare training with the options that change how batches come to the device, with one process on the host."""
    ways: dict[str, dict[str, Any]] = {
        "defaults": {},
        "no prefetching": {"prefetch": 0},
        "prefetching in threads": {"prefetch": 3, "sampling_threads": 2},
        "features on disk": {"features_on_disk": True, "cache": "2KB", "prefetch": 2},
        "strategy data": {"strategy": "data"},
    }
    if device != "cpu":
        ways |= {
            "no cache": {"device_cache": 0, "prefetch": 2},
            "a small cache": {"device_cache": "2KB", "prefetch": 2},
            "sampling on the device": {"sample_device": device},
        }
    if nproc > 1:
        ways["replicas"] = {"replicas": nproc}
    with partitioned(_SMALL, nproc, FANOUTS) as store:
        found = run(compare_options, nproc, device, path=str(store), ways=ways)
    return _compared("options", f"{len(ways)} ways of training on {nproc} rank(s)", found, _TOLERANCE)


def check_bf16(device: str, nproc: int, run: RunRanks) -> Finding:
    """Compare the losses of bf16 with those of float32, both on the device."""
    with partitioned(_SMALL, nproc, FANOUTS) as store:
        found: dict[str, float] = run(compare_bf16, nproc, device, path=str(store), models=STEP_MODELS)
    largest = max(found.values())
    text = f"losses of {len(found)} models differ from those of float32 by up to {largest:.4f}"
    if not all(error <= _BF16_TOLERANCE for error in found.values()):  # also if one is NaN
        return Finding("bf16", "error", f"{text}, more than {_BF16_TOLERANCE}", SEND_BACK, found)
    return Finding("bf16", "ok", text, figures=found)


def check_inference(device: str, nproc: int, run: RunRanks) -> Finding:
    """Compare the outputs for all vertices, and exact scores, with those of one process on the host."""
    with partitioned(_SMALL, nproc, FANOUTS) as store:
        found = run(compare_inference, nproc, device, path=str(store), out=str(store.parent / "outputs.npy"))
    return _compared("inference", f"infer and evaluate on {nproc} rank(s)", found, _TOLERANCE)


def check_sizes(device: str, nproc: int, run: RunRanks, num_steps: int) -> Finding:
    """Train on mini-batches of changing sizes, in which kernels must not be compiled anew and memory must not grow."""
    with partitioned(_SMALL, nproc, FANOUTS) as store:
        figures: dict[str, float] = run(compare_sizes, nproc, device, path=str(store), num_steps=num_steps)
    found = _compared("changing sizes", f"{num_steps} steps", {"losses": figures["largest_error"]}, _TOLERANCE)
    times = f"median {figures['median_ms']:.1f} ms, slowest of the second half {figures['slowest_ms']:.1f} ms"
    return Finding(found.check, found.verdict, f"{found.found}; {times}", found.fix, figures)


def check_times(device: str, nproc: int, run: RunRanks, typical: PlantedGraph) -> Finding:
    """Measure the stages of a step of GraphSAGE with the default options, by events on the device."""
    with partitioned(typical, nproc, TYPICAL_FANOUTS) as store:
        figures: dict[str, float] = run(time_stages, nproc, device, path=str(store))
    stages = ", ".join(f"{name.removesuffix('_ms')} {ms:.1f}" for name, ms in figures.items() if name != "step_ms")
    text = f"{figures['step_ms']:.1f} ms on {nproc} rank(s), of rank 0: {stages}"
    return Finding("times of a step", "ok", text, figures=figures)


def check_waits(device: str, nproc: int, run: RunRanks) -> Finding:
    """Check that the host does not wait for a GPU in a step."""
    name = "waits for the device"
    if not device.startswith("cuda"):
        return Finding(name, "skipped", f"the device is {device}")
    sites: dict[str, list[str]] = run(find_waits, nproc, device, models=STEP_MODELS)
    figures = {model: float(len(found)) for model, found in sites.items()}
    if any(figures.values()):
        lines = ", ".join(sorted({site for found in sites.values() for site in found}))
        return Finding(name, "error", f"in a step, after loading: {lines}", SEND_BACK, figures)
    return Finding(name, "ok", "none in a step, after loading", figures=figures)


def check_races(device: str, run: RunRanks) -> Finding:
    """Train on one GPU under torch's CUDA sanitizer, with batches that a second stream prepares."""
    if not device.startswith("cuda"):
        return Finding("races", "skipped", f"the device is {device}")
    try:
        run(train_models, 1, device, sanitize=True, models=STEP_MODELS)
    except CommError as error:
        return Finding("races", "error", f"torch's CUDA sanitizer: {error}", SEND_BACK)
    return Finding("races", "ok", "none found by torch's CUDA sanitizer in training on one GPU")


def check_killed_rank(device: str, nproc: int, run: RunRanks) -> Finding:
    """Kill a rank in a step: all ranks must end, and the error must name it."""
    name = "a killed rank"
    if nproc < 2:
        return Finding(name, "skipped", "one rank only", "--nproc 2 starts two")
    start = time.perf_counter()
    try:
        run(die, nproc, device)
    except CommError as error:
        seconds = time.perf_counter() - start
        if "rank 1" in str(error) and "SIGKILL" in str(error):
            return Finding(name, "ok", f"all ranks ended {seconds:.0f} s after the start, with an error that names it")
        return Finding(name, "error", f"the error does not name it: {error}", SEND_BACK)
    return Finding(name, "error", "training continued without it", SEND_BACK)


def _compared(check: str, which: str, errors: dict[str, float], tolerance: float) -> Finding:
    """The finding of a comparison with the host; an error that is NaN is larger than any tolerance."""
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    if wrong:
        worst = ", ".join(f"{name} {errors[name]:.1e}" for name in wrong)
        return Finding(check, "error", f"{which}: results differ from the host: {worst}", SEND_BACK, errors)
    return Finding(check, "ok", f"{which}: {max(errors.values()):.1e} from the host", figures=errors)
