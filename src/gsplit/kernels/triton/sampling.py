"""Keyed neighbour sampling on a device: how many in-edges each row draws, and which.

Draws equal ``sampling.kernels_numba`` bit for bit, because slot i's number is a hash and not a state: Floyd's method is
run for many rows at once, slot after slot, with the picks of a row in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsplit.kernels.triton.launch import launch, num_blocks
from gsplit.kernels.triton.words import bounded, join, mix, word_halves

__all__ = ["MAX_FANOUT", "count_kernel", "count_layer", "draw_kernel", "draw_sources", "take_all_kernel"]

MAX_FANOUT = 256
"""Largest fanout whose picks are held in registers; more are drawn with torch operations."""
_BLOCK = 128
_PICKS = 256


@triton.jit(do_not_specialize=("first", "num_rows", "fanout"))
def count_kernel(indptr, frontier, first, num_rows, fanout, counts, BLOCK: tl.constexpr):
    """``counts[i + 1]``: the in-edges that row i will draw; fanout -1 takes them all."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    local = tl.load(frontier + row, mask=inside, other=0) - first
    local = tl.where(inside, local, 0)
    degree = tl.load(indptr + local + 1, mask=inside, other=0) - tl.load(indptr + local, mask=inside, other=0)
    tl.store(counts + row + 1, tl.where(fanout < 0, degree, tl.minimum(degree, fanout)), mask=inside)


@triton.jit
def _sources_at(cached, num_cached, indices, place, drawn):
    """``indices[place]``, from ``cached``, the first of them, where it has them."""
    hot = drawn & (place < num_cached)
    value = tl.load(cached + place, mask=hot, other=0)
    return tl.where(hot, value, tl.load(indices + place, mask=drawn & ~hot, other=0)).to(tl.int64)


