"""Checks that a checkpoint contains the state of a training, and of this training, before anything is changed.

A file with a right checksum may come from anywhere. ``check_form`` needs only the state; ``check_fit`` compares it with
the model, the optimizer and the loader that are to continue from it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, model_validator
from torch import Tensor

from gsplit.files.untrusted import Expected
from gsplit.training.train_state import TrainState

__all__ = ["check_fit", "check_form"]

_EXPECTED = Expected("the state of this training", "use another checkpoint")

_Count = Annotated[int, Field(ge=0)]
_Tensors = dict[str, InstanceOf[Tensor]]
_Steps = list[float] | InstanceOf[Tensor]  # lists: of few steps, by gsplit 0.1.0


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Position(_Strict):
    epoch: _Count
    step: _Count


class _Evaluation(_Strict):
    epoch: _Count
    num_steps: _Count
    scores: dict[str, float]


class _Best(_Evaluation):
    weights: _Tensors


class _History(_Strict):
    losses: _Steps
    step_seconds: _Steps
    evaluations: list[_Evaluation]

    @model_validator(mode="after")
    def _check_steps(self) -> "_History":
        for name, values in (("losses", self.losses), ("step_seconds", self.step_seconds)):
            if isinstance(values, Tensor) and (values.dtype != torch.float64 or values.ndim != 1):
                raise ValueError(f"{name} of {values.dtype}, {list(values.shape)}")
        if len(self.losses) != len(self.step_seconds):
            raise ValueError(f"{len(self.losses)} losses and {len(self.step_seconds)} step_seconds")
        return self


class _ParameterGroup(_Strict):
    model_config = ConfigDict(extra="allow")

    params: list[int]


class _Optimizer(_Strict):
    state: dict[Any, dict[Any, Any]]
    param_groups: list[_ParameterGroup]


class _State(_Strict):
    model: _Tensors
    optimizer: _Optimizer
    lr_scheduler: dict[Any, Any] | None
    loader: _Position
    history: _History
    best: _Best | None
    train_edges: _Count
    evaluation_edges: _Count


def check_form(state: Mapping[str, Any], path: Path) -> None:
    """Refuse what is not the state of any training: missing or unknown keys, wrong types."""
    try:
        _State.model_validate(dict(state))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part)[:80] for part in first["loc"])
        raise _EXPECTED.refuse(path, f"{key}: {first['msg']}") from None


def check_fit(state: Mapping[str, Any], training: TrainState, path: Path) -> None:
    """Refuse the state of another model, optimizer or loader; ``state`` has the right form."""
    fault = _find_misfit(state, training)
    if fault is not None:
        raise _EXPECTED.refuse(path, fault)


def _find_misfit(state: Mapping[str, Any], training: TrainState) -> str | None:
    trained = [name for name, _ in training.model.named_parameters(remove_duplicate=False)]
    for kind, weights in (("model", state["model"]), ("best", (state["best"] or {}).get("weights"))):
        if weights is None:
            continue
        wanted = {name: value.shape for name, value in training.model.state_dict().items()}
        if wanted != {name: value.shape for name, value in weights.items()}:
            return f"other weights in {kind}"
        for name in trained:
            if name in weights and weights[name].isnan().any():
                return f"NaN in {name} of {kind}: the training had diverged"
    if state["loader"]["step"] > len(training.loader):
        return f"step {state['loader']['step']} of an epoch of {len(training.loader)}"
    saved = state["optimizer"]
    groups = training.optimizer.param_groups
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        return "other groups of parameters in optimizer"
    if not type(training.optimizer).__module__.startswith("torch.optim"):
        return None  # other optimizers may have tensors of any shape
    places = [place for group in saved["param_groups"] for place in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        for name, value in saved["state"].get(place, {}).items():
            if isinstance(value, Tensor) and not _broadcasts(value, parameter):
                return f"optimizer {name} of shape {list(value.shape)} for a parameter of {list(parameter.shape)}"
    return None


def _broadcasts(value: Tensor, parameter: Tensor) -> bool:
    """A scalar, or the parameter's shape; Adafactor has rows and columns of it, with extents of 1."""
    if value.ndim == 0:
        return True
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.ndim == parameter.ndim and all(ours in (1, theirs) for ours, theirs in pairs)
