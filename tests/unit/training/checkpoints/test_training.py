"""What of a training goes into a checkpoint, and what the trainer says where it cannot save or go on."""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_graph import CLASSES, WIDTH, small_store
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit import InputError, NeighborLoader, Trainer, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.inference.metrics import METRICS
from gsplit.store.in_memory import MemoryStore
from gsplit.training.checkpoints.files import Checkpoint, CheckpointManifest, read_checkpoint, read_latest
from gsplit.training.checkpoints.names import checkpoint_path, latest_file
from gsplit.training.train_state import history_of


def _trainer(lr: float = 0.05, **options: Any) -> Trainer:
    loader = NeighborLoader(small_store("random", 1)[0], [3, 3], "train", batch_size=12)
    torch.manual_seed(0)
    model = parallelize(GraphSAGE(WIDTH, 8, 2, CLASSES).double(), solo_mesh())
    return Trainer(model, torch.optim.Adam(model.parameters(), lr=lr), loader, **options)


def test_saved_while_training_goes_on_and_by_hand(tmp_path: Path) -> None:
    trainer = _trainer(save_to=tmp_path / "often", save_every=2, keep_checkpoints=3)
    trainer.train_epoch()
    trainer.save()
    trainer.save(tmp_path / "once")
    names = [path.name for path in sorted((tmp_path / "often").glob("step-*"))]
    assert names == [checkpoint_path(tmp_path, number).name for number in (2, 4, 5)]
    one, two = read_latest(tmp_path / "often"), read_latest(tmp_path / "once")
    assert history_of(one.state) == history_of(two.state) == trainer.state.history and one.manifest == two.manifest
    assert read_latest(tmp_path / "often").state["train_edges"] == trainer.state.train_edges > 0
    fresh = _trainer()
    fresh.load(checkpoint_path(tmp_path / "often", 2))  # a file by name
    fresh.train_epoch()
    assert fresh.state.history.losses == trainer.state.history.losses


def test_a_request_to_stop_is_heard_after_the_step(tmp_path: Path) -> None:
    trainer = _trainer(save_to=tmp_path)
    trainer.request_stop()
    assert len(trainer.train_epoch()) == 1 and trainer.stopped


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    trainer = _trainer(save_to=tmp_path, save_every=1, keep_checkpoints=1)
    trainer.train_epoch(2)
    trainer.state.record_evaluation({"val": 0.5}, "val", METRICS["accuracy"])
    trainer.train_epoch(2)
    trainer.save()
    assert [path.name[5:13] for path in sorted(tmp_path.glob("step-*"))] == ["00000002", "00000004"]


def test_the_documented_loop_ends_the_epoch_it_was_resumed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text()
    loop = document.split("```python\n")[1].split("```")[0].replace("10 *", "2 *")
    monkeypatch.chdir(tmp_path)
    losses = []
    for steps in (0, 2):
        begun = _trainer()
        if steps:  # stopped in the last epoch
            begun.train_epoch()
            begun.train_epoch(steps)
            begun.save("checkpoints")
        fresh = _trainer().state
        names = {"gsplit": gsplit, "Path": Path, "model": fresh.model, "optimizer": fresh.optimizer}
        names |= {"loader": fresh.loader, "scheduler": None}
        exec(loop, names)
        losses.append(cast(Trainer, names["trainer"]).state.history.losses)
        shutil.rmtree("checkpoints")
    assert losses[0] == losses[1] and len(losses[0]) == 10


