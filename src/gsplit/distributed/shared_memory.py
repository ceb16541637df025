"""Exchanges between ranks of one host through shared memory instead of sockets.

A rank writes what it sends into a segment of its own, then tells every peer, in one small all-to-all, where to
look; each peer copies its piece straight out of there. That message is also the barrier: data is in place before it
is sent. Two segments take turns, so nothing is overwritten early: whoever has heard from all peers in exchange t +
1 knows that they are done with t, and may write the segment of t again in t + 2.

Segments are anonymous files (memfd) that peers open through /proc, so no name is left behind however a rank ends.
Used only where every rank could open every other's probe at start; otherwise exchanges go over the process group as
before.
"""

import json
import mmap
import os
import secrets
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsplit.distributed.comm import Call, Comm, CompletedWork, LedgerEntry, Work
from gsplit.distributed.process_groups import GroupComm
from gsplit.errors import CommError, explain

__all__ = ["SharedComm", "share_memory"]

_SLACK = 1.25
_LEAST_BYTES = 1 << 20
_WORDS = 7  # process, descriptor, generation, capacity; where the peer's piece begins, how long, what it is for


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


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class SharedComm:
    """See ``comm.Comm``. Everything but ``all_to_all`` goes over the process group."""

    def __init__(self, group: GroupComm) -> None:
        self._group = group
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.ledger: deque[LedgerEntry] = group.ledger
        self._slots: list[_Segment | None] = [None, None]
        self._turn = 0
        self._peers: dict[tuple[int, int], tuple[tuple[int, ...], Tensor]] = {}

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        return self._group.all_to_all_counts(call, counts)

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

    def send_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This turn's segment: rows written here need not be copied there."""
        count = 1
        for extent in shape:
            count *= extent
        return self._segment(count * dtype.itemsize).data[: count * dtype.itemsize].view(dtype).view(shape)

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

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        """See ``Comm``; done when it returns."""
        assert out.is_contiguous() and rows.is_contiguous()
        self.ledger.append(LedgerEntry(call, rows.nbytes, out.nbytes))
        purpose = zlib.crc32(f"{call} {rows.dtype} {list(rows.shape[1:])}".encode())
        segment = self._segment(rows.nbytes)
        if rows.nbytes and rows.data_ptr() != segment.data.data_ptr():
            segment.data[: rows.nbytes].copy_(_bytes_of(rows))
        row_bytes = rows.nbytes // rows.size(0) if rows.size(0) else 0
        ours = torch.empty(self.size, _WORDS, dtype=torch.int64, device="cpu")
        begin = 0
        for peer, count in enumerate(row_counts):
            length = count * row_bytes
            held = (os.getpid(), segment.descriptor, segment.generation, segment.data.numel())
            ours[peer] = torch.tensor((*held, begin, length, purpose), device="cpu")
            begin += length
        theirs = torch.empty_like(ours)
        ones = (1,) * self.size
        self._group.start_all_to_all(
            call, theirs, ours, ones, ones
        ).wait()  # all ranks: says where, and that it is there
        self._fetch(call, out, out_counts, theirs, purpose)
        self._turn ^= 1
        return CompletedWork()

    def _fetch(self, call: Call, out: Tensor, out_counts: tuple[int, ...], where: Tensor, purpose: int) -> None:
        """Copy every peer's piece out of its segment, if it is what this rank is waiting for."""
        data, row_bytes, at = _bytes_of(out), out.nbytes // out.size(0) if out.size(0) else 0, 0
        for peer, (count, words) in enumerate(zip(out_counts, where.tolist(), strict=True)):
            *segment, begin, sent, theirs = words
            length = count * row_bytes
            if theirs != purpose or sent != length:
                expected = f"{length} bytes of {out.dtype} {list(out.shape[1:])} from rank {peer} for this call"
                got = f"{sent} bytes" if theirs == purpose else "rows of another call, type or width"
                fix = "make all ranks call the same collectives with the same types"
                raise CommError(explain(f"rank {self.rank}: {call}", expected, got, fix))
            if length:
                data[at : at + length].copy_(self._peer(peer, tuple(segment))[begin : begin + length])
            at += length
        if out.numel():
            torch.autograd.graph.increment_version(out)

    def _peer(self, peer: int, segment: tuple[int, ...]) -> Tensor:
        """The peer's segment of this turn; opened when it is first seen or has been made anew."""
        held = self._peers.get((peer, self._turn))
        if held is None or held[0] != segment:
            process, descriptor, _, capacity = segment
            held = self._peers[peer, self._turn] = (segment, _open_peer(process, descriptor, capacity))
        return held[1]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def share_memory(groups: list[GroupComm]) -> list[Comm]:
    """The groups on the CPU exchanging through shared memory, if every rank can open every other's; the rest as is.

    A collective: all ranks come to the same answer.
    """
    on_host = [group for group in groups if group.device.type == "cpu"]
    if not on_host or not _all_can_share(on_host[0]):
        return list(groups)
    return [SharedComm(group) if group in on_host else group for group in groups]


def _all_can_share(group: GroupComm) -> bool:
    token = secrets.token_bytes(16)
    fine, offer = True, dict[str, Any]()
    try:
        probe = _new_segment(1, 0)
        probe.data[:16] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        offer = {"boot": _boot(), "process": os.getpid(), "descriptor": probe.descriptor, "token": token.hex()}
    except (OSError, AttributeError):  # no memfd, or no /proc: not Linux, or not allowed
        fine = False
    offers = [json.loads(text) for text in group.gather_text(Call("offer shared memory"), json.dumps(offer))]
    fine = fine and all(_can_open(offer, other) for other in offers)
    verdict = torch.tensor([0 if fine else 1], device="cpu")
    group.all_reduce(
        Call("compare shared memory"), verdict
    ).wait()  # also: nobody closes a probe before all have looked
    if offer:
        os.close(probe.descriptor)
    return int(verdict) == 0


def _can_open(ours: dict[str, Any], other: dict[str, Any]) -> bool:
    if not other or other["boot"] != ours["boot"]:
        return False
    try:
        seen = _open_peer(other["process"], other["descriptor"], mmap.PAGESIZE)
    except OSError:
        return False
    return bytes(seen[:16].tolist()).hex() == str(other["token"])
