"""The whole offline path: presample, weigh, solve, forecast, renumber; one store in, one store out, or nothing."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.distributed.comm.comm import SoloComm
from gsplit.partitioning.plan import check_plan, choose_solver, count_parts, find_parts
from gsplit.partitioning.presample import Workload, held_out_epochs, presample
from gsplit.partitioning.relabel import write_renumbered
from gsplit.partitioning.settings import C_E, C_V, EPOCHS, TOLERANCE, PartitionSettings
from gsplit.progress import Progress, silent
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.neighbor import check_fanouts
from gsplit.sampling.pairs import StoredPairs
from gsplit.store.manifest import new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter, check_output, work_folder

__all__ = ["partition", "partition_store"]


def partition(
    graph: Any,
    path: str | Path,
    parts: int,
    num_neighbors: list[int],
    input_nodes: str | None = "train",
    *,
    pairs: str | None = None,
    neg_sampling: str | None = None,
    num_negatives: float = 1,
    batch_size: int = 1024,
    objective: str = "gsplit",
    solver: str | None = None,
    threads: int = 1,
    tolerance: float = TOLERANCE,
    c_v: float = C_V,
    c_e: float = C_E,
    epochs: int = EPOCHS,
    seed: int = 0,
    sampler: str = "uniform",
    weight_attr: str | None = None,
    replace: bool = False,
    layer_dependency: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Partition a graph for training with these targets, fanouts and global batch size; write and open the result.

    With R replicas, ``batch_size`` is the global one divided by R: each replica splits a mini-batch of its own.

    ``graph`` is an opened store, or a PyG ``Data`` or ``HeteroData``. Any number of ranks up to ``parts`` runs from the
    result. ``input_nodes``: the name of stored targets, such as "train" or, of a vertex type, "paper/train"; None for
    every vertex. In a heterogeneous graph, ``num_neighbors`` count for each edge type. ``objective``: "gsplit"
    (expected work balanced, expected traffic cut), or the baselines "node", "edge", "random". ``solver``: "metis" (the
    default up to 10 million edges), "kaminpar" (above), "cluster" (if memory is not enough for kaminpar), "mtkahypar",
    "restream" (the least memory) or "random" (with the objective of that name); ``threads``: of kaminpar, cluster and
    mtkahypar; parts repeat bit for bit with one only, and never with mtkahypar.
    A part's work is c_v times vertices computed plus c_e times edges; solvers aim at no more than ``tolerance`` times
    the mean.
    ``pairs``: the name of stored pairs, in place of ``input_nodes``, for link prediction, with the mode and the amount
    of negatives as in training; by default "binary", and "none" for pairs with labels. ``sampler``, ``weight_attr``,
    ``replace`` and ``layer_dependency``: as in training; what training draws is counted.
    """
    check_fanouts(num_neighbors)
    settings = PartitionSettings(
        parts=_plain(parts),
        targets=input_nodes,
        pairs=pairs,
        neg_sampling=neg_sampling,
        num_negatives=_plain(num_negatives),
        fanout=tuple(num_neighbors),
        batch_size=_plain(batch_size),
        objective=objective,
        solver=solver,
        threads=_plain(threads),
        tolerance=_plain(tolerance),
        c_v=_plain(c_v),
        c_e=_plain(c_e),
        epochs=_plain(epochs),
        seed=_plain(seed),
        sampler=sampler,
        weight_attr=weight_attr,
        replace=replace,
        layer_dependency=layer_dependency,
    )
    check_output(Path(path), overwrite=overwrite)
    with _as_store(graph, Path(path), progress) as store:
        partition_store(store, Path(path), settings, overwrite=overwrite, progress=progress)
    return open_store(path)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which the manifest can hold."""
    return value.item() if isinstance(value, np.generic) else value


def _stored_pairs(settings: PartitionSettings) -> StoredPairs | None:
    """The pairs to partition for, if any."""
    if settings.pairs is None:
        return None
    return StoredPairs.given(settings.pairs, settings.neg_sampling or "binary", settings.num_negatives)


def _with_negatives(graph: Store, settings: PartitionSettings) -> PartitionSettings:
    """The settings with the negatives that training draws if it is told no others."""
    if settings.pairs is None or settings.neg_sampling is not None or graph.types is not None:
        return settings
    return dataclasses.replace(settings, neg_sampling="binary" if graph.pair_labels(settings.pairs) is None else "none")


@contextmanager
def _as_store(graph: Any, path: Path, progress: Progress) -> Iterator[Store]:
    """A store as it is; a PyG object as a temporary store on disk, beside the result."""
    if isinstance(graph, Store):
        yield graph
        return
    from gsplit.store.importers.pyg import from_pyg  # PyG, only when its data is given

    with work_folder(path) as folder:
        yield from_pyg(graph, folder / "data.gsplit", progress=progress)


def partition_store(
    graph: Store, path: Path, settings: PartitionSettings, *, overwrite: bool = False, progress: Progress = silent
) -> None:
    """Partition an opened store; see ``partition``."""
    settings = _with_negatives(graph, settings)
    workload = Workload.of_store(
        graph,
        settings.targets,
        list(settings.fanout),
        settings.batch_size,
        settings.seed,
        DrawOptions(**settings.sampler_options),
        _stored_pairs(settings),
    )
    check_plan(workload, choose_solver(workload.graph, settings))
    with StoreWriter(path, overwrite=overwrite) as writer:
        begun = time.perf_counter()
        verify_store(graph, progress)  # damage would get new checksums
        start = time.perf_counter()
        counts = presample(workload, epochs=settings.epochs, progress=progress)
        counted = time.perf_counter()
        plan = find_parts(workload, counts, settings, writer.spill_directory, progress)
        solved = time.perf_counter()
        hotness, presampled = counts.loaded, counts.num_batches
        del counts  # 4 bytes per edge, which the held-out mini-batches need now
        held_out = presample(
            workload,
            epochs=held_out_epochs(workload.steps_per_epoch),
            first_epoch=settings.epochs,
            progress=progress,
        )
        statistics = count_parts(workload.graph, held_out, plan.parts, settings, SoloComm())
        del held_out
        forecast = time.perf_counter()
        step = new_step(
            "partition",
            settings.with_solver(plan.solution.solver).as_dict() | {"num_neighbors": workload.num_neighbors},
            {
                "mini_batches": presampled,
                "verify_ms": round(1000 * (start - begun)),
                "presample_ms": round(1000 * (counted - start)),
                "solve_ms": round(1000 * (solved - counted)),
                "held_out_ms": round(1000 * (forecast - solved)),
                "solver_peak_bytes": plan.solution.peak_bytes,
            },
        )
        write_renumbered(writer, graph, plan.parts, hotness, statistics, step, progress)
