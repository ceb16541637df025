"""Mini-batches of a heterogeneous graph do not depend on whether it is stored, and how it is partitioned (law 1)."""

from pathlib import Path
from typing import Any, cast

import torch
from typed_graphs import academic

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.minibatch.typed_batch import TypedBatch


def _batches(graph: Any) -> list[TypedBatch]:
    loader = gsplit.NeighborLoader(
        graph, [3, 2], ("paper", "train"), batch_size=8, mesh=solo_mesh(), features={"paper": "x"}
    )
    return cast(list[TypedBatch], list(loader))


def test_memory_disk_and_parts_give_the_same_mini_batches(tmp_path: Path) -> None:
    graph = academic(edges=600)
    plain = graph.build(tmp_path / "g.gsplit")
    options = {"batch_size": 8, "solver": "random", "objective": "random", "epochs": 1}
    parts = gsplit.partition(plain, tmp_path / "p.gsplit", 3, [3, 2], "paper/train", **options)  # type: ignore[arg-type]
    x = torch.from_numpy(graph.arrays["features/paper/x"])
    y = torch.from_numpy(graph.arrays["y/paper"])
    wanted = _batches(plain)
    assert len(wanted) == 4
    for before, after in zip(wanted, _batches(parts), strict=True):
        for batch in (before, after):
            papers = batch.n_id_dict["paper"]
            torch.testing.assert_close(batch.x_dict["paper"], x[papers], rtol=0, atol=0)
            torch.testing.assert_close(batch.y, y[papers[: batch.num_targets]], rtol=0, atol=0)
        for name in ("paper", "author"):
            assert before.n_id_dict[name].sort().values.tolist() == after.n_id_dict[name].sort().values.tolist()
    data = _batches(gsplit.to_pyg(plain))
    for before, after in zip(wanted, data, strict=True):
        assert before.n_id_dict["paper"].sort().values.tolist() == after.n_id_dict["paper"].sort().values.tolist()
