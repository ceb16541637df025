"""What the ranks of the inference tests run."""

from pathlib import Path
from typing import Any

from gsplit import evaluate, infer
from gsplit.bench.exactness import Case, make_model, small_store
from gsplit.distributed.mesh import Mesh
from gsplit.inference import closure
from gsplit.nn.parallelize import parallelize
from gsplit.ownership import Ownership


def infer_all(mesh: Mesh, kinds: list[str], boundaries: list[tuple[int, ...]], folder: str) -> list[Any]:
    """Outputs and accuracy of every model under every ownership, in chunks of a few rows and edges."""
    closure.CHUNK_EDGES, closure.CHUNK_ROWS = 150, 25
    store, _ = small_store("random", 1)
    results = []
    for kind in kinds:
        model = parallelize(make_model(Case(kind, "split", "random", 0.5, "max", None)), mesh)
        for number, cuts in enumerate(boundaries):
            owned = Ownership(cuts) if mesh.size > 1 else None
            out = Path(folder) / f"{kind}-{number}-{mesh.size}.npy"
            rows = infer(model, store, out, ownership=owned, workspace=folder)
            results.append((rows.tolist(), evaluate(model, store, ["train"], ownership=owned)))
    return results
