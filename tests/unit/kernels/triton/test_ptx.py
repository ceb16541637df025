"""The interpreter of compiled kernels finds planted mistakes, raises at what it does not know, and computes exactly."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from planted_kernels import copy_from_kernel, scale_kernel, sine_kernel, take_kernel
from ptx.arithmetic import OPERATIONS
from ptx.instructions import prepare_kernel
from ptx.launcher import CompiledLauncher, run_programs
from ptx.memory import KernelError
from ptx.module import parse_module
from ptx.values import constant
from torch import Tensor

TEXT = """
.version 8.8
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry written_by_hand(
	.param .u64 .ptr .global .align 1 written_by_hand_param_0
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [written_by_hand_param_0];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
	@BODY@
	ret;
}
"""


def launch(
    kernel: Any, grid: int, args: Sequence[Any], writes: Sequence[Tensor], seed: int = 0, **constants: Any
) -> None:
    CompiledLauncher(80, seed)(kernel, (grid,), args, constants, writes)


def run_text(body: str, out: Tensor, shared_bytes: int = 0) -> Tensor:
    """Two warps execute a body in which %r1 is the thread, and %rd2 the address of its number in ``out``."""
    kernel = prepare_kernel(parse_module(TEXT.replace("@BODY@", body)))
    run_programs(kernel, (1,), [out], [out], shared_bytes, np.random.default_rng(0))
    return out


def numbers(count: int = 64) -> Tensor:
    return torch.full((count,), -1, dtype=torch.int32)


def test_a_missing_mask_is_found() -> None:
    x, out = torch.randn(2, 100)
    launch(scale_kernel, 1, (x, 100, out), (out,), BLOCK=128, MASKED=True)
    assert torch.equal(out, 2 * x)
    with pytest.raises(
        KernelError, match="scale_kernel: .*ld.global.*: load of 16 bytes out of bounds: 7 of 32 threads"
    ):
        launch(scale_kernel, 1, (x.clone(), 100, out), (out,), BLOCK=128, MASKED=False, num_warps=1)


def test_a_misaligned_access_is_found() -> None:
    x, out = torch.randn(256), torch.empty(128)
    launch(copy_from_kernel, 1, (x, 4, out), (out,), BLOCK=128, num_warps=1)
    assert torch.equal(out, x[4:132])
    with pytest.raises(KernelError, match="load of 16 bytes misaligned: 32 of 32 threads"):
        launch(copy_from_kernel, 1, (x, 3, out), (out,), BLOCK=128, num_warps=1)


def test_a_store_to_what_is_not_written_is_found() -> None:
    x, out = torch.randn(2, 128)
    with pytest.raises(KernelError, match="store of 16 bytes out of bounds: 32 of 32 threads"):
        launch(scale_kernel, 1, (x, 128, out), (x,), BLOCK=128, MASKED=True, num_warps=1)


def test_atomics_and_stores_race_in_random_order() -> None:
    """One program takes the cell, another one may write last, and both are others for another seed."""
    first, last = set(), set()
    for seed in range(8):
        cell, winners = numbers(1), numbers(9)
        launch(take_kernel, 8, (cell, winners), (cell, winners), seed)
        assert winners[1:].sum() == 1 and winners[1 + int(cell)] == 1
        first.add(int(cell))
        last.add(int(winners[0]))
    assert len(first) > 2 and len(last) > 2


def test_an_instruction_of_a_kernel_that_is_not_known_is_named() -> None:
    x, out = torch.randn(2, 1)
    with pytest.raises(NotImplementedError, match="PTX"):
        launch(sine_kernel, 1, (x, out), (out,))


@pytest.mark.parametrize(
    "body, named",
    [
        ("sin.approx.f32 %r3, %r2;", "instruction sin.approx.f32"),
        ("add.sat.s32 %r3, %r2, %r1;", "instruction add.sat.s32"),
        ("ld.global.nc.b32 %r3, [%rd2];", "instruction ld.global.nc.b32"),
        ("@%p1 bra.uni $out; add.f16 %rs1, %rs2, %rs3; $out: ", "instruction add.f16"),
        ("shfl.sync.bfly.b32 %r3|%p1, %r2, 1, 31, -1;", "operand %r3|%p1"),
        ("shfl.sync.bfly.b32 %r3, %r2, 1, 15, -1;", "shfl.sync with operands %r3, %r2, 1, 15, -1"),
        ("bar.sync 0, 32;", "bar.sync with operands 0, 32"),
        (".local .b8 stack[8];", "statement .local .b8 stack"),
        ("mov.u32 %r3, %clock;", "constant %clock"),
        ("mov.b32 %r3, 0d3FF0000000000000;", "constant 0d3FF0000000000000"),
    ],
)
def test_what_is_not_known_raises_by_name(body: str, named: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        run_text(body, numbers())
    assert named in str(raised.value)


def test_a_directive_that_is_not_known_raises_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"PTX directive \.maxnreg 64"):
        parse_module(TEXT.replace(".reqntid 64", ".reqntid 64\n.maxnreg 64"))


def test_lanes_take_different_branches_and_meet_again() -> None:
    """Each thread halves its number until it is odd, in loops of other lengths, and threads 0 to 7 go another way."""
    body = """
	mov.u32 %r2, %r1;
	setp.lt.s32 %p1, %r1, 8;
	@%p1 bra $few;
