"""Settings of a training run: from flags, from a TOML file, and as they are kept beside a trained model.

``TrainSettings`` is the only list of them: the flags of ``gsplit train`` and ``gsplit verify`` and their help are made
from its fields. Settings exist only at the edge: classes below take plain arguments. Errors name the key.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from gsplit.errors import InputError, explain

__all__ = ["MODELS", "TrainSettings", "applies_to_verify", "load_settings"]

MODELS = ("sage", "sage_max", "gat", "gatv2", "gin", "pna", "transformer", "graphconv", "edgecnn", "gcn", "gine")
"""Names of the stock models; ``run.models`` makes them."""

_ONLY_TRAINING: JsonDict = {"applies_to_verify": False}
"""Marks what ``gsplit verify`` does not take: it compares some steps and trains nothing to the end."""


class TrainSettings(BaseModel):
    """Everything that decides what a run computes, but not on how many ranks: that does not change the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("sage", description=f"{', '.join(MODELS[:-1])} or {MODELS[-1]}")
    hidden: int = Field(256, ge=1, description="width of the hidden layers")
    heads: int = Field(4, ge=1, description="attention heads of gat, gatv2 and transformer")
    dropout: float = Field(0.5, ge=0.0, lt=1.0, description="probability of dropping a hidden value")
    norm: Literal["batch_norm", "layer_norm"] | None = Field(None, description="normalisation between layers")
    jk: Literal["cat", "max", "lstm"] | None = Field(None, description="jumping knowledge over all layers")
    fanout: list[int] = Field(
        [15, 15, 15], min_length=1, description="neighbours per layer, the targets' own first; -1: all"
    )
    batch_size: int = Field(1024, ge=1, description="targets of the GLOBAL mini-batch, over all ranks")
    epochs: int = Field(10, ge=1, description="passes over the targets", json_schema_extra=_ONLY_TRAINING)
    steps: int | None = Field(
        None, ge=1, description="stop after so many steps, whatever --epochs says", json_schema_extra=_ONLY_TRAINING
    )
    lr: float = Field(1e-3, gt=0.0, description="learning rate of Adam")
    weight_decay: float = Field(0.0, ge=0.0, description="weight decay of Adam", json_schema_extra=_ONLY_TRAINING)
    lr_scheduler: Literal["constant", "cosine"] = Field(
        "constant", description="course of the learning rate after the warm-up", json_schema_extra=_ONLY_TRAINING
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear increase to --lr", json_schema_extra=_ONLY_TRAINING)
    max_grad_norm: float | None = Field(
        None, gt=0.0, description="clip the gradient to this norm", json_schema_extra=_ONLY_TRAINING
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the mini-batches, the dropout and the first weights")
    targets: str = Field("train", description="stored targets to train on")
    features: str = Field("x", description="stored features to train from; several, side by side: x,z")
    cache: str = Field(
        "0",
        description="memory of each rank for its hottest rows, such as 2GB; the store must be partitioned",
        json_schema_extra=_ONLY_TRAINING,
    )
    device_cache: str = Field(
        "0",
        description="the same in each device's memory",
        json_schema_extra=_ONLY_TRAINING,
    )
    copies: str = Field(
        "0",
        description="memory of each rank for copies of other ranks' hottest rows, such as 1GB, which then need not "
        "travel; the store must be partitioned",
        json_schema_extra=_ONLY_TRAINING,
    )
    features_on_disk: bool = Field(
        False,
        description="read features from files instead of mapping them: for features that do not fit into memory",
        json_schema_extra=_ONLY_TRAINING,
    )
    edge_attr: str | None = Field(
        None, description="stored per-edge values as edge features, for gat, gatv2, pna, transformer and gine"
    )
    edge_weight: str | None = Field(None, description="stored per-edge values as weights, for gcn and graphconv")
    strategy: str = Field(
        "split",
        description="how ranks share a mini-batch: split, data, data_cached, push_pull, hybrid(k), or auto, the "
        "fastest by the planner",
    )
    replicas: int = Field(1, ge=1, description="groups of ranks; each takes its cut of every mini-batch")
    prefetch: int = Field(
        0,
        ge=0,
        description="batches made ahead in a thread, beside training; 0: none",
        json_schema_extra=_ONLY_TRAINING,
    )
    evaluate_every: int | None = Field(
        None,
        ge=0,
        description="epochs between exact evaluations on val and test; 0: never [default: as often as evaluation costs "
        "no more than training, and after the last epoch]",
        json_schema_extra=_ONLY_TRAINING,
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="stop after so many evaluations without a better one on val",
        json_schema_extra=_ONLY_TRAINING,
    )
    save_every: int | None = Field(
        None,
        ge=0,
        description="steps between checkpoints in --out; 0: none [default: one after every evaluation]",
        json_schema_extra=_ONLY_TRAINING,
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="newest checkpoints that are left, beside the best", json_schema_extra=_ONLY_TRAINING
    )
    deterministic: bool = Field(
        False,
        description="sums of the shuffle in one order on GPUs too; on CPUs they always are",
        json_schema_extra=_ONLY_TRAINING,
    )

    @field_validator("model")
    @classmethod
    def _is_known(cls, model: str) -> str:
        if model not in MODELS:
            raise PydanticCustomError("model", "one of {names}", {"names": ", ".join(MODELS)})
        return model

    @property
    def feature_names(self) -> list[str]:
        """The feature arrays, one name each."""
        return self.features.split(",")

    @property
    def num_layers(self) -> int:
        """Layers of the model: one per hop."""
        return len(self.fanout)


def applies_to_verify(name: str) -> bool:
    """Whether ``gsplit verify`` takes this setting, too."""
    return TrainSettings.model_fields[name].json_schema_extra != _ONLY_TRAINING


def load_settings(
    path: Path | None, given: Mapping[str, object], resumed: TrainSettings | None = None
) -> TrainSettings:
    """Settings of a run that is resumed, overridden by a TOML file and by what was given on the command line."""
    table: dict[str, Any] = {} if resumed is None else resumed.model_dump()
    if path is not None:
        try:
            table |= tomllib.loads(path.read_text())
        except OSError as error:
            raise InputError(explain(path, "a readable file", error.strerror, "check the path")) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(explain(path, "TOML", error, "see docs/training.md for an example")) from error
    try:
        return TrainSettings(**{**table, **given})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        where = f"{path}: {key}" if path is not None and key not in given else key
        unknown = first["type"] == "extra_forbidden"
        expected = "a setting that exists" if unknown else first["msg"].removeprefix("Input should be ")
        fix = f"use one of {', '.join(TrainSettings.model_fields)}" if unknown else "change this setting"
        raise InputError(explain(where, expected, first.get("input"), fix)) from error
