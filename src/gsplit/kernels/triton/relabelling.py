"""Rows for vertices in the order a host loop would find them, found by a device in three passes over the sources:

1. ``meet``: the first source of each vertex, by an atomic minimum. Own vertices have a place in ``state``,
   foreign ones in a hash table (linear probing by compare and swap) of the size of the layer.
2. ``flag``: 1 for every source that was first; their running sum numbers the new vertices in the order found.
3. ``place``: each source finds the number of its vertex's first source.

Where a vertex lies in the table depends on the order of threads; no number does. ``state`` holds one int32 per own
vertex: ``UNSEEN``, or its first source (between passes), or ``-1 - row``: a minimum with a source leaves a
row as it is.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.triton.launch import launch, num_blocks
from gsplit.kernels.triton.words import mix

__all__ = ["UNSEEN", "Relabelled", "flag_kernel", "meet_kernel", "num_found", "place_kernel", "relabel"]

UNSEEN = 2**31 - 1
_BLOCK = 128


@triton.jit(do_not_specialize=("num_ids", "first", "stop"))
def meet_kernel(
    ids, num_ids, first, stop, state, table, table_mask, met_by, slots, FOREIGN: tl.constexpr, BLOCK: tl.constexpr
):
    """The first source of each vertex: in ``state`` for own ones, in ``met_by`` at its ``slots`` for foreign."""
    source = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    vertex = tl.load(ids + source, mask=source < num_ids, other=-1)
    inside = vertex >= 0
    own = inside & (vertex >= first) & (vertex < stop)
    tl.atomic_min(state + tl.where(own, vertex - first, 0), source, mask=own)
    if FOREIGN:
        todo = inside & ~own
        word = mix(tl.zeros([BLOCK], tl.uint64), vertex.to(tl.uint64, bitcast=True))
        at = word.to(tl.int32) & table_mask
        while tl.max(todo.to(tl.int32), axis=0) > 0:
            free = tl.where(todo, tl.full([BLOCK], -1, tl.int64), tl.full([BLOCK], -2, tl.int64))
            found = tl.atomic_cas(table + at, free, vertex)  # takes no mask: nothing in the table is -2
            done = todo & ((found == -1) | (found == vertex))
            tl.atomic_min(met_by + at, source, mask=done)
            tl.store(slots + source, at, mask=done)
            todo = todo & ~done
            at = tl.where(todo, (at + 1) & table_mask, at)


@triton.jit(do_not_specialize=("num_ids", "first", "stop"))
def flag_kernel(ids, num_ids, first, stop, state, met_by, slots, flags, FOREIGN: tl.constexpr, BLOCK: tl.constexpr):
    """``flags[source + 1]``: 1 for the first source of a new own vertex, 2**32 for the first of a foreign one."""
    source = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    vertex = tl.load(ids + source, mask=source < num_ids, other=-1)
    inside = vertex >= 0
    own = inside & (vertex >= first) & (vertex < stop)
    new = own & (tl.load(state + tl.where(own, vertex - first, 0), mask=own, other=-1) == source)
    flag = new.to(tl.int64)
    if FOREIGN:
        outside = inside & ~own
        slot = tl.load(slots + source, mask=outside, other=0)
        outside = outside & (tl.load(met_by + slot, mask=outside, other=-1) == source)
        flag += outside.to(tl.int64) << 32
    tl.store(flags + source + 1, flag, mask=inside)


@triton.jit(do_not_specialize=("num_ids", "first", "stop", "num_rows"))
def place_kernel(
    ids,
    num_ids,
    first,
    stop,
    num_rows,
    sums,
    state,
    met_by,
    slots,
    rows,
    new_ids,
    foreign_ids,
    FOREIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The row of every own source, -1 - number of every foreign one; new vertices are listed.

    A vertex's first source replaces itself in ``state`` by the row while others read it: both give the same row.
    """
    source = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    vertex = tl.load(ids + source, mask=source < num_ids, other=-1)
    inside = vertex >= 0
    own = inside & (vertex >= first) & (vertex < stop)
    local = tl.where(own, vertex - first, 0)
    met = tl.load(state + local, mask=own, other=-1)
    fresh = own & (met >= 0)
    number = (tl.load(sums + tl.where(fresh, met, 0) + 1, mask=fresh, other=1) & 0xFFFFFFFF) - 1
    row = tl.where(fresh, num_rows + number, -1 - met)
    first_met = fresh & (met == source)
    tl.store(new_ids + number, vertex, mask=first_met)
    tl.store(state + local, (-1 - row).to(tl.int32), mask=first_met)
    if FOREIGN:
        foreign = inside & ~own
        met = tl.load(met_by + tl.load(slots + source, mask=foreign, other=0), mask=foreign, other=0)
        number = (tl.load(sums + met + 1, mask=foreign, other=0) >> 32) - 1
        tl.store(foreign_ids + number, vertex, mask=foreign & (met == source))
        row = tl.where(foreign, -1 - number, row)
    tl.store(rows + source, row, mask=inside)


@dataclass(frozen=True, slots=True)
class Relabelled:
    """Rows of vertices in the order found.

    ``rows``: of each id; ``-1 - number`` for a foreign one. ``new_ids``: the own vertices that are new.
    ``foreign_ids``: the foreign ones. Both have room behind them. ``total``, one number: see ``num_found``. All are on
    the device.
    """

    rows: Tensor
    new_ids: Tensor
    foreign_ids: Tensor
    total: Tensor


def num_found(total: int) -> tuple[int, int]:
    """How many own vertices are new, and how many are foreign, from a ``Relabelled.total`` that the host has read."""
    return total & (2**32 - 1), total >> 32


def relabel(ids: Tensor, first: int, stop: int, num_rows: int, state: Tensor, *, foreign: bool) -> Relabelled:
    """Find the rows of vertices. The host does not wait.

    Own vertices are ``first .. stop - 1``, of which ``num_rows`` have a row. If not ``foreign``, all ids are own
    vertices. Ids below 0 only fill the tensor.
    """
    device, count = ids.device, ids.numel()
    assert count < UNSEEN, "a layer of 2**31 edges on one rank"
    size = 1 << max(4, (2 * count - 1).bit_length()) if foreign and count else 1
    table = torch.full((size,), -1, dtype=torch.int64, device=device)
    met_by = torch.full((size,), UNSEEN, dtype=torch.int32, device=device)
    slots = torch.empty(count if foreign else 1, dtype=torch.int32, device=device)
    flags = torch.zeros(count + 1, dtype=torch.int64, device=device)
    grid, constants = (num_blocks(count, _BLOCK),), {"FOREIGN": foreign, "BLOCK": _BLOCK}
    meeting = (state, table, size - 1, met_by, slots)
    launch(meet_kernel, grid, (ids, count, first, stop, *meeting), constants, (state, table, met_by, slots))
    launch(flag_kernel, grid, (ids, count, first, stop, state, met_by, slots, flags), constants, (flags,))
    sums = flags.cumsum(0)
    rows, new_ids = torch.empty_like(ids), torch.empty_like(ids)
    foreign_ids = torch.empty_like(ids) if foreign else ids[:0]
    args = (ids, count, first, stop, num_rows, sums, state, met_by, slots, rows, new_ids, foreign_ids)
    launch(place_kernel, grid, args, constants, (state, rows, new_ids, foreign_ids))
    return Relabelled(rows, new_ids, foreign_ids, sums[-1:])
