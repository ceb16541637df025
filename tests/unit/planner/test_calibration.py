"""Probes give sane rates at toy size, and a calibration is kept until the machine or a version changes."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from gsplit.graph.graph import Graph
from gsplit.partitioning.presample import Workload
from gsplit.planner import calibration
from gsplit.planner.calibration import measure_kernels, measure_sampling, measure_thread_gain
from gsplit.planner.disk import measure_disk
from gsplit.planner.hardware import PRESETS, Hardware, read_hardware


def test_kernels_have_rates_at_toy_size() -> None:
    rates = asdict(measure_kernels(scale=0.01, repeats=1))
    for name, value in rates.items():
        least = 1e4 if name.endswith("_per_s") else 1e-6 if name == "optimizer_s" else 0
        assert value >= least, name
    assert 1e8 < rates["flops_per_s"] < 1e13


def test_disk_threads_and_sampling_are_measured(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path, 2000)
    assert disk.reads_per_s > 10 and disk.bytes_per_s > 1e5 and list(tmp_path.iterdir()) == []
    assert measure_thread_gain(1) == 0.0 and 0 <= measure_thread_gain(2, 1000) <= 1
    ring = Graph(np.arange(101), (np.arange(100) + 1) % 100, 100)
    workload = Workload(ring, np.empty(0, np.int64), np.arange(100), [1, 1], 10)
    assert measure_sampling(workload, steps=1) > 1


def test_a_calibration_is_kept_until_the_machine_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Hardware] = []

    def calibrate(**options: object) -> Hardware:
        made.append(PRESETS["v100-nvlink"])
        return made[-1]

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = calibration.cache_file()
    assert path.is_relative_to(tmp_path)
    first, second = calibration.this_machine(), calibration.this_machine()
    assert first == second == read_hardware(path) and len(made) == 1
    calibration.this_machine(again=True)
    assert len(made) == 2
    document = json.loads(path.read_text())
    document["notes"]["torch"] = "0.1"
    path.write_text(json.dumps(document))
    calibration.this_machine()
    assert len(made) == 3
    path.write_text("damaged")
    calibration.this_machine()
    assert len(made) == 4 and read_hardware(path) == made[-1]
    document = json.loads(path.read_text())
    del document["constants"]["split_s"]  # by a version that did not know it
    path.write_text(json.dumps(document))
    calibration.this_machine()
    assert len(made) == 5 and read_hardware(path) == made[-1]
