"""Exact inference on real ranks: one array in original order, whoever owns what, replicas included."""

from pathlib import Path

import numpy as np
import pytest
from inference_programs import infer_after_casts, infer_all, infer_through_private_maps
from small_graph import VERTICES

from gsplit.distributed.comm.mesh import solo_mesh
from gsplit_bench.ranks import run_ranks

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
