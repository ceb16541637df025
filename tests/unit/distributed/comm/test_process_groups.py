"""What is arranged before ranks exchange anything: limits that many ranks run into, and where gloo listens."""

import os
import resource

import pytest

from gsplit.distributed.comm import process_groups
from gsplit.distributed.launch.launched_rank import STORE
from gsplit.errors import InputError

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "limits, ranks, raised",
    [
        ((1024, 20_000), 4, None),
        ((1024, 40_000), 1000, (32_512, 40_000)),
        ((1024, 20_000), 1000, (20_000, 20_000)),  # enough to start
        ((1024, NONE), 4000, (128_512, NONE)),
        ((NONE, NONE), 4000, None),
    ],
)
def test_the_limit_of_open_files_is_raised_for_many_ranks(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], ranks: int, raised: tuple[int, int] | None
) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: done.append(new))
    process_groups._allow_sockets(ranks)
    assert done == ([] if raised is None else [raised])


def test_too_few_open_files_are_refused_before_gloo_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(InputError, match="open files: expected a limit of at least 12512 for 1000 ranks .got 4096"):
        process_groups._allow_sockets(1000)


@pytest.mark.parametrize(
    "local, world, given, used",
    [("2", "2", None, "lo"), ("2", "2", "eth7", "eth7"), ("2", "4", None, None), (None, "2", None, None)],
    ids=["one host", "as asked", "two hosts", "started by hand"],
)
def test_ranks_of_torchrun_on_one_host_use_the_loopback_interface(
    local: str | None, world: str, given: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another one was asked for; otherwise gloo would listen where the name of the host leads."""
    variables = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": world, "GLOO_SOCKET_IFNAME": given, STORE: None}
    for name, value in variables.items():
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    process_groups._prefer_loopback()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == used
