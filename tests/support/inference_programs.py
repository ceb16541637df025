"""What the ranks of the inference tests run."""

from pathlib import Path
from typing import Any

from gsplit import evaluate, infer, write_predictions
from gsplit.bench.exactness import VERTICES, Case, make_model, small_store
from gsplit.distributed.mesh import Mesh
from gsplit.inference import closure
from gsplit.nn.parallelize import parallelize
from gsplit.ownership import Ownership
from gsplit.store.in_memory import MemoryStore


def infer_all(mesh: Mesh, kinds: list[str], boundaries: list[tuple[int, ...] | None], folder: str) -> list[Any]:
    """Outputs and accuracy of every model under every ownership, in chunks of a few rows and edges.

    None is no ownership: that of a store of two parts.
    """
    closure.CHUNK_EDGES, closure.CHUNK_ROWS = 150, 25
    whole, _ = small_store("random", 1)
    store = MemoryStore(whole.graph, [0, VERTICES // 3, VERTICES], whole.arrays, whole.dtypes)
    results = []
    for kind in kinds:
        model = parallelize(make_model(Case(kind, "split", "random", 0.5, "max", None)), mesh)
        for number, cuts in enumerate(boundaries):
            owned = Ownership(cuts) if mesh.size > 1 and cuts is not None else None
            out = Path(folder) / f"{kind}-{number}-{mesh.size}.npy"
            rows = infer(model, store, out, ownership=owned, workspace=folder)
            if kind == kinds[0] and cuts is None:
                write_predictions(model, store, out.with_suffix(".csv"), only="train", workspace=folder)
            results.append((rows.tolist(), evaluate(model, store, ["train"], ownership=owned)))
    return results
