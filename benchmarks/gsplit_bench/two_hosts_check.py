"""Two hosts on one machine (network namespaces, a cable with a bandwidth) against one process, and a cable that is cut.

python -m gsplit_bench two-hosts STORE [--ranks 4] [--replicas 1] [--rate 1gbit] [--steps 20]      (as root)

The same command trains on one process, and on two hosts under torchrun with the ranks shared out between them: losses
are compared step by step. With ``--replicas 2`` each host is a group that splits its half of every mini-batch, and only
gradients cross the cable. Then the cable is cut in the middle of a run: how long until both hosts have ended, and what
they say.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gsplit_bench.host_network import HostNetwork
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.soak_life import Life, start

__all__ = ["main"]

PATIENCE_S = 200.0


def train(store: Path, options: list[str], ranks: int, folder: Path, network: HostNetwork | None) -> list[float]:
    """Losses of a run that is left alone."""
    life = start([str(store), *options, "--json"], ranks, folder, network)
    life.watch(1800)
    return life.losses()


def cut(store: Path, options: list[str], ranks: int, folder: Path, network: HostNetwork) -> tuple[float | None, Life]:
    """Seconds from pulling the cable until nothing lives; None if something still does."""
    life = start([str(store), *options, "--steps", "100000", "--epochs", "100000"], ranks, folder, network)
    life.wait_for_ranks(120)
    while "started" not in (life.folder / "err-0").read_text() and not life.is_over():
        life.watch(1)  # before that, ranks wait ten minutes for each other
    life.watch(40)
    members, at = life.members(), time.monotonic()
    network.set_link(up=False)
    seconds = time.monotonic() - at if life.wait_gone(members, PATIENCE_S) else None
    life.end(members)
    return seconds, life


def measure(store: Path, ranks: int, replicas: int, rate: str, steps: int) -> dict[str, Any]:
    options = ["--hidden", "32", "--fanout", "5,5", "--batch-size", "512", "--evaluate-every", "0"]
    some = [*options, "--steps", str(steps)]
    grouped = ["--replicas", str(replicas)]
    with tempfile.TemporaryDirectory(prefix="gsplit-hosts-") as name:
        folder = Path(name)
        alone = train(store, some, 1, folder / "alone", None)
        with HostNetwork(rate=rate) as network:
            both = train(store, [*some, *grouped], ranks, folder / "both", network)
        with HostNetwork(rate=rate) as network:
            seconds, life = cut(store, [*options, *grouped], ranks, folder / "cut", network)
        said = [(life.folder / f"err-{host}").read_text() for host in (0, 1)]
    return {
        "kind": "two hosts",
        "commit": current_commit(),
        "versions": installed_versions(),
        "machine": describe_machine(),
        "ranks": ranks,
        "replicas": replicas,
        "rate": rate,
        "steps": len(both),
        "largest_relative_difference": max(abs(a / b - 1) for a, b in zip(both, alone, strict=True)),
        "cut_until_gone_s": seconds,
        "cut_exit_codes": list(life.exit_codes),
        "cut_said": [[line for line in text.splitlines() if line.startswith("error: ")] for text in said],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks; 2: a group per host")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    found = measure(given.store, given.ranks, given.replicas, given.rate, given.steps)
    print(json.dumps(found, indent=1))
    return 0 if found["largest_relative_difference"] < 1e-4 and found["cut_until_gone_s"] is not None else 1
