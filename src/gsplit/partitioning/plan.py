"""From counts to parts: weigh, solve, and put the parts in an order in which neighbours are close."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.distributed.comm.comm import Call, Comm, SoloComm
from gsplit.errors import InputError, explain
from gsplit.files.host_limits import free_bytes
from gsplit.graph.graph import Graph
from gsplit.partitioning.presample import Counts, Workload
from gsplit.partitioning.quotient import bisection_order, count_links
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.sharded.held_shard import add_up, send_to_all
from gsplit.partitioning.solvers.run import Solution, estimate_memory, run_solver, solver_module
from gsplit.partitioning.weighted_graph import WeightedGraph
from gsplit.partitioning.weights import NUM_CONSTRAINTS, check_costs, check_objective, sort_columns, vertex_work, weigh
from gsplit.progress import Progress, silent
from gsplit.store.manifest import PartStatistics, part_group_size

__all__ = [
    "PartitionPlan",
    "check_plan",
    "check_settings",
    "choose_solver",
    "count_parts",
    "find_parts",
    "renumber_parts",
    "spread_unreached",
]

MAX_PARTS = 16_384
_MOST_UNORDERED = 1024
"""Parts of a solver that does not order them: ordering takes the cube of their number."""
_LARGEST_TOLERANCE = 2.0
_MOST_EDGES_OF_METIS = 10_000_000
"""Stored edges up to which METIS is the default: it takes seconds there, and cuts as little as any at equal balance."""


@dataclass(frozen=True)
class PartitionPlan:
    """The part of every vertex, neighbouring parts close; the solver's cost."""

    parts: npt.NDArray[np.int32]
    solution: Solution


def choose_solver(graph: Graph, settings: PartitionSettings) -> PartitionSettings:
    """The settings with a solver. The default for large graphs is KaMinPar, if it is installed and can do it."""
    is_large = graph.num_edges > _MOST_EDGES_OF_METIS and find_spec("kaminpar") is not None
    return settings.with_solver("kaminpar" if is_large and settings.objective != "edge" else "metis")


def check_plan(workload: Workload, settings: PartitionSettings) -> None:
    """Refuse what cannot be solved, before anything long begins. ``settings`` have a solver."""
    check_settings(settings, workload.graph.num_vertices, is_renumbered=workload.original_ids.size > 0)


def check_settings(settings: PartitionSettings, num_vertices: int, *, is_renumbered: bool) -> None:
    """The same for a graph of which only this is known, and settings with a solver."""
    check_objective(settings.objective)
    assert settings.solver is not None
    if (settings.objective == "random") != (settings.solver == "random"):
        got = f"{settings.objective} with {settings.solver}"
        raise InputError(explain("objective and solver", "random with random", got, "give both, or neither"))
    solver = solver_module(settings.solver)
    solver.check(NUM_CONSTRAINTS[settings.objective])
    if settings.threads > 1 and not solver.THREADED:
        fix = "leave --threads out, or use --solver kaminpar"
        raise InputError(explain("threads", f"1, all that {settings.solver} uses", settings.threads, fix))
    supported = MAX_PARTS if solver.ORDERED else _MOST_UNORDERED
    most = min(num_vertices, supported)
    if not isinstance(settings.parts, int) or not 1 <= settings.parts <= most:
        limit = "the number of vertices" if most < supported else f"the most that {settings.solver} supports"
        raise InputError(
            explain(
                "parts", f"1 to {most}, {limit}", settings.parts, "choose another number of parts, or --solver metis"
            )
        )
    if not 1.0 < settings.tolerance <= _LARGEST_TOLERANCE:
        expected = f"more than 1 and at most {_LARGEST_TOLERANCE}"
        raise InputError(explain("tolerance", expected, settings.tolerance, "choose one such as 1.05"))
    check_costs(settings.c_v, settings.c_e)
    if is_renumbered:
        fix = "partition the store that it was made from"
        raise InputError(explain("the store", "one that has not been renumbered", "a partitioned one", fix))


