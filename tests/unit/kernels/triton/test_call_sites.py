"""Dropout, shuffle and sampling lead to their kernels where the rule says so; elsewhere Triton is not even imported."""

import subprocess
import sys

from triton_process import Run


def test_dropout_starts_its_kernel_in_both_directions(interpreter: Run) -> None:
    assert interpreter("triton_call_sites.check_dropout_site") == ["dropout_kernel"] * 2


def test_the_shuffle_takes_one_launch_each_way(interpreter: Run) -> None:
    assert interpreter("triton_call_sites.check_shuffle_sites") == ["spread_kernel", "merge_kernel", "merge_kernel"]


def test_the_sampler_is_the_one_of_kernels(interpreter: Run) -> None:
    relabelling = ["meet_kernel", "flag_kernel", "place_kernel"]
    started = interpreter("triton_call_sites.check_sampler_site")
    assert started == ["count_kernel", "draw_kernel", *relabelling]


def test_the_host_never_imports_triton() -> None:
    code = (
        "import sys, torch, numpy as np; from gsplit.nn.dropout import keyed_dropout;"
        "from gsplit.sampling.neighbor import make_sampler; from gsplit.graph.graph import Graph;"
        "import gsplit.minibatch.shuffle;"
        "keyed_dropout(torch.ones(2, 2), torch.arange(2), 0.5);"
        "make_sampler(Graph(np.array([0, 0]), np.array([], int), 1), np.array([], int), torch.device('cpu'));"
        "print('triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "False"
