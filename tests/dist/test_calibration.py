"""A calibration starts ranks, measures, and gives a machine that plans can be made for."""

import json
import subprocess
import sys

from gsplit.planner.hardware import Hardware

PROGRAM = """
import json
from dataclasses import asdict
from gsplit.planner.calibration import calibrate
print(json.dumps(asdict(calibrate(scale=0.01, rank_numbers=(2, 2)))))
"""


def test_ranks_measure_this_machine() -> None:
    """In a process of its own: the launcher sets the environment."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    machine = Hardware(**json.loads(done.stdout.splitlines()[-1]))
    assert machine.name == "this" and machine.cores is not None and machine.cores >= 1
    assert 0 < machine.collective_s < 1 and machine.collective_per_rank_s == 0
    for rate in (machine.exchange_bytes_per_s, machine.reduce_bytes_per_s, machine.disk_bytes_per_s):
        assert 1e4 < rate < 1e13
