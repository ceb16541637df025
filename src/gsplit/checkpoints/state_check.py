"""Whether what a checkpoint holds is the state of a training, and of this one, before anything is touched.

A file with a right checksum may have been made by anybody. ``check_form`` needs nothing but the state; ``check_fit``
compares it with the model, the optimizer and the loader that are to go on from it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gsplit.train_state import TrainState
from gsplit.untrusted import Expected

__all__ = ["check_fit", "check_form"]

_EXPECTED = Expected("the state of this training", "use another checkpoint")
_KEYS = {"model", "optimizer", "lr_scheduler", "loader", "history", "best", "train_edges", "evaluation_edges"}
_EVALUATION = {"epoch", "num_steps", "scores"}


def check_form(state: Mapping[str, Any], path: Path) -> None:
    """Refuse what is not the state of any training: its keys, and the types of what people wrote down."""
    fault = _find_fault(state)
    if fault is not None:
        raise _EXPECTED.refuse(path, fault)


def check_fit(state: Mapping[str, Any], training: TrainState, path: Path) -> None:
    """Refuse the state of another model, optimizer or loader; ``state`` has the right form."""
    fault = _find_misfit(state, training)
    if fault is not None:
        raise _EXPECTED.refuse(path, fault)


def _find_fault(state: Mapping[str, Any]) -> str | None:
    if state.keys() != _KEYS:
        return f"the keys {', '.join(map(str, state)) or 'none'}"
    for name, keys in (("loader", {"epoch", "step"}), ("history", {"losses", "step_seconds", "evaluations"})):
        if not _has_keys(state[name], keys):
            return f"{name} without {', '.join(sorted(keys))}"
    if not all(_is_count(count) for count in (*state["loader"].values(), *_edges(state))):
        return "a position or numbers of edges that are no counts"
    losses, seconds = state["history"]["losses"], state["history"]["step_seconds"]
    if not _are_floats(losses) or not _are_floats(seconds) or len(losses) != len(seconds):
        return "losses and step_seconds that are not as many numbers"
    evaluations, best = state["history"]["evaluations"], state["best"]
    if not isinstance(evaluations, list) or not all(_is_evaluation(one, _EVALUATION) for one in evaluations):
        return "evaluations that are none"
    if best is not None and not (_is_evaluation(best, _EVALUATION | {"weights"}) and _are_tensors(best["weights"])):
        return "a best evaluation that is none"
    if not _are_tensors(state["model"]) or not isinstance(state["lr_scheduler"], dict | None):
        return "a model that is not in tensors, or a scheduler that is no dictionary"
    return None if _is_optimizer(state["optimizer"]) else "an optimizer that is none"


def _find_misfit(state: Mapping[str, Any], training: TrainState) -> str | None:
    for kind, weights in (("model", state["model"]), ("best", (state["best"] or {}).get("weights"))):
        wanted = {name: value.shape for name, value in training.model.state_dict().items()}
        if weights is not None and wanted != {name: value.shape for name, value in weights.items()}:
            return f"other weights in {kind}"
    if state["loader"]["step"] > len(training.loader):
        return f"step {state['loader']['step']} of an epoch of {len(training.loader)}"
    saved, groups = state["optimizer"], training.optimizer.param_groups
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        return "other groups of parameters in optimizer"
    if not type(training.optimizer).__module__.startswith("torch.optim"):
        return None  # others may keep tensors of any shape
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


def _edges(state: Mapping[str, Any]) -> tuple[object, object]:
    return state["train_edges"], state["evaluation_edges"]


def _has_keys(value: object, keys: set[str]) -> bool:
    return isinstance(value, dict) and value.keys() == keys


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_floats(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is float for value in values)


def _are_tensors(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values())


def _is_evaluation(value: Any, keys: set[str]) -> bool:
    if not _has_keys(value, keys) or not isinstance(value["scores"], dict):
        return False
    counts, scores = (value["epoch"], value["num_steps"]), value["scores"].values()
    return all(map(_is_count, counts)) and all(isinstance(score, float | int) for score in scores)


def _is_optimizer(value: Any) -> bool:
    if not _has_keys(value, {"state", "param_groups"}) or not isinstance(value["param_groups"], list):
        return False
    groups, states = value["param_groups"], value["state"]
    places = all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    known = places and all(type(place) is int for group in groups for place in group["params"])
    return known and isinstance(states, dict) and all(isinstance(one, dict) for one in states.values())
