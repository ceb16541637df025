"""``--strategy auto`` of a run: the planner's choice for the stock model that will be trained."""

from gsplit.distributed.mesh import Mesh
from gsplit.planner.auto import AUTO, PlannedSteps, resolve_strategy
from gsplit.planner.shapes import PlannedModel
from gsplit.run.config import TrainSettings
from gsplit.run.results import ModelShape, RunView, SilentView
from gsplit.store.reader import Store

__all__ = ["choose_strategy"]


def choose_strategy(
    settings: TrainSettings, shape: ModelShape, store: Store, mesh: Mesh, view: RunView | None = None
) -> TrainSettings:
    """The settings with a strategy in place of "auto"; the view is told which, and why. A collective for "auto"."""
    if settings.strategy != AUTO:
        return settings
    model = PlannedModel(
        settings.model, shape.num_features, settings.hidden, shape.num_classes, settings.num_layers, settings.heads
    )
    steps = PlannedSteps(
        settings.targets,
        settings.fanout,
        settings.batch_size,
        settings.feature_names,
        settings.features_on_disk,
        settings.cache,
        settings.copies,
        model,
        strategies=("split",) if settings.norm == "batch_norm" else None,  # each vertex computed once
    )
    choice = resolve_strategy(AUTO, store, mesh, steps)
    (view or SilentView()).note(f"strategy {choice.strategy}: {choice.reason}")
    return settings.model_copy(update={"strategy": choice.strategy})
