"""Training steps on several imitated hosts: bytes on their cables, seconds, and losses against one process.

python -m gsplit_bench host-steps STORE [--case 2x2] [--case 4x1] [--rate 1gbit] [--hidden 256] [--steps 4]    (as root)

A case of H x S is H hosts (network namespaces, ``host_network``) with S ranks each, which split every mini-batch over
all hosts: from rank to rank without shared memory, as before ranks knew their hosts, and in two levels where there are
several ranks on each host. Replicas: one per host. Bytes are those that left the hosts' interfaces during a step, with
everything that TCP adds, gradients of weights included. The ways take turns, step by step, in the same processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.comm import Call
from gsplit.errors import CommError, explain
from gsplit_bench.host_network import HostNetwork
from gsplit_bench.machine import current_commit, describe_machine, installed_versions, read_clocks

__all__ = ["main"]

_TIMEOUT_S = 900


@dataclass(frozen=True)
class Way:
    """How ranks exchange: arguments of ``gsplit.init``."""

    name: str
    replicas: int
    shared_memory: bool


@dataclass(frozen=True)
class Work:
    """What every rank runs: every way at every rate."""

    store: str
    fanout: tuple[int, ...]
    batch_size: int
    hidden: int
    steps: int
    rates: tuple[str, ...]
    ways: tuple[Way, ...]
    folder: str


class Steps:
    """Training one way; every rank has its own."""

    def __init__(self, work: Work, way: Way) -> None:
        self.mesh = gsplit.init("cpu", replicas=way.replicas, shared_memory=way.shared_memory, timeout_s=300)
        graph = gsplit.open(work.store)
        self._loader = gsplit.NeighborLoader(
            graph, list(work.fanout), "train", batch_size=work.batch_size, mesh=self.mesh
        )
        torch.manual_seed(0)
        net = GraphSAGE(graph.num_features, work.hidden, len(work.fanout), graph.num_classes)
        self._model = gsplit.parallelize(net, self.mesh)
        self._optimizer = torch.optim.Adam(self._model.parameters(), 1e-3)
        self._number = 0

    def run(self, rate: str, way: str) -> dict[str, Any]:
        """One step: its loss, its times, and the bytes that left the host."""
        sent = _bytes_sent()
        start = read_clocks()
        batch = self._loader.make_batch(0, self._number)
        loss = batch.mean(F.cross_entropy(self._model(batch.x, batch.edge_index), batch.y, reduction="none"))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        value = float(loss.detach())
        passed = read_clocks().since(start)
        self.mesh.control.gather_text(Call("end of the step"), "")  # so that all bytes of the step have left
        bytes_sent = _bytes_sent() - sent if os.environ.get("LOCAL_RANK", "0") == "0" else 0
        found = {"rate": rate, "way": way, "step": self._number, "loss": value, "bytes_sent": bytes_sent}
        self._number += 1
        return found | {"wall_s": passed.wall_s, "cpu_s": passed.cpu_s}


def run_rank(work: Work) -> None:
    """Take steps in every way, in turn, at every rate, and write down what each took. The first ones are not kept."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # so that there can be several meshes
    trained = {way.name: Steps(work, way) for way in work.ways}
    found = [steps.run("warm-up", name) for name, steps in trained.items()]
    folder = Path(work.folder)
    rank = next(iter(trained.values())).mesh.rank
    for rate in work.rates:
        if rank == 0:
            (folder / f"ready-{rate}").touch()
        while not (folder / f"go-{rate}").exists():
            time.sleep(0.05)
        found += [steps.run(rate, name) for _ in range(work.steps) for name, steps in trained.items()]
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    for steps in trained.values():
        steps.mesh.close()


