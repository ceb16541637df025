"""Training on simulated devices as a user starts it: bf16, waits of a step, a limit of memory, operations of CUDA."""

import numpy as np
import pytest
from device_programs import count_waits, train_in_bf16

from gsplit_bench.exactness import Case
from gsplit_bench.ranks import run_ranks
from gsplit_bench.simulated import why_not_supported

pytestmark = pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported()))
BF16 = [Case(m, "split", "random", 0.0, None, n) for n, m in (("layer_norm", "sage"), ("batch_norm", "graphconv"))]
BF16 += [Case("gcn", "split", "random", 0.0, None, None), Case("gat", "split", "random", 0.0, None, "layer_norm")]
ALL_BF16 = [
    Case(model, "split", "random", 0.0, None, norm)
    for model in ("sage", "graphconv", "gcn", "gat")
    for norm in (None, "layer_norm", "batch_norm")
]


# every change: every model once, and each norm
@pytest.mark.parametrize("cases", [BF16, pytest.param(ALL_BF16, marks=pytest.mark.weekly)], ids=["some", "all"])
def test_bf16_trains_near_float32_and_near_the_host(cases: list[Case]) -> None:
    """By the casts of CUDA's autocast. Losses lie between 1.3 and 2.4."""
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
        late = {place: count for place, count in waits.items() if not place.endswith("of the last launch")}
        assert num_steps == 5 and sum(waits.values()) == num_steps and sum(late.values()) == num_steps - 1, waits
        assert all(place.startswith("gsplit/training/trainer.py") for place in waits)
