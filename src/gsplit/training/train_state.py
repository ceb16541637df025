"""The state of a training after a step, as one object: what a checkpoint contains and what resuming restores.

Randomness is keyed by (seed, epoch, step), so there is no generator state: the weights, the optimizer, the scheduler
and the loader's position determine all later steps. The rest is a record of the past: losses, seconds, evaluations, the
best weights so far and the numbers of edges that training and evaluation have computed.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gsplit.errors import InputError, explain
from gsplit.inference.metrics import Metric
from gsplit.loading.batch_loader import BatchLoader

__all__ = ["Best", "Evaluation", "History", "LRScheduler", "TrainState", "history_of"]


class LRScheduler(Protocol):
    """The methods of a learning-rate scheduler of torch that training uses."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """Scores by name of the targets, after ``num_steps`` steps; ``epoch`` is the number of epochs begun."""

    epoch: int
    num_steps: int
    scores: dict[str, float]


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, and a copy of its weights."""

    epoch: int
    num_steps: int
    scores: dict[str, float]
    weights: dict[str, Tensor]


@dataclass(init=False)
class History:
    """The loss and the seconds of every step, and all evaluations.

    Arrays, in which a step takes 16 bytes: a training may have millions of steps. In lists it takes 80.
    """

    losses: "array[float]"
    step_seconds: "array[float]"
    evaluations: list[Evaluation]

    def __init__(
        self,
        losses: Iterable[float] = (),
        step_seconds: Iterable[float] = (),
        evaluations: Iterable[Evaluation] = (),
    ) -> None:
        self.losses = array("d", losses)
        self.step_seconds = array("d", step_seconds)
        self.evaluations = list(evaluations)

    def add(self, loss: float, seconds: float) -> None:
        """Append a step. An array that numpy has a view of cannot grow, and is replaced by a copy."""
        self.losses = _appended(self.losses, loss)
        self.step_seconds = _appended(self.step_seconds, seconds)


def _appended(values: "array[float]", value: float) -> "array[float]":
    try:
        values.append(value)
    except BufferError:
        return values + array("d", [value])
    return values


def _pack_history(history: History) -> dict[str, Any]:
    """The history as new dictionaries, and tensors with the memory of its arrays."""
    return {
        "losses": _as_tensor(history.losses),
        "step_seconds": _as_tensor(history.step_seconds),
        "evaluations": [{**vars(one), "scores": dict(one.scores)} for one in history.evaluations],
    }


def _as_tensor(values: "array[float]") -> Tensor:
    """By way of numpy, which keeps the array from growing meanwhile; with torch.frombuffer its memory could move."""
    return torch.from_numpy(np.asarray(values))


def history_of(state: dict[str, Any]) -> History:
    """The history from the result of ``TrainState.state_dict``."""
    history = state["history"]
    evaluations = [Evaluation(**evaluation) for evaluation in history["evaluations"]]
    steps = (torch.as_tensor(history[name], dtype=torch.float64) for name in ("losses", "step_seconds"))
    losses, seconds = (array("d", values.numpy().tobytes()) for values in steps)
    return History(losses, seconds, evaluations)


class TrainState:
    """The state of a training. As in torch, ``state_dict`` refers to live tensors: save or copy it before training.

    The state is complete and the same on every rank when ``Trainer.train_epoch`` or ``Trainer.evaluate`` has returned,
    also in the middle of an epoch.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, loader: BatchLoader[Any], lr_scheduler: LRScheduler | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.lr_scheduler = lr_scheduler
        self.history = History()
        self.best: Best | None = None
        self.train_edges = 0
        """Sampled edges of all steps, over all layers and ranks."""
        self.evaluation_edges = 0
        """Edges of all exact evaluations, over all layers and ranks."""

    @property
    def num_steps(self) -> int:
        return len(self.history.losses)

    @property
    def epoch(self) -> int:
        """Epochs begun: 1 from the first step of the first epoch to its last."""
        position = self.loader.state_dict()
        return position["epoch"] + (1 if position["step"] > 0 else 0)

    @property
    def is_evaluated(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        evaluations = self.history.evaluations
        return bool(evaluations) and evaluations[-1].num_steps == self.num_steps

    def record_evaluation(self, scores: dict[str, float], keep_best: str | None, metric: Metric) -> None:
        """Add the scores to the history; copy the weights if the score ``keep_best`` is the best so far.

        A score that was NaN is missing in ``scores`` and never the best.
        """
        self.history.evaluations.append(Evaluation(self.epoch, self.num_steps, scores))
        if keep_best in scores and (
            self.best is None or metric.is_better(scores[keep_best], self.best.scores[keep_best])
        ):
            weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            self.best = Best(self.epoch, self.num_steps, scores, weights)

    def state_dict(self) -> dict[str, Any]:
        """The whole state as numbers, strings, lists, dictionaries and tensors."""
        best = self.best
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "history": _pack_history(self.history),
            "best": None if best is None else dict(vars(best)),
            "train_edges": self.train_edges,
            "evaluation_edges": self.evaluation_edges,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the model, optimizer, loader and scheduler must be made as for that state."""
        wanted = self.state_dict().keys()
        if state.keys() != wanted:
            fix = "pass what TrainState.state_dict returned"
            raise InputError(
                explain("state", f"the keys {', '.join(wanted)}", ", ".join(state) or "an empty dict", fix)
            )
        if (state["lr_scheduler"] is None) != (self.lr_scheduler is None):
            expected = "None" if self.lr_scheduler is None else f"the state of a {type(self.lr_scheduler).__name__}"
            got = "None" if state["lr_scheduler"] is None else "the state of a scheduler"
            fix = "make the trainer with the lr_scheduler the state was saved with"
            raise InputError(explain("state: lr_scheduler", f"{expected}, as the trainer has", got, fix))
        self.model.load_state_dict(state["model"])
        _load_optimizer(self.optimizer, state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.loader.load_state_dict(state["loader"])
        best = state["best"]
        self.history = history_of(state)
        self.best = None if best is None else Best(**best)
        self.train_edges = state["train_edges"]
        self.evaluation_edges = state["evaluation_edges"]


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state bit for bit: torch alone would cast tensors to the type of their parameter."""
    optimizer.load_state_dict(state)
    places = [place for group in state["param_groups"] for place in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        for name, saved in state["state"].get(place, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(saved, Tensor) and saved.dtype != loaded.dtype:
                optimizer.state[parameter][name] = saved.to(loaded.device, copy=True)