def test_refusals(tmp_path: Path) -> None:
    for options in ({"save_every": 3}, {"save_every": 0, "save_to": tmp_path}):
        with pytest.raises(InputError, match="save_every: expected a positive number of steps, and a folder"):
            _trainer(**options)
    trainer = _trainer(description={"dropout": "0"})
    with pytest.raises(InputError, match=r"save: expected a folder .*Fix: trainer.save\(FOLDER\)"):
        trainer.save()
    trainer.train_epoch(1)
    trainer.save(tmp_path)
    with pytest.raises(InputError, match="got optimizer lr 0.1 instead of 0.05"):
        _trainer(lr=0.1, description={"dropout": "0"}).load(tmp_path)
    with pytest.raises(InputError, match="got max_grad_norm 1.0 instead of None; dropout 0.5 instead of 0"):
        _trainer(description={"dropout": "0.5"}, max_grad_norm=1.0).load(tmp_path)
    found = read_latest(tmp_path)
    path = latest_file(tmp_path)
    assert path is not None
    for key in ("history", "optimizer", "model"):
        broken = Checkpoint(path, found.manifest, {**found.state, key: {}})
        with pytest.raises(InputError, match=r"safetensors: expected the state of this training"):
            _trainer(description={"dropout": "0"}).restore(broken)


def _grouped(first: int, *, frozen: bool = False) -> Trainer:
    """One parameter in a group of its own, the others in another."""
    torch.manual_seed(0)
    model = parallelize(GraphSAGE(WIDTH, WIDTH, 2, CLASSES).double(), solo_mesh())
    parameters = list(model.parameters())
    parameters[0].requires_grad_(not frozen)
    groups = [[parameters[first]], [one for number, one in enumerate(parameters) if number != first]]
    loader = NeighborLoader(small_store("random", 1)[0], [3, 3], "train", batch_size=12)
    return Trainer(model, torch.optim.Adam([{"params": group} for group in groups]), loader)


def test_parameters_in_another_order_or_frozen_are_refused(tmp_path: Path) -> None:
    """The optimizer's state goes to parameters by position; shapes are equal here."""
    trainer = _grouped(0)
    trainer.train_epoch(1)
    trainer.save(tmp_path)
    _grouped(0).load(tmp_path)
    with pytest.raises(InputError, match=r"optimizer group 0 convs.0.lin_r.weight instead of convs.0.lin_l.weight"):
        _grouped(2).load(tmp_path)
    with pytest.raises(InputError, match=r"model convs.0.lin_l.weight float64 .* frozen instead of float64"):
        _grouped(0, frozen=True).load(tmp_path)


def _names(folder: Path) -> list[str]:
    return [path.name.removeprefix("step-000000") for path in sorted(folder.glob("step-*"))]


def test_what_is_saved_after_going_back_to_an_older_step_is_kept(tmp_path: Path) -> None:
    often, once = tmp_path / "often", tmp_path / "once"
    trainer = _trainer(save_to=often, save_every=1)
    trainer.train_epoch(1)
    trainer.save(once)
    trainer.train_epoch()
    trainer.save()
    assert _names(often) == ["04.safetensors", "05.safetensors"]
    again = _trainer(save_to=often, save_every=1)
    again.load(checkpoint_path(once, 1))
    again.train_epoch(2)
    again.save()
    unused = ["04.safetensors.unused", "05.safetensors.unused"]
    assert _names(often) == ["02.safetensors", "03.safetensors", *unused]
    assert again.state.history.losses == trainer.state.history.losses[:3]


def test_a_damaged_checkpoint_is_not_the_one_that_is_kept(tmp_path: Path) -> None:
    trainer = _trainer(save_to=tmp_path)
    trainer.train_epoch(1)
    trainer.save()
    checkpoint_path(tmp_path, 9).write_bytes(b"damaged")
    again = _trainer(save_to=tmp_path, save_every=1, keep_checkpoints=1)
    again.load(tmp_path)
    again.train_epoch(1)
    again.save()
    assert _names(tmp_path) == ["02.safetensors", "09.safetensors.unused"]
    assert read_latest(tmp_path).damaged == ()


