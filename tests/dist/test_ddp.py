"""Ranks that share a batch without sharing gradients are refused: DDP and FSDP, and another mesh."""

import re

import pytest
from ddp_programs import wrap_in_ddp

from gsplit_bench.ranks import run_ranks


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return run_ranks(wrap_in_ddp, 2)


@pytest.mark.parametrize(
    "case, message",
    [
        (
            "outside",
            r"the wrapped model: expected no other wrapper \(got DistributedDataParallel\).*averages gradients",
        ),
        ("inside", r"the model: expected a model that is not parallel yet \(got DistributedDataParallel\)"),
        ("FSDP", r"the wrapped model: expected no other wrapper \(got FSDP\).*averages gradients itself"),
        ("a part in fully_shard", r"the wrapped model: expected no other wrapper \(got FSDP\)"),
        ("inside FSDP", r"the model: expected a model that is not parallel yet \(got FullyShardedDataParallel\)"),
        ("inside fully_shard", r"the model: expected a model that is not parallel yet \(got FSDPModule\)"),
        ("other mesh", r"expected a batch of the model's mesh of 2 ranks \(got one of another mesh, of 1\).*same mesh"),
        ("alone", r"expected a batch of the model's mesh of 1 ranks \(got one of another mesh, of 2\)"),
    ],
)
def test_gradients_over_other_ranks_are_refused(messages: list[dict[str, str]], case: str, message: str) -> None:
    for of_rank in messages:
        assert re.search(message, of_rank[case]), of_rank[case]
