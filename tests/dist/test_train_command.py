"""``gsplit train``, ``infer`` and ``verify`` as a user runs them.

The command's own process is forked from a server; the ranks that it starts, or that torchrun starts, are real ones.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_scripts import run_forked, run_ranks_forked, start_forked

from gsplit.run.folder import latest_checkpoint
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.soak_watch import find_ranks

SMALL = ["--hidden", "16", "--fanout", "5,5", "--batch-size", "256"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = PlantedGraph(4000, 60_000, num_features=16)
    return str(build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit").path)


def _json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # one document and nothing else


def _json_of_ranks(num_ranks: int, folder: Path, *args: str) -> Any:
    """The document of a command that ranks run together: rank 0 writes it, the others write nothing."""
    first, *others = run_ranks_forked(["-m", "gsplit", *args], num_ranks, folder)
    assert others == [""] * (num_ranks - 1)
    return json.loads(first)


def test_train_infer_and_evaluate_do_not_depend_on_the_ranks(store: str, tmp_path: Path) -> None:
    train = ["-m", "gsplit", "train", store, *SMALL, "--epochs", "2", "--lr", "0.01"]
    one = _json(run_forked([*train, "--json", "--out", str(tmp_path / "one")], tmp_path))
    shown = run_forked([*train, "--nproc", "2", "--out", str(tmp_path / "two")], tmp_path)
    _people_see_epochs_and_a_summary(shown)
    two = json.loads((tmp_path / "two" / "1" / "history.json").read_text())
    data = _json_of_ranks(2, tmp_path, *train[2:], "--strategy", "data", "--json")
    assert (one["ranks"], one["strategy"], data["ranks"], data["strategy"]) == (1, "split", 2, "data")
    assert len(one["losses"]) == one["steps"] > 10
    assert one["losses"] == pytest.approx(two["losses"], abs=1e-4)
    assert one["losses"] == pytest.approx(data["losses"], abs=1e-4)
    assert [found["test"] for found in one["evaluations"]] == pytest.approx(
        [found["test"] for found in two["evaluations"]], abs=0.01
    )
    assert one["best"]["test"] > 0.2  # sixteen classes
    for rank in (0, 1):
        lines = (tmp_path / "two" / "1" / f"steps-rank-{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["rank"] for line in lines] == [rank] * one["steps"]
    outs = []
    for nproc in ("1", "2"):
        out = tmp_path / f"{nproc}.npy"
        words = ["infer", store, "--weights", str(tmp_path / "one"), "--out", str(out), "--nproc", nproc, "--json"]
        assert _json(run_forked(["-m", "gsplit", *words], tmp_path))["rows"] == 4000
        outs.append(np.load(out))
    assert np.abs(outs[0] - outs[1]).max() < 1e-4


def _people_see_epochs_and_a_summary(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    said = [
        "2 rank(s), strategy split; global mini-batch of 256 targets, 128.0 per rank on average",
        "hint: this store is not partitioned",
        "2 rank(s) started; compiling kernels in the first step",
        "epoch   1  mean loss",
    ]
    places = [done.stderr.find(text) for text in said]
    assert -1 not in places and places == sorted(places), done.stderr
    assert done.stderr.count("hint:") == 1
    assert "steps" in done.stdout and "best epoch" in done.stdout


@pytest.mark.parametrize("more", [["--model", "gat"], ["--model", "sage", "--strategy", "data"], ["--replicas", "2"]])
def test_verify_says_how_far_apart(store: str, more: list[str], tmp_path: Path) -> None:
    num_ranks = 4 if "--replicas" in more else 2
    words = ["verify", store, *SMALL, *more, "--json"]  # as many ranks as the launcher has
    found = _json_of_ranks(num_ranks, tmp_path, *words)
    assert found["ok"] is True
    assert found["max_buffer_error"] == 0  # no batch norm
    assert 0 <= found["max_loss_error"] < 1e-9
    assert 0 < found["max_grad_error"] < 1e-9


_OWN = """
from torch import nn
from torch_geometric.nn import MessagePassing, SAGEConv


class Sum(MessagePassing):
    def __init__(self, width, out):
        super().__init__(aggr="sum")
        self.lin = nn.Linear(width, out)

    def forward(self, x, edge_index):
        return self.lin(self.propagate(edge_index[:, : self.most], x=x))

    most = 10**9


