"""Training on simulated devices as a user starts it: bf16, waits of a step, a limit of memory, operations of CUDA."""

import numpy as np
import pytest
from cuda_kernels import without_cuda_kernel
from device_programs import count_waits, operations_used, train_in_bf16
from simulated_programs import simulated_cases
from small_graph import Case

from gsplit.run.models import MODELS
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

pytestmark = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
BF16 = [("sage", "layer_norm"), ("graphconv", "batch_norm"), ("gcn", None), ("gat", "layer_norm")]
ALL_BF16 = [(model, norm) for model, _ in BF16 for norm in (None, "layer_norm", "batch_norm")]


# every change: every model once, and each norm
@pytest.mark.parametrize("models", [BF16, pytest.param(ALL_BF16, marks=pytest.mark.weekly)], ids=["some", "all"])
def test_bf16_trains_near_float32_and_near_the_host(models: list[tuple[str, str | None]]) -> None:
    """By the casts of CUDA's autocast. Losses lie between 1.3 and 2.4."""
    cases = [Case(model, "split", "random", 0.0, None, norm) for model, norm in models]
    there, operations = run_ranks(train_in_bf16, 2, cases, ["float32", "bf16"], device="sim:0")[0]
    host, _ = run_ranks(train_in_bf16, 2, cases, ["bf16"])[0]
    for case, found, wanted in zip(cases, there, host, strict=True):
        distance = np.abs(np.subtract(found["bf16"], found["float32"])).max()
        assert 0.0 < distance < 0.02, case  # measured: 0.009
        np.testing.assert_allclose(found["bf16"], wanted["bf16"], rtol=0.0, atol=0.02, err_msg=str(case))
    assert ("aten::addmm", "dense", ("bfloat16",)) in operations or ("aten::mm", "dense", ("bfloat16",)) in operations
    sums = {(name, types) for name, layout, types in operations if layout == "sparse" or "scatter" in name}
    assert any("mm" in name for name, _ in sums) and any("scatter" in name for name, _ in sums)
    assert not [each for each in sums if "bfloat16" in each[1]]  # rows of bf16 are added over edges in float32


def test_the_host_waits_once_per_step_for_a_device_that_is_behind() -> None:
    """For the loss of the step before; only at the end of an epoch does the device run out of work."""
    case = Case("sage", "split", "random", 0.5, None, "batch_norm")
    for num_steps, waits in run_ranks(count_waits, 2, case, [0, 2], device="sim:0")[0]:
        at_once = sum(count for place, count in waits.items() if place.endswith("of the last launch"))
        assert num_steps == 5 and 1 < sum(waits.values()) <= num_steps and at_once <= 1, waits
        assert all(place.startswith("gsplit/training/trainer.py") for place in waits)


# every change: the two kinds of layers; every week: all of them, with values of edges
@pytest.mark.parametrize(
    "models", [("sage", "gat"), pytest.param(MODELS, marks=pytest.mark.weekly)], ids=["two", "all"]
)
def test_every_operation_has_a_cuda_kernel(models: tuple[str, ...]) -> None:
    """Also with the branches of PyG's layers for CUDA, sampling on the device and on the host, and evaluation."""
    cases = simulated_cases(1, ("split",))
    cases = cases if models is MODELS else [case for case in cases if case.model in models and not case.edge_values]
    operations = run_ranks(operations_used, 2, cases, device="sim:0", sample_device="sim:0")[0]
    assert len(operations) > 150 and {"aten::addmm", "aten::index_add_"} <= {name for name, _, _ in operations}
    assert without_cuda_kernel(operations) == []


def test_an_operation_without_a_cuda_kernel_is_named() -> None:
    """PyG's mean over a CSR matrix on the CPU, a product of the CPU's library, and one that does not exist."""
    planted = [("aten::_sparse_mm_reduce_impl", "sparse"), ("aten::mkldnn_linear", "dense"), ("aten::gone", "dense")]
    right = [("aten::addmm", "sparse"), ("aten::relu", "dense"), ("aten::add.Tensor", "dense")]
    found = without_cuda_kernel([(name, layout, ("float32",)) for name, layout in planted + right])
    assert found == sorted(f"{name}, {layout}, float32" for name, layout in planted)
