"""What ranks that partition shards refuse, in one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs import sample_store
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.cli.tasks import PartitionTask, parse_task
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError, StoreError
from gsplit.graph.ownership import Ownership
from gsplit.partitioning.settings import PartitionSettings
from gsplit.partitioning.sharded.held_shard import HeldShard
from gsplit.partitioning.sharded.partition import partition_shards
from gsplit.partitioning.sharded.plan import check_shard_plan
from gsplit.partitioning.sharded.relabel import new_shards
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.verify import verify_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder: Path = tmp_path_factory.mktemp("sharded")
    return sample_store(folder / "g.gsplit")


def test_shards_that_are_not_side_by_side_are_refused(store: Store, tmp_path: Path) -> None:
    half = write_shard(store, tmp_path / "half.gsplit", 0, 150)
    with pytest.raises(InputError, match=r"shards: expected ranges side by side from 0 to 300 \(got rank 0: 0..150\)"):
        HeldShard.join(half, solo_mesh())


@pytest.mark.parametrize("mesh", [solo_mesh("meta"), replace(solo_mesh(), num_replicas=2)])
def test_other_meshes_are_refused(mesh: Any, store: Store) -> None:
    with pytest.raises(InputError, match="mesh: expected ranks of one replica on the host"):
        HeldShard.join(store, mesh)


def test_other_solvers_and_too_few_parts_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="solver: expected restream, the one that ranks can run together .got metis"):
        partition_shards(
            store, tmp_path / "p.gsplit", PartitionSettings(2, fanout=(2,), solver="metis"), mesh=solo_mesh()
        )
    held = HeldShard(store, solo_mesh(), Ownership((0, 100, 200, 300)))
    with pytest.raises(InputError, match=r"parts: expected at least one for each of 3 ranks \(got 2\)"):
        check_shard_plan(held, PartitionSettings(2, solver="restream"))


def test_a_second_partitioning_of_the_same_name_is_refused_and_a_dead_one_replaced(
    store: Store, tmp_path: Path
) -> None:
    held, path = HeldShard.join(store, solo_mesh()), tmp_path / "p.gsplit"
    folder = tmp_path / ".p.gsplit.ranks-1"
    (folder / "left").mkdir(parents=True)  # by a run that died
    first = new_shards(held, path, overwrite=False)
    first.__enter__()
    assert (folder / "lock").exists() and not (folder / "left").exists()
    with pytest.raises(InputError, match="expected one partitioning of this name .got another that is under way"):
        new_shards(held, path, overwrite=False).__enter__()
    assert (folder / "lock").exists()
    assert not first.__exit__(KeyError, KeyError(), None)
    assert list(tmp_path.iterdir()) == []


def test_a_partition_that_fails_leaves_nothing_and_overwriting_is_asked_for(store: Store, tmp_path: Path) -> None:
    damaged = write_shard(store, tmp_path / "damaged.gsplit", 0, 300)
    with (damaged.path / "y.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(StoreError, match="y.npy: expected contents with SHA-256"):
        partition_shards(open_store(damaged.path), tmp_path / "p.gsplit", PartitionSettings(2), mesh=solo_mesh())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.gsplit"]
    settings = PartitionSettings(2, fanout=(2,), epochs=1, batch_size=64)
    made = partition_shards(store, tmp_path / "p.gsplit", settings, mesh=solo_mesh())
    with pytest.raises(InputError, match="p-0-of-1.gsplit: expected no file or directory of this name"):
        partition_shards(store, tmp_path / "p.gsplit", settings, mesh=solo_mesh())
    again = partition_shards(store, tmp_path / "p.gsplit", settings, mesh=solo_mesh(), overwrite=True)
    assert again.fingerprint == made.fingerprint


def test_the_command_wants_all_shards(store: Store) -> None:
    arguments = ["partition", str(store.path), "p.gsplit", "--parts", "2", "--nproc", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "g-0-of-2.gsplit: expected the directory of a store" in result.output


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_says_what_ranks_made(
    as_json: bool, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shard(store, tmp_path / "g-0-of-1.gsplit", 0, 300)
    task = PartitionTask(
        store=tmp_path / "g.gsplit",
        as_json=as_json,
        device="cpu",
        output=tmp_path / "p.gsplit",
        settings=PartitionSettings(3, fanout=(2, 2), batch_size=32, objective="node", epochs=1),
        overwrite=False,
    )
    assert parse_task(task.model_dump_json()) == task
    task.announce(1)
    task.check(1)
    assert task.run(solo_mesh()) == 0
    made, said = tmp_path / "p-0-of-1.gsplit", capsys.readouterr()
    verify_store(open_store(made))
    assert "partition 1 shards of" in said.err
    if as_json:
        document = json.loads(said.out)
        assert document["shards"] == [str(made)] and document["num_parts"] == 3
    else:
        assert "3 parts by node with restream" in said.out and "all 1 shards are there in" in said.out
