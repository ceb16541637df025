"""How a store was partitioned, as its provenance says: free-form values, read as what they must be."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gsplit.errors import StoreError, explain
from gsplit.store.reader import Store

__all__ = ["RecordedPartition", "recorded_partition"]

Cost = Annotated[float, Field(ge=0.0, le=1e30)]


class RecordedPartition(BaseModel):
    """The mini-batches that presampling drew, and what a vertex and an edge were taken to cost."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    num_neighbors: Annotated[list[Annotated[int, Field(ge=-1, le=1 << 16)]], Field(min_length=1, max_length=64)]
    batch_size: Annotated[int, Field(ge=1, le=1 << 40)]
    c_v: Cost
    c_e: Cost


def recorded_partition(store: Store) -> RecordedPartition | None:
    """What the last ``gsplit partition`` noted; None if the store was never partitioned."""
    steps = [step.settings for step in store.manifest.provenance if step.step == "partition"]
    if not steps:
        return None
    try:
        return RecordedPartition.model_validate(steps[-1])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["provenance", "settings", *(str(part) for part in first["loc"])])
        got, fix = str(first["input"])[:80], "partition the store again"
        raise StoreError(explain(f"{store.path}: manifest.json: {key}", first["msg"], got, fix)) from None
