"""The course of the learning rate: a linear start, then constant or half a cosine."""

import math
from collections.abc import Callable

from gsplit.run.config import TrainSettings

__all__ = ["learning_rate"]


def learning_rate(settings: TrainSettings, num_steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at every step: a linear start, then constant or half a cosine."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.lr_scheduler == "constant":
            return 1.0
        done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor
