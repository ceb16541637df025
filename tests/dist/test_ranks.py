"""Real gloo ranks: the same mini-batch, the same outputs and gradients as one process, and no hang when one fails."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_programs import (
    Case,
    average_lengths,
    end_after_a_look,
    everything,
    exchange_many,
    fail_on_one,
    imported_modules,
    mismatched,
    read_variable,
    refuse_sharing,
    return_rank,
    return_tensor,
    sampled_edges,
    train_by_hand,
)

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import IMPORTED_BEFORE, RankFailedError, run_ranks


def _case(seed: int, world_size: int, kind: str) -> Case:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 80))
    count = 6 * n
    src, dst = (n * rng.random(count) ** 2).astype(np.int64), (n * rng.random(count) ** 1.5).astype(np.int64)
    even = tuple(n * rank // world_size for rank in range(world_size + 1))
    boundaries = {
        "even": even,
        "random": (0, *sorted(rng.integers(0, n, world_size - 1).tolist()), n),
        "all on rank 0": (0, *[n] * world_size),
        "none on rank 0": (0, 0, *even[2:]),
    }[kind]
    targets = rng.permutation(n)[: int(rng.integers(3, 20))]
    fanouts = [int(f) for f in rng.choice([-1, 1, 2, 3, 5], 3)]
    return Case(seed, n, src, dst, boundaries, fanouts, targets)


def _cases(world_size: int) -> list[Case]:
    kinds = ["even", "random", "all on rank 0", "none on rank 0"]
    return [_case(100 * world_size + i, world_size, kind) for i, kind in enumerate(kinds)]


HOSTS = [(2,), (3,), (4,), (1, 1), (2, 2), (2, 1), (2, 2, 2)]


@pytest.fixture(scope="module", params=HOSTS, ids=lambda p: f"{'+'.join(map(str, p))} ranks")
def ran(request: pytest.FixtureRequest) -> tuple[list[Case], list[Any]]:
    """Every program on these ranks of each host: through shared memory, from rank to rank or in two levels."""
    hosts = request.param
    cases = _cases(sum(hosts))
    ranks = run_ranks(everything, sum(hosts), cases, hosts=hosts)
    in_levels = len(hosts) > 1 and set(hosts) == {2}
    assert {rank["comm"] for rank in ranks} == {("SharedComm" if len(hosts) == 1 else "GroupComm", in_levels)}
    return cases, ranks


def test_splits_are_the_one_process_minibatch(ran: tuple[list[Case], list[Any]]) -> None:
    cases, ranks = ran
    whole = sampled_edges(solo_mesh(), cases)
    for number, case in enumerate(cases):
        one, many = whole[number], [rank["edges"][number] for rank in ranks]
        assert {part["len"] for part in many} == {one["len"]}
        assert all(part["calls"] == many[0]["calls"] for part in many)  # every rank joined every collective, in order
        seen: list[int] = []
        for step, want in enumerate(one["steps"]):
            got = [part["steps"][step] for part in many]
            for layer in range(len(case.fanouts)):
                assert sorted(e for g in got for e in g["layers"][layer]) == sorted(want["layers"][layer])
            assert sorted(v for g in got for v in g["inputs"]) == sorted(want["inputs"])
            assert sorted(v for g in got for v in g["targets"]) == sorted(want["targets"])
            assert {g["global"] for g in got} == {want["global"]} == {len(want["targets"])}
            features = {row[0]: row[1:] for row in want["rows"]}
            for g in got:  # input rows, received ones included, are the right vertices' rows
                assert all(features[row[0]] == row[1:] for row in g["rows"])
            seen += want["targets"]
        assert sorted(seen) == sorted(case.targets.tolist())


def test_shuffle_is_adjoint_to_its_backward(ran: tuple[list[Case], list[Any]]) -> None:
    for rank in ran[1]:
        assert len(rank["adjoint"]) == 4 * 3 * 2  # cases, layers, deterministic or not
        for forward, backward in rank["adjoint"]:
            assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


def test_models_by_hand_equal_one_process(ran: tuple[list[Case], list[Any]]) -> None:
    cases, ranks = ran
    whole = train_by_hand(solo_mesh(), cases)
    assert len(whole) >= 2 * len(cases)
    for step, one in enumerate(whole):
        rows: dict[int, Any] = {}
        for part in (rank["training"][step] for rank in ranks):
            rows |= part["rows"]
            assert part["loss"] == pytest.approx(one["loss"], abs=1e-9)
            for got, want in zip(part["grads"], one["grads"], strict=True):
                assert np.allclose(got, want, rtol=0, atol=1e-9)
        assert rows.keys() == one["rows"].keys()
        for vertex, want in one["rows"].items():
            assert rows[vertex] == pytest.approx(want, abs=1e-9)


def test_a_step_has_one_exchange_per_layer_and_purpose(ran: tuple[list[Case], list[Any]]) -> None:
    """Per layer one exchange of counts and one of ids; L - 1 for rows in forward and in backward; one for the loss.

    One more for input rows, unless the ranks know that they are on one host, where they read rows in place.
    """
    comm, in_levels = ran[1][0]["comm"]
    shares_memory = comm == "SharedComm"
    want = {
        "loading": [
            *(f"{name} ids of step 0, layer {layer}" for layer in (2, 1, 0) for name in ("count", "exchange")),
            *([] if shares_memory else ["exchange features of step 0, layer 0"]),
        ],
        "shuffles": [
            "shuffle of step 0, layer 1",
            "shuffle of step 0, layer 2",
            "shuffle backward of step 0, layer 2",
            "shuffle backward of step 0, layer 1",
        ],
        "world": ["sum of step 0"],
    }
    if in_levels:  # both exchange everything that belongs to a mini-batch
        want |= {group: sorted(2 * want[group]) for group in ("loading", "shuffles")}
    for rank in ran[1]:
        got = rank["exchanges"]
        assert got == want if not in_levels else {group: sorted(calls) for group, calls in got.items()} == want


def test_different_settings_are_refused_on_every_rank(ran: tuple[list[Case], list[Any]]) -> None:
    said = {rank["disagreement"] for rank in ran[1]}
    assert len(said) == 1
    assert "NeighborLoader: seed: expected the same on every rank (got rank 0: 0, rank 1: 1" in said.pop()
    for rank in ran[1]:
        assert "input_nodes: expected the same on every rank" in rank["lists"]["nodes"]
        assert "graph: expected the same on every rank" in rank["lists"]["parts"]
    assert [rank["rank"] for rank in ran[1]] == list(range(len(ran[1])))


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(return_rank, 3, 10) == [10, 11, 12]


def test_tensors_arrive_whole_after_their_rank_has_ended() -> None:
    """Trap 16: not as file descriptors of a process that is gone."""
    for rank, found in enumerate(run_ranks(return_tensor, 2)):
        assert torch.equal(found["rows"], torch.arange(100_000) + rank) and not found["rows"].is_shared()


def test_ranks_have_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the moment in which the first call started the server."""
    for value in ("first", "second"):
        monkeypatch.setenv("GSPLIT_TEST_WORD", value)
        assert run_ranks(read_variable, 2, "GSPLIT_TEST_WORD") == [value, value]


