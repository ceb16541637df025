"""The whole offline path: presample, weigh, solve, renumber; one store in, one store out, or nothing."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gsplit.partitioning.defaults import C_E, C_V, EPOCHS, TOLERANCE
from gsplit.partitioning.plan import PartitionSettings, check_plan, find_parts
from gsplit.partitioning.presample import Workload, presample
from gsplit.partitioning.relabel import write_renumbered
from gsplit.partitioning.weights import vertex_work
from gsplit.progress import Progress, silent
from gsplit.store.manifest import PartStatistics, new_step
from gsplit.store.reader import Store, open_store
from gsplit.store.verify import verify_store
from gsplit.store.writer import StoreWriter

__all__ = ["partition"]


def partition(
    graph: Any,
    path: str | Path,
    parts: int,
    num_neighbors: list[int],
    input_nodes: str | None = "train",
    *,
    batch_size: int = 1024,
    objective: str = "gsplit",
    solver: str | None = None,
    tolerance: float = TOLERANCE,
    c_v: float = C_V,
    c_e: float = C_E,
    epochs: int = EPOCHS,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Partition a graph for training with these targets, fanouts and global batch size; write and open the result.

    ``graph`` is an opened store or a PyG ``Data``. Any number of ranks up to ``parts`` runs from the result.
    ``input_nodes``: the name of stored targets, or None for every vertex. ``objective``: "gsplit" (expected work
    balanced, expected traffic cut), or the baselines "node", "edge", "random". ``solver``: "metis" (the default),
    "mtkahypar", "restream" (for graphs that METIS cannot hold) or "random" (with the objective of that name). A part's
    work is c_v times vertices computed plus c_e times edges; solvers aim at no more than ``tolerance`` times the mean.
    """
    chosen = solver or ("random" if objective == "random" else "metis")
    settings = PartitionSettings(parts, objective, chosen, tolerance, c_v, c_e, seed)
    with _as_store(graph, Path(path), progress) as store:
        workload = Workload.of_store(store, input_nodes, num_neighbors, batch_size, seed)
        _partition(store, Path(path), workload, settings, input_nodes, epochs, overwrite, progress)
    return open_store(path)


@contextmanager
def _as_store(graph: Any, path: Path, progress: Progress) -> Iterator[Store]:
    """A store as it is; a PyG ``Data`` as a temporary store on disk, beside the result."""
    if isinstance(graph, Store):
        yield graph
        return
    from gsplit.store.importers.pyg import from_pyg  # PyG, only when its data is given

    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        yield from_pyg(graph, Path(folder) / "data.gsplit", progress=progress)


def _partition(
    graph: Store,
    path: Path,
    workload: Workload,
    settings: PartitionSettings,
    input_nodes: str | None,
    epochs: int,
    overwrite: bool,
    progress: Progress,
) -> None:
    check_plan(workload, settings)
    with StoreWriter(path, overwrite=overwrite) as writer:
        begun = time.perf_counter()
        verify_store(graph, progress)  # damage would get new checksums
        start = time.perf_counter()
        counts = presample(workload, epochs=epochs, progress=progress)
        counted = time.perf_counter()
        progress(f"solve ({settings.solver})", 0, None)
        plan = find_parts(workload, counts, settings, writer.spill_directory)
        solved = time.perf_counter()
        step = new_step(
            "partition",
            {
                **asdict(settings),
                "targets": input_nodes or "every vertex",
                "num_neighbors": workload.num_neighbors,
                "batch_size": workload.batch_size,
                "epochs": epochs,
            },
            {
                "mini_batches": counts.num_batches,
                "verify_ms": round(1000 * (start - begun)),
                "presample_ms": round(1000 * (counted - start)),
                "solve_ms": round(1000 * (solved - counted)),
                "solver_peak_bytes": plan.solution.peak_bytes,
            },
        )
        loads = np.zeros(settings.parts, np.int64)
        np.add.at(loads, plan.parts, vertex_work(counts, settings.c_v, settings.c_e))
        statistics = PartStatistics(num_batches=counts.num_batches, loads=loads.tolist(), links=plan.links.tolist())
        write_renumbered(writer, graph, plan.parts, counts.loaded, statistics, step, progress)
