"""The loader: mini-batches of one graph for any number of ranks, with PyG's argument names.

``batch_size`` is the size of the GLOBAL mini-batch, shared by all ranks. The number of steps is known before the
first and the same on every rank. A position in training is (epoch, step) and nothing else: any step can be made
without the ones before.
"""

import hashlib
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.batch import Batch
from gsplit.distributed.comm import assert_same_on_all_ranks
from gsplit.distributed.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.features.mapped import MappedRows, torch_dtype
from gsplit.ownership import Ownership, own_parts
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import check_fanouts, make_sampler
from gsplit.sampling.targets import LocalTargets, all_local_vertices, local_listed_targets, local_stored_targets
from gsplit.store.memory import MemoryStore
from gsplit.store.reader import Store
from gsplit.strategies.data import DataStrategy
from gsplit.strategies.protocol import Strategy
from gsplit.strategies.split import SplitStrategy
from gsplit.strategies.vertex_data import VertexData, gcn_factors
from gsplit.telemetry import Telemetry

__all__ = ["STRATEGIES", "NeighborLoader"]

STRATEGIES = ("split", "data")
_PLANNED_STRATEGIES = ("push_pull", "data_cached", "auto")
_PLANNED_SAMPLERS = ("weighted", "labor", "replace")
_REFUSED = {
    "replace": "neighbours are drawn without replacement",
    "weight_attr": "weighted sampling is not built yet",
    "disjoint": "a mini-batch is one graph, shared by all targets",
    "time_attr": "temporal sampling is not built",
    "input_time": "temporal sampling is not built",
    "temporal_strategy": "temporal sampling is not built",
    "subgraph_type": "blocks hold the sampled edges, in their direction",
    "directed": "blocks hold the sampled edges, in their direction",
    "transform": "change the batch in the training loop",
    "transform_sampler_output": "change the batch in the training loop",
    "neighbor_sampler": "choose one with sampler=",
    "num_workers": "sampling runs compiled in this process; leave it out",
    "persistent_workers": "there are no workers; leave it out",
    "prefetch_factor": "there are no workers; leave it out",
    "pin_memory": "batches are made on the mesh's device; leave it out",
    "filter_per_worker": "there are no workers; leave it out",
    "is_sorted": "the store is sorted; leave it out",
}


