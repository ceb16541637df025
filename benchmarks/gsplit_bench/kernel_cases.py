"""What every kernel of this folder compiles to on an architecture, without a device: registers, spills, shared memory.

Triton's own wheel has the assembler. ``CASES`` lists every kernel with the argument types it is called with; widths are
those of common models. A spill is memory of a thread on the stack: it would mean that a kernel wants more registers
than it can have. Used by python -m gsplit_bench kernel-matrix and by the tests.
"""

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gsplit.kernels.triton import attention, dropout, gather, relabelling, rows, sampling, sums
from gsplit.kernels.triton.attention import REALS, edge_tile
from gsplit.kernels.triton.sums import sum_tile

__all__ = ["CASES", "Case", "Usage", "compile_case", "compile_for_amd"]

_WARP = 32
_WAVEFRONT = 64


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments, in order, its constants, and other options than Triton's defaults."""

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """What one thread takes, in registers and in bytes of spilled ones, and one program of shared memory in bytes.

    ``vector_loads``: instructions that load two or more words of global memory at once.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    vector_loads: int


def _tile(rows: int, columns: int, **more: bool) -> dict[str, int]:
    return {"ROWS": rows, "COLUMNS": columns, **more}


def _gather(name: str, stored: str, out: str, *, scaled: bool = False) -> Case:
    types = f"{stored} {stored} i32 *i64 i32 i32 i32 {out} i32 {'*fp32' if scaled else '*i64'}"
    return Case(f"gather, {name}", gather.gather_kernel, types, _tile(4, 128, SCALED=scaled))


def _draw(fanout: int) -> Case:
    width = 1 << (fanout - 1).bit_length()
    constants = {"RENUMBERED": True, "EDGE_IDS": True, "ROWS": max(1, 256 // width), "WIDTH": width}
    types = "*i64 *i32 i64 *i32 *i64 *i64 i64 i32 i32 i32 i32 *i64 *i64 *i64 i32 i32"
    return Case(f"draw, fanout {fanout}", sampling.draw_kernel, types, constants)


def _dropout(name: str, pointer: str) -> Case:
    types = f"{pointer} *i64 i32 i32 i32 i32 i32 i32 {pointer}"
    return Case(f"dropout, {name}", dropout.dropout_kernel, types, _tile(4, 128, IS_BFLOAT16=name == "bfloat16"))


def _relabel(name: str, kernel: Any, types: str) -> Case:
    return Case(name, kernel, types, {"FOREIGN": True, "BLOCK": 128})


def _attention(name: str, kernel: Any, v2: bool, dtype: str, width: int) -> Case:
    """A kernel of attention, with everything it can have; pointers are told by the names of arguments."""
    known = {"keep": "*u8", **dict.fromkeys(_INDICES, "*i64"), **dict.fromkeys(_NUMBERS, "i32")}
    constants = {"V2": v2, "ONE_ROW": False, "HAS_EDGE": True, "HAS_KEEP": True, **edge_tile(width, _TORCH[dtype])}
    constants |= {name: True for name in ("WANTS_EDGE", "WANTS_VALUES") if name in kernel.arg_names}
    names = [n for n in kernel.arg_names if n not in constants]
    types = " ".join(known.get(n, f"*{dtype}") for n in names)
    return Case(f"{name}, width {width}", kernel, types, constants, {"num_warps": 1, "enable_fp_fusion": False})


def _sums(name: str, pointer: str, width: int, *, weighted: bool) -> Case:
    what = "weighted sums" if weighted else "sums"
    types = f"*i64 *i64 *fp32 {pointer} i32 {pointer}"
    constants = {"WEIGHTED": weighted, **sum_tile(width)}
    return Case(f"{what}, {name}, width {width}", sums.sum_kernel, types, constants, {"num_warps": 1})


_INDICES = ("indptr", "src_rows", "edges", "dst_rows")
_NUMBERS = (*REALS, "num_heads", "width")
_ATTENTION = {
    "forward": attention.attention_forward_kernel,
    "backward, by destination": attention.attention_backward_dst_kernel,
    "backward, by source": attention.attention_backward_src_kernel,
}
_TORCH = {"fp32": torch.float32, "fp64": torch.float64}
_DTYPES = {"float32": "fp32", "float64": "fp64"}

CASES = (
    _gather("4 bytes", "*i32", "*i32"),
    _gather("2 bytes", "*i16", "*i16"),
    _gather("int8 to float32", "*i8", "*fp32", scaled=True),
    _dropout("float32", "*fp32"),
    _dropout("float64", "*fp64"),
    _dropout("bfloat16", "*i16"),
    Case("spread", rows.spread_kernel, "*i32 *i64 i32 i32 i32 *i32 *i32", _tile(4, 128)),
    *(
        Case(f"merge, {name}", rows.merge_kernel, f"*{t} *{t} *i64 *i64 *{t} i32 i32 i32 *{t}", _tile(4, 128))
        for name, t in _DTYPES.items()
    ),
    Case("count", sampling.count_kernel, "*i64 *i64 i64 i32 i32 *i64", {"BLOCK": 128}),
    *(_draw(fanout) for fanout in (5, 10, 15, 30, 64, 256)),
    Case(
        "take all",
        sampling.take_all_kernel,
        "*i64 *i32 i64 *i32 *i64 i64 *i64 *i64 *i64 i32 i32",
        {"EDGE_IDS": True, "BLOCK": 128},
    ),
    _relabel("meet", relabelling.meet_kernel, "*i64 i32 i64 i64 *i32 *i64 i32 *i32 *i32"),
    _relabel("flag", relabelling.flag_kernel, "*i64 i32 i64 i64 *i32 *i32 *i32 *i64"),
    _relabel("place", relabelling.place_kernel, "*i64 i32 i64 i64 i32 *i64 *i32 *i32 *i32 *i64 *i64 *i64"),
    *(
        _sums(name, pointer, width, weighted=weighted)
        for name, pointer in (("float32", "*fp32"), ("float64", "*fp64"), ("bfloat16", "*bf16"))
        for width, weighted in ((64, False), (256, True))
    ),
    *(
        _attention(f"{kind} {name}, {dtype}", kernel, kind == "GATv2", t, width)
        for kind in ("GAT", "GATv2")
        for name, kernel in _ATTENTION.items()
        for dtype, t, width in (("float32", "fp32", 64), ("float32", "fp32", 256), ("float64", "fp64", 64))
    ),
)


def _source(case: Case) -> ASTSource:
    names = [name for name in case.kernel.arg_names if name not in case.constants]
    signature = dict(zip(names, case.types.split(), strict=True))
    if "constexprs" not in inspect.signature(ASTSource).parameters:  # triton 3.2
        return ASTSource(fn=case.kernel, signature=signature, constants=case.constants)
    signature = {name: signature.get(name, "constexpr") for name in case.kernel.arg_names}
    # as the JIT does: pointers of torch's allocator, and widths of common models, are multiples of 16
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or n in ("width", "out_stride")]
    attrs = {(case.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attrs)


def compile_case(case: Case, capability: int) -> Usage:
    """Compile a kernel for a compute capability (80 is sm_80) to machine code, and read what it takes."""
    compiled = triton.compile(_source(case), target=GPUTarget("cuda", capability, _WARP), options=case.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    registers, stack, local = (int(number) for number in found.groups())
    vectors = len(re.findall(r"ld\.global\S*\.v[248]\.", compiled.asm["ptx"]))
    shared = int(compiled.metadata.shared)  # without what the driver keeps for itself
    return Usage(registers, stack, local, shared, vectors)


def compile_for_amd(case: Case, architecture: str = "gfx942") -> Usage:
    """Compile a kernel for a GPU of AMD (gfx942 is MI300), and read vector registers and spilled ones of a thread."""
    target = GPUTarget("hip", architecture, _WAVEFRONT)
    compiled = triton.compile(_source(case), target=target, options=case.options)
    listing = compiled.asm["amdgcn"]

    def read(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", listing)
        assert found is not None, name
        return int(found[1])

    spilled = 4 * (read("vgpr_spill_count") + read("sgpr_spill_count"))
    vectors = len(re.findall(r"(?:global|buffer)_load_(?:dwordx|b64|b96|b128)", listing))
    stack, shared = read("private_segment_fixed_size"), int(compiled.metadata.shared)
    return Usage(read("vgpr_count"), stack, spilled, shared, vectors)
