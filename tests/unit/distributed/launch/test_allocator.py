"""The tuned allocator keeps what is freed, in a process that has started already; what the environment says stays."""

import json
from pathlib import Path

import pytest
from forked_scripts import start_forked

from gsplit.distributed.launch.allocator import ALLOCATOR

_PROGRAM = """
import json, sys
import gsplit

def kept():
    blocks = [bytearray(b"x") * (64 << 20)]  # above 32 MiB glibc maps a block of its own, whatever was freed before
    before = int(open("/proc/self/statm").read().split()[1])
    del blocks
    return 1 - (before - int(open("/proc/self/statm").read().split()[1])) * 4096 / (64 << 20)

plain = kept()
gsplit.init(tuned_allocator=True)
print(json.dumps([plain, kept()]))
"""


@pytest.mark.parametrize("variables, expected", [({}, [0.0, 1.0]), (ALLOCATOR, [0.0, 0.0])])
def test_memory_is_kept_from_now_on_if_the_environment_does_not_say_how(
    variables: dict[str, str], expected: list[float], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = start_forked([str(tmp_path / "program.py")], tmp_path, variables).wait()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(expected, abs=0.1)
