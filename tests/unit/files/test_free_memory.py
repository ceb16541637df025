"""Free memory: the machine's, or the container's where that is less."""

from pathlib import Path

import pytest

from gsplit.files import free_memory
from gsplit.files.free_memory import free_bytes


def test_a_container_with_less_memory_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    assert free_bytes() == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes() > 1 << 20
