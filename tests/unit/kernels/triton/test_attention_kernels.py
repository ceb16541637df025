"""Attention: within a stated bound of the exact result, the same bits in every order of programs."""

import pytest
from triton_attention_shape import Shape
from triton_process import Run

SHAPES = {
    "plain": Shape(4, 6, 20, 2, 5, 2),
    "edges, dropout, self-loops": Shape(3, 5, 16, 2, 17, 2, edge=True, p=0.5, loops=True),
    "one head of one": Shape(4, 6, 20, 1, 1, 1),
    "no edges": Shape(3, 4, 0, 2, 3, 2),
    "all dropped": Shape(3, 4, 9, 2, 3, 2, p=1.0),
    "no destinations": Shape(0, 4, 0, 2, 3, 2),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_stays_within_the_bound(interpreter: Run, kind: str, shape: str, dtype: str) -> None:
    interpreter("triton_attention.check_attention", kind, SHAPES[shape], dtype, 1)


def test_one_row_of_values_for_all_heads(interpreter: Run) -> None:
    shape = Shape(4, 6, 20, 3, 7, 1, p=0.3)
    interpreter("triton_attention.check_attention", "gat", shape, "float32", 2)


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_is_the_same_in_every_order(interpreter: Run, kind: str) -> None:
    interpreter("triton_attention.same_for_every_order", kind, [0, 1])


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_keeps_nothing_of_the_size_of_the_edges(interpreter: Run, kind: str) -> None:
    num_edges, shapes = interpreter("triton_attention.sizes_saved", kind)
    assert num_edges > 20
    assert max(size for shape in shapes for size in shape) < 10


@pytest.mark.parametrize("values", [1, 2])
def test_a_gradient_of_values_that_nobody_wants_is_not_computed(interpreter: Run, values: int) -> None:
    assert interpreter("triton_attention.without_gradient_of_values", values) == [8 * 2 * 20, 0]
