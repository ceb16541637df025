"""Typed toy batches: all row spaces differ in size, rows are in place, and halves and boundaries have equal targets."""

import pytest
import torch

from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.checks.toy_typed import TypedExample
from gsplit.nn.forward_plan import num_rows

TYPES = ("paper", "author", "field", "venue")
RELATIONS = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
    ("field", "of", "paper"),
    ("paper", "has", "field"),
    ("author", "knows", "author"),
    ("paper", "in", "venue"),
)


def _like(num_types: int, num_relations: int) -> TypedExample:
    shapes = dict.fromkeys(TYPES[:num_types], (5,))
    counts = (3,) * num_types
    return TypedExample(
        TYPES[:num_types], RELATIONS[:num_relations], counts, shapes, torch.float64, torch.device("cpu")
    )


@pytest.mark.parametrize("num_types, num_relations", [(4, 7), (4, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("num_layers", [1, 3, 14])
def test_sizes_identify_row_spaces(num_types: int, num_relations: int, num_layers: int) -> None:
    batch, space_of = _like(num_types, num_relations).batch(num_layers)
    assert {num_rows(batch, space) for space in space_of.values()} == set(space_of)
    same = sum(relation[0] == relation[2] for relation in RELATIONS[:num_relations])
    of_rows = (num_types + (num_types > 1)) * (2 * num_layers + 1)
    of_edges = (num_relations + (num_relations > 1)) * num_layers
    num_looped = same + (num_relations > 1 or num_types > 1)  # one type and relation: all loops are those of the type
    assert len(space_of) == of_rows + of_edges + num_looped * num_layers
    assert all(batch.x_dict[name].size(0) == batch.part(name).blocks[0].num_src for name in TYPES[:num_types])


def _targets(batch: TypedBatch, name: str) -> list[int]:
    part = batch.part(name)
    found: list[int] = part.frontiers[-1].n_id[: part.num_targets].tolist()
    return found


def test_halves_and_boundaries_have_the_targets_of_the_whole() -> None:
    like = _like(4, 7)
    (whole, _), (first, _), (second, _) = like.halves(2)
    crossed = like.boundary(2, 1)
    for name in TYPES:
        assert isinstance(whole, TypedBatch) and isinstance(first, TypedBatch) and isinstance(second, TypedBatch)
        assert _targets(whole, name) == _targets(first, name) + _targets(second, name) == _targets(crossed, name)
        assert len(_targets(first, name)) == len(_targets(second, name)) == 4
        assert like.empty(2).part(name).num_targets == 0
    assert crossed.part("paper").layers[1].route is not None
    assert isinstance(whole, TypedBatch)
    cites, of_whole = crossed.part(RELATIONS[0]).blocks[1], whole.part(RELATIONS[0]).blocks[1]
    assert cites.num_edges > 0 and torch.equal(cites.src_rows, of_whole.src_rows)
