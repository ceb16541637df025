"""The rule that picks a kernel: numba on the CPU, Triton where it runs, torch for all else and for other types."""

import logging
import sysconfig
from pathlib import Path

import pytest
import torch

import gsplit
from gsplit.kernels.dispatch import Kernel, Operation, kernel_for
from gsplit.kernels.triton import availability

CASES: list[tuple[Operation, str, torch.dtype | None, Kernel]] = [
    ("sample", "cpu", None, "numba"),
    ("sample", "cuda", None, "triton"),
    ("move rows", "cpu", torch.float32, "numba"),
    ("move rows", "cpu", torch.float64, "numba"),
    ("move rows", "cpu", torch.bfloat16, "torch"),
    ("move rows", "cpu", torch.int64, "torch"),
    ("move rows", "cuda", torch.float32, "triton"),
    ("move rows", "cuda", torch.bfloat16, "torch"),
    ("dropout", "cpu", torch.float32, "numba"),
    ("dropout", "cpu", torch.float64, "numba"),
    ("dropout", "cpu", torch.float16, "torch"),
    ("dropout", "cuda", torch.float64, "triton"),
    ("dropout", "cuda", torch.bfloat16, "triton"),
    ("dropout", "cuda", torch.float16, "torch"),
    ("attention", "cpu", torch.float32, "numba"),
    ("attention", "cpu", torch.float64, "numba"),
    ("attention", "cpu", torch.bfloat16, "torch"),
    ("attention", "cuda", torch.float32, "triton"),
    ("attention", "cuda", torch.bfloat16, "torch"),
    ("dot-product attention", "cpu", torch.float32, "numba"),
    ("dot-product attention", "cpu", torch.bfloat16, "torch"),
    ("dot-product attention", "cuda", torch.float32, "torch"),
]


def a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Answer for hardware that is not here: one GPU, and Triton installed."""
    for name in ("GSPLIT_TRITON", "CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(availability, "is_installed", lambda: True)
    monkeypatch.setattr(availability, "_capability", lambda device: capability)
    availability._find_build_obstacle.cache_clear()


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A search path with these programs and no others, and Python's headers beside them."""
    for name in (*names, "Python.h"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folder)})


def kernel_on_the_gpu() -> Kernel:
    return kernel_for("attention", torch.device("cuda", 0), torch.float32)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("operation, device, dtype, want", CASES)
def test_the_kernel_of_an_operation(
    operation: Operation,
    device: str,
    dtype: torch.dtype | None,
    want: Kernel,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_gpu(monkeypatch, (8, 0))
    monkeypatch.setattr(availability, "is_installed", lambda: installed)
    monkeypatch.setenv("GSPLIT_TRITON", "1")  # whatever compiler this machine has
    expected = "torch" if want == "triton" and not installed else want
    assert kernel_for(operation, torch.device(device), dtype) == expected


@pytest.mark.parametrize(
    "there, cc, want",
    [
        (["gcc"], None, "triton"),
        (["clang"], None, "triton"),
        (["cc", "tcc"], None, "torch"),  # Triton does not look for these
        ([], None, "torch"),
        (["tcc"], "tcc", "triton"),
        (["gcc"], "tcc", "torch"),
        (["gcc"], "gcc -m64", "torch"),  # one program to Triton, which would not find it
    ],
)
def test_triton_needs_a_compiler(
    there: list[str], cc: str | None, want: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, (8, 0))
    programs(tmp_path, monkeypatch, *there)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    assert kernel_on_the_gpu() == want
    monkeypatch.setenv("GSPLIT_TRITON", "1")
    assert kernel_on_the_gpu() == "triton"
    monkeypatch.setenv("GSPLIT_TRITON", "0")
    assert kernel_on_the_gpu() == "torch"
    assert kernel_for("sample", torch.device("meta")) == "torch"


def test_triton_needs_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, (8, 0))
    programs(tmp_path, monkeypatch, "gcc")
    (tmp_path / "Python.h").unlink()
    assert kernel_on_the_gpu() == "torch"
    availability._find_build_obstacle.cache_clear()
    monkeypatch.setenv("CPATH", "elsewhere")
    assert kernel_on_the_gpu() == "triton"


@pytest.mark.parametrize("capability, want", [((6, 1), "torch"), ((7, 0), "triton"), ((12, 0), "triton")])
def test_triton_needs_compute_capability_7(
    capability: tuple[int, int], want: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, capability)
    programs(tmp_path, monkeypatch, "gcc")
    assert kernel_on_the_gpu() == want


def test_init_says_once_on_a_host_why_triton_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a_gpu(monkeypatch, (8, 0))
    programs(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        gsplit.init("cuda")
        kernel_on_the_gpu()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("no gcc or clang", "slower, same results", "install gcc or clang", "GSPLIT_TRITON=0"):
        assert part in record.getMessage()
    monkeypatch.setenv("GSPLIT_TRITON", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    gsplit.init("cuda")
    assert len(caplog.records) == 1