class NeighborLoader:
    """Iterates over the mini-batches of an epoch; each ``iter`` is the next epoch."""

    def __init__(
        self,
        graph: "Store | Any",
        num_neighbors: list[int],
        input_nodes: str | Tensor | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        *,
        strategy: str = "split",
        sampler: str = "uniform",
        seed: int = 0,
        mesh: Mesh | None = None,
        ownership: Ownership | None = None,
        partition: Tensor | None = None,
        features: str = "x",
        gcn_norm: bool = False,
        deterministic: bool = False,
        telemetry: str | Path | None = None,
        quiet: bool = False,
        **options: object,
    ) -> None:
        """``graph`` is an opened store, or a PyG ``Data`` with a ``partition`` tensor (a rank or part for every
        vertex).

        ``input_nodes``: the name of stored targets, a tensor of original ids or a mask, or None for every vertex.
        ``num_neighbors[0]`` is the targets' own hop; -1 takes all neighbours. ``ownership`` overrides who owns
        which range. ``strategy``: "split" (the ranks share the mini-batch) or "data" (each rank takes some targets
        and their whole neighbourhood); the result is the same. ``gcn_norm`` makes ``batch.edge_weight``, GCN's
        normalisation by the degrees of the whole graph. ``telemetry`` is a file for one JSON line per step and rank.
        """
        _check_options(num_neighbors, batch_size, strategy, sampler, seed, options)
        self._mesh = mesh or solo_mesh()
        store = _as_store(graph, partition)
        self._ownership = ownership or own_parts(store.part_boundaries, self._mesh.num_splits, store.part_loads)
        first, stop = self._check_range(store, whole=strategy == "data")
        targets = _own_targets(store, input_nodes, first, stop)
        self._seed, self._batch_size, self._drop_last = int(seed), int(batch_size), drop_last
        settings = {
            "num_neighbors": num_neighbors,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "strategy": strategy,
            "seed": seed,
            "features": features,
            "gcn_norm": gcn_norm,
            "boundaries": self._ownership.boundaries,
            "num_vertices": store.num_vertices,
            "num_targets": targets.num_targets,
            "graph": store.fingerprint,
            "input_nodes": _fingerprint(input_nodes),
        }
        assert_same_on_all_ranks(self._mesh.world, "NeighborLoader", settings)
        self.telemetry = Telemetry(self._mesh.rank, telemetry)
        renumbered = "original_ids" in store.names
        original = np.asarray(store.original_ids(first, stop)) if renumbered else np.empty(0, np.int64)
        own = store.graph.restrict(first, stop)
        data = VertexData(
            features=_rows(store, f"features/{features}"),
            labels=_rows(store, "y") if "y" in store.names else None,
            original_ids=MappedRows("original_ids", original, torch.int64, first) if renumbered else None,
            factors=gcn_factors(own) if gcn_norm else None,
        )
        common: dict[str, Any] = {
            "sampler": make_sampler(own, original, self._mesh.device),
            "targets": targets,
            "data": data,
            "mesh": self._mesh,
            "telemetry": self.telemetry,
            "num_neighbors": list(num_neighbors),
            "batch_size": batch_size,
            "shuffle": shuffle,
        }
        self._strategy: Strategy
        if strategy == "data":
            self._strategy = DataStrategy(**common)
        else:
            self._strategy = SplitStrategy(**common, ownership=self._ownership, deterministic=deterministic)
        self._position = (-1, 0)  # of the newest iterator: epoch, and the step that comes next
        self._start: tuple[int, int] | None = None  # where the next iterator is told to begin
        self._iterators = 0
        if self._mesh.rank == 0 and not quiet:
            per_rank = batch_size / self._mesh.size
            sys.stderr.write(
                f"gsplit: global mini-batch of {batch_size} targets over {self._mesh.size} rank(s), "
                f"{per_rank:.1f} per rank on average; {len(self)} steps per epoch\n"
            )
            if isinstance(store, MemoryStore) and store.unused:
                sys.stderr.write(f"gsplit: not in the mini-batches: {', '.join(store.unused)}\n")

    def _check_range(self, store: Store | MemoryStore, *, whole: bool) -> tuple[int, int]:
        """The vertices this rank samples: those it owns, or all of them."""
        ranks = self._mesh.num_splits
        if self._ownership.num_ranks != ranks or self._ownership.num_vertices != store.num_vertices:
            expected = f"{ranks} ranges over {store.num_vertices} vertices"
            got = f"{self._ownership.num_ranks} over {self._ownership.num_vertices}"
            raise InputError(explain("ownership", expected, got, "make it for this graph and mesh"))
        first, stop = (0, store.num_vertices) if whole else self._ownership.range_of(self._mesh.split_rank)
        low, high = store.vertex_range
        if not low <= first <= stop <= high:
            fix = "open the whole store" if whole else "give this rank the store that holds its vertices"
            raise InputError(
                explain(f"rank {self._mesh.rank}", f"vertices {first}..{stop}", f"a shard {low}..{high}", fix)
            )
        return first, stop

    @property
    def num_targets(self) -> int:
        """Targets of an epoch, over all ranks."""
        return self._strategy.num_targets

    def __len__(self) -> int:
        whole, rest = divmod(self.num_targets, self._batch_size)
        return whole + (1 if rest and not self._drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter`` run this epoch, from its first step."""
        self.load_state_dict({"epoch": epoch, "step": 0})

    def state_dict(self) -> dict[str, int]:
        """Where training stands: the epoch, and the step that comes next in it."""
        epoch, step = self._start or self._position
        return {"epoch": max(epoch, 0), "step": step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next ``iter`` go on from there; the end of an epoch is the beginning of the next."""
        if set(state) != {"epoch", "step"}:
            raise InputError(explain("state", "epoch and step", sorted(state), "pass what state_dict returned"))
        epoch, step = operator.index(state["epoch"]), operator.index(state["step"])
        if epoch < 0 or not 0 <= step <= len(self):
            fix = "pass what state_dict returned for the same targets and batch size"
            raise InputError(explain("state", f"an epoch from 0 and a step in 0..{len(self)}", (epoch, step), fix))
        self._start = (epoch + 1, 0) if step == len(self) > 0 else (epoch, step)

    def __iter__(self) -> Iterator[Batch]:
        epoch, step = self._start or (self._position[0] + 1, 0)
        self._position, self._start = (epoch, step), None
        self._iterators += 1
        return self._batches(epoch, step, self._iterators)

    def _batches(self, epoch: int, first: int, number: int) -> Iterator[Batch]:
        """The steps of one epoch. Only the newest iterator moves the loader's position."""
        for step in range(first, len(self)):
            if number != self._iterators:
                fix = "iterate over one epoch at a time, or use make_batch(epoch, step)"
                raise InputError(explain("this iterator", "to be the loader's newest", "a newer one", fix))
            self.telemetry.begin_step()
            batch = self.make_batch(epoch, step)
            self._position = (epoch, step + 1)
            try:
                yield batch
            finally:  # also when the loop is left or fails: no step's numbers run into the next
                self.telemetry.end_step(epoch, step)

    @torch.inference_mode(False)
    def make_batch(self, epoch: int, step: int) -> Batch:
        """Any step of any epoch, by its name alone. A collective: every rank makes it."""
        epoch, step = operator.index(epoch), operator.index(step)
        if epoch < 0 or not 0 <= step < len(self):
            got, fix = f"epoch {epoch}, step {step}", "len(loader) says how many steps there are"
            raise InputError(explain("make_batch", f"an epoch from 0 and a step in 0..{len(self) - 1}", got, fix))
        return self._strategy.make_batch(StepKey(self._seed, epoch, step))


def _check_options(
    num_neighbors: list[int], batch_size: int, strategy: str, sampler: str, seed: int, options: dict[str, object]
) -> None:
    check_fanouts(num_neighbors)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(
            explain("batch_size", "a positive number", batch_size, "give the size of the global mini-batch")
        )
    if not hasattr(seed, "__index__") or not 0 <= seed < 1 << 63:
        raise InputError(explain("seed", "0 to 2**63 - 1", seed, "choose another seed"))
    if strategy not in STRATEGIES:
        fix = "use one of these" + ("; this one is planned" if strategy in _PLANNED_STRATEGIES else "")
        raise InputError(explain("strategy", " or ".join(map(repr, STRATEGIES)), repr(strategy), fix))
    if sampler != "uniform":
        fix = "use sampler='uniform'" + ("; this one is planned" if sampler in _PLANNED_SAMPLERS else "")
        raise InputError(explain("sampler", "'uniform', the only one built so far", repr(sampler), fix))
    for name in options:
        fix = _REFUSED.get(name, "see the signature of NeighborLoader")
        raise InputError(explain(f"option {name}", "an option of this loader", "one it does not have", fix))


def _as_store(graph: Any, partition: Tensor | None) -> Store | MemoryStore:
    if isinstance(graph, Store | MemoryStore):
        if partition is not None:
            raise InputError(explain("partition", "none for a store", "one", "partition the store instead"))
        return graph
    from gsplit.store.importers.pyg import memory_store  # PyG, only when its data is given

    return memory_store(graph, partition)


def _rows(store: Store | MemoryStore, name: str) -> MappedRows:
    return MappedRows(name, store.stored_array(name), torch_dtype(store.dtype(name)), store.vertex_range[0])


def _own_targets(store: Store | MemoryStore, input_nodes: str | Tensor | None, first: int, stop: int) -> LocalTargets:
    if isinstance(input_nodes, str):
        return local_stored_targets(*store.stored_targets(input_nodes), first, stop)
    original = np.asarray(store.original_ids(first, stop))
    if input_nodes is None:
        return all_local_vertices(original, first, store.num_vertices)
    wanted = _as_ids(input_nodes, store.num_vertices)
    if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < store.num_vertices:
        fix = "give original ids, or a mask over all vertices"
        raise InputError(explain("input_nodes", f"ids in 0..{store.num_vertices - 1}", "others", fix))
    return local_listed_targets(wanted, original, first)


def _as_ids(nodes: Tensor, num_vertices: int) -> npt.NDArray[np.int64]:
    whole = isinstance(nodes, Tensor) and nodes.dim() == 1 and not nodes.is_floating_point() and not nodes.is_complex()
    if whole and nodes.dtype == torch.bool and nodes.numel() == num_vertices:
        return np.flatnonzero(nodes.cpu().numpy())
    if not whole or nodes.dtype == torch.bool or nodes.dtype == torch.uint8:
        got = f"{nodes.dtype} {list(nodes.shape)}" if isinstance(nodes, Tensor) else type(nodes).__name__
        expected = f"a 1-d tensor of integer ids, or a bool mask of {num_vertices}"
        raise InputError(explain("input_nodes", expected, got, "give ids, or a mask over all vertices"))
    return nodes.cpu().numpy().astype(np.int64)


def _fingerprint(nodes: str | Tensor | None) -> str:
    """The targets' list in short, to compare between ranks."""
    if nodes is None or isinstance(nodes, str):
        return str(nodes)
    return hashlib.sha256(nodes.cpu().contiguous().numpy().tobytes()).hexdigest()
