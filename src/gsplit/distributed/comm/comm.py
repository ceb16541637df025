"""What the ranks of a group can do together, and the same for one process alone.

All ranks always join (law 5): every method here is called by all ranks of the group in the same order, with
tensors that may be empty. One process runs the same code through ``SoloComm``; several use a process group
(``group_comm.GroupComm``) or, on one host, shared memory (``shared_memory.SharedComm``). Each call has a name, step and
layer, so that a hang or a mismatch can be reported. What a collective writes is marked as modified for autograd, which
cannot see it otherwise.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gsplit.errors import GSplitError, InputError, UnavailableError, explain

__all__ = [
    "Call",
    "Comm",
    "CompletedWork",
    "Levels",
    "Work",
    "SoloComm",
    "assert_same_on_all_ranks",
    "explain_closed",
    "run_on_all_ranks",
    "run_on_rank_zero",
]

_WRONG_PATHS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors of files that stay: others, of full or failing disks, may not come again."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective is for; the same on every rank.

    ``detail``: what else must be the same. ``long_wait``: a rank may work long before it while the others wait, which
    only groups on the host allow.
    """

    name: str
    step: int = -1
    layer: int = -1
    detail: str = ""
    long_wait: bool = False

    def __str__(self) -> str:
        place = [f"step {self.step}"] * (self.step >= 0) + [f"layer {self.layer}"] * (self.layer >= 0)
        return f"{self.name} of {', '.join(place)}" if place else self.name


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there."""


class Comm(Protocol):
    """The ranks of one group, seen from one of them. Tensors that are sent and received lie on ``device``.

    ``levels``: the two groups over which mini-batches are exchanged, if the ranks are on several hosts.
    """

    rank: int
    size: int
    device: torch.device
    levels: "Levels | None"

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for the others, all in all."""

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Send one number to every peer and receive one from each."""

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """Send ``rows``, peer after peer, and receive into ``out``, peer after peer. Neither may change until the
        wait.
        """

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """``all_to_all`` whose result is left where it arrived, in one tensor per peer: only to be read, and only
        until the next exchange.
        """

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor to write the rows of the next all-to-all into; not to be kept beyond that all-to-all."""

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        """Sum a tensor over the ranks, in place. It may not be touched until the wait."""

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """Give every rank what rank 0 has, in place."""

    def gather_text(self, call: Call, text: str) -> list[str]:
        """A short text from every rank, in rank order. Only in groups on the host."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    def close(self) -> None:
        """Refuse every later collective. No communication: no peer is waited for."""


@dataclass(frozen=True)
class Levels:
    """The ranks of a group that is on several hosts, with as many on each: rank ``h * near.size + i`` is i of host h.

    ``near``: the ranks of this host. ``far``: the ranks with the same place in all hosts.
    """

    near: Comm
    far: Comm


class CompletedWork:
    """A collective that is over when it returns."""

    def wait(self) -> None:
        """Return at once."""


class SoloComm:
    """One process: nothing to send, the same calls."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = 0, 1, torch.device(device)
        self.closed = False
        self.waited_s = 0.0
        self.levels: Levels | None = None

    def check_open(self, call: Call) -> None:
        if self.closed:
            raise InputError(explain_closed(call))

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        self.check_open(call)
        return counts

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        assert out_counts == row_counts == (out.size(0),) == (rows.size(0),)
        self.check_open(call)
        out.copy_(rows)
        return CompletedWork()

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        out = torch.empty(sum(out_counts), *rows.shape[1:], dtype=rows.dtype, device=self.device)
        self.all_to_all(call, out, rows, out_counts, row_counts).wait()
        return tuple(out.split(out_counts))

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        self.check_open(call)
        return CompletedWork()

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        self.check_open(call)

    def gather_text(self, call: Call, text: str) -> list[str]:
        self.check_open(call)
        return [text]

    def close(self) -> None:
        self.closed = True


def explain_closed(call: Call) -> str:
    """The message for a collective on a closed mesh."""
    return explain(call, "an open mesh", "one that was closed", "close the mesh when nothing uses it any more")


def assert_same_on_all_ranks(comm: Comm, what: str, settings: Mapping[str, object]) -> None:
    """Compare settings across the ranks before anything depends on them; all ranks raise if they differ."""
    ours = {key: _short(value) for key, value in settings.items()}
    all_ranks = [json.loads(text) for text in comm.gather_text(Call(f"compare {what}"), json.dumps(ours))]
    for key in sorted({key for theirs in all_ranks for key in theirs}):
        values = [theirs.get(key, "not set") for theirs in all_ranks]
        if len(set(values)) > 1:
            got = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise InputError(explain(f"{what}: {key}", "the same on every rank", got, "start every rank alike"))


def run_on_rank_zero(comm: Comm, what: str, act: Callable[[], None]) -> None:
    """Call ``act`` on rank 0 only; if it fails there, all ranks raise its error. A collective."""
    failure, may_work_later = "", False
    if comm.rank == 0:
        try:
            act()
        except (GSplitError, OSError) as error:
            failure = str(error) or type(error).__name__
            may_work_later = isinstance(error, UnavailableError) or (
                isinstance(error, OSError)
                and not isinstance(error, _WRONG_PATHS)
                and error.errno not in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
            )
    text = json.dumps([failure, may_work_later])
    failure, may_work_later = json.loads(comm.gather_text(Call(what, long_wait=True), text)[0])
    if failure:
        raise (UnavailableError if may_work_later else InputError)(failure)


def run_on_all_ranks(comm: Comm, what: str, act: Callable[[], None]) -> None:
    """Call ``act``, which is not a collective, on every rank; if it fails anywhere, all ranks raise. A collective."""
    failed: GSplitError | None = None
    try:
        act()
    except GSplitError as error:
        failed = error
    texts = comm.gather_text(Call(what, long_wait=True), "" if failed is None else str(failed))
    if failed is not None:
        raise failed
    for text in filter(None, texts):
        raise InputError(text)


def _short(value: object) -> str:
    text = json.dumps(value, default=str, sort_keys=True)
    return text if len(text) <= 200 else "sha256 " + hashlib.sha256(text.encode()).hexdigest()
