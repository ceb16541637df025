"""A case of the exactness harness: one value for every option, and what combinations of them mean.

A new option is a new field, or a new value of one. Any two values can be combined, unless ``is_meaningful`` says that
one has nothing to act on, or a row of ``REFUSED`` says with which message the combination raises today.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

__all__ = ["AXES", "PAIRS", "REFUSED", "Case", "Refused", "is_meaningful", "refusal"]

PAIRS = ("binary", "triplet", "joint", "in_batch", "labels")
"""Tasks of pairs, by their negatives; "labels" are pairs with labels and without negatives."""

AXES: dict[str, tuple[str, ...]] = {
    "task": ("vertices", *PAIRS),
    "types": ("one", "three"),
    "model": ("sage", "gat", "gcn", "transformer", "batch_norm", "decoder", "rgcn", "hgt", "to_hetero"),
    "values": ("none", "stored"),
    "sampler": ("uniform", "layer_dependency", "replace", "labor", "weighted", "weighted labor", "user's"),
    "times": ("none", "uniform", "last"),
    "excluded": ("reverse", "themselves", "none"),
    "strategy": ("split", "data", "data(owner)", "data_cached", "data_cached(strided)", "hybrid(1)", "hybrid(2)"),
    "ownership": ("random", "nearly all on rank 0", "no targets on rank 1"),
    "tier": ("memory", "mapped", "files", "cache", "copies", "int8", "bfloat16", "shard", "user's"),
    "prefetch": ("0", "2", "4 in 2 threads"),
    "rows": ("stored", "owned"),
    "resume": ("no", "yes"),
    "dropout": ("on", "off"),
    "device": ("host", "sim", "sim samples"),
    "mesh": ("1 x 2", "1 x 3", "2 x 2"),
}
"""Values of every option that the covering array combines; the first is the default."""


@dataclass(frozen=True)
class Case:
    """One training run.

    ``values``: whether the model takes stored values of edges. ``excluded``: the edges of pairs that leave the
    mini-batch. ``ownership``: who owns what. ``tier``: where input rows come from. ``prefetch``: batches made ahead,
    and threads. ``rows``: stored features, or an ``OwnedEmbedding``. ``resume``: in the middle everything is made anew,
    from states. ``device``: where the model is, and what samples. ``mesh``: replicas x the ranks of each. ``jk``: of
    PyG's models.
    """

    task: str = "vertices"
    types: str = "one"
    model: str = "sage"
    values: str = "none"
    sampler: str = "uniform"
    times: str = "none"
    excluded: str = "reverse"
    strategy: str = "split"
    ownership: str = "random"
    tier: str = "memory"
    prefetch: str = "0"
    rows: str = "stored"
    resume: str = "no"
    dropout: str = "on"
    device: str = "host"
    mesh: str = "1 x 2"
    jk: str = "none"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.chosen.items()) or "the defaults"

    @property
    def chosen(self) -> dict[str, str]:
        """The options that do not have their default."""
        return {name: value for name, value in vars(self).items() if value != getattr(DEFAULT, name)}

    @property
    def reference(self) -> "Case":
        """The case that one process computes: what may not change a result has its default."""
        free = ("strategy", "ownership", "tier", "prefetch", "resume", "device", "mesh")
        return replace(self, **{name: getattr(DEFAULT, name) for name in free})

    @property
    def num_replicas(self) -> int:
        return int(self.mesh.split(" x ")[0])

    @property
    def num_splits(self) -> int:
        """The ranks of a replica."""
        return int(self.mesh.split(" x ")[1])

    @property
    def is_of_pairs(self) -> bool:
        return self.task in PAIRS


DEFAULT = Case()
_VALUES_OF_ONE = ("gat", "gatv2", "pna", "transformer", "gine", "gcn", "graphconv")
_ONLY_ONE = ("gcn", "transformer", "decoder", "sage_max", "gatv2", "gin", "gine", "pna", "graphconv", "edgecnn")
_ONLY_THREE = ("rgcn", "hgt", "to_hetero", "rgat")


def is_meaningful(case: Case) -> bool:
    """Whether every option of a case has something to act on."""
    wrong = (
        case.excluded != "reverse" and not case.is_of_pairs,
        case.tier == "shard" and (case.types != "one" or case.ownership != "random"),  # a shard has the parts of a rank
        case.model in _ONLY_ONE and case.types != "one",
        case.model in _ONLY_THREE and case.types == "one",
        case.model == "decoder" and not case.is_of_pairs,
        case.types not in AXES["types"]
        and (case.is_of_pairs or case.model not in ("sage", "gat") or case.tier != "memory"),
        case.is_of_pairs and case.types == "three" and case.model not in ("sage", "gat"),  # one row per type
        case.values == "stored" and case.model not in (_VALUES_OF_ONE if case.types == "one" else ("gat",)),
        case.model == "gine" and case.values == "none",
        case.rows == "owned" and (case.tier != "memory" or case.model in ("rgcn", "rgat", "to_hetero", "decoder")),
        case.tier != "memory" and case.ownership == "no targets on rank 1",  # parts of a store are by work
        case.model == "to_hetero" and case.device != "host",  # the simulated device cannot find sizes of -1
    )
    return not any(wrong)


@dataclass(frozen=True)
class Refused:
    """A combination that raises today. ``when``: values of options, of which one of each has to be there."""

    when: Mapping[str, Collection[str]]
    text: str

    def fits(self, case: Case) -> bool:
        return all(getattr(case, name) in values for name, values in self.when.items())


_TYPES: dict[str, Collection[str]] = {"types": ("three",)}
_TIMES: dict[str, Collection[str]] = {"times": ("uniform", "last")}
_DRAWS = ("replace", "labor", "weighted", "weighted labor")
_NOT_SPLIT = ("data", "data(owner)", "data_cached", "data_cached(strided)", "hybrid(1)", "hybrid(2)")
_THREADS: dict[str, Collection[str]] = {"prefetch": ("4 in 2 threads",)}
REFUSED: tuple[Refused, ...] = (
    Refused(
        _TYPES | {"sampler": ("layer_dependency", *_DRAWS, "user's")}, "sampler: expected an option that is built for"
    ),
    Refused(_TYPES | {"tier": ("copies",)}, "copies: expected an option that is built for heterogeneous graphs"),
    Refused(_TYPES | {"tier": ("user's",)}, "features: expected names of stored features by vertex type"),
    Refused(_TYPES | {"device": ("sim",)}, "mesh: expected an option that is built for heterogeneous graphs"),
    Refused(
        _TYPES | {"device": ("sim samples",), "prefetch": ("2", "4 in 2 threads")},
        "prefetch: expected a graph without vertex types",
    ),
    Refused(_TYPES | _TIMES, "time_attr: expected options that temporal sampling is built for"),
    Refused(_TIMES | {"tier": ("copies",)}, "time_attr: expected options that temporal sampling is built for"),
    Refused(_TIMES | {"sampler": _DRAWS}, "time_attr: expected the uniform sampler without weights or replacement"),
    Refused(_TIMES | {"sampler": ("user's",)}, "sampler: expected a built-in sampler for these options"),
    Refused(_TIMES | {"model": ("gcn",)}, "GCN normalisation: expected a mini-batch without times"),
    Refused(_TIMES | {"task": ("joint", "in_batch")}, "neg_sampling: expected negatives of one pair each"),
    Refused(
        {"model": ("batch_norm",), "strategy": _NOT_SPLIT}, "batch norm: expected each vertex computed on one rank"
    ),
    Refused({"model": ("batch_norm",), "mesh": ("2 x 2",)}, "batch norm: expected one replica"),
    Refused(
        {"tier": ("copies",), "strategy": [name for name in _NOT_SPLIT if not name.startswith("hybrid")]},
        "copies: expected a strategy that shuffles input rows",
    ),
    Refused({"tier": ("shard",), "strategy": _NOT_SPLIT}, "Fix: open the whole store"),
    Refused(
        {"tier": ("shard",), "sampler": ("labor", "weighted labor")},
        "sampler='labor': expected a store with the original ids of all vertices",
    ),
    Refused({"rows": ("owned",), "strategy": ("data", "data(owner)")}, "OwnedEmbedding: expected split, hybrid(k) or"),
    Refused(
        _THREADS | {"device": ("sim samples",)}, "sampling_threads: expected mini-batches that are sampled on the CPU"
    ),
    Refused(_THREADS | {"sampler": ("user's",)}, "sampling_threads: expected a built-in sampler"),
    Refused(_THREADS | {"tier": ("user's",)}, "sampling_threads: expected stored features"),
)
"""The first that fits a case gives its message."""


def refusal(case: Case) -> str | None:
    """The text that the error of a case has; None if its result is that of one process."""
    return next((row.text for row in REFUSED if row.fits(case)), None)