@pytest.mark.parametrize(
    "how, message",
    [
        ("raise", "rank 1 failed:.*rank 1 has a bug"),
        ("kill", r"rank 1 ended without a word, exit code -9|rank 0 failed"),
    ],
)
def test_a_failing_rank_ends_the_others_in_seconds(how: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=f"(?s){message}"):
        run_ranks(fail_on_one, 3, how, str(tmp_path / "clock"))
    assert time.monotonic() - float((tmp_path / "clock").read_text()) < 100  # others would wait for 300


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[0, 1\] did not finish in 2 s"):
        run_ranks(fail_on_one, 2, "sleep", str(tmp_path / "clock"), timeout_s=2)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_exchanges_of_any_size_and_type_arrive_whole(shared_memory: bool) -> None:
    """Hundreds in a row, growing, shrinking and empty, each rank at its own pace: segments are never reused early."""
    assert run_ranks(exchange_many, 3, 300, shared_memory=shared_memory) == [300, 300, 300]


def test_a_comparison_of_weights_does_not_change_the_average_by_a_bit() -> None:
    """Or a resumed training, which compares at other steps, would not be the uninterrupted one."""
    for averages in run_ranks(average_lengths, 4):
        assert all(with_sums == without for with_sums, without in averages)


def test_shared_memory_is_given_up_where_a_rank_cannot_be_opened() -> None:
    assert run_ranks(refuse_sharing, 2) == ["GroupComm", "GroupComm"]


def test_ranks_that_do_not_do_the_same_are_told() -> None:
    """What they expected and what the other rank called."""
    called = {
        "dtype": "mean of step 0 (all-to-all of torch.float64 [3])",
        "width": "mean of step 0 (all-to-all of torch.float32 [4])",
        "call": "sum of step 0 (all-to-all of torch.float32 [3])",
        "kind": "mean of step 0 (counts)",
        "count": "12 bytes",
    }
    one, two = run_ranks(mismatched, 2, list(called))
    for how, got in called.items():
        assert f"24 bytes of torch.float32 [3] from rank 1 for this call (got {got})" in one[how]
        back = "24 bytes" if how == "count" else "mean of step 0 (all-to-all of torch.float32 [3])"
        assert f"from rank 0 for this call (got {back})" in two[how]


def test_a_collective_that_ends_just_after_a_look_has_not_failed() -> None:
    """A rank looks every second whether the others do the same; a busy machine puts the end right behind a look."""
    assert run_ranks(end_after_a_look, 2) == [2.0, 2.0]


def test_the_server_of_ranks_has_imported_what_it_was_told_to() -> None:
    """Also modules of the caller's path; an import that fails there is silent, and every rank would do the work."""
    assert set(IMPORTED_BEFORE) <= run_ranks(imported_modules, 1)[0]
    assert "warm_server" in IMPORTED_BEFORE
