"""Small Triton kernels, most of them with a mistake, for the tests of what executes compiled kernels."""

import triton
import triton.language as tl

__all__ = ["copy_from_kernel", "scale_kernel", "sine_kernel", "take_kernel"]


@triton.jit
def scale_kernel(x, length, out, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """``out = 2 * x``; without MASKED, what lies behind ``x`` is read too."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    tl.store(out + place, tl.load(x + place, mask=mask | (not MASKED)) * 2, mask=mask)


@triton.jit(do_not_specialize=("start",))
def copy_from_kernel(x, start, out, BLOCK: tl.constexpr):
    """Says of ``start`` that it is a multiple of 4, so that four numbers are loaded at once."""
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + tl.max_contiguous(tl.multiple_of(start + place, [4]), [4])))


@triton.jit
def take_kernel(cell, winners):
    """The programs that find the cell free, and the last one that writes to ``winners[0]``."""
    program = tl.program_id(0)
    found = tl.atomic_cas(cell, -1, program)
    tl.store(winners + 1 + program, (found == -1).to(tl.int32))
    tl.store(winners, program)


@triton.jit
def sine_kernel(x, out):
    """Not an instruction of the kernels of gsplit."""
    tl.store(out, tl.sin(tl.load(x)))
