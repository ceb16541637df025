"""Where Triton runs, and that every launch goes through the launcher in place."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gsplit.kernels.triton.availability import is_available, is_installed
from gsplit.kernels.triton.launch import launch, set_launcher


def test_the_host_has_kernels_of_its_own_and_simulated_devices_need_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPLIT_TRITON", raising=False)
    assert not is_available(torch.device("cpu"))
    assert not is_available(torch.device("meta"))
    monkeypatch.setenv("GSPLIT_TRITON", "1")
    assert not is_available(torch.device("cpu"))
    assert is_available(torch.device("meta")) == is_available(torch.device("cuda")) == is_installed()


def test_a_launcher_sees_every_launch_with_programs() -> None:
    seen: list[Any] = []

    def record(
        kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
    ) -> None:
        seen.append((kernel, grid, args, constants, writes))

    before = set_launcher(record)
    try:
        launch("kernel", (2, 3), (1,), {"B": 4}, ())
        launch("kernel", (2, 0), (1,), {"B": 4}, ())
    finally:
        assert set_launcher(before) is record
    assert seen == [("kernel", (2, 3), (1,), {"B": 4}, ())]


class _Kernel:
    """What Triton's kernels look like from outside."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.calls.append((grid, args, constants))


def test_without_another_launcher_the_kernel_is_called_on_its_grid() -> None:
    kernel = _Kernel()
    launch(kernel, (2,), (5, 6), {"B": 4}, ())
    assert kernel.calls == [((2,), (5, 6), {"B": 4})]


def test_the_host_never_imports_triton() -> None:
    code = (
        "import sys, torch, numpy as np; from gsplit.nn.dropout import keyed_dropout;"
        "from gsplit.sampling.neighbor import make_sampler; from gsplit.graph.graph import Graph;"
        "import gsplit.minibatch.shuffle;"
        "keyed_dropout(torch.ones(2, 2), torch.arange(2), 0.5);"
        "make_sampler(Graph(np.array([0, 0]), np.array([], int), 1), np.array([], int), torch.device('cpu'));"
        "print('triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "False"