def find_parts(
    workload: Workload, counts: Counts, settings: PartitionSettings, folder: Path, progress: Progress = silent
) -> PartitionPlan:
    """Weigh the graph into ``folder``, run the solver there, order the parts.

    If ``settings`` have no solver and KaMinPar would be the default, but cannot hold the graph, it is "cluster".
    """
    chosen = choose_solver(workload.graph, settings)
    check_plan(workload, chosen)
    solver = chosen.solver
    assert solver is not None
    progress("weigh", 0, None)
    graph = workload.graph
    drawn = counts
    if workload.types is not None:  # columns are ordered by relation first
        graph, edge_counts = sort_columns(graph, counts.edges, folder)
        drawn = replace(counts, edges=edge_counts)
    weighted = weigh(settings.objective, graph, drawn, workload.targets, folder, settings.c_v, settings.c_e)
    if settings.solver is None and solver == "kaminpar" and estimate_memory(solver, weighted) > free_bytes():
        solver = "cluster"
    progress(f"solve ({solver})", 0, None)
    solution = run_solver(
        solver,
        weighted,
        folder,
        settings.parts,
        settings.tolerance,
        settings.seed,
        settings.threads,
    )
    idle = find_idle(counts, weighted)
    parts = spread_unreached(solution.parts, idle, settings.parts, settings.tolerance, SoloComm())
    if not solution.ordered:
        links = count_links(workload.graph, counts.edges, parts, settings.parts)
        parts = renumber_parts(parts, bisection_order(links, settings.seed))
    return PartitionPlan(parts, solution)


def renumber_parts(parts: npt.NDArray[np.int32], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The part of every vertex with the parts in another order.

    >>> renumber_parts(np.array([0, 1, 1], np.int32), np.array([1, 0])).tolist()
    [1, 0, 0]
    """
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    return number.astype(np.int32)[parts]


def count_parts(
    graph: Graph, counts: Counts, parts: npt.NDArray[Any], settings: PartitionSettings, comm: Comm
) -> PartStatistics:
    """Work of the parts and edges between them in the mini-batches counted. A collective.

    ``parts`` are those of all vertices; ``graph`` and ``counts`` are of the vertices held.
    """
    size = part_group_size(settings.parts)
    links = count_links(graph, counts.edges, parts // size, -(-settings.parts // size))
    held = parts[graph.first_vertex : graph.first_vertex + counts.computed.size]
    loads = np.zeros(settings.parts, np.int64)
    np.add.at(loads, held, vertex_work(counts, settings.c_v, settings.c_e))
    return PartStatistics(
        num_batches=counts.num_batches,
        loads=add_up(comm, Call("loads"), loads).tolist(),
        links=add_up(comm, Call("links"), links).tolist(),
    )


def find_idle(counts: Counts, weighted: WeightedGraph) -> npt.NDArray[np.bool_]:
    """The vertices that no mini-batch reached, unless an objective gives them a weight, as "edge" does."""
    weighs = np.asarray(weighted.vertex_weights).any(axis=1)
    return (counts.loaded == 0) & ~weighs  # type: ignore[no-any-return]


def spread_unreached(
    parts: npt.NDArray[np.int32], unreached: npt.NDArray[np.bool_], num_parts: int, tolerance: float, comm: Comm
) -> npt.NDArray[np.int32]:
    """Move vertices that no mini-batch reached out of parts with too many vertices; return the parts of those held.

    They weigh nothing, so a solver may put them all into one part; but they have rows and edges on disk, and inference
    computes them. Moving them changes nothing that was counted. The last unreached ones of a part that is too large go
    to the first parts with room. A collective: the ranks move what one process would.

    >>> from gsplit.distributed.comm.comm import SoloComm
    >>> unreached = np.array([False, True, True, True, True, True])
    >>> spread_unreached(np.zeros(6, np.int32), unreached, 2, 1.01, SoloComm()).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    counted = [np.bincount(held, minlength=num_parts) for held in (parts, parts[unreached])]
    by_rank = np.concatenate(send_to_all(comm, Call("sizes of parts"), np.stack(counted)[None], (1,) * comm.size))
    sizes = by_rank[:, 0].sum(axis=0)
    idle = by_rank[:, 1]
    cap = max(-(-int(sizes.sum()) // num_parts), int(tolerance * int(sizes.sum()) / num_parts))
    moved = np.minimum(np.maximum(sizes - cap, 0), idle.sum(axis=0))
    by_later = np.minimum(moved, idle[comm.rank + 1 :].sum(axis=0))
    mine = np.minimum(moved - by_later, idle[comm.rank])
    begins = np.cumsum(moved) - by_later - mine  # of this rank's, in the row of all that are moved, part after part
    ends_of_room = np.cumsum(np.maximum(cap - sizes, 0))
    spread = parts.copy()
    for part in np.flatnonzero(mine):
        ids = np.flatnonzero(unreached & (parts == part))[-mine[part] :]
        spread[ids] = np.searchsorted(ends_of_room, begins[part] + np.arange(ids.size), side="right")
    return spread