$loop:
	and.b32 %r3, %r2, 1;
	setp.eq.b32 %p2, %r3, 1;
	@%p2 bra $end;
	shr.u32 %r2, %r2, 1;
	bra.uni $loop;
$end:
	shfl.sync.idx.b32 %r4, %r2, 31, 31, -1;
	st.global.v2.b32 [%rd3], {%r2, %r4};
	ret;
$few:
	mov.b32 %r2, 100;
	bra.uni $end;
	"""
    out = run_text("mad.wide.u32 %rd3, %r1, 8, %rd1;" + body, numbers(128)).view(64, 2)
    odd = [100 if thread < 8 else thread // (thread & -thread) for thread in range(64)]
    assert out[:, 0].tolist() == odd
    assert out[:, 1].tolist() == [31] * 32 + [63] * 32


def test_threads_that_wait_for_others_which_never_come_are_an_error() -> None:
    with pytest.raises(KernelError, match="bar.sync 0: threads wait for others"):
        run_text("setp.lt.s32 %p1, %r1, 8; @%p1 bra $out; bar.sync 0; $out: bar.sync 0;", numbers())


def test_warps_read_what_others_have_stored_before_a_barrier() -> None:
    """Thread i reads the number of thread 63 - i; too little memory is found."""
    body = """
	shl.b32 %r2, %r1, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	st.shared.b32 [%r4], %r1;
	bar.sync 0;
	sub.s32 %r4, %r3, %r2;
	ld.shared.b32 %r5, [%r4 + 252];
	st.global.b32 [%rd2], %r5;
	"""
    assert run_text(body, numbers(), 256).tolist() == list(range(63, -1, -1))
    with pytest.raises(KernelError, match="st.shared.b32 .*: store of 4 bytes out of bounds: 32 of 64 threads"):
        run_text(body, numbers(), 128)


@pytest.mark.parametrize(
    "name, sources, want",
    [
        ("prmt.b32", ["0x33221100", "0x77665584", "0xC430"], "0xFF843300"),
        ("bfe.u32", ["0xABCD", "4", "8"], "0xBC"),
        ("bfe.s32", ["0xABCD", "4", "8"], "0xFFFFFFBC"),
        ("shl.b32", ["1", "32"], "0"),
        ("shr.s32", ["-8", "40"], "-1"),
        ("shr.u64", ["-1", "63"], "1"),
        ("mul.wide.s32", ["-2", "0x7FFFFFFF"], "-4294967294"),
        ("cvt.s64.s32", ["-5"], "-5"),
        ("cvt.u32.u64", ["0x100000007"], "7"),
        ("setp.ne.f32", ["0f7FC00000", "0f00000000"], "0"),
        ("setp.neu.f32", ["0f7FC00000", "0f00000000"], "1"),
        ("max.f32", ["0f7FC00000", "0fBF800000"], "0fBF800000"),
        ("abs.ftz.f32", ["0f80000001"], "0f00000000"),
        ("cvt.rn.bf16.f32", ["0f3F808000"], "0x3F80"),
        ("cvt.rn.bf16.f32", ["0f3F818000"], "0x3F82"),
        ("cvt.rn.bf16x2.f32", ["0f40000000", "0f3F800000"], "0x40003F80"),
        ("cvt.rn.f16x2.f32", ["0f40000000", "0f3F800000"], "0x40003C00"),
    ],
)
def test_an_operation_gives_these_bits(name: str, sources: list[str], want: str) -> None:
    operation = OPERATIONS[name]
    values = [constant(source, of)[None] for source, of in zip(sources, operation.sources, strict=True)]
    got = operation.compute(*values)
    assert got.tobytes() == constant(want, operation.result).tobytes()
