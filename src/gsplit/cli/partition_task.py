"""``gsplit partition`` on ranks that each hold a shard."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from gsplit.cli.console import emit_json, progress_bars
from gsplit.cli.summary import describe, show_partition
from gsplit.cli.task_base import TaskBase, say
from gsplit.store.reader import open_store
from gsplit.store.writer import check_output

if TYPE_CHECKING:
    from gsplit.distributed.mesh import Mesh

__all__ = ["PartitionTask"]


class PartitionTask(TaskBase):
    """``store`` is the name that the shards were imported under: rank r of N holds ``NAME-r-of-N.gsplit``."""

    kind: Literal["partition"] = "partition"
    output: Path
    parts: int
    fanout: list[int]
    targets: str | None
    batch_size: int
    objective: str
    solver: str | None
    tolerance: float
    c_v: float
    c_e: float
    epochs: int
    seed: int
    overwrite: bool

    def agreement(self) -> dict[str, object]:
        """See the base class. The shards are compared when they are joined."""
        return self.model_dump(exclude={"store", "output", "as_json", "device"})

    @property
    def replicas(self) -> int:
        """Every rank has its own vertices."""
        return 1

    def announce(self, num_ranks: int) -> None:
        """Say what is being started."""
        say(f"partition {num_ranks} shards of {self.store} into {self.parts} parts; starting ...")

    def check(self, nproc: int) -> None:
        """Whether all shards are there, and have a place to go to."""
        from gsplit.store.sharded_import import shard_paths

        for shard, output in zip(shard_paths(self.store, nproc), shard_paths(self.output, nproc), strict=True):
            open_store(shard)
            check_output(output, overwrite=self.overwrite)

    def run(self, mesh: "Mesh") -> int:
        """Partition; rank 0 shows it."""
        from gsplit.partitioning.sharded.partition import partition_shards
        from gsplit.store.sharded_import import shard_paths

        start = time.perf_counter()
        shard = open_store(shard_paths(self.store, mesh.size)[mesh.rank])
        choices = self.model_dump(exclude={*TaskBase.model_fields, "kind", "output", "parts", "fanout", "targets"})
        with progress_bars(self.as_json or mesh.rank > 0) as progress:
            made = partition_shards(
                shard, self.output, self.parts, self.fanout, self.targets, mesh=mesh, **choices, progress=progress
            )
        if mesh.rank:
            return 0
        shards, seconds = shard_paths(self.output, mesh.size), time.perf_counter() - start
        document = describe(made) | {"seconds": seconds, "shards": [str(shard) for shard in shards]}
        if self.as_json:
            emit_json(document)
            return 0
        console = Console()
        show_partition(document, console)
        text = f"\nall {mesh.size} shards are there in {seconds:.1f} s: {shards[0]} and so on"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return 0