@triton.jit(
    do_not_specialize=(
        "num_cached",
        "first",
        "key_high",
        "key_low",
        "num_rows",
        "fanout",
        "first_edge_high",
        "first_edge_low",
    )
)
def draw_kernel(
    indptr,
    cached,
    num_cached,
    indices,
    original,
    frontier,
    first,
    key_high,
    key_low,
    num_rows,
    fanout,
    out_indptr,
    sources,
    edge_ids,
    first_edge_high,
    first_edge_low,
    RENUMBERED: tl.constexpr,
    EDGE_IDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Floyd's method for ROWS destinations; column i of the tile is the pick of slot i, and WIDTH >= fanout."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    vertex = tl.load(frontier + row, mask=inside, other=0)
    local = tl.where(inside, vertex - first, 0)
    start = tl.load(indptr + local, mask=inside, other=0)
    degree = tl.load(indptr + local + 1, mask=inside, other=0) - start
    name = vertex
    if RENUMBERED:
        name = tl.load(original + local, mask=inside, other=0)
    layer_key = join(key_high, key_low).to(tl.uint64, bitcast=True)
    key = mix(layer_key, name.to(tl.uint64, bitcast=True))
    slots = tl.arange(0, WIDTH)
    picks = tl.zeros([ROWS, WIDTH], tl.int64) + slots[None, :]  # every neighbour, in order
    for slot in range(fanout):
        last = degree - fanout + slot
        word = mix(key, tl.zeros([ROWS], tl.uint64) + slot)
        pick = bounded(word, (last + 1).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
        repeats = (picks == pick[:, None]) & (slots < slot)[None, :]
        pick = tl.where(tl.max(repeats.to(tl.int32), axis=1) > 0, last, pick)
        here = (degree > fanout)[:, None] & (slots == slot)[None, :]
        picks = tl.where(here, pick[:, None], picks)
    count = tl.minimum(degree, fanout)
    drawn = inside[:, None] & (slots[None, :] < count[:, None])
    place = start[:, None] + picks
    target = tl.load(out_indptr + row, mask=inside, other=0)[:, None] + slots[None, :]
    tl.store(sources + target, _sources_at(cached, num_cached, indices, place, drawn), mask=drawn)
    if EDGE_IDS:
        tl.store(edge_ids + target, place + join(first_edge_high, first_edge_low), mask=drawn)


@triton.jit(do_not_specialize=("num_cached", "first", "first_edge_high", "first_edge_low"))
def take_all_kernel(
    indptr,
    cached,
    num_cached,
    indices,
    frontier,
    first,
    out_indptr,
    sources,
    edge_ids,
    first_edge_high,
    first_edge_low,
    EDGE_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every in-edge of one destination, in order."""
    row = tl.program_id(0)
    local = tl.load(frontier + row) - first
    start = tl.load(indptr + local)
    degree = tl.load(indptr + local + 1) - start
    begin = tl.load(out_indptr + row)
    for offset in range(0, degree, BLOCK):
        slot = offset + tl.arange(0, BLOCK)
        drawn = slot < degree
        found = _sources_at(cached, num_cached, indices, start + slot, drawn)
        tl.store(sources + begin + slot, found, mask=drawn)
        if EDGE_IDS:
            tl.store(edge_ids + begin + slot, start + slot + join(first_edge_high, first_edge_low), mask=drawn)


def count_layer(indptr: Tensor, first: int, frontier: Tensor, fanout: int) -> Tensor:
    """Offsets, int64 [rows + 1], of the in-edges each vertex of ``frontier`` will draw; fanout -1 takes them all."""
    counts = torch.zeros(frontier.numel() + 1, dtype=torch.int64, device=indptr.device)
    launch(
        count_kernel,
        (num_blocks(frontier.numel(), _BLOCK),),
        (indptr, frontier, first, frontier.numel(), fanout, counts),
        {"BLOCK": _BLOCK},
        (counts,),
    )
    return counts.cumsum(0)


def draw_sources(
    indptr: Tensor,
    cached: Tensor,
    indices: Tensor,
    first: int,
    original_ids: Tensor,
    key: int,
    frontier: Tensor,
    fanout: int,
    out_indptr: Tensor,
    most_edges: int,
    first_edge: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Source ids of the drawn in-edges and, if ``first_edge`` is given, their places in the graph counted from it.

    ``indptr`` and ``indices`` are of the own range; ``indices`` may be in registered host memory, and ``cached`` has
    the first of them on the device. ``original_ids`` is empty where ids are original; fanout is -1 or at most
    ``MAX_FANOUT``. There is room for ``most_edges``, of which ``out_indptr[-1]`` are drawn; sources behind them
    are -1. Equals ``kernels_numba.draw_places`` and ``copy_sources``.
    """
    sources = torch.full((most_edges,), -1, dtype=torch.int64, device=indptr.device)
    edge_ids = None if first_edge is None else torch.empty_like(sources)
    targets = (sources, sources if edge_ids is None else edge_ids)
    constants = {"EDGE_IDS": edge_ids is not None}
    place = word_halves(first_edge or 0)
    num_rows = frontier.numel()
    if fanout < 0:
        args = (indptr, cached, cached.numel(), indices, frontier, first, out_indptr, *targets, *place)
        launch(take_all_kernel, (num_rows,), args, constants | {"BLOCK": _BLOCK}, targets)
        return sources, edge_ids
    width = 1 << (fanout - 1).bit_length()
    rows = max(1, _PICKS // width)
    launch(
        draw_kernel,
        (num_blocks(num_rows, rows),),
        (
            indptr,
            cached,
            cached.numel(),
            indices,
            original_ids,
            frontier,
            first,
            *word_halves(key),
            num_rows,
            fanout,
            out_indptr,
            *targets,
            *place,
        ),
        constants | {"RENUMBERED": original_ids.numel() > 0, "ROWS": rows, "WIDTH": width},
        targets,
    )
    return sources, edge_ids
