"""Settings of a partition, the one list of them: ``gsplit.partition`` and the options of ``gsplit partition`` use it.

This module imports neither torch nor numba, so that ``gsplit --help`` is fast.
"""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Self, TypedDict

from pydantic import BeforeValidator, Field

__all__ = ["C_E", "C_V", "EPOCHS", "TOLERANCE", "PartitionSettings", "SamplerOptions"]

C_V = 8.0
C_E = 1.0
"""Work of computing a vertex and of one of its edges: layers on one core take 4 to 15 to 1 (docs/decisions/0005)."""

EPOCHS = 10
"""Presampled epochs, as in the paper."""

TOLERANCE = 1.05
"""Largest allowed work of a part, over the mean."""


class SamplerOptions(TypedDict):
    """The settings of the built-in samplers, by the names of ``NeighborLoader``."""

    sampler: str
    weight_attr: str | None
    replace: bool
    layer_dependency: bool


@dataclass(frozen=True)
class PartitionSettings:
    """What to partition for, and how. ``targets``: None for every vertex. ``solver``: None for the default one."""

    parts: Annotated[int, Field(ge=1, description="number of parts")]
    targets: Annotated[
        str | None,
        BeforeValidator(lambda name: None if name == "all" else name),
        Field(description="targets that training uses; all: every vertex"),
    ] = "train"
    pairs: Annotated[str | None, Field(description="stored pairs that training uses, in place of targets")] = None
    neg_sampling: Annotated[
        str | None,
        Field(
            description="negatives of pairs, as in training: binary, triplet, joint, in_batch or none "
            "[default: binary; none for pairs with labels]"
        ),
    ] = None
    num_negatives: Annotated[float, Field(gt=0, description="negatives per pair, or per step if they are joint")] = 1.0
    fanout: Annotated[tuple[int, ...], Field(description="neighbours per hop, as in training")] = (15, 15, 15)
    batch_size: Annotated[int, Field(ge=1, description="GLOBAL batch size of training, divided by its replicas")] = 1024
    objective: Annotated[str, Field(description="gsplit, or a baseline: node, edge or random")] = "gsplit"
    solver: Annotated[
        str | None, Field(description="metis, kaminpar, mtkahypar, cluster or restream [default: by size]")
    ] = None
    threads: Annotated[
        int, Field(ge=1, description="of kaminpar, mtkahypar and cluster; parts repeat bit for bit with one only")
    ] = 1
    tolerance: Annotated[float, Field(description="largest allowed work of a part, over the mean")] = TOLERANCE
    c_v: Annotated[float, Field(description="work per sampled vertex")] = C_V
    c_e: Annotated[float, Field(description="work per sampled edge")] = C_E
    epochs: Annotated[int, Field(ge=1, description="epochs to presample")] = EPOCHS
    seed: Annotated[int, Field(ge=0, description="seed of the presampled mini-batches and of the solver")] = 0
    sampler: Annotated[str, Field(description="how neighbours are drawn, as in training: uniform or labor")] = "uniform"
    weight_attr: Annotated[str | None, Field(description="stored per-edge weights to draw by, as in training")] = None
    replace: Annotated[bool, Field(description="draw neighbours with replacement, as in training")] = False
    layer_dependency: Annotated[bool, Field(description="same random numbers at every layer, as in training")] = False

    def with_solver(self, default: str) -> Self:
        """The settings with a solver: the one that was chosen, that of random parts, or ``default``."""
        return replace(self, solver=self.solver or ("random" if self.objective == "random" else default))

    @property
    def sampler_options(self) -> SamplerOptions:
        return {
            "sampler": self.sampler,
            "weight_attr": self.weight_attr,
            "replace": self.replace,
            "layer_dependency": self.layer_dependency,
        }

    def as_dict(self) -> dict[str, Any]:
        """The settings as a store's manifest keeps them."""
        kept = asdict(self)
        kept["num_neighbors"] = list(kept.pop("fanout"))
        kept["targets"] = self.targets or "every vertex"
        if self.pairs is None:  # as before there were pairs
            del kept["pairs"], kept["neg_sampling"], kept["num_negatives"]
        else:
            kept["targets"] = f"pairs {self.pairs}"
        return kept
