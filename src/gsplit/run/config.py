"""Settings of a training run: from flags, from a TOML file, and from the folder of a trained model.

``TrainSettings`` is the only list of settings: the flags of ``gsplit train`` and ``gsplit verify`` and their help are
generated from its fields. Settings exist only in this layer: classes below take plain arguments. Errors name the key.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from gsplit.errors import InputError, explain
from gsplit.files.untrusted import Expected, read_document
from gsplit.partitioning.settings import SamplerOptions

if TYPE_CHECKING:
    from gsplit.store.reader import Store

__all__ = [
    "LINK_SETTINGS",
    "MAX_LAYERS",
    "MODELS",
    "TYPED_MODELS",
    "TrainSettings",
    "applies_to_verify",
    "check_heads",
    "check_settings",
    "load_settings",
    "refuse_settings",
]

MODELS = ("sage", "sage_max", "gat", "gatv2", "gin", "pna", "transformer", "graphconv", "edgecnn", "gcn", "gine")
"""Names of the stock models; ``run.models`` makes them."""

TYPED_MODELS = ("sage", "sage_max", "gat", "gatv2", "transformer", "graphconv")
"""Those of them that are made for heterogeneous graphs, with a layer for every edge type."""

MAX_LAYERS = 64
"""Largest number of layers. A deeper model takes minutes to build."""
_MOST = 1 << 40  # steps and targets: products stay within 64 bits
_LARGEST_RATE = 1e6  # its square is finite in float32

LINK_SETTINGS = frozenset({"task", "pairs", "neg_sampling", "num_negatives", "embedding", "ranked_negatives"})
"""Settings that only link prediction has."""

_ONLY_TRAINING: JsonDict = {"applies_to_verify": False}
"""Marks settings that ``gsplit verify`` does not have."""
_SIZE: JsonDict = _ONLY_TRAINING | {"metavar": "SIZE"}
_SETTINGS_FILE = Expected("settings in TOML", "check the path; docs/train-command.md has an example")


class TrainSettings(BaseModel):
    """All settings of a run. The number of ranks is not one of them, because it does not change the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=1000)

    task: Literal["node", "link"] = Field(
        "node", description="what to learn: labels of vertices, or pairs of vertices (link prediction)"
    )
    model: str = Field("sage", description=f"{', '.join(MODELS[:-1])} or {MODELS[-1]}")
    hidden: int = Field(256, ge=1, le=1 << 20, description="width of the hidden layers")
    heads: int = Field(4, ge=1, le=1 << 12, description="attention heads of gat, gatv2 and transformer")
    dropout: float = Field(0.5, ge=0.0, lt=1.0, description="probability of dropping a hidden value")
    norm: Literal["batch_norm", "layer_norm"] | None = Field(None, description="normalisation between layers")
    jk: Literal["cat", "max", "lstm"] | None = Field(None, description="jumping knowledge over all layers")
    fanout: list[int] = Field(
        [15, 15, 15],
        min_length=1,
        max_length=MAX_LAYERS,
        description="neighbours per layer, the targets' own first; -1: all",
    )
    sampler: str = Field("uniform", description="how neighbours are drawn: uniform, or labor for fewer distinct ones")
    weight_attr: str | None = Field(None, description="stored per-edge weights to draw neighbours by")
    replace: bool = Field(False, description="draw neighbours with replacement")
    layer_dependency: bool = Field(False, description="draw by the same random numbers at every layer")
    batch_size: int = Field(1024, ge=1, le=_MOST, description="targets of the GLOBAL mini-batch, over all ranks")
    accumulate: int = Field(
        1,
        ge=1,
        le=_MOST,
        description="mini-batches per step of the optimizer; steps are counted in these",
        json_schema_extra=_ONLY_TRAINING,
    )
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32",
        description="bf16: forward pass and loss under autocast, weights in float32; tf32: matrix products of float32 "
        "on GPUs with fewer digits",
        json_schema_extra=_ONLY_TRAINING,
    )
    epochs: int = Field(10, ge=1, le=_MOST, description="passes over the targets", json_schema_extra=_ONLY_TRAINING)
    steps: int | None = Field(
        None,
        ge=1,
        le=_MOST,
        description="stop after this number of steps, regardless of --epochs",
        json_schema_extra=_ONLY_TRAINING,
    )
    loss: Literal["cross_entropy", "bce", "mse", "l1", "huber", "bpr"] | None = Field(
        None,
        description="loss function, by PyTorch's names; cross_entropy or bpr for pairs [default: what fits the labels]",
    )
    class_weights: str | None = Field(
        None,
        description="weight of every class in the mean loss: balanced (by the classes of the targets), or one number "
        "per class, as in 1,2.5,1",
    )
    metric: str | None = Field(
        None,
        description="metrics to evaluate: accuracy, f1_micro, f1_macro, roc_auc, rmse, mae; mrr, hits@K for pairs; of "
        "several, as in rmse,mae, the first decides what is best [default: what fits the loss]",
        json_schema_extra=_ONLY_TRAINING,
    )
    lr: float = Field(1e-3, gt=0.0, le=_LARGEST_RATE, description="learning rate of Adam")
    weight_decay: float = Field(
        0.0, ge=0.0, le=_LARGEST_RATE, description="weight decay of Adam", json_schema_extra=_ONLY_TRAINING
    )
    lr_scheduler: Literal["constant", "cosine"] = Field(
        "constant", description="learning rate schedule after the warm-up", json_schema_extra=_ONLY_TRAINING
    )
    warmup_steps: int = Field(
        0, ge=0, le=_MOST, description="steps of linear increase to --lr", json_schema_extra=_ONLY_TRAINING
    )
    max_grad_norm: float | None = Field(
        None, gt=0.0, le=1e30, description="clip the gradient to this norm", json_schema_extra=_ONLY_TRAINING
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the mini-batches, the dropout and the initial weights")
    targets: str = Field(
        "train", description="stored targets to train on; in a heterogeneous graph with their type: paper/train"
    )
    pairs: str = Field("train", description="stored pairs to train on, for --task link")
    neg_sampling: Literal["none", "binary", "triplet", "joint", "in_batch"] | None = Field(
        None, description="negatives for --task link [default: binary; triplet for bpr; none for pairs with labels]"
    )
    num_negatives: float = Field(
        1.0, gt=0.0, le=1 << 20, description="negatives per pair, or per step if they are joint, for --task link"
    )
    embedding: int = Field(64, ge=1, le=1 << 20, description="width of the embeddings, for --task link")
    ranked_negatives: int = Field(
        1000,
        ge=1,
        le=_MOST,
        description="negatives to rank a pair among in evaluations for --task link, if none are stored",
        json_schema_extra=_ONLY_TRAINING,
    )
    features: str = Field("x", description="stored features to train from; several, side by side: x,z")
    cache: str = Field(
        "0",
        description="memory of each rank for its hottest rows, such as 2GB; the store must be partitioned",
        json_schema_extra=_SIZE,
    )
    device_cache: str = Field(
        "auto",
        description="the same in the memory of each device; auto: all but 8 GB of what is free",
        json_schema_extra=_SIZE,
    )
    copies: str = Field(
        "0",
        description="memory of each rank for copies of other ranks' hottest rows, such as 1GB, which then need not "
        "travel; the store must be partitioned",
        json_schema_extra=_SIZE,
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
        description="how ranks share a mini-batch: split, data, data_cached, hybrid(k), or auto, the "
        "fastest by the planner",
    )
    trial_steps: int = Field(
        5,
        ge=0,
        le=1 << 10,
        description="steps by which --strategy auto and gsplit plan time the planner's best three on CPUs; 0: none",
        json_schema_extra=_ONLY_TRAINING,
    )
    replicas: int = Field(1, ge=1, le=1 << 20, description="groups of ranks; each trains a share of every mini-batch")
    prefetch: int | None = Field(
        None,
        ge=0,
        le=1 << 10,
        description="batches to prepare ahead in threads during training; 0: none [default: 2 for devices, else 0]",
        json_schema_extra=_ONLY_TRAINING,
    )
    sampling_threads: int = Field(
        1,
        ge=1,
        le=1 << 10,
        description="threads of each rank that prepare batches ahead, at most --prefetch",
        json_schema_extra=_ONLY_TRAINING,
    )
    evaluate_every: int | None = Field(
        None,
        ge=0,
        le=_MOST,
        description="epochs between exact evaluations on val and test; 0: never [default: as often as evaluation costs "
        "no more than training, and after the last epoch]",
        json_schema_extra=_ONLY_TRAINING,
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="stop after this number of evaluations without a better one on val",
        json_schema_extra=_ONLY_TRAINING,
    )
    save_every: int | None = Field(
        None,
        ge=0,
        description="steps between checkpoints in --out; 0: none [default: one after every evaluation]",
        json_schema_extra=_ONLY_TRAINING,
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="newest checkpoints to keep, beside the best", json_schema_extra=_ONLY_TRAINING
    )
    verify_every: int | None = Field(
        None,
        ge=0,
        le=_MOST,
        description="compare loss and gradients with one process also before every so many mini-batches; 0: not at all "
        "[default: at the first step, after the first evaluation and when other parameters are trained]",
        json_schema_extra=_ONLY_TRAINING,
    )
    log_dir: str | None = Field(
        None,
        description="folder for scalars.csv: loss, learning rate, scores and seconds by step",
        json_schema_extra=_ONLY_TRAINING,
    )
    log_every: int = Field(10, ge=1, description="steps between rows in --log-dir", json_schema_extra=_ONLY_TRAINING)
    tensorboard: bool = Field(
        False,
        description="event files for TensorBoard in --log-dir, too (pip install 'gsplit[log]')",
        json_schema_extra=_ONLY_TRAINING,
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
        """The names of the feature arrays."""
        return self.features.split(",")

    @property
    def sampler_options(self) -> SamplerOptions:
        return {
            "sampler": self.sampler,
            "weight_attr": self.weight_attr,
            "replace": self.replace,
            "layer_dependency": self.layer_dependency,
        }

    @property
    def of_pairs(self) -> bool:
        """Whether the run is of link prediction."""
        return self.task == "link"

    @property
    def vertex_type(self) -> str | None:
        """The type of the targets of a heterogeneous graph, which their name begins with."""
        return self.targets.rpartition("/")[0] or None

    def list_named(self, name: str) -> str:
        """The targets of this name of the same vertex type, or the pairs: "val" becomes "paper/val" with types."""
        return name if self.of_pairs or self.vertex_type is None else f"{self.vertex_type}/{name}"

    def count_targets(self, store: "Store") -> int:
        """The targets of an epoch: vertices or pairs."""
        return store.pairs(self.pairs).shape[0] if self.of_pairs else store.stored_targets(self.targets)[2]

    def steps_per_epoch(self, num_targets: int) -> int:
        """Steps of the optimizer in an epoch of so many targets."""
        num_batches = -(-num_targets // self.batch_size)
        return -(-num_batches // self.accumulate)

    def num_steps(self, store: "Store") -> int:
        """Steps of a whole run, unless it stops early."""
        return self.steps or self.epochs * self.steps_per_epoch(self.count_targets(store))

    @property
    def num_layers(self) -> int:
        """Layers of the model: one per hop."""
        return len(self.fanout)


def check_heads(model: str, hidden: int, heads: int) -> None:
    """Refuse attention heads that cannot share the hidden columns."""
    if model in ("gat", "gatv2", "transformer") and hidden % heads:
        raise InputError(explain("hidden", f"a multiple of {heads} heads", hidden, "change one of them"))


def applies_to_verify(name: str) -> bool:
    """Whether ``gsplit verify`` has this setting, too."""
    return not TrainSettings.model_fields[name].json_schema_extra


def load_settings(
    path: Path | None, given: Mapping[str, object], resumed: TrainSettings | None = None
) -> TrainSettings:
    """Settings of a resumed run, overridden by a TOML file and by options of the command line."""
    before: dict[str, object] = {} if resumed is None else resumed.model_dump()
    table = {} if path is None else read_document(path, _SETTINGS_FILE, toml=True)
    if "epochs" in {**table, **given}:  # they replace the number of steps of the run
        before["steps"] = None
    values = {**before, **table, **given}
    return check_settings(values, lambda key: f"{path}: {key}" if key in table and key not in given else key)


def check_settings(values: Mapping[str, object], where: Callable[[str], str]) -> TrainSettings:
    """Settings from any values; ``where`` names the place of a key in messages."""
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        raise refuse_settings(error, TrainSettings.model_fields, where) from error


def refuse_settings(error: ValidationError, known: Iterable[str], where: Callable[[str], str]) -> InputError:
    """The error message for the first value that a settings model does not accept."""
    first = error.errors()[0]
    key = ".".join(str(part)[:80] for part in first["loc"])
    unknown = first["type"] == "extra_forbidden"
    expected = "a setting that exists" if unknown else first["msg"].removeprefix("Input should be ")
    fix = f"use one of {', '.join(known)}" if unknown else "change this setting"
    return Expected(expected, fix).refuse(where(key), first.get("input"))
