"""Every line of the doctor can say that something is wrong, and what to do. Real ranks: tests/dist/test_doctor.py."""

import importlib.metadata
import json
import math
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.distributed.launch.allocator import ALLOCATOR
from gsplit.doctor import examination, kernels, machine, network, programs, training
from gsplit.doctor.examination import check_store, examine
from gsplit.doctor.finding import DoctorReport, Finding
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.training.verification import Verification


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = PlantedGraph(200, 1000, num_features=4)
    return build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit").path


def _told(lines: list[Finding], check: str) -> tuple[str, str, str]:
    (line,) = (line for line in lines if line.check == check)
    return line.verdict, line.found, line.fix


def test_a_package_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_versions().verdict == "ok"
    version = importlib.metadata.version

    def without_numba(name: str) -> str:
        if name in ("numba", "pyarrow"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_numba)
    found = machine.check_versions()
    assert found.verdict == "error" and found.found.endswith("not installed: numba")  # pyarrow is optional


def test_little_memory_and_disk_are_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 1 << 30)
    found = machine.check_memory()
    assert found.verdict == "warning" and found.found.startswith("1 GiB free of ")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    assert machine.check_disk(tmp_path) == Finding(
        "disk", "warning", f"1 MiB free at {tmp_path}", "free space, or give --out another place", {"free_bytes": 2**20}
    )
    monkeypatch.undo()
    assert machine.check_disk(tmp_path / "nothing").verdict == "error"


def test_limits_that_are_too_low_come_with_the_command_that_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 256))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=16384))
    lines = machine.check_limits()
    assert _told(lines, "open files") == ("warning", "256 per process", "ulimit -n 1024")
    assert _told(lines, "/dev/shm")[:2] == ("warning", "64 MiB; GSplit itself needs none of it")


@pytest.mark.parametrize(
    "nproc, threads, verdict",
    [(1, "", "ok"), (2, "1", "ok"), (2, "2", "warning"), (3, "", "warning"), (2, "many", "ok")],
)
def test_more_threads_than_cores_are_warned_of(
    nproc: int, threads: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = machine.check_threads(nproc)
    assert found.verdict == verdict and bool(found.fix) == (verdict == "warning")


def test_the_allocator_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so.2")
    assert machine.check_allocator().found == "preloaded: /lib/libjemalloc.so.2"
    monkeypatch.delenv("LD_PRELOAD")
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert "export MALLOC_MMAP_MAX_=0 " in machine.check_allocator().fix
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "1")
    assert machine.check_allocator().found == "glibc, tuned to keep its memory"


def test_backends_and_interfaces_that_are_not_there_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.check_backends().verdict == "ok"
    monkeypatch.setattr(network, "available_backends", list)
    assert network.check_backends().verdict == "error"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert network.check_interfaces().verdict == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nothing0")
    found = network.check_interfaces()
    assert found.verdict == "error" and "GLOO_SOCKET_IFNAME=lo,nothing0" in found.found
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def fail(host: str) -> str:
        raise OSError("unknown")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    assert network.check_interfaces().verdict == "warning"


def test_wrong_results_of_training_are_errors() -> None:
    def giving(result: Any) -> Callable[..., Any]:
        return lambda *_, **__: result

    times = {"median_ms": 1.0, "slowest_ms": 2.0}
    for right, wrong in (
        (
            training.check_bf16("cpu", 2, giving({"sage": 0.01, "gat": 0.02})),
            training.check_bf16("cpu", 2, giving({"sage": 0.01, "gat": 0.2})),
        ),
        (
            training.check_bf16("cpu", 2, giving({"sage": 0.01, "gat": 0.02})),
            training.check_bf16("cpu", 2, giving({"sage": 0.01, "gat": math.nan})),
        ),
        (
            training.check_sizes("cpu", 2, giving({"largest_error": 0.0, **times}), 5),
            training.check_sizes("cpu", 2, giving({"largest_error": 1.0, **times}), 5),
        ),
        (
            training.check_inference("cpu", 2, giving({"outputs": 0.0, "scores": 0.0})),
            training.check_inference("cpu", 2, giving({"outputs": 0.0, "scores": math.nan})),
        ),
    ):
        assert (right.verdict, wrong.verdict) == ("ok", "error") and right.check == wrong.check
        assert wrong.fix and not right.fix


def test_a_slow_exchange_and_one_without_shared_memory_are_warned_of() -> None:
    figures = {"gloo latency_s": 0.5, "gloo bytes_per_s": 1e9}
    assert network._describe("gloo", figures).verdict == "warning"
    assert network._describe("gloo", figures | {"gloo latency_s": 1e-4}).found == "100 us and 1.00 GB/s from each rank"
    assert network._describe("shared memory", figures).verdict == "warning"


