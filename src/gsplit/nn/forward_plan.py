"""What is known about a model's forward: its layers, its depth, and what the rows of its tensors are.

The dry run (``nn.checks``) learns it when a model is wrapped; every forward pass then goes by it.
"""

from dataclasses import dataclass
from typing import Literal

from gsplit.batch import Batch
from gsplit.errors import InputError, explain
from gsplit.nn.self_loops import num_other_edges

__all__ = ["ForwardPlan", "RowSpace", "Space", "check_batch", "num_rows"]

Space = Literal["local", "mixed", "edges", "looped edges"]


@dataclass(frozen=True)
class RowSpace:
    """What the rows of a tensor are: a local frontier (level l counts from the input), a mixed one, or edges of a
    layer; looped edges are those without self-loops and then one self-loop per destination, as GAT makes them.
    """

    space: Space
    layer: int


@dataclass(frozen=True)
class ForwardPlan:
    """What the dry run found out about a model.

    ``boundaries``: levels at which the rows of a mini-batch may become those of other vertices.
    ``input_in_bottom_only``: the bottom layers alone read the input rows (``nn.checks.row_crossing``).
    """

    depth: int
    layer_of: dict[str, int]
    single_input: frozenset[str]
    dropouts: tuple[RowSpace, ...]
    norms: tuple[RowSpace, ...]
    takes_edge_attr: bool = False
    boundaries: frozenset[int] = frozenset()
    input_in_bottom_only: bool = False


def num_rows(batch: Batch, rows: RowSpace) -> int:
    """How many rows of a kind a batch has."""
    if rows.space == "local":
        return batch.num_targets if rows.layer == batch.num_layers else batch.layers[rows.layer].num_local
    block = batch.blocks[rows.layer]
    if rows.space == "mixed":
        return block.num_src
    if rows.space == "edges":
        return block.num_edges
    return num_other_edges(block) + block.num_dst


def check_batch(batch: Batch, plan: ForwardPlan) -> None:
    """Refuse a batch with more or fewer layers than the model, or one whose levels do not stand for the same rows."""
    if plan.depth != batch.num_layers:
        expected, got = f"{plan.depth} numbers, one per layer of the model", batch.num_layers
        raise InputError(explain("num_neighbors", expected, got, "make the loader with as many numbers as layers"))
    for level in [upper.level - 1 for upper in batch.frontiers[1:]]:
        if level not in plan.boundaries:
            needed = f"a model that joins no rows from below layer {level} with rows from above"
            found = "one that does, such as a residual x[:h.size(0)] + h across that layer"
            raise InputError(
                explain(f"strategy={batch.context.strategy!r}", needed, found, "use split, data or data_cached")
            )
