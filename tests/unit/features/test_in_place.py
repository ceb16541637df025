"""Rows in place: a tensor to everything that takes tensors, and row numbers of a matrix to a layer that reads it."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gsplit
from gsplit.errors import InputError, StoreError
from gsplit.features.in_place import InPlaceRows
from gsplit.features.protocol import RowsRead
from gsplit.features.sources import MappedRows, ScaledRows, torch_dtype
from gsplit.kernels.buffers import BufferPool
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

POOL = BufferPool(torch.device("cpu"))
IDS = torch.tensor([3, 1, 9, 1])


def _source(dtype: str = "float32") -> MappedRows:
    array = np.arange(40).reshape(10, 4).astype(dtype)
    array.flags.writeable = False
    return MappedRows("features/x", array, torch_dtype(dtype), 0)


def _plain(dtype: str = "float32") -> Tensor:
    return torch.arange(40).reshape(10, 4).to(torch_dtype(dtype))[IDS]


def _rows(reads: list[RowsRead] | None = None) -> InPlaceRows:
    return InPlaceRows(_source(), IDS, POOL, None if reads is None else lambda read, num_bytes: reads.append(read))


def _save_and_load(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


WEIGHT = torch.arange(8.0).view(2, 4)
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "module": lambda x: torch.nn.Flatten()(x),
    "index": lambda x: x[torch.tensor([2, 0])],
    "row": lambda x: x[1],
    "inner slice": lambda x: x[1:3],
    "first of first": lambda x: x[:3][:2] * 1,
    "mask": lambda x: x[x[:, 0] > 4],
    "sum": lambda x: x + 1,
    "reflected": lambda x: 1 - x,
    "product": lambda x: x @ x.T,
    "cat": lambda x: torch.cat([x, x[:2]]),
    "stack": lambda x: torch.stack((x, x)),
    "to": lambda x: x.to(torch.float64) * 1,
    "to another": lambda x: x.to(torch.int64),
    "to by name": lambda x: x.to(dtype=torch.float64),
    "half": lambda x: x.half(),
    "same type": lambda x: x.float(),
    "isfinite": lambda x: torch.isfinite(x).all(),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "array protocol": lambda x: torch.from_numpy(np.asarray(x) + 1),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x),
    "list": lambda x: torch.tensor(x.tolist()),
    "iteration": lambda x: torch.stack(list(x)),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "out": lambda x: torch.add(x, x, out=torch.empty(4, 4)),
    "deepcopy": copy.deepcopy,
    "save": lambda x: _save_and_load(x),
    "in a dict": lambda x: copy.deepcopy({"x": x})["x"],
    "einsum": lambda x: torch.einsum("ij,ij->i", x, x),
    "by name": lambda x: torch.add(input=x, other=x),
    "written": lambda x: x.mul_(2),
    "filled": lambda x: x.index_fill_(0, torch.tensor([0]), 7.0),
    "grad": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gets_the_rows_and_returns_a_plain_tensor(name: str) -> None:
    reads: list[RowsRead] = []
    found = FUNCTIONS[name](_rows(reads))
    assert type(found) is Tensor
    assert torch.equal(found, FUNCTIONS[name](_plain()))
    assert reads == [RowsRead(rows=4, num_bytes=64)]


def test_what_a_tensor_is_asked_for_first_needs_no_rows() -> None:
    x = _rows()
    plain = _plain()
    for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf"):
        assert getattr(x, name) == getattr(plain, name), name
    for name in ("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_contiguous", "__len__"):
        assert getattr(x, name)() == getattr(plain, name)(), name
    assert x.size(0) == len(x) == 4 and torch.is_tensor(x) and hash(x) == id(x)
    assert not x.is_read


def test_a_layer_takes_the_matrix_and_its_rows_without_a_copy() -> None:
    source = _source()
    x = InPlaceRows(source, IDS, POOL)
    assert x.array.data_ptr() == source.matrix.data_ptr() and x.array.shape == (10, 4)
    assert x.rows.tolist() == IDS.tolist()
    first = x[:2]
    assert isinstance(first, InPlaceRows) and first.shape == (2, 4) and first.rows.tolist() == [3, 1]
    assert torch.equal(first.array[first.rows], _plain()[:2])
    assert not x.is_read and not first.is_read


def test_rows_are_gathered_once_for_all_that_refer_to_them() -> None:
    reads: list[RowsRead] = []
    x = _rows(reads)
    first = x[:2]
    assert isinstance(first, InPlaceRows)
    assert torch.equal(first + 0, _plain()[:2])
    assert x.read() is x.read() and x.is_read and len(reads) == 1
    assert first.read().data_ptr() == x.read().data_ptr()
    assert type(x[:2]) is Tensor


def test_what_was_written_is_what_a_layer_reads() -> None:
    x = _rows()
    first = x[:2]
    assert isinstance(first, InPlaceRows)
    x[1] = -1.0
    want = _plain()
    want[1] = -1.0
    assert torch.equal(x.array[x.rows], want) and torch.equal(first.array[first.rows], want[:2])
    assert x._version == 1
    assert torch.equal(_rows().read(), _plain())  # the stored rows are not written to


def test_a_gradient_that_is_wanted_is_seen() -> None:
    x = _rows()
    x.requires_grad_()
    assert x.requires_grad


def test_it_prints_as_its_rows() -> None:
    assert str(_rows()) == str(_plain()) and repr(_rows()) == repr(_plain())


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * weight, x

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, (g[0] * x).sum()


def test_autograd_functions_take_it() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    out, same = _Square.apply(_rows(), weight)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert torch.equal(out, 2 * _plain()) and torch.equal(same, _plain())
    assert type(out) is type(same) is Tensor
    assert weight.grad == _plain().sum()


def test_compiled_submodules_take_it() -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    compiled: Any = torch.compile(encoder, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(_rows()), encoder(_plain()))


def test_rows_read_in_inference_can_be_trained_on() -> None:
    x = _rows()
    with torch.inference_mode():
        x + 1
    assert not x.read().is_inference()


def test_another_default_device_changes_nothing() -> None:
    with torch.device("meta"):
        x = _rows()
        assert x.device.type == x.read().device.type == x.rows.device.type == "cpu"
    assert torch.equal(x.read(), _plain())


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "bool"])
def test_every_stored_type_is_its_own_matrix(dtype: str) -> None:
    x = InPlaceRows(_source(dtype), IDS, POOL)
    assert x.dtype == torch_dtype(dtype)
    assert torch.equal(x.array[x.rows], _plain(dtype)) and torch.equal(x.read(), _plain(dtype))


def test_bfloat16_and_rows_of_any_shape() -> None:
    want = torch.randn(6, 2, 3).bfloat16()
    source = MappedRows("x", want.view(torch.uint16).numpy(), torch.bfloat16, 100)
    x = InPlaceRows(source, torch.tensor([104, 100]), POOL)
    assert x.shape == (2, 2, 3) and x.rows.tolist() == [4, 0]
    assert torch.equal(x.array[x.rows], want[[4, 0]]) and torch.equal(x.read(), want[[4, 0]])


def _compressed(dtype: str) -> tuple[MappedRows | ScaledRows, Tensor]:
    """A source of rows of some stored type, and all its rows."""
    torch.manual_seed(0)
    rows = torch.randn(10, 37)
    if dtype == "int8":
        stored = torch.randint(-128, 128, (10, 37), dtype=torch.int8)
        scales = rows[:, 0].contiguous()
        mapped = MappedRows("x", stored.numpy(), torch.int8, 0)
        return ScaledRows("x", mapped, scales.numpy(), 0), stored.float() * scales[:, None]
    stored = rows.to(torch_dtype(dtype))
    bits = stored.view(torch.uint16) if dtype == "bfloat16" else stored
    return MappedRows("x", bits.numpy(), torch_dtype(dtype), 0), stored


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "float32", "float64"])
@pytest.mark.parametrize("decoded", [torch.float32, torch.float64])
def test_rows_of_fewer_bits_are_decoded_where_they_are_read(dtype: str, decoded: torch.dtype) -> None:
    source, want = _compressed(dtype)
    reads: list[tuple[RowsRead, int]] = []
    stored = InPlaceRows(source, IDS, POOL, lambda *read: reads.append(read))
    x = stored.to(decoded)
    assert isinstance(x, InPlaceRows) and x.dtype == decoded and x.shape == (4, 37)
    assert x.array.dtype == torch_dtype(dtype) and x.rows.tolist() == IDS.tolist() and not reads
    assert (x.scales is not None) == (dtype == "int8")
    first = x[:2]
    assert isinstance(first, InPlaceRows)
    assert torch.equal(x.read(), want[IDS].to(decoded))
    assert torch.equal(first.read(), x.read()[:2]) and x.scales is None
    num_bytes = 4 * 37 * torch_dtype(dtype).itemsize
    assert reads == [(RowsRead(rows=4, num_bytes=num_bytes), 4 * 37 * decoded.itemsize)]


def test_a_conversion_is_a_copy_of_what_it_was_made_from() -> None:
    source, want = _compressed("float16")
    stored = InPlaceRows(source, IDS, POOL)
    one, other = stored.to(torch.float32), stored.to(torch.float32)
    one.mul_(2)
    stored.mul_(3)
    assert torch.equal(one, 2 * want[IDS].float()) and torch.equal(other, want[IDS].float())
    assert torch.equal(stored.to(torch.float32), (3 * want[IDS]).float())
    same = _rows()
    assert torch.equal(same.to(torch.float32).mul_(2), same.read())  # as torch: no copy


def test_no_rows_are_a_tensor_too() -> None:
    x = InPlaceRows(_source(), IDS[:0], POOL)
    assert x.shape == (0, 4) and F.linear(x, WEIGHT).shape == (0, 2)


def test_ids_that_are_not_stored_are_refused() -> None:
    with pytest.raises(InputError, match=r"features/x: expected ids in 0..9.* .got 1..10"):
        InPlaceRows(_source(), torch.tensor([1, 10]), POOL)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    """Not a signal that ends the process, whether rows are gathered or taken in place."""
    planted = PlantedGraph(2000, 6000, num_communities=4, num_features=8, num_classes=4)
    store = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    loader = gsplit.NeighborLoader(store, [3], "train", batch_size=16)
    kept, unread, later = (loader.make_batch(0, step).x for step in range(3))
    assert isinstance(unread, InPlaceRows) and isinstance(later, InPlaceRows)
    kept.sum()
    file = store.path / "features" / "x.npy"
    with file.open("rb+") as stream:
        stream.truncate(4096)
    assert torch.isfinite(kept).all()  # was gathered before
    for fails in (unread.read, lambda: later.array, lambda: loader.make_batch(0, 3)):
        with pytest.raises(StoreError, match=r"x.npy: expected \d+ bytes, as when it was opened .got 4096 bytes"):
            fails()
