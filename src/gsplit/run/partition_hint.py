"""What a run says where it would be faster on a partitioned store."""

from gsplit.distributed.mesh import Mesh
from gsplit.run.config import TrainSettings
from gsplit.run.results import RunView
from gsplit.store.reader import Store
from gsplit.strategies.spec import parse_strategy

__all__ = ["hint_at_partitioning"]


def hint_at_partitioning(store: Store, settings: TrainSettings, mesh: Mesh, view: RunView) -> None:
    """Several ranks that split mini-batches of a store in one part exchange most rows: say how to make it less."""
    spec = parse_strategy(settings.strategy, len(settings.fanout))
    if mesh.num_splits == 1 or not spec.reads_own_rows or len(store.part_boundaries) > 2:
        return
    fanout, made = ",".join(map(str, settings.fanout)), store.path.with_name(f"{store.path.stem}-{mesh.size}.gsplit")
    options = f"--parts {mesh.size} --targets {settings.targets} --fanout {fanout} --batch-size {settings.batch_size}"
    view.note(
        "hint: this store is not partitioned, so ranks exchange more than they need to; before training:\n"
        f"  gsplit partition {store.path} {made} {options}"
    )
