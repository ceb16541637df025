"""From counts to parts: weigh, solve, and put the parts in an order in which neighbours are close."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.partitioning.defaults import C_E, C_V, TOLERANCE
from gsplit.partitioning.presample import Counts, Workload
from gsplit.partitioning.quotient import bisection_order, count_links
from gsplit.partitioning.solvers.run import Solution, run_solver
from gsplit.partitioning.weights import check_strategy, weigh

__all__ = ["Plan", "PlanSettings", "find_parts"]


@dataclass(frozen=True)
class PlanSettings:
    """What is asked of a partition. ``tolerance``: how much larger than the mean a part's work may be."""

    parts: int
    strategy: str = "gsplit"
    solver: str = "metis"
    tolerance: float = TOLERANCE
    c_v: float = C_V
    c_e: float = C_E
    seed: int = 0

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        if (self.strategy == "random") != (self.solver == "random"):
            fix = "give both, or neither"
            raise InputError(explain("strategy and solver", "random with random", self.solver, fix))


@dataclass(frozen=True)
class Plan:
    """The part of every vertex, neighbouring parts close; how often edges between parts were drawn; the solver's cost.

    ``links[p, q]`` counts draws of edges from part q into part p.
    """

    parts: npt.NDArray[np.int32]
    links: npt.NDArray[np.int64]
    solution: Solution


def find_parts(workload: Workload, counts: Counts, settings: PlanSettings, folder: Path) -> Plan:
    """Weigh the graph into ``folder``, run the solver there, order the parts."""
    weighted = weigh(settings.strategy, workload.graph, counts, workload.targets, folder, settings.c_v, settings.c_e)
    solution = run_solver(settings.solver, weighted, folder, settings.parts, settings.tolerance, settings.seed)
    parts = solution.parts
    links = count_links(workload.graph, counts.edges, parts, settings.parts)
    if not solution.ordered:
        order = bisection_order(links, settings.seed)
        number = np.empty_like(order)
        number[order] = np.arange(order.size)
        parts, links = number.astype(np.int32)[parts], links[np.ix_(order, order)]
    return Plan(parts, links, solution)
