"""What ranks run in the test that loaders, trainers, evaluations and inferences return their resources."""

import gc
import time
from pathlib import Path

import pytest
import torch
from prefetch_programs import make_trainer
from small_graph import small_store
from torch.distributed import distributed_c10d  # noqa: TID251

import gsplit
from gsplit.distributed.comm.comm import Call, Comm
from gsplit.distributed.comm.mesh import Mesh

Resources = dict[str, int]


def _shared_bytes() -> int:
    """Mapped bytes of anonymous files: shared memory, status pages."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:gsplit" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def _count() -> Resources:
    """What is in use now; the least of several moments, since gloo opens sockets for a moment."""
    gc.collect()
    moments = []
    for _ in range(5):
        moments.append(_count_once())
        time.sleep(0.1)
    return {name: min(moment[name] for moment in moments) for name in moments[0]}


def _count_once() -> Resources:
    files = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            files.append(str(file.readlink()))
        except OSError:  # the folder itself
            continue
    return {
        "descriptors": len(files),
        "segments": sum("/memfd:gsplit" in file for file in files),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "process groups": len(distributed_c10d._world.pg_map),
        "mapped bytes": _shared_bytes(),
    }


def _use_everything(mesh: Mesh, folder: Path, prefetch: int, sampling_threads: int) -> None:
    trainer = make_trainer(mesh, prefetch=prefetch, sampling_threads=sampling_threads)
    trainer.train_epoch(2)
    store = small_store("no targets on rank 1", mesh.num_splits)[0]
    gsplit.evaluate(trainer.state.model, store, ["train"])
    gsplit.infer(trainer.state.model, store, folder / "outputs.npy", workspace=folder)


def count_resources(mesh: Mesh, folder: str, num_rounds: int) -> tuple[Resources, Resources]:
    """What is in use after one round of work, and after many."""
    _use_everything(mesh, Path(folder), prefetch=2, sampling_threads=2)
    one = _count()
    for number in range(1, num_rounds):
        _use_everything(mesh, Path(folder), prefetch=2 + number % 3, sampling_threads=1 + number % 2)
    return one, _count()


def drop_at_different_times(mesh: Mesh, num_rounds: int) -> tuple[list[list[float]], int]:
    """Losses of loaders that every rank drops at another moment, and how many process groups that took."""
    held: list[gsplit.Trainer] = []
    losses = []
    for number in range(num_rounds):
        trainer = make_trainer(mesh, prefetch=2)
        trainer.train_epoch()
        losses.append(trainer.state.history.losses.tolist())
        held.append(trainer)
        if number % 3 == mesh.rank:
            held.clear()
        del trainer
        gc.collect()
    return losses, len(distributed_c10d._world.pg_map)


class _Owner:
    """What holds borrowed groups in place of a loader."""


def borrow_after_a_failure(mesh: Mesh) -> list[bool]:
    """Whether the next owner gets the same groups: after work that ended well, that failed, that was not the same."""

    def borrow_again(ids: Comm) -> tuple[bool, _Owner, Comm]:
        owner = _Owner()
        groups = mesh.borrow_loading_groups(owner)
        groups.ids.all_to_all_counts(Call("count"), (1, 2))
        return groups.ids is ids, owner, groups.ids

    _, owner, ids = borrow_again(mesh.loading)
    del owner
    same_after_good_work, owner, ids = borrow_again(ids)
    if mesh.rank == 0:
        watch = ids._group.calls  # type: ignore[attr-defined]
        with (
            pytest.raises(ValueError, match="on purpose"),
            watch.begin(Call("count"), ""),
        ):
            raise ValueError("on purpose")
    del owner
    same_after_failure, owner, ids = borrow_again(ids)
    if mesh.rank == 1:
        watch = ids._group.calls  # type: ignore[attr-defined]
        with watch.begin(Call("count"), ""):
            pass  # rank 0 does not begin it
    del owner
    same_out_of_step, _, _ = borrow_again(ids)
    return [same_after_good_work, same_after_failure, same_out_of_step]


def exchange_with_a_long_purpose(mesh: Mesh) -> list[int]:
    """Counts and rows for calls whose description is longer than what a message has room for."""
    call = Call("a name that is long" + 20 * ", really long", 3, 1, detail="é" * 100)
    counts = mesh.shuffles.all_to_all_counts(call, (1, 2))
    rows = torch.full((3, 1), mesh.rank)
    parts = mesh.shuffles.all_to_all_views(call, rows, counts, (1, 2))
    return [int(value) for part in parts for value in part]
