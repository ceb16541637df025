"""The checks of a selftest, one after another, each turned into a finding whatever happens in it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from gsplit.devices import resolve_device
from gsplit.distributed.local_ranks import RankFailedError, run_ranks
from gsplit.distributed.mesh import solo_mesh
from gsplit.progress import Progress, silent
from gsplit.run.models import MODELS
from gsplit.selftest import programs
from gsplit.selftest.environment import check_architectures, check_triton, collect_versions
from gsplit.selftest.finding import Finding, Report
from gsplit.selftest.kernels import BOUNDS
from gsplit.selftest.training import TOLERANCE, largest_difference, train_models

__all__ = ["run_selftest"]

_MODELS = tuple(model for model in MODELS if model != "gine")
_SIZES_MB = (1, 16, 64)
_TIMEOUT_S = 200.0
_ATTENTION_AND_NOT = ["sage", "gat", "gcn"]


def run_selftest(
    device: str,
    nproc: int,
    progress: Progress = silent,
    *,
    models: tuple[str, ...] = _MODELS,
    sizes_mb: tuple[int, ...] = _SIZES_MB,
) -> Report:
    """All checks on ``nproc`` ranks of a kind of device: "cpu" or "cuda"."""
    resolve_device(device)
    checks: list[Callable[[str, int], Finding]] = [
        lambda device, nproc: check_architectures(device),
        lambda device, nproc: check_triton(device),
        lambda device, nproc: _check_links(device, nproc, sizes_mb),
        lambda device, nproc: _check_models(device, nproc, models),
        _check_kernels,
        _check_waits,
        _check_races,
        _check_killed_rank,
    ]
    findings: list[Finding] = []
    for number, check in enumerate(checks):
        progress("checks", number, len(checks))
        findings.append(_timed(check, device, nproc))
    progress("checks", len(checks), len(checks))
    return Report(device, nproc, collect_versions(device), findings)


def _timed(check: Callable[[str, int], Finding], device: str, nproc: int) -> Finding:
    start = time.perf_counter()
    try:
        found = check(device, nproc)
    except Exception as error:  # whatever it is, the other checks and the report go on
        found = _failed(getattr(check, "__name__", "check").strip("_"), error, "send this report back")
    return Finding(
        found.check, found.verdict, found.found, found.fix, round(time.perf_counter() - start, 1), found.figures
    )


def _failed(name: str, error: Exception, fix: str) -> Finding:
    return Finding(name, "wrong", (str(error).strip().splitlines() or [type(error).__name__])[-1], fix)


def _check_links(device: str, nproc: int, sizes_mb: tuple[int, ...]) -> Finding:
    name = "links"
    try:
        rates = run_ranks(programs.measure_links, nproc, sizes_mb, device=device, timeout_s=_TIMEOUT_S)[0]
    except RankFailedError as error:
        return _failed(name, error, "run nvidia-smi topo -m; NCCL_DEBUG=INFO says what NCCL tried")
    largest = [f"{what.split(',')[0]} {rate:.1f} GB/s" for what, rate in rates.items() if f"{sizes_mb[-1]} MB" in what]
    if not any(what.startswith("zero-copy") for what in rates):
        largest.append("zero-copy gather not measured here: it needs a GPU that runs Triton")
    return Finding(name, "ok", "; ".join(largest), figures={what: round(rate, 3) for what, rate in rates.items()})


def _check_models(device: str, nproc: int, models: tuple[str, ...]) -> Finding:
    """Models on 1 to ``nproc`` ranks of the device against one process on the host."""
    name, worst = "models", {}
    for size in sorted({1, nproc}):
        host = train_models(solo_mesh(), list(models), size)
        try:
            ranks = run_ranks(train_models, size, list(models), size, device=device, timeout_s=_TIMEOUT_S)
        except RankFailedError as error:
            return _failed(name, error, "send this report back: the device path has failed")
        for place, model in enumerate(models):
            worst[f"{model} on {size}"] = max(largest_difference(host[place], rank[place]) for rank in ranks)
    largest = max(worst.values())
    found = f"{len(models)} models on {' and '.join(map(str, sorted({1, nproc})))} ranks: {largest:.1e} from the host"
    if largest > TOLERANCE:
        return Finding(name, "wrong", found, "send this report back: results differ", figures=worst)
    return Finding(name, "ok", found, figures=worst)


def _check_kernels(device: str, nproc: int) -> Finding:
    name = "kernels"
    if check_triton(device).verdict != "ok":
        return Finding(name, "not tried", "Triton's are not used here")
    done = _run_module("gsplit.selftest.kernels", [device.split(":")[0]], {})
    if done.returncode:
        return Finding(name, "wrong", _last_line(done), "send this report back")
    units = {kernel: float(value) for kernel, value in json.loads(done.stdout).items()}
    wrong = [kernel for kernel, value in units.items() if value > BOUNDS[kernel]]
    if wrong:
        return Finding(name, "wrong", f"{', '.join(wrong)} differ from the host's", "send this report back", 0, units)
    return Finding(
        name, "ok", f"{len(units)} as the host's; sums to {max(units.values()):.0f} roundings", figures=units
    )


def _run_module(module: str, args: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, *args]
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


def _check_waits(device: str, nproc: int) -> Finding:
    name = "waits for the device"
    if device == "cpu":
        return Finding(name, "not tried", "nothing waits for a CPU")
    try:
        sites = run_ranks(programs.count_waits, nproc, _ATTENTION_AND_NOT, device=device, timeout_s=_TIMEOUT_S)[0]
    except RankFailedError as error:
        return _failed(name, error, "send this report back")
    figures = {model: float(len(found)) for model, found in sites.items()}
    if any(figures.values()):
        lines = sorted({site for found in sites.values() for site in found})
        return Finding(
            name, "wrong", f"in a step behind loading: {', '.join(lines)}", "send this report back", 0, figures
        )
    return Finding(name, "ok", "none in a step behind loading", figures=figures)


def _check_races(device: str, nproc: int) -> Finding:
    name = "races"
    if device == "cpu":
        return Finding(name, "not tried", "a CPU has no streams")
    done = _run_module("gsplit.selftest.sanitized", [], {"TORCH_CUDA_SANITIZER": "1"})
    if done.returncode:
        return Finding(name, "wrong", f"torch's CUDA sanitizer: {_last_line(done)}", "send this report back")
    return Finding(name, "ok", "none that torch's CUDA sanitizer sees in training on one GPU")


def _check_killed_rank(device: str, nproc: int) -> Finding:
    name = "a killed rank"
    if nproc < 2:
        return Finding(name, "not tried", "one rank only: give --nproc 2")
    start = time.perf_counter()
    try:
        run_ranks(programs.die, nproc, device=device, timeout_s=_TIMEOUT_S)
    except RankFailedError as error:
        seconds = time.perf_counter() - start
        if "rank 1 ended without a word" in str(error) or "expected all ranks to join" in str(error):
            return Finding(name, "ok", f"all ranks ended {seconds:.0f} s after the start, and it was said why")
        return _failed(name, error, "send this report back: the end of a rank was not named")
    return Finding(name, "wrong", "training went on without it", "send this report back")