def test_a_store_is_opened_and_read_if_asked_for(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = check_store(store, 2, full=True)
    assert _told(lines, "parts")[0] == "warning" and "--parts 2" in _told(lines, "parts")[2]
    assert _told(lines, "checksums")[:2] == ("ok", "every checksum, every id and every order is right")
    assert _told(check_store(store, 1, full=False), "checksums")[2] == "--full reads all"
    damaged = shutil.copytree(store, tmp_path / "damaged.gsplit")
    data = bytearray((damaged / "features" / "x.npy").read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / "features" / "x.npy").write_bytes(data)
    verdict, found, _ = _told(check_store(damaged, 1, full=True), "checksums")
    assert verdict == "error" and "x.npy" in found
    assert check_store(tmp_path, 1, full=False)[0].verdict == "error"
    monkeypatch.setattr(examination, "free_bytes", lambda: 100)
    assert _told(check_store(store, 1, full=False), "store in memory")[0] == "warning"


def test_a_check_that_fails_is_a_line_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Finding:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("gsplit.doctor.examination.check_memory", fail)
    found = examine(None, 1)
    assert not found.ok
    assert _told(found.findings, "memory")[:2] == ("error", "on purpose")
    assert _told(found.findings, "ranks")[0] == "skipped"


def test_the_report_is_a_file_too_and_a_failed_check_exits_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = DoctorReport("cpu", 1, [Finding("models", "error", "differ by 1", "send it back", {"sage": 1.0})])
    monkeypatch.setattr(examination, "examine", lambda *_, **__: wrong)
    out = tmp_path / "report.json"
    shown = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--out", str(out)])
    assert shown.exit_code == 1 and "differ by 1" in shown.stdout and "fix: send it back" in shown.stdout
    document = json.loads(out.read_text())
    assert document["ok"] is False and document["findings"][0]["figures"] == {"sage": 1.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--device", "cuda"])
    assert shown.exit_code == 2 and "a machine with a cuda device" in shown.stderr
    shown = CliRunner().invoke(app, ["doctor", "--device", "gpu", "--nproc", "1"])
    assert shown.exit_code == 2 and "device: expected cpu or cuda (got gpu)" in shown.stderr


def test_the_screen_fits_80_columns_and_the_exit_code_tells(store: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["doctor", str(store), "--nproc", "1"], env={"COLUMNS": "80"})
    assert run.exit_code == 0, run.output
    assert all(len(line) <= 80 for line in run.stdout.splitlines())
    assert re.search(r"^ok +versions ", run.stdout, re.M) and "200 vertices, 1,000 edges" in run.stdout
    run = CliRunner().invoke(app, ["doctor", str(tmp_path / "nothing.gsplit"), "--nproc", "1", "--json"])
    document = json.loads(run.stdout)
    assert run.exit_code == 1 and document["ok"] is False
    assert [line["verdict"] for line in document["findings"] if line["check"] == "store"] == ["error"]


class _Gone(Function):
    """A backward that loses its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * math.nan


def test_a_gradient_of_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(edges: Any, given: list[Tensor], options: Any) -> Tensor:
        first = _Gone.apply(given[0]) if given[0].dtype == torch.float32 else given[0]  # type: ignore[no-untyped-call]
        return first[: edges.num_dst] * given[1].sum()

    edges = [torch.randn(kernels._NUM_SRC, kernels._HEADS, kernels._WIDTH), torch.ones(3)]
    assert math.isnan(kernels._compare_attention(attend, edges, torch.device("cpu")))
    gone = Verification(0.0, math.nan, 0.0, 1.0, 1e-9, 3, 1, "split")
    monkeypatch.setattr(programs, "verify", lambda *_, **__: gone)
    assert math.isnan(programs.compare_models(solo_mesh(), ["sage"])["sage"]) and not gone.ok


def test_a_report_with_nan_is_json_and_the_file_is_checked_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    report = DoctorReport(None, 1, [Finding("models", "error", "sage differs", figures={"sage": math.nan})])
    monkeypatch.setattr(examination, "examine", lambda *_, **__: report)
    out = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["doctor", "--json", "--out", str(out)])
    assert done.exit_code == 1
    for text in (done.stdout, out.read_text()):
        assert json.loads(text, parse_constant=refuse)["findings"][0]["figures"] == {"sage": None}
    monkeypatch.setattr(examination, "examine", refuse)
    done = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path / "nowhere" / "report.json")])
    assert done.exit_code == 2 and "expected a folder to write in (got no such folder)" in done.stderr
