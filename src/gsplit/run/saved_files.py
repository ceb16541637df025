"""Reading the files of a run without trust: a run folder may come from a stranger.

Settings are a small document whose every value is checked. Weights must have the names, shapes and types of a
model of these settings, and a file that is larger than such weights is not read: so what a file can make us allocate is
bounded by the model, whose size ``models.make_model`` limits.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.files.untrusted import Expected, read_bounded, read_document
from gsplit.run.config import TrainSettings, check_settings
from gsplit.run.results import ModelShape
from gsplit.store.manifest import ClassNames, ColumnNames
from gsplit.training.checkpoints.tensor_file import MAX_HEADER_BYTES, parse_tensor_file

__all__ = ["read_settings", "read_weights"]

_FIX = "train again with gsplit train --out"
_SETTINGS = Expected("the settings of a run", _FIX)
_WEIGHTS = Expected("weights of this model", _FIX)

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
    """Load ``weights.safetensors`` into the model of its run."""
    wanted = model.state_dict()
    limit = sum(tensor.nbytes for tensor in wanted.values()) + MAX_HEADER_BYTES + 8
    weights = parse_tensor_file(read_bounded(path, limit, _WEIGHTS, follow=False), path).tensors
    for name in sorted(wanted.keys() ^ weights.keys()):
        got = f"{name[:80]!r}, which the model does not have" if name in weights else f"no {name}"
        raise _WEIGHTS.refuse(path, got)
    for name, tensor in wanted.items():
        expected = f"{_describe(tensor)}, as in this model"
        if _describe(weights[name]) != _describe(tensor):
            raise InputError(explain(f"{path}: {name}", expected, _describe(weights[name]), _FIX))
    model.load_state_dict(weights)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
