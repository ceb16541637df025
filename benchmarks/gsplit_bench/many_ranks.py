"""Steps of up to a thousand ranks in one process: imbalance, rows, bytes, messages, and the CPU time of a rank's split.

The splits are made by the code of training (``split_in_one_process``). Of some ranks, the first and the last among
them, ``split_minibatch`` itself is then timed, with a communicator that replays what the other ranks sent; so is that
of a rank without targets that nobody asks, which is what grows with the number of ranks alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call, Comm, CompletedWork, SoloComm, Work
from gsplit.graph.ownership import Ownership, own_parts
from gsplit.minibatch.split import Split, split_in_one_process, split_minibatch
from gsplit.partitioning.forecast import imbalance
from gsplit.partitioning.presample import Workload
from gsplit.partitioning.settings import C_E, C_V
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.store.reader import Store, open_store
from gsplit.telemetry import StepTelemetry
from gsplit_bench.machine import current_commit, describe_machine, installed_versions

__all__ = ["main", "measure"]

TIMED_RANKS, TURNS = 6, 3


class ReplayedComm(SoloComm):
    """A rank whose peers sent the same before: what they ask for, layer by layer from the targets down."""

    def __init__(self, rank: int, size: int, asked: list[list[Tensor]]) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._asked = asked
        self._layer = -1

    def all_to_all_counts(self, call: Call, counts: tuple[int, ...]) -> tuple[int, ...]:
        self._layer += 1
        return tuple(ids.numel() for ids in self._asked[self._layer])

    def all_to_all(
        self, call: Call, out: Tensor, rows: Tensor, out_counts: tuple[int, ...], row_counts: tuple[int, ...]
    ) -> Work:
        torch.cat(self._asked[self._layer], out=out)
        return CompletedWork()


def asked_of(rank: int, splits: list[Split]) -> list[list[Tensor]]:
    """What every rank asks of one, for each layer from the targets down."""
    layers = range(len(splits[0].layers) - 1, -1, -1)
    return [[_foreign_of(split, layer, rank) for split in splits] for layer in layers]


def _foreign_of(split: Split, layer: int, owner: int) -> Tensor:
    route = split.layers[layer].route
    first = sum(route.recv_counts[:owner])
    return split.layers[layer].foreign_ids[first : first + route.recv_counts[owner]]


def measure(
    store: Store, num_ranks: int, fanout: list[int], *, per_rank: int, hidden: int, steps: int
) -> dict[str, Any]:
    """One number of ranks, ``per_rank`` targets for each, over the first steps of an epoch."""
    workload = Workload.of_store(store, "train", fanout, per_rank * num_ranks)
    ownership = own_parts(store.part_boundaries, num_ranks, store.part_loads)
    ranges = [ownership.range_of(rank) for rank in range(num_ranks)]
    samplers = [
        HostNeighborSampler(workload.graph.restrict(first, stop), workload.original_ids[first:stop])
        for first, stop in ranges
    ]
    found: list[dict[str, Any]] = []
    for step in range(min(steps, workload.steps_per_epoch)):
        key = workload.key(epoch=100, step=step)
        targets, _ = workload.step_targets(key)
        splits = split_in_one_process(samplers, targets, fanout, key, ownership)
        found.append(_count(splits, store.num_features, hidden))
    assert found
    timed = [_time(samplers, splits, rank, targets, key, ownership, fanout) for rank in _some(num_ranks)]
    none = [[torch.empty(0, dtype=torch.int64)] * num_ranks] * len(fanout)
    idle = _time_split(samplers[0], targets[:0], fanout, key, ownership, ReplayedComm(0, num_ranks, none))
    return {
        "ranks": num_ranks,
        "batch_size": workload.batch_size,
        **{name: _mean([step[name] for step in found]) for name in found[0]},
        "split_ms": round(1e3 * statistics.median(timed), 2),
        "split_ms_of_an_idle_rank": round(1e3 * idle, 2),
    }


def _mean(values: list[Any]) -> Any:
    return np.mean(values, axis=0).round(3).tolist()


def _some(num_ranks: int) -> list[int]:
    return sorted({int(rank) for rank in np.linspace(0, num_ranks - 1, TIMED_RANKS)})


def _count(splits: list[Split], num_features: int, hidden: int) -> dict[str, Any]:
    """Sums and largest over mean, of one step."""
    layers = range(len(splits[0].layers))
    work = np.array(
        [sum(C_V * s.layers[n].block.num_dst + C_E * s.layers[n].block.num_edges for n in layers) for s in splits]
    )
    sent = np.array([[sum(split.layers[n].route.send_counts) for n in layers] for split in splits])
    peers = np.array([[np.count_nonzero(split.layers[n].route.send_counts) for n in layers] for split in splits])
    widths = 4 * np.array([num_features, *[hidden] * (len(layers) - 1)])
    return {
        "input_rows": sum(split.input_ids.numel() for split in splits),
        "imbalance_of_work": float(imbalance(work)),
        "rows_sent_per_input_row": sent.sum() / sum(split.input_ids.numel() for split in splits),
        "imbalance_of_bytes": float(imbalance((sent * widths).sum(1))),
        "kb_sent_per_rank_and_layer": sent.mean(0) * widths / 1e3,
        "peers_per_rank_and_layer": peers.mean(0),
    }


def _time(
    samplers: list[HostNeighborSampler],
    splits: list[Split],
    rank: int,
    targets: Tensor,
    key: StepKey,
    ownership: Ownership,
    fanout: list[int],
) -> float:
    asked = asked_of(rank, splits)
    own = targets[ownership.owners(targets) == rank]
    return min(
        _time_split(samplers[rank], own, fanout, key, ownership, ReplayedComm(rank, len(splits), asked))
        for _ in range(TURNS)
    )


def _time_split(
    sampler: HostNeighborSampler,
    targets: Tensor,
    fanout: list[int],
    key: StepKey,
    ownership: Ownership,
    comm: ReplayedComm,
) -> float:
    start = time.process_time()
    split_minibatch(sampler, targets, fanout, key, ownership, cast(Comm, comm), StepTelemetry())
    return time.process_time() - start


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path, help="partitioned into at least as many parts as ranks")
    parser.add_argument("--ranks", default="64,256,1000")
    parser.add_argument("--per-rank", type=int, default=64, help="targets of the mini-batch for each rank")
    parser.add_argument("--fanout", default="5,5,5")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write OUT.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    store = open_store(options.store)
    fanout = [int(number) for number in options.fanout.split(",")]
    rows = []
    for number in map(int, options.ranks.split(",")):
        rows.append(
            measure(store, number, fanout, per_rank=options.per_rank, hidden=options.hidden, steps=options.steps)
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        about = {"store": store.path.stem, "vertices": store.num_vertices, "edges": store.num_edges}
        about |= {"parts": len(store.part_boundaries) - 1, "fanout": fanout, "hidden": options.hidden}
        document = {
            "command": "python -m gsplit_bench many-ranks " + " ".join(arguments),
            "commit": current_commit(),
            "machine": describe_machine(),
            "versions": installed_versions(),
            **about,
        }
        options.out.with_suffix(".json").write_text(json.dumps(document | {"runs": rows}, indent=1) + "\n")
