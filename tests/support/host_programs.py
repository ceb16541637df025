"""What ranks on several hosts run: a little of everything that exchanges rows, in one start."""

from typing import Any

from copies_programs import train_with_copies
from count_programs import count_steps
from link_programs import LinkCase, train_links
from prefetch_programs import train_at_depths
from small_graph import Case, train_cases
from temporal_programs import TemporalCase, train_temporal
from typed_programs import TypedCase, train_all

from gsplit.distributed.comm.mesh import Mesh

SPLITS = 4
STRATEGIES = ("split", "hybrid(1)", "data_cached")
MODELS = [
    *(Case("sage", strategy, "random", 0.5, None, None) for strategy in STRATEGIES),
    Case("gat", "split", "no targets on rank 1", 0.0, None, None),
    Case("gcn", "split", "all on rank 0", 0.5, "cat", "batch_norm"),
]
TYPED = [TypedCase("sage", "split"), TypedCase("gat", "hybrid(1)"), TypedCase("hgt", "data_cached")]
LINKS = [LinkCase("split"), LinkCase("hybrid(1)", prefetch=1)]
TEMPORAL = [TemporalCase("split"), TemporalCase("split", parts="first")]


def train_tasks(mesh: Mesh) -> dict[str, list[Any]]:
    """Models, vertex types, pairs and times: what one process must also come to."""
    return {
        "models": train_cases(mesh, MODELS, SPLITS, 2),
        "typed": train_all(mesh, TYPED),
        "links": train_links(mesh, LINKS),
        "temporal": train_temporal(mesh, TEMPORAL),
    }


def train_over_hosts(mesh: Mesh, path: str, budgets: list[int], depths: list[tuple[str, int, int]]) -> dict[str, Any]:
    """The same, and what must not change a bit: copies of rows and batches that are made ahead."""
    assert mesh.shuffles.levels is not None and mesh.loading.levels is not None
    return train_tasks(mesh) | {
        "copies": train_with_copies(mesh, [path] * mesh.size, budgets, None),
        "depths": train_at_depths(mesh, depths),
        "counts": count_steps(mesh, path, list(STRATEGIES)),
    }
