"""Limits that many ranks run into before they exchange anything."""

import resource

import pytest

from gsplit.distributed.comm import process_groups
from gsplit.errors import InputError

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "limits, ranks, raised",
    [
        ((1024, 20_000), 4, None),
        ((1024, 20_000), 1000, (12_512, 20_000)),
        ((1024, NONE), 4000, (48_512, NONE)),
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
