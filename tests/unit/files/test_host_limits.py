"""Memory and cores: the machine's, or those of the container or job where they are less."""

import os
from pathlib import Path

import pytest

from gsplit.files import host_limits
from gsplit.files.host_limits import free_bytes, total_bytes, usable_cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of control groups."""
    monkeypatch.setattr(host_limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return tmp_path


def _write(folder: Path, **texts: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_limits_it_is_the_machine(groups: Path) -> None:
    _write(groups, memory__max="max", cpu__max="max 100000")
    _write(groups / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=5)
    _write(groups / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert free_bytes() > 1 << 20
    assert total_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_cores() == 64


def test_a_container_with_less_is_seen_and_its_cached_files_are_free(groups: Path) -> None:
    _write(groups, memory__max=5000, memory__current=1000, cpu__max="250000 100000")
    assert (free_bytes(), total_bytes(), usable_cores()) == (4000, 5000, 3)
    _write(groups, memory__current=4900, memory__stat="anon 1000\nactive_file 900\ninactive_file 3000\nfile 3950")
    assert free_bytes() == 4000
    _write(groups, memory__current=6000, memory__stat="anon 6000")
    assert free_bytes() == 0


def test_control_groups_of_version_1(groups: Path) -> None:
    stat = "inactive_file 1\ntotal_active_file 100\ntotal_inactive_file 700"
    _write(groups / "memory", memory__limit_in_bytes=9000, memory__usage_in_bytes=2000, memory__stat=stat)
    _write(groups / "cpu", cpu__cfs_quota_us=50_000, cpu__cfs_period_us=100_000)
    assert (free_bytes(), total_bytes(), usable_cores()) == (7800, 9000, 1)


def test_the_limits_of_a_job_count_in_whichever_group_around_the_process_they_are(groups: Path) -> None:
    (groups / "own").write_text("7:cpu,cpuacct:/slurm/job_1/step\n4:memory:/slurm/job_1/step\n0::/job_2/step/task\n")
    _write(groups / "job_2", memory__max=8000, memory__current=1000, cpu__max="900000 100000")
    _write(groups / "job_2/step/task", memory__max="max", memory__current=1000, cpu__max="max 100000")
    _write(groups / "memory/slurm/job_1", memory__limit_in_bytes=7000, memory__usage_in_bytes=500)
    _write(groups / "cpu/slurm/job_1", cpu__cfs_quota_us=800_000, cpu__cfs_period_us=100_000)
    assert (free_bytes(), total_bytes(), usable_cores()) == (6500, 7000, 8)
    (groups / "own").write_text("0::/../../elsewhere\n")  # a container that sees the names of the machine
    assert usable_cores() == 64
