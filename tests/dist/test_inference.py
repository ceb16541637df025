"""Exact inference on real ranks: one array in original order, whoever owns what, replicas included."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_graph import VERTICES, WIDTH, Case, make_model, small_store
from torch_geometric.nn import GraphSAGE

from gsplit import InputError, NeighborLoader, evaluate, infer, write_predictions
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.inference import closure
from gsplit.nn.parallelize import parallelize
from gsplit.store.in_memory import MemoryStore
from gsplit_bench.ranks import run_ranks


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


def infer_after_casts(mesh: Mesh, folder: str) -> list[Any]:
    """Outputs after training on rows that were cast by hand, and what is raised after training on their negatives.

    The last rank has no vertices, and so no rows that could differ.
    """
    whole, _ = small_store("random", 1)
    store = MemoryStore(whole.graph, [0, VERTICES], whole.arrays, whole.dtypes)
    owned = Ownership((0, *[VERTICES] * mesh.size))
    found: list[Any] = []
    for sign in (1, -1):
        torch.manual_seed(0)
        model = parallelize(GraphSAGE(WIDTH, 8, 2, 3), mesh, num_features=WIDTH)
        loader = NeighborLoader(store, [3, 3], "train", batch_size=30, mesh=mesh, ownership=owned)
        for batch in loader:
            rows = batch.x if sign == 1 else sign * batch.x
            batch.mean(model(rows.float(), batch.edge_index).sum(1)).backward()
        try:
            found.append(infer(model, store, Path(folder) / f"{sign}-{mesh.size}.npy", ownership=owned).tolist())
        except InputError as error:
            found.append(str(error))
    return found


_LOAD = np.load


class _PrivateMap(np.memmap):
    """A map as a network file system may give it: a change reaches the file at ``flush``, others do not arrive."""

    def flush(self) -> None:
        assert self.filename is not None
        shared = _LOAD(self.filename, mmap_mode="r+", allow_pickle=False)
        changed = np.flatnonzero((self != 0).any(axis=1))
        shared[changed] = self[changed]


def infer_through_private_maps(mesh: Mesh, folder: str) -> None:
    """Write predictions where no rank sees what another has written before that rank's flush."""

    def load_private(path: Any, *args: Any, **options: Any) -> Any:
        if options.get("mmap_mode") != "r+" or not str(path).endswith(".partial"):
            return _LOAD(path, *args, **options)
        found = _LOAD(path, mmap_mode="c", allow_pickle=False)
        return _PrivateMap(path, found.dtype, "c", found.offset, found.shape)

    whole, _ = small_store("random", 1)
    store = MemoryStore(whole.graph, [0, VERTICES // 3, VERTICES], whole.arrays, whole.dtypes)
    model = parallelize(make_model(Case("gat", "split", "random", 0.5, "max", None)), mesh)
    np.load = load_private  # type: ignore[assignment]
    infer(model, store, Path(folder) / "rows.npy", workspace=folder)
    write_predictions(model, store, Path(folder) / "rows.csv", what="outputs", workspace=folder)
    np.load = _LOAD


KINDS = ["gat", "gcn", "pna"]


@pytest.mark.parametrize("replicas, splits, hosts", [(1, 2, ()), (1, 3, ()), (2, 2, ()), (1, 4, (2, 2))])
def test_ranks_write_what_one_process_writes(
    replicas: int, splits: int, hosts: tuple[int, ...], tmp_path: Path
) -> None:
    n, size = VERTICES, replicas * splits
    boundaries: list[tuple[int, ...] | None] = [
        (0, *[n] * size),
        (0, 0, *[n * k // size for k in range(2, size)], n),
        (0, *range(7, 7 + size - 1), n),
        None,  # two parts: from three ranks on, or with replicas, fewer than ranks
    ]
    ranks = run_ranks(infer_all, size, KINDS, boundaries, str(tmp_path), replicas=replicas, hosts=hosts)
    (tmp_path / "one").mkdir()
    one = infer_all(solo_mesh(), KINDS, boundaries, str(tmp_path / "one"))
    for rank in ranks:
        for (rows, scores), (want, wanted) in zip(rank, one, strict=True):
            assert np.abs(np.array(rows) - np.array(want)).max() < 1e-11
            assert scores == wanted
    left = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {".npy", ".csv"}  # no maps, no partial files
    (table,) = tmp_path.glob("*.csv")
    (wanted_table,) = (tmp_path / "one").glob("*.csv")
    assert table.read_text() == wanted_table.read_text()


def test_rows_of_all_ranks_reach_the_file_before_it_is_named(tmp_path: Path) -> None:
    """As on a network file system, a rank's map shows neither unflushed rows of others nor what was written later."""
    run_ranks(infer_through_private_maps, 2, str(tmp_path))
    rows = np.load(tmp_path / "rows.npy")
    assert rows.shape[0] == VERTICES
    assert (rows != 0).any(axis=1).all()
    table = np.loadtxt(tmp_path / "rows.csv", delimiter=",", skiprows=1)
    assert np.abs(table[:, 1:] - rows).max() < 1e-12


@pytest.mark.parametrize("hosts", [(), (1, 1, 1)])
def test_ranks_agree_whether_the_model_was_trained_on_stored_rows(hosts: tuple[int, ...], tmp_path: Path) -> None:
    wanted, _ = infer_after_casts(solo_mesh(), str(tmp_path))
    for rows, raised in run_ranks(infer_after_casts, 3, str(tmp_path), hosts=hosts):
        assert np.abs(np.array(rows) - np.array(wanted)).max() < 1e-5
        assert "put the step that computes it into a module inside the model" in raised
