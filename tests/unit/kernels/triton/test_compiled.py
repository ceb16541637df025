"""Every kernel compiles without a device, for an old and a new architecture, without spills and in few registers."""

import ast
from pathlib import Path

import pytest

from gsplit_bench.kernel_cases import CASES, compile_case, compile_for_amd

FOLDER = Path(__file__).resolve().parents[4] / "src" / "gsplit" / "kernels" / "triton"


# every change: the newest architecture, with the same limit
@pytest.mark.parametrize("capability", [pytest.param(75, marks=pytest.mark.weekly), 90])
def test_no_kernel_spills_or_takes_too_many_registers(capability: int) -> None:
    assert len(CASES) > 30
    for case in CASES:
        usage = compile_case(case, capability)
        assert usage.stack_bytes == usage.local_bytes == 0, case.name
        assert usage.registers <= (104 if case.name.startswith("GAT") else 76), case.name  # at 104 an SM has 19 warps


@pytest.mark.weekly
def test_every_kernel_compiles_for_amd_without_spills() -> None:
    for case in CASES:
        usage = compile_for_amd(case)
        assert usage.stack_bytes == usage.local_bytes == 0 and 0 < usage.registers <= 96, case.name


def test_numbers_of_rows_do_not_make_new_variants() -> None:
    """Triton compiles anew for multiples of 16 and for 1, in the middle of training, unless it is told not to."""
    specialized = set()
    for case in CASES:
        names = [name for name in case.kernel.arg_names if name not in case.constants]
        fixed = {case.kernel.arg_names[each.num] for each in case.kernel.params if each.do_not_specialize}
        numbers = {name for name, type_ in zip(names, case.types.split(), strict=True) if type_[0] != "*"}
        specialized |= numbers - fixed
    assert specialized <= {"width", "out_stride", "num_heads", "num_columns", "table_mask"}


def test_every_kernel_is_compiled() -> None:
    written = {
        node.name
        for file in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert len(written) >= 13
    assert {case.kernel.__name__ for case in CASES} == written
