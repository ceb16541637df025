"""Reading the files of a run without trust: a run folder may come from a stranger.

Settings are a small document whose every value is checked. Weights are read only where a model of these settings has a
tensor of that name, shape and type: so what a file can make us allocate is the model, and how large that may be is
``models.make_model``'s business.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.run.config import TrainSettings, check_settings
from gsplit.run.results import ModelShape
from gsplit.store.importers.npz_file import NpzMember, npz_members
from gsplit.store.manifest import ClassNames, ColumnNames
from gsplit.untrusted import Expected, read_document

__all__ = ["read_settings", "read_weights"]

_FIX = "train again with gsplit train --out"
_SETTINGS = Expected("the settings of a run", _FIX)

Size = Annotated[int, Field(ge=0, le=1 << 40)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)

    num_features: Size
    num_classes: Annotated[Size, Field(ge=1)]
    num_edge_features: Size | None
    class_names: ClassNames = []
    feature_columns: ColumnNames = []


class _Document(BaseModel):
    settings: dict[str, Any]
    shape: _Shape


def read_settings(path: Path) -> tuple[TrainSettings, ModelShape]:
    """The settings of a run and the shape of its graph, from ``settings.json``."""
    try:
        document = _Document.model_validate(read_document(path, _SETTINGS, follow=False))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"])
        raise _SETTINGS.refuse(path, f"{key}: {first['msg']}") from None
    found = document.shape
    names = tuple(found.class_names), tuple(found.feature_columns)
    shape = ModelShape(found.num_features, found.num_classes, found.num_edge_features, *names)
    return check_settings(document.settings, lambda key: f"{path}: settings.{key}"), shape


def read_weights(path: Path, model: Module) -> None:
    """Put the weights of ``weights.npz`` into the model of their run."""
    members, wanted = npz_members(path, follow=False), model.state_dict()
    for name in sorted(wanted.keys() ^ members.keys()):
        got = f"{name[:80]!r}, which it has not" if name in members else f"none for {name}"
        raise InputError(explain(path, "weights of this model", got, _FIX))
    for name, tensor in wanted.items():
        _check_member(members[name], tensor)
    model.load_state_dict({name: torch.from_numpy(member.read()) for name, member in members.items()})


def _check_member(member: NpzMember, tensor: torch.Tensor) -> None:
    expected = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, as in this model"
    found = f"{member.dtype.name} {list(member.shape)}"
    if (member.dtype.name, member.shape) != (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)):
        raise InputError(explain(member.where, expected, found, _FIX))
