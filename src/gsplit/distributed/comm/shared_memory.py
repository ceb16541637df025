"""Exchanges between ranks of one host through shared memory instead of sockets.

A rank writes what it sends into a segment of its own, then sends every peer the place of its piece through a pipe
(``pipes``); each peer reads its piece there. The messages are also the barrier: data is in place before they are sent.
Two segments take turns, so nothing is overwritten early: a rank that has a message of every peer for exchange t + 1 may
overwrite the segment of t in t + 2, because all peers are done with t. So what a peer sent may be read in place until
this rank's next exchange.

Segments are anonymous files (memfd) that peers open through /proc, so no name is left behind however a rank ends.
Used only where every rank could open every other's probe at start; otherwise exchanges go over the process group as
before.
"""

import hashlib
import json
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Comm, CompletedWork, Levels, Work, explain_closed
from gsplit.distributed.comm.group_comm import GroupComm
from gsplit.distributed.comm.pipes import Inbox, Pipes, open_inbox, open_outbox
from gsplit.distributed.watch import processes
from gsplit.distributed.watch.collective_watch import DO_THE_SAME, describe_call
from gsplit.errors import CommError, InputError, RankFaultError, explain

__all__ = ["SharedComm", "gather_hosts", "share_memory"]

_SLACK = 1.25
_LEAST_BYTES = 1 << 20
_PURPOSE_BYTES = 200
_MESSAGE = struct.Struct(
    f"6q{_PURPOSE_BYTES}s"
)  # process, descriptor, generation, capacity; begin, length; what it is for


@dataclass(frozen=True)
class _Segment:
    """Memory that other processes can open: a descriptor, how often it was made anew, and its bytes."""

    descriptor: int
    generation: int
    data: Tensor


