"""Every kernel compiles without a device, for an old and a new architecture, without spills and in few registers."""

import ast
from pathlib import Path

import pytest
from triton_process import Run

FOLDER = Path(__file__).resolve().parents[4] / "src" / "gsplit" / "kernels" / "triton"


# every change: the newest architecture, with the same limit
@pytest.mark.parametrize("capability", [pytest.param(75, marks=pytest.mark.weekly), 90])
def test_no_kernel_spills_or_takes_too_many_registers(compiler: Run, capability: int) -> None:
    usage = compiler("triton_programs.compiled_usage", capability)
    assert len(usage) > 30
    for name, (registers, stack_bytes, local_bytes, *_) in usage.items():
        assert stack_bytes == local_bytes == 0, name
        assert registers <= (96 if name.startswith("GAT") else 76), name  # at 96 registers an SM has room for 21 warps


@pytest.mark.weekly
def test_every_kernel_compiles_for_amd_without_spills(compiler: Run) -> None:
    usage = compiler("triton_programs.compiled_usage_on_amd")
    assert len(usage) > 30
    for name, (registers, stack_bytes, spilled_bytes, *_) in usage.items():
        assert stack_bytes == spilled_bytes == 0 and 0 < registers <= 96, name


def test_numbers_of_rows_do_not_make_new_variants(compiler: Run) -> None:
    """Triton compiles anew for multiples of 16 and for 1, in the middle of training, unless it is told not to."""
    specialized = compiler("triton_programs.specialized_numbers")
    assert set(specialized) <= {"width", "out_stride", "num_heads", "num_columns", "table_mask"}


def test_every_kernel_is_compiled(compiler: Run) -> None:
    written = {
        node.name
        for file in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert len(written) >= 13
    assert compiler("triton_programs.compiled_names") == written
