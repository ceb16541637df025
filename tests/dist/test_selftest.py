"""``gsplit selftest`` on the host: what is right is found right, what is wrong is named."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.kernels.triton import availability
from gsplit.selftest import Finding, Report, run, run_selftest
from gsplit.selftest.environment import check_triton, has_code_for
from gsplit_bench.simulated import why_not_supported


def test_everything_is_right_here() -> None:
    report = run_selftest("cpu", 2, models=("gat",), sizes_mb=(1,))
    assert report.is_right, report.findings
    tried = {finding.check for finding in report.findings if finding.verdict == "ok"}
    assert tried == {"links", "models", "a killed rank"}
    models = next(finding for finding in report.findings if finding.check == "models")
    assert set(models.figures) == {"gat on 1", "gat on 2"}
    assert 0.0 < max(models.figures.values()) < 1e-9  # two ranks add in another order
    assert report.versions["torch"].startswith("2.")
    links = next(finding for finding in report.findings if finding.check == "links")
    assert "zero-copy gather not measured here" in links.found


def test_what_is_wrong_is_exit_code_3_and_a_line_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Report(
        "cpu", 1, {"torch": "2"}, [Finding("models", "wrong", "differ by 1", "send it back", 1.0, {"sage": 1.0})]
    )
    monkeypatch.setattr("gsplit.selftest.run_selftest", lambda *_: wrong)
    out = tmp_path / "report.json"
    shown = CliRunner().invoke(app, ["selftest", "--out", str(out)])
    assert shown.exit_code == 3 and "differ by 1" in shown.stdout and "send it back" in shown.stdout
    document = json.loads(out.read_text())
    assert document["ok"] is False and document["findings"][0]["figures"] == {"sage": 1.0}


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TOLERANCE", -1.0)  # nothing is that good
    found = run._check_models("cpu", 1, ("sage",))
    assert found.verdict == "wrong" and "results differ" in found.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    shown = CliRunner().invoke(app, ["selftest", "--device", "cuda"])
    assert shown.exit_code == 2 and "a machine with a cuda device" in shown.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_zero_copy_reads_the_hosts_rows_by_one_launch_each_time() -> None:
    if why := why_not_supported():
        pytest.skip(why)
    code = (
        "import torch; from gsplit.kernels.triton.launch import set_launcher;"
        "from gsplit.selftest.programs import measure_zero_copy\n"
        "from gsplit_bench.simulated import simulated_device\n"
        "seen = []\n"
        "def record(kernel, grid, args, constants, writes):\n"
        "    before(kernel, grid, args, constants, writes)\n"
        "    seen.append((kernel.__name__, args[0].numel(), args[1].is_pinned()))\n"
        "    assert torch.equal(args[6].cpu().view(rows.shape), rows.view(torch.int32)[args[3].cpu()])\n"
        "with simulated_device():\n"
        "    before = set_launcher(record); rows = torch.randn(11, 128)\n"
        "    assert measure_zero_copy(rows, torch.device('sim', 0)) > 0\n"
        "assert seen == [('gather_kernel', 0, True)] * 6, seen\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_triton_that_cannot_run_is_a_line_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_capability", lambda device: (6, 1))
    monkeypatch.setattr("gsplit.selftest.environment.resolve_device", torch.device)
    monkeypatch.setattr(availability, "is_installed", lambda: True)
    monkeypatch.setattr("gsplit.selftest.environment.is_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("GSPLIT_TRITON", raising=False)
    line = check_triton("cuda:0")
    assert line.verdict == "not tried" and "cuda:0 has 6.1" in line.found and "newer GPU" in line.fix
    assert run._check_kernels("cuda:0", 1).verdict == "not tried"
    monkeypatch.setenv("GSPLIT_TRITON", "0")
    assert "GSPLIT_TRITON=0" in check_triton("cuda").found


def test_a_v100_needs_older_wheels() -> None:
    built = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    assert not has_code_for((7, 0), built) and has_code_for((8, 9), built) and has_code_for((12, 0), built)