def _new_segment(num_bytes: int, generation: int) -> _Segment:
    capacity = -(-max(int(num_bytes * _SLACK), _LEAST_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("gsplit", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, capacity)
    return _Segment(descriptor, generation, torch.frombuffer(mmap.mmap(descriptor, capacity), dtype=torch.uint8))


@torch.inference_mode(False)
def _open_peer(process: int, descriptor: int, capacity: int) -> Tensor:
    """Map another process's segment."""
    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(file, capacity), dtype=torch.uint8)
    finally:
        os.close(file)


def _fit(purpose: str) -> bytes:
    """A text of any length as what a message has room for; texts that differ stay different."""
    data = purpose.encode()
    if len(data) <= _PURPOSE_BYTES:
        return data
    digest = hashlib.sha256(data).hexdigest()[:16]
    return data[: _PURPOSE_BYTES - 17] + f" {digest}".encode()


def _show(purpose: bytes) -> str:
    return purpose.decode(errors="replace")


class SharedComm:
    """See ``comm.Comm``. Counts and rows go through shared memory, everything else over the process group."""

    def __init__(self, group: GroupComm, pipes: Pipes) -> None:
        self._group, self._pipes = group, pipes
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.levels: Levels | None = None
        self._slots: list[_Segment | None] = [None, None]
        self._turn = 0
        self._peers: dict[tuple[int, int], tuple[tuple[int, ...], Tensor]] = {}

    @property
    def waited_s(self) -> float:
        return self._group.waited_s

    def all_reduce(self, call: Call, tensor: Tensor) -> Work:
        return self._group.all_reduce(call, tensor)

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        self._group.broadcast(call, tensor)

    def gather_text(self, call: Call, text: str) -> list[str]:
        return self._group.gather_text(call, text)

    @property
    def closed(self) -> bool:
        return self._group.closed

    def close(self) -> None:
        """See ``Comm``. Segments live until the process ends, because a peer may still be reading its last rows."""
        self._group.close()
        self._pipes.close()

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This turn's segment: rows written here need not be copied there."""
        num_bytes = prod(shape) * dtype.itemsize
        return self._segment(num_bytes).data[:num_bytes].view(dtype).view(shape)

    @torch.inference_mode(False)
    def _segment(self, num_bytes: int) -> _Segment:
        """This turn's segment, made anew if it is too small."""
        held = self._slots[self._turn]
        if held is None or held.data.numel() < num_bytes:
            generation = 0 if held is None else held.generation + 1
            if held is not None:
                os.close(held.descriptor)  # peers that still map the old one keep it alive
            held = self._slots[self._turn] = _new_segment(num_bytes, generation)
        return held

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        self.check_open(call)
        purpose = _fit(describe_call(call, "counts"))
        answers = self._exchange_messages(call, "counts", purpose, [(0, 0, 0, 0, 0, count) for count in counts])
        for peer, (_, theirs) in enumerate(answers):
            if theirs != purpose:
                raise RankFaultError(self._explain(call, f"a count from rank {peer} for this call", _show(theirs)))
        return tuple(words[-1] for words, _ in answers)

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """See ``Comm``; done when it returns."""
        assert out.is_contiguous() and out.size(0) == sum(out_counts)
        pieces = self.all_to_all_views(call, rows, out_counts, row_counts)
        for target, piece in zip(out.detach().split(out_counts), pieces, strict=True):
            target.copy_(piece)
        if out.numel():
            torch.autograd.graph.increment_version(out)
        return CompletedWork()

    def all_to_all_views(
        self, call: Call, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """See ``Comm``: parts of the peers' segments."""
        assert rows.is_contiguous()
        row_bytes = prod(rows.shape[1:]) * rows.dtype.itemsize
        self.check_open(call)
        segment = self._segment(rows.nbytes)
        if rows.nbytes and rows.data_ptr() != segment.data.data_ptr():
            segment.data[: rows.nbytes].copy_(rows.detach().reshape(-1).view(torch.uint8))
        held = (os.getpid(), segment.descriptor, segment.generation, segment.data.numel())
        begins = [row_bytes * sum(row_counts[:peer]) for peer in range(self.size)]
        rows_of = f"{rows.dtype} {list(rows.shape[1:])}"
        what = f"all-to-all of {rows_of}"
        purpose = _fit(describe_call(call, what))
        words = [(*held, begin, row_bytes * count) for begin, count in zip(begins, row_counts, strict=True)]
        pieces = []
        for peer, (theirs, theirs_for) in enumerate(self._exchange_messages(call, what, purpose, words)):
            length = row_bytes * out_counts[peer]
            if theirs_for != purpose or theirs[-1] != length:
                got = f"{theirs[-1]} bytes" if theirs_for == purpose else _show(theirs_for)
                raise RankFaultError(
                    self._explain(call, f"{length} bytes of {rows_of} from rank {peer} for this call", got)
                )
            piece = self._peer(call, peer, theirs) if length else segment.data[:0]
            pieces.append(piece.view(rows.dtype).view(out_counts[peer], *rows.shape[1:]))
        self._turn ^= 1
        return tuple(pieces)

    def check_open(self, call: Call) -> None:
        if self.closed:
            raise InputError(explain_closed(call))

    def _exchange_messages(
        self, call: Call, what: str, purpose: bytes, words: Sequence[tuple[int, ...]]
    ) -> list[tuple[tuple[int, ...], bytes]]:
        """Send words to every rank, with what they are for; what every rank sent. All ranks: each exchange does."""
        messages = [_MESSAGE.pack(*each, purpose) for each in words]
        with self._group.calls.begin(call, what, compare=False) as collective:  # the messages themselves are compared
            answers = [_MESSAGE.unpack(answer) for answer in self._pipes.exchange(collective, messages)]
        return [(answer[:-1], answer[-1].rstrip(b"\0")) for answer in answers]

    def _explain(self, call: Call, expected: str, got: str) -> str:
        return explain(f"rank {self.rank}: {call}", expected, got, DO_THE_SAME)

    def _peer(self, call: Call, peer: int, words: tuple[int, ...]) -> Tensor:
        """A peer's piece; its segment of this turn is opened when it is first seen or has been made anew."""
        *segment, begin, length = words
        held = self._peers.get((peer, self._turn))
        if held is None or held[0] != tuple(segment):
            process, descriptor, _, capacity = segment
            try:
                opened = _open_peer(process, descriptor, capacity)
            except OSError as error:
                raise CommError(self._explain(call, f"the memory of rank {peer}", str(error))) from error
            held = self._peers[peer, self._turn] = (tuple(segment), opened)
        return held[1][begin : begin + length]


def gather_hosts(control: GroupComm) -> list[str]:
    """The host of every rank. A collective."""
    return control.gather_text(Call("describe hosts"), processes.describe_host())


def share_memory(groups: list[GroupComm]) -> list[Comm]:
    """The groups on the CPU exchanging through shared memory, if every rank can open every other's; the rest as is.

    A collective: all ranks come to the same answer.
    """
    return [_share(group) if group.device.type == "cpu" else group for group in groups]


@dataclass(frozen=True)
class _MemoryInfo:
    """What peers need to open this rank's memory, a sample of it, and the pipes that they write into."""

    host: str
    process: int
    descriptor: int
    token: str
    inboxes: list[int]


def _share(group: GroupComm) -> Comm:
    inboxes, outboxes, fine = dict[int, Inbox](), dict[int, int](), False
    with ExitStack() as during, ExitStack() as kept:
        try:
            info = _describe_memory(group, inboxes, during)
        except (OSError, AttributeError):  # no memfd, or no /proc: not Linux, or not allowed
            info = None
        for inbox in inboxes.values():
            during.callback(os.close, inbox.writing)
            kept.callback(os.close, inbox.reading)
        text = json.dumps(None if info is None else asdict(info))
        infos = [json.loads(theirs) for theirs in group.gather_text(Call("describe shared memory"), text)]
        if info is not None and None not in infos:
            try:
                _open_outboxes(group, info, [_MemoryInfo(**theirs) for theirs in infos], outboxes)
                fine = len(outboxes) == len(inboxes)
            except OSError:
                fine = False
        for outbox in outboxes.values():
            kept.callback(os.close, outbox)
        verdict = torch.tensor([0 if fine else 1], device="cpu")
        group.all_reduce(Call("compare shared memory"), verdict).wait()  # nobody closes before all have opened
        if int(verdict):
            return group
        kept.pop_all()
    return SharedComm(group, Pipes(group.rank, {p: i.reading for p, i in inboxes.items()}, outboxes))


def _describe_memory(group: GroupComm, inboxes: dict[int, Inbox], during: ExitStack) -> _MemoryInfo:
    token, probe = secrets.token_bytes(16), _new_segment(1, 0)
    during.callback(os.close, probe.descriptor)
    probe.data[:16] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    for peer in range(group.size):
        if peer != group.rank:
            inboxes[peer] = open_inbox()
    ends = [inboxes[peer].writing if peer in inboxes else -1 for peer in range(group.size)]
    return _MemoryInfo(processes.describe_host(), os.getpid(), probe.descriptor, token.hex(), ends)


def _open_outboxes(group: GroupComm, ours: _MemoryInfo, infos: list[_MemoryInfo], outboxes: dict[int, int]) -> None:
    """Open the pipes to all peers, up to the first whose memory is not what it says."""
    for peer, other in enumerate(infos):
        if other.host != ours.host:
            return
        seen = _open_peer(other.process, other.descriptor, mmap.PAGESIZE)
        if bytes(seen[:16].tolist()).hex() != other.token:
            return
        if peer != group.rank:
            outboxes[peer] = open_outbox(other.process, other.inboxes[group.rank])
