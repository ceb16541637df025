"""``gsplit doctor --device``: what is right passes on the host and on the simulated device, what is wrong is named."""

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_ranks import run_compiled_ranks
from simulated_programs import train_without_races, use_kernels_as_the_doctor

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.doctor import device as device_module
from gsplit.doctor.device import check_kernels, check_triton, device_checks, has_code_for
from gsplit.doctor.kernels import BOUNDS
from gsplit.doctor.programs import find_waits
from gsplit.doctor.ranks import run_ranks
from gsplit.doctor.training import check_models, training_checks
from gsplit.errors import CommError
from gsplit.kernels.triton import availability
from gsplit.planner.hardware import Hardware
from gsplit.store.importers.synthetic import PlantedGraph
from gsplit_bench.ranks import RankFailedError
from gsplit_bench.ranks import run_ranks as run_test_ranks
from gsplit_bench.simulated import why_not_supported


def _run_simulated(
    program: Callable[..., Any], nproc: int, device: str, /, *, sanitize: bool = False, **arguments: Any
) -> Any:
    """Ranks on simulated devices, which only the ranks of tests have."""
    try:
        return run_test_ranks(functools.partial(program, **arguments), nproc, device=device)[0]
    except RankFailedError as error:
        raise CommError(str(error).replace("exit code -9", "SIGKILL")) from None


# every change: the same checks on the simulated device, and a program of the doctor on real ranks below
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.weekly), "sim"])
def test_everything_is_right_here(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "sim" and (why := why_not_supported()):
        pytest.skip(why)
    monkeypatch.setattr(device_module, "is_switched_off", lambda: True)  # Triton is checked below
    run = run_ranks if device == "cpu" else _run_simulated
    checks = device_checks(device, 2, run, sizes_mb=(1,), num_vertices=3000)
    checks |= training_checks(device, 2, run, models=("gat",), typical=PlantedGraph(500, 5000), num_steps=8)
    findings = {name: check() for name, check in checks.items()}
    assert all(found.check == name and found.verdict != "error" for name, found in findings.items()), findings
    only_on_gpus = {"code for this GPU", "Triton", "kernels", "large arrays", "waits for the device", "races"}
    only_on_gpus |= {"constants"} if device == "cpu" else set()
    assert {name for name, found in findings.items() if found.verdict == "skipped"} == only_on_gpus
    figures = {name: found.figures for name, found in findings.items()}
    assert set(figures["models"]) == {"gat on 1", "gat on 2"}
    assert max(figures["models"].values()) > 0.0  # two ranks add in another order
    for name in ("models", "options", "inference"):
        assert max(figures[name].values()) < 1e-9
    assert len(figures["options"]) == (9 if device == "sim" else 6)
    assert 1e-5 < max(figures["bf16"].values()) < 0.05
    assert {"step_ms", "forward_ms", "backward_ms", "sample_ms"} <= set(figures["times of a step"])
    if device == "sim":
        assert figures["constants"].keys() <= {field.name for field in dataclasses.fields(Hardware)}
        assert len(figures["constants"]) == 8 and min(figures["constants"].values()) > 0
    assert "zero-copy gather not measured" in findings["links"].found


def test_sage_and_gat_train_without_races() -> None:
    if why := why_not_supported():
        pytest.skip(why)
    launches = run_test_ranks(train_without_races, 2, ["sage", "gat"], device="sim")[0]
    assert launches > 100


def test_a_difference_and_a_failed_rank_are_errors() -> None:
    differs = check_models("cpu", 1, lambda *_, **__: {"sage": 1e-8}, ("sage",))
    assert differs.verdict == "error" and "results differ" in differs.found
    undefined = check_models("cpu", 1, lambda *_, **__: {"sage": float("nan")}, ("sage",))
    assert undefined.verdict == "error"
    failed = check_models("cpu", 1, run_ranks, ("resnet",))
    assert failed.verdict == "error" and "model: expected one of sage" in failed.found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_are_as_the_hosts_and_zero_copy_reads_the_hosts_rows_by_one_launch_each_time() -> None:
    if why := why_not_supported():
        pytest.skip(why)
    ((units, launches, (rates, of_nothing)),) = run_compiled_ranks(use_kernels_as_the_doctor, 1)
    assert units.keys() == BOUNDS.keys() and all(units[name] <= BOUNDS[name] for name in BOUNDS), units
    assert launches == [("gather_kernel", 0, True)] * 6
    assert rates.keys() == {"huge pages", "small pages", "memory of the device"} and min(rates.values()) > 0
    assert max(of_nothing.values()) == 0


def test_kernels_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "find_obstacle", lambda device: None)
    monkeypatch.setattr(device_module, "is_installed", lambda: True)
    monkeypatch.setattr(device_module, "resolve_device", torch.device)
    monkeypatch.delenv("GSPLIT_TRITON", raising=False)
    found = check_kernels("cuda", lambda *_, **__: {"GAT": 100.0, "gather": 0.0})
    assert found.verdict == "error" and found.found == "GAT differ from the host's"
    found = check_kernels("cuda", lambda *_, **__: {"GAT": 3.0, "gather": 0.0})
    assert found.verdict == "ok" and found.found == "2 as the host's; sums to 3 roundings"


def test_a_triton_that_cannot_run_is_a_warning_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_capability", lambda device: (6, 1))
    monkeypatch.setattr(device_module, "resolve_device", torch.device)
    monkeypatch.setattr(availability, "is_installed", lambda: True)
    monkeypatch.setattr(device_module, "is_installed", lambda: True)
    monkeypatch.delenv("GSPLIT_TRITON", raising=False)
    found = check_triton("cuda:0")
    assert found.verdict == "warning" and "cuda:0 has 6.1" in found.found and "newer GPU" in found.fix
    assert check_kernels("cuda:0", run_ranks).verdict == "skipped"
    monkeypatch.setenv("GSPLIT_TRITON", "0")
    assert "GSPLIT_TRITON=0" in check_triton("sim").found


def test_the_notice_of_the_debug_mode_is_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both texts are torch's: of ``set_sync_debug_mode`` itself, once, and of an operation that waits."""
    notice = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    said = [notice]

    def set_mode(mode: str) -> None:
        for text in said if mode == "warn" else ():
            warnings.warn(text, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    assert find_waits(solo_mesh("cpu"), ["sage"]) == {"sage": []}
    said.append("called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)")
    (site,) = find_waits(solo_mesh("cpu"), ["sage"])["sage"]
    assert site.startswith(__file__)


def test_a_v100_needs_older_wheels() -> None:
    built = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    assert not has_code_for((7, 0), built) and has_code_for((8, 9), built) and has_code_for((12, 0), built)