def test_saving_by_hand_waits_for_the_save_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer in the folder would remove what the first one is writing."""
    trainer, flush, flushes = _trainer(save_to=tmp_path), os.fsync, threading.Event()

    def slow_flush(descriptor: int) -> None:
        flushes.set()
        time.sleep(0.1)
        flush(descriptor)

    monkeypatch.setattr("gsplit.files.atomic.os.fsync", slow_flush)
    trainer.train_epoch(1)
    trainer.save_in_background()
    assert flushes.wait(300)
    trainer.save(tmp_path)
    trainer.save()  # raises what went wrong in the background
    assert _names(tmp_path) == ["01.safetensors"]


def test_a_model_with_more_than_tensors_in_its_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer()
    monkeypatch.setattr(type(trainer.state.model), "get_extra_state", lambda _: {"k": 1})
    with pytest.raises(InputError, match="model .*_extra_state: expected a tensor .got dict"):
        trainer.save(tmp_path)


@pytest.mark.parametrize("name", ["features/x", "y"])
def test_other_arrays_of_a_graph_in_memory_are_refused(name: str, tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.save(tmp_path)
    store = small_store("random", 1)[0]
    changed = MemoryStore(
        store.graph, store.part_boundaries, {**store.arrays, name: store.arrays[name][::-1]}, store.dtypes
    )
    loader = NeighborLoader(changed, [3, 3], "train", batch_size=12)
    other = Trainer(trainer.state.model, trainer.state.optimizer, loader)
    with pytest.raises(
        InputError, match=f"expected the same training .got graph {name} [0-9a-f]+ instead of [0-9a-f]+[)]"
    ):
        other.load(tmp_path)


def _continue(checkpoint: Checkpoint) -> list[float]:
    trainer = _trainer()
    trainer.restore(checkpoint)
    trainer.train_epoch()
    return trainer.state.history.losses.tolist()


KEPT = Path(__file__).parents[3] / "assets" / "checkpoints"


@pytest.mark.parametrize("path", sorted(KEPT.iterdir()), ids=lambda path: path.stem)
def test_checkpoints_of_released_versions_are_continued(path: Path) -> None:
    """Each was saved after three steps of ``_trainer()`` by the version in its name, and is never made again."""
    kept = read_checkpoint(path)
    assert kept.manifest.free["gsplit"] == path.stem.removeprefix("gsplit-") and kept.manifest.free["torch"]
    undisturbed = _trainer()
    undisturbed.train_epoch()
    assert _continue(kept) == pytest.approx(undisturbed.state.history.losses, rel=1e-9)


def test_other_versions_are_named_and_their_new_options_do_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    kept = read_checkpoint(KEPT / "gsplit-0.1.0.safetensors")
    older = {name: value for name, value in kept.manifest.fixed.items() if name != "optimizer maximize"}
    for group in kept.state["optimizer"]["param_groups"]:
        del group["maximize"]
    free = {**kept.manifest.free, "torch": "2.1.0"}
    losses = _continue(replace(kept, manifest=CheckpointManifest(older, free)))
    assert len(losses) == 5
    assert "was saved with gsplit 0.1.0, torch 2.1.0 and is continued with gsplit " in caplog.text
    del free["gsplit"]
    _continue(replace(kept, manifest=CheckpointManifest({**older, "optimizer unknown": "1"}, free)))
    assert "was saved with gsplit of an unknown version, torch 2.1.0" in caplog.text
    other = CheckpointManifest({**older, "optimizer eps": "1"}, free)
    with pytest.raises(InputError, match="expected the same training .got optimizer eps 1e-08 instead of 1"):
        _continue(replace(kept, manifest=other))


def test_weights_that_are_not_numbers_are_refused_though_the_checksum_is_right(tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.train_epoch(1)
    next(trainer.state.model.parameters()).data[0, 0] = float("nan")
    trainer.save(tmp_path)
    fresh = _trainer()
    before = [parameter.clone() for parameter in fresh.state.model.parameters()]
    with pytest.raises(InputError, match="the state of this training .got NaN in convs.0.lin_l.weight of model"):
        fresh.load(tmp_path)
    assert all(map(torch.equal, before, fresh.state.model.parameters()))