def _bytes_sent() -> int:
    """What has left the host's interface; 0 without a network."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text()) if interface else 0


def launch(work: Work, hosts: int, per_host: int) -> list[list[dict[str, Any]]]:
    """Run some hosts; the steps of every rank."""
    folder = Path(work.folder)
    folder.mkdir()
    program = ["gsplit_bench.host_steps", json.dumps(asdict(work))]
    with HostNetwork(hosts, rate="25gbit") as network:
        processes = []
        for host, interface in enumerate(network.interfaces):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(network.torchrun(host, per_host, program), env=environment))
        try:
            for rate in work.rates:
                _wait_for(folder / f"ready-{rate}", processes)
                network.set_rate(rate)
                (folder / f"go-{rate}").touch()
            codes = [process.wait(_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.terminate()
                process.wait()
    if any(codes):
        raise CommError(explain("host-steps", "ranks that finish", f"exit codes {codes}", "see what they printed"))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def _wait_for(path: Path, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            raise CommError(explain("host-steps", path.name, "ranks that failed", "see what they printed"))
        time.sleep(0.1)


def measure(
    store: Path, cases: Sequence[tuple[int, int]], rates: tuple[str, ...], plan: dict[str, Any]
) -> dict[str, Any]:
    """Every case at every rate, and one process."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="gsplit-host-steps-") as name:
        alone = Work(str(store), rates=(), ways=(Way("one process", 1, True),), folder="", **plan)
        steps = Steps(alone, alone.ways[0])
        wanted = [steps.run("", "one process") for _ in range(1 + len(rates) * alone.steps)]
        for hosts, per_host in cases:
            ways = [Way("from rank to rank", 1, False)]
            if per_host > 1:
                ways += [Way("in two levels", 1, True), Way("replicas", hosts, True)]
            folder = str(Path(name) / f"{hosts}x{per_host}")
            ranks = launch(replace(alone, rates=rates, ways=tuple(ways), folder=folder), hosts, per_host)
            for rate in rates:
                rows += [
                    {"hosts": hosts, "ranks_per_host": per_host, "rate": rate, "way": way.name}
                    | _sum_up(ranks, wanted, rate, way.name)
                    for way in ways
                ]
    return {
        "kind": "host steps",
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "graph": store.stem,
        **plan,
        "one_process": {key: median(step[key] for step in wanted[1:]) for key in ("wall_s", "cpu_s")},
        "rows": rows,
    }


def _sum_up(
    ranks: Sequence[Sequence[dict[str, Any]]], wanted: Sequence[dict[str, Any]], rate: str, way: str
) -> dict[str, Any]:
    """Of the steps of one way at one rate: bytes of all hosts, wall time of the slowest rank, CPU seconds of all."""
    steps = list(
        zip(*([step for step in rank if (step["rate"], step["way"]) == (rate, way)] for rank in ranks), strict=True)
    )
    walls = [max(rank["wall_s"] for rank in step) for step in steps]
    return {
        "bytes_between_hosts": median(sum(rank["bytes_sent"] for rank in step) for step in steps),
        "wall_s": median(walls),
        "least_wall_s": min(walls),
        "cpu_s": median(sum(rank["cpu_s"] for rank in step) for step in steps),
        "largest_relative_difference": max(
            abs(rank["loss"] / wanted[rank["step"]]["loss"] - 1) for step in steps for rank in step
        ),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--case", action="append", help="hosts x ranks of each; repeatable [2x2 and 4x1]")
    parser.add_argument("--rate", action="append", help="of every cable, as tc writes it [1gbit, 10gbit, 25gbit]")
    parser.add_argument("--fanout", default="15,15,15")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args(arguments)
    plan = {
        "fanout": tuple(int(number) for number in given.fanout.split(",")),
        "batch_size": given.batch_size,
        "hidden": given.hidden,
        "steps": given.steps,
    }
    rates = tuple(given.rate or ("1gbit", "10gbit", "25gbit"))
    cases = [tuple(int(number) for number in text.split("x")) for text in given.case or ("2x2", "4x1")]
    found = measure(given.store, [(hosts, per_host) for hosts, per_host in cases], rates, plan)
    print(json.dumps(found, indent=1))
    return 0 if max(row["largest_relative_difference"] for row in found["rows"]) < 1e-4 else 1


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    run_rank(Work(**settings | {"ways": tuple(Way(**way) for way in settings["ways"])}))