class Net(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.first, self.second = Sum(width, 8), SAGEConv(8, out)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def right(in_channels, out_channels):
    return Net(in_channels, out_channels)


def wrong(in_channels, out_channels):
    net = Net(in_channels, out_channels)
    net.first.most = 100
    return net
"""


def test_verify_takes_a_function_of_a_script_or_a_module(store: str, tmp_path: Path) -> None:
    (tmp_path / "own_nets.py").write_text(_OWN)
    command = ["-m", "gsplit", "verify", store, *SMALL, "--steps", "1", "--json", "--own-model"]
    found = _json(run_forked([*command, "own_nets.py:right", "--nproc", "2"], tmp_path, cwd=tmp_path))
    assert (found["ok"], found["ranks"]) == (True, 2)
    wrong = run_forked([*command, "own_nets:wrong", "--nproc", "2"], tmp_path, cwd=tmp_path)
    assert wrong.returncode == 3
    assert json.loads(wrong.stdout)["max_grad_error"] > 1e-3


def test_under_torchrun_it_joins(store: str, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gsplit"]
    config = tmp_path / "run.toml"
    config.write_text('hidden = 16\nfanout = [5, 5]\nsteps = 3\nevaluate_every = 0\nlr_scheduler = "cosine"\n')
    document = _json(run_forked([*launcher, "train", store, "--config", str(config), "--json"], tmp_path))
    assert (document["ranks"], document["steps"], document["best"]) == (2, 3, None)


def test_the_cause_is_said_once_when_ranks_fail(store: str, tmp_path: Path) -> None:
    diverging = ["--lr", "1e6", "--fanout", "2,2,2,2,2,2,2"]  # weights of a million, layer upon layer
    words = ["train", store, *SMALL, *diverging, "--nproc", "2", "--json"]
    done = run_forked(["-m", "gsplit", *words], tmp_path)
    assert done.returncode == 2
    assert ": the loss of epoch 0, step " in json.loads(done.stdout)["error"]
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


_WITH_A_THREAD = """
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
from gsplit.cli.main import main
sys.argv[0] = "gsplit"
main()
"""


def test_a_launcher_with_threads_starts_ranks_that_are_no_copies_of_it(store: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_WITH_A_THREAD)
    words = ["verify", store, *SMALL, "--nproc", "2", "--json"]
    found = _json(run_forked([str(tmp_path / "program.py"), *words], tmp_path))
    assert (found["ok"], found["ranks"]) == (True, 2)


@pytest.mark.parametrize("how, code", [("kill a rank", 2), ("interrupt", 75), ("terminate", 75)])
def test_a_killed_rank_and_an_interrupt_end_everything(store: str, tmp_path: Path, how: str, code: int) -> None:
    command = ["-m", "gsplit", "train", store, *SMALL, "--epochs", "10000", "--nproc", "2"]
    out = tmp_path / "run"
    command += ["--save-every", "2"] if how == "kill a rank" else []
    started = start_forked([*command, "--evaluate-every", "0", "--out", str(out), "--json"], tmp_path)
    deadline = time.monotonic() + 300
    steps = out / "1" / "steps-rank-1.jsonl"
    while not (steps.exists() and steps.read_text().count("\n") > 3):
        assert time.monotonic() < deadline and started.process.is_alive()
        time.sleep(0.1)
    ranks = find_ranks(started.pid)
    assert sorted(ranks) == [0, 1]
    if how == "kill a rank":
        os.kill(ranks[1], signal.SIGKILL)
    else:
        os.kill(started.pid, signal.SIGINT if how == "interrupt" else signal.SIGTERM)
    done = started.wait(300)
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    if how == "kill a rank":
        assert "expected to finish (got signal 9 (SIGKILL)" in document["error"]
        kept = document["error"].splitlines()[-1]
        assert kept == f"the latest checkpoint of {out} is kept; to continue: --resume {out}"
    else:  # all that was trained is kept
        latest = latest_checkpoint(out)
        assert latest is not None and int(latest.name[5:13]) == document["steps"] > 3
        assert document["finished"] is False
    assert "Traceback" not in done.stderr
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks.values())
    assert not (out / "current").exists()  # not a finished run
