"""Training computes what it computed when the record was made: losses and gradients of 40 cases, in float64."""

import json

import numpy as np
import pytest
from golden_programs import RECORD, golden_cases, run_golden


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_and_gradients_are_those_of_the_record(ranks: int) -> None:
    wanted = [row for row in json.loads(RECORD.read_text()) if row["ranks"] == ranks]
    assert len(wanted) == sum(case.ranks == ranks for case in golden_cases()) > 0
    for results in run_golden(ranks):
        for got, want in zip(results, wanted, strict=True):
            case = {key: want[key] for key in ("model", "strategy", "partitioned", "dropout", "norm")}
            assert case == {key: got[key] for key in case}
            assert np.allclose(got["losses"], want["losses"], rtol=1e-11, atol=0), case
            assert np.allclose(got["gradients"], want["gradients"], rtol=1e-9, atol=1e-12), case
