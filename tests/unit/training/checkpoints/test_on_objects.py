"""Checkpoints on object storage: whole or not there, read again after faults, and refused by name where not built."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE

from gsplit import NeighborLoader, Trainer, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError, UnavailableError
from gsplit.files import objects
from gsplit.files.places import is_file, list_names, open_whole
from gsplit.run.folder import check_new_run
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter, read_checkpoint, read_latest
from gsplit.training.checkpoints.names import checkpoint_path, latest_file, list_checkpoints
from gsplit_bench.s3_server import BUCKET, FaultyProxy

MANIFEST = CheckpointManifest({"seed": "0"})
FAULTS = {"slow down": 0.1, "error": 0.1, "cut": 0.1}


def _folder(name: str) -> Path:
    return Path(f"s3://{BUCKET}/{name}")


def _save(writer: CheckpointWriter, step: int) -> None:
    writer.save(step, {"w": torch.full((1000,), float(step))}, MANIFEST)


def test_states_are_kept_and_read_in_spite_of_faults(s3_proxy: FaultyProxy) -> None:
    s3_proxy.shares = FAULTS
    folder = _folder("kept")
    assert latest_file(folder) is None
    writer = CheckpointWriter(folder, keep=2)
    for step in (1, 2, 3):
        _save(writer, step)
    writer.finish()
    assert sum(s3_proxy.counts.values()) > 0
    assert [path.name[5:13] for path in list_checkpoints(folder)] == ["00000003", "00000002"]
    assert read_latest(folder).state["w"].unique().tolist() == [3.0]
    assert read_checkpoint(checkpoint_path(folder, 2)).state["w"].unique().tolist() == [2.0]
    assert not os.path.lexists("s3:")


def test_a_damaged_object_is_passed_over_and_set_aside(s3_proxy: FaultyProxy) -> None:
    folder = _folder("damaged")
    writer = CheckpointWriter(folder, keep=3)
    _save(writer, 5)
    writer.finish()
    with open_whole(checkpoint_path(folder, 9)) as stream:
        stream.write(b"cut off")
    found = read_latest(folder)
    assert found.path == checkpoint_path(folder, 5) and len(found.damaged) == 1
    writer.set_newer_aside(5)
    assert list_checkpoints(folder) == [found.path]
    assert "step-00000009.safetensors.unused" in list_names(folder)


def test_an_object_that_cannot_be_read_now_is_not_passed_over(
    s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder("outage")
    writer = CheckpointWriter(folder, keep=3)
    for step in (1, 2):
        _save(writer, step)
    writer.finish()
    monkeypatch.setattr(objects, "ATTEMPTS", 1)
    s3_proxy.once = {"GET /graphs/outage/step-00000002": "slow down"}  # and the older one could be read
    with pytest.raises(UnavailableError, match="step-00000002.safetensors: expected an answer of object storage"):
        read_latest(folder)
    assert s3_proxy.once == {} and read_latest(folder).path == checkpoint_path(folder, 2)


def test_an_upload_that_fails_leaves_nothing(s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "ATTEMPTS", 2)
    folder = _folder("failed")
    writer = CheckpointWriter(folder, keep=2)
    _save(writer, 1)
    writer.finish()
    s3_proxy.shares = {"error": 1.0}
    _save(writer, 2)
    with pytest.raises(UnavailableError, match="step-00000002.safetensors: expected an answer .* 2 attempts"):
        writer.finish()
    s3_proxy.shares = {}
    assert not is_file(checkpoint_path(folder, 2))
    assert read_latest(folder).path == checkpoint_path(folder, 1)
    with suppress(ZeroDivisionError), open_whole(folder / "table.csv") as stream:
        stream.write(b"half" + bytes(1 // 0))
    assert not is_file(folder / "table.csv")


def test_a_trainer_saves_and_continues_there(s3_proxy: FaultyProxy) -> None:
    url = f"s3://{BUCKET}/trained"
    s3_proxy.shares = FAULTS
    trainer = _trainer(save_to=url, save_every=2)
    trainer.train_epoch()
    trainer.save()
    fresh = _trainer()
    fresh.load(f"{url}/step-00000004.safetensors")
    fresh.train_epoch()
    assert fresh.state.history.losses == trainer.state.history.losses
    again = _trainer()
    again.load(url)
    assert again.state.num_steps == trainer.state.num_steps
    with pytest.raises(InputError, match="expected a checkpoint that can be read .got no file step"):
        again.load(f"s3://{BUCKET}/no-checkpoints")


def _trainer(**options: Any) -> Trainer:
    loader = NeighborLoader(small_store("random", 1)[0], [3, 3], "train", batch_size=12)
    torch.manual_seed(0)
    model = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), solo_mesh())
    return Trainer(model, torch.optim.Adam(model.parameters(), lr=0.05), loader, **options)


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=f"s3://{BUCKET}/run: expected a run folder on a disk"):
        check_new_run(_folder("run"), overwrite=False)
    with pytest.raises(InputError, match="expected the URL of a folder or file, without a query"):
        list_names(Path(f"s3://{BUCKET}/run?region=eu-west-1"))
