"""Toy mini-batches are sampled once, and what is kept of them serves every later model."""

import torch
from torch_geometric.nn import GraphSAGE

from gsplit import parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.nn.checks import toy

LIKE = toy.ExampleInput(torch.zeros(1, 4), None)


def test_what_was_sampled_in_inference_mode_is_of_use_outside() -> None:
    toy._toy_sample.cache_clear()
    toy._toy_parts.cache_clear()
    with torch.inference_mode():
        parallelize(GraphSAGE(4, 8, 2, 3), solo_mesh())
    for batch in (toy.toy_halves(2, LIKE)[0][0], toy.toy_boundary(2, LIKE, 1)):
        for layer in batch.layers:
            assert not layer.block.src_rows.is_inference() and not layer.block.indptr.is_inference()


def test_row_spaces_have_different_numbers_of_rows_for_any_input() -> None:
    for num_layers in (1, 2, 3, 4):
        sizes = [set(toy.toy_batch(num_layers, like)[1]) for like in (LIKE, toy.ExampleInput(torch.zeros(1, 9), 3))]
        assert sizes[0] == sizes[1] and len(sizes[0]) == 4 * num_layers + 1
