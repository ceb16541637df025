"""Rows and bytes between hosts in a split mini-batch, counted in one process: by rank, by host, and a direct partition.

python -m gsplit_bench between-hosts STORE [--mesh 2x2] [--mesh 2x4] [--raw STORE] [--hidden 256] [--steps 4]

A mesh of H x S is H hosts with S ranks each. ``rows`` cross if every rank sends to every rank; ``rows_once`` cross if a
row that several ranks of a host need is sent there once: as many as in a split of H ranks, because mini-batches do not
depend on ranks. With ``--raw``, the store that STORE was partitioned from is also partitioned into H parts directly, by
the same settings: what a partition for hosts first could save. Mini-batches are those of an epoch that neither
partition was made from.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.features.cache import stored_row_bytes
from gsplit.graph.ownership import Ownership, own_parts
from gsplit.minibatch.split import split_in_one_process
from gsplit.partitioning.partition import partition
from gsplit.partitioning.presample import Workload
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.reader import Store, open_store
from gsplit_bench.machine import current_commit, installed_versions

__all__ = ["Crossing", "count_crossing", "main"]

_ID_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Crossing:
    """Bytes of a step that go to another host, all hosts together, by what they are."""

    ids: float
    features: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.ids + self.features + self.forward + self.backward


def count_crossing(workload: Workload, ownership: Ownership, num_hosts: int, steps: int, epoch: int) -> list[float]:
    """Rows of every layer, from the input up, that a step sends to ranks of other hosts; a mean over steps."""
    samplers = [_sampler(workload, ownership, rank) for rank in range(ownership.num_ranks)]
    per_host = ownership.num_ranks // num_hosts
    rows = np.zeros(len(workload.num_neighbors))
    for step in range(steps):
        key = workload.key(epoch, step)
        targets, _ = workload.step_targets(key)
        splits = split_in_one_process(samplers, targets, workload.fanouts, key, ownership)
        for rank, split in enumerate(splits):
            near = range(rank // per_host * per_host, (rank // per_host + 1) * per_host)
            for level, layer in enumerate(split.layers):
                sent = layer.route.send_counts
                rows[level] += sum(sent) - sum(sent[peer] for peer in near)
    return [float(count) / steps for count in rows]


def _sampler(workload: Workload, ownership: Ownership, rank: int) -> HostNeighborSampler:
    first, stop = ownership.range_of(rank)
    original = workload.original_ids
    return workload.sampler_of(
        workload.graph.restrict(first, stop), original[first:stop] if original.size else original
    )


def to_bytes(rows: Sequence[float], row_bytes: int, hidden: int) -> Crossing:
    """Every row was requested by an id, and every hidden row has a gradient."""
    above = sum(rows[1:]) * hidden * _FLOAT_BYTES
    return Crossing(ids=sum(rows) * _ID_BYTES, features=rows[0] * row_bytes, forward=above, backward=above)


def measure(path: Path, raw: Path | None, meshes: Sequence[tuple[int, int]], hidden: int, steps: int) -> dict[str, Any]:
    store = open_store(path)
    made_by = store.manifest.provenance[-1].settings
    row_bytes = stored_row_bytes(store, ["x"])
    found = []
    for num_hosts, per_host in meshes:
        ownership = own_parts(store.part_boundaries, num_hosts * per_host, store.part_loads)
        hosts = Ownership(ownership.boundaries[::per_host])
        workload = _workload(store, made_by)
        by_rank = count_crossing(workload, ownership, num_hosts, steps, made_by["epochs"])
        by_host = count_crossing(workload, hosts, num_hosts, steps, made_by["epochs"])
        found.append(
            {
                "hosts": num_hosts,
                "ranks_per_host": per_host,
                "rows": by_rank,
                "rows_once": by_host,
                "bytes": asdict(to_bytes(by_rank, row_bytes, hidden)),
                "bytes_once": asdict(to_bytes(by_host, row_bytes, hidden)),
            }
        )
    direct = {}
    for num_hosts in sorted({hosts for hosts, _ in meshes} if raw is not None else ()):
        assert raw is not None
        direct[str(num_hosts)] = _partition_directly(open_store(raw), made_by, num_hosts, steps)
    return {
        "kind": "between hosts",
        "commit": current_commit(),
        "versions": installed_versions(),
        "graph": path.stem,
        "parts": len(store.part_boundaries) - 1,
        "partition": dict(made_by),
        "hidden": hidden,
        "steps": steps,
        "meshes": found,
        "rows_of_direct_partition": direct,
    }


def _workload(store: Store, made_by: dict[str, Any]) -> Workload:
    return Workload.of_store(
        store, made_by["targets"], made_by["num_neighbors"], made_by["batch_size"], made_by["seed"]
    )


def _partition_directly(raw: Store, made_by: dict[str, Any], num_hosts: int, steps: int) -> list[float]:
    """Rows between hosts, each of which owns one of as many parts."""
    with tempfile.TemporaryDirectory(prefix="gsplit-direct-") as folder:
        direct = partition(
            raw,
            Path(folder) / "direct.gsplit",
            num_hosts,
            made_by["num_neighbors"],
            made_by["targets"],
            batch_size=made_by["batch_size"],
            solver=made_by["solver"],
            tolerance=made_by["tolerance"],
            epochs=made_by["epochs"],
            seed=made_by["seed"],
        )
        ownership = own_parts(direct.part_boundaries, num_hosts, direct.part_loads)
        return count_crossing(_workload(direct, made_by), ownership, num_hosts, steps, made_by["epochs"])


def _mesh(text: str) -> tuple[int, int]:
    hosts, ranks = text.split("x")
    return int(hosts), int(ranks)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--raw", type=Path, help="the store that it was partitioned from")
    parser.add_argument("--mesh", type=_mesh, action="append", help="hosts x ranks of each; repeatable")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args(arguments)
    meshes = given.mesh or [(2, 2), (2, 4), (4, 1), (4, 2)]
    print(json.dumps(measure(given.store, given.raw, meshes, given.hidden, given.steps), indent=1))
    return 0
