"""What ``gsplit train`` says at once, from the store's manifest and the settings: importing torch takes seconds."""

from rich.console import Console

from gsplit.run.config import TrainSettings
from gsplit.store.reader import Store

__all__ = ["announce_training"]


def announce_training(store: Store, settings: TrainSettings, num_ranks: int, console: Console) -> None:
    """Say what is being started."""
    num_targets = store.stored_targets(settings.targets)[2]
    per_epoch = settings.steps_per_epoch(num_targets)
    steps = settings.steps or settings.epochs * per_epoch
    size = f"{store.num_vertices:,} vertices, {store.num_edges:,} edges"
    layers = f"{settings.num_layers} layers of width {settings.hidden}"
    shared = f", {settings.batch_size / num_ranks:.1f} per rank on average" if num_ranks > 1 else ""
    shared += f", {settings.accumulate} of them per step" if settings.accumulate > 1 else ""
    ranks = f"{num_ranks} rank(s), strategy {settings.strategy}"
    for line in (
        f"train {settings.model}, {layers}, on {store.path}: {size}",
        f"{ranks}; global mini-batch of {settings.batch_size} targets{shared}",
        f"{steps} steps, {per_epoch} per epoch; starting ...",
    ):
        console.print(line, highlight=False, markup=False)
