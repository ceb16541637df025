"""The checkpoints of a run: what must be equal to go on from one, where the latest is, and how a stopped run ends."""

from collections.abc import Mapping

from gsplit.distributed.launch.launcher import REQUEUE
from gsplit.loading.plan import stored_checksums
from gsplit.run.config import TrainSettings
from gsplit.run.layout import latest_checkpoint
from gsplit.store.reader import Store
from gsplit.training.checkpoints.files import Checkpoint, CheckpointManifest

__all__ = ["REQUEUE", "check_run", "describe_run", "latest_checkpoint"]

_FREE = frozenset(
    {
        *("epochs", "steps", "patience", "metric", "evaluate_every", "save_every", "keep_checkpoints"),
        *("log_dir", "log_every", "tensorboard"),
        *("strategy", "replicas", "prefetch", "cache", "device_cache", "copies", "features_on_disk", "deterministic"),
    }
)
"""Settings that decide how long or how fast a run is, not what its steps compute."""


def describe_run(settings: TrainSettings, store: Store, num_steps: int) -> dict[str, str]:
    """What must be equal for a run to go on exactly, beside what its loader, model and optimizer are."""
    found = {name: str(value) for name, value in settings.model_dump().items() if name not in _FREE}
    if settings.lr_scheduler != "constant":
        found["steps of the schedule"] = str(num_steps)
    if settings.metric is not None:
        found["metric"] = settings.metric.split(",")[0]
    found["store parts"] = str(len(store.part_boundaries) - 1)
    return found | stored_checksums(store, _arrays(settings))


def check_run(checkpoint: Checkpoint, description: Mapping[str, str]) -> None:
    """Refuse to go on with another run than the checkpoint's, before anything of it is touched."""
    saved = checkpoint.manifest
    saved.compare(CheckpointManifest({**saved.fixed, **description}), checkpoint.path)


def _arrays(settings: TrainSettings) -> list[str]:
    names = ["indptr", "indices", "original_ids", "y", *(f"features/{name}" for name in settings.feature_names)]
    names += [f"targets/{name}" for name in (settings.targets, "val", "test")]
    return names + [f"edges/{name}" for name in (settings.edge_attr, settings.edge_weight)]
