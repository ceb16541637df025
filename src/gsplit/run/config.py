"""Settings of a training run: from flags, from a TOML file, and as they are kept beside a trained model.

Settings exist only at the edge: classes below take plain arguments. Errors name the key.
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gsplit.errors import InputError, explain

__all__ = ["TrainSettings", "load_settings"]


class TrainSettings(BaseModel):
    """Everything that decides what a run computes, but not on how many ranks: that does not change the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = "sage"
    hidden: int = Field(256, ge=1)
    heads: int = Field(4, ge=1)
    dropout: float = Field(0.5, ge=0.0, lt=1.0)
    norm: Literal["batch_norm", "layer_norm"] | None = None
    jk: Literal["cat", "max", "lstm"] | None = None
    fanout: list[int] = Field([15, 15, 15], min_length=1)
    batch_size: int = Field(1024, ge=1)
    epochs: int = Field(10, ge=1)
    steps: int | None = Field(None, ge=1)
    lr: float = Field(1e-3, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0.0)
    seed: int = Field(0, ge=0, lt=1 << 63)
    targets: str = "train"
    features: str = "x"
    strategy: str = "split"
    replicas: int = Field(1, ge=1)
    evaluate_every: int = Field(1, ge=0)
    deterministic: bool = False

    @property
    def num_layers(self) -> int:
        """Layers of the model: one per hop."""
        return len(self.fanout)


def load_settings(path: Path | None, given: dict[str, Any]) -> TrainSettings:
    """Settings from a TOML file, overridden by what was given on the command line."""
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text())
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
