"""Rows arrive where they should, and a buffer is never shared."""

import gc

import numpy as np
import pytest
import torch

from gsplit.errors import InputError
from gsplit.features.protocol import take_rows
from gsplit.features.sources import MappedRows, torch_dtype
from gsplit.kernels.buffers import BufferPool

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int64"])
def test_rows_of_vertices(name: str) -> None:
    array = np.arange(30).reshape(10, 3).astype(name)
    rows = MappedRows("x", array, torch_dtype(name), first_id=100)
    out = torch.zeros(3, 3, dtype=torch_dtype(name))
    read = rows.read(torch.tensor([109, 100, 100]), out)
    assert (read.rows, read.num_bytes) == (3, out.nbytes)
    assert out.tolist() == array[[9, 0, 0]].tolist()
    assert take_rows(rows, torch.empty(0, dtype=torch.int64), CPU).shape == (0, 3)
    labels = MappedRows("y", array[:, 0], torch_dtype(name), 100)
    assert take_rows(labels, torch.tensor([101]), CPU).tolist() == [array[1, 0]]


def test_bfloat16_lies_as_bits() -> None:
    want = torch.randn(4, 2).bfloat16()
    rows = MappedRows("x", want.view(torch.uint16).numpy(), torch.bfloat16, 0)
    assert torch.equal(take_rows(rows, torch.arange(4), CPU), want)


@pytest.mark.parametrize("bad", [99, 110, -1])
def test_vertices_of_others_are_refused(bad: int) -> None:
    rows = MappedRows("features/x", np.zeros((10, 3)), torch.float64, 100)
    with pytest.raises(InputError, match=rf"features/x: expected ids in 100..109.* .got {bad}..{bad}"):
        take_rows(rows, torch.tensor([bad]), CPU)


def test_a_buffer_comes_back_when_nothing_looks_at_it() -> None:
    pool = BufferPool(CPU)
    first = pool.empty((10, 4), torch.float32)
    address = first.data_ptr()
    second = pool.empty((10, 4), torch.float32)
    assert second.data_ptr() != address
    view = first[2:5]
    del first
    assert pool.empty((10, 4), torch.float32).data_ptr() != address
    del view
    gc.collect()
    assert address in {
        pool.empty((10, 4), torch.float32).data_ptr(),
        (kept := pool.empty((1, 4), torch.float32)).data_ptr(),
    }
    assert kept.shape == (1, 4)


def test_a_graph_that_saved_the_rows_keeps_the_buffer() -> None:
    """The rule that makes the pool safe: without it the second tensor would overwrite what backward needs."""
    pool = BufferPool(CPU)
    weight = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    x = pool.empty((3, 4), torch.float64)
    x.fill_(2.0)
    loss = (x @ weight).sum()
    del x
    gc.collect()
    other = pool.empty((3, 4), torch.float64)
    other.fill_(100.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[6.0]] * 4


def test_growing_and_empty_tensors() -> None:
    pool = BufferPool(CPU)
    for size in (10, 1000, 100_000):
        rows = pool.empty((size, 3), torch.float32)
        assert rows.shape == (size, 3)
        del rows
    gc.collect()
    assert pool.num_bytes < 2 * 100_000 * 12
    assert pool.empty((0, 3), torch.bfloat16).shape == (0, 3)
