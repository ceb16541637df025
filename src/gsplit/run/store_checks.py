"""Whether every target has a label that the model can learn, and degrees are degrees, before training begins.

Opening a store samples its arrays; a label out of range in between would end training in a loss function, with a
message about a tensor.
"""

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, StoreError, explain
from gsplit.graph import Graph
from gsplit.sampling.targets import StoredTargets
from gsplit.store.reader import Store

__all__ = ["check_degrees", "check_labels"]

_VERIFY = "run gsplit inspect --verify, then restore the store or import it again"


def check_labels(store: Store, name: str) -> None:
    """Every target of a list needs a class; unlabelled vertices have -1."""
    labels, targets = store.stored_array("y"), StoredTargets(name, *store.stored_targets(name), store.vertex_range)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        got = f"{store.dtype('y')} {list(labels.shape)}"
        raise InputError(explain("y", "one class per vertex", got, "import labels as integers"))
    if targets.ids.size == 0:
        raise InputError(explain(f"targets/{name}", "at least one target", "none", "name other targets"))
    unlabelled = 0
    for _, ids in targets.pieces():
        found = labels[ids - store.vertex_range[0]]
        unlabelled += int((found < 0).sum())
        if int(found.max()) >= store.num_classes:
            raise StoreError(explain("y", f"classes 0..{store.num_classes - 1}", int(found.max()), _VERIFY))
    if unlabelled:
        fix = "leave unlabelled vertices out of the targets"
        raise InputError(explain(f"targets/{name}", "a label of every target", f"{unlabelled} without", fix))


def check_degrees(graph: Graph) -> npt.NDArray[np.int64]:
    """In-degrees of all vertices; those of damaged offsets are refused."""
    degrees = graph.in_degrees()
    if degrees.size and not 0 <= int(degrees.min()) <= int(degrees.max()) <= graph.indices.size:
        got = f"{degrees.min()}..{degrees.max()}"
        raise StoreError(explain("indptr", f"in-degrees of 0..{graph.indices.size}", got, _VERIFY))
    return degrees
