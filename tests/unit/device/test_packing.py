"""Packing: every tensor once, any dataclass, and no buffer that is written before it was moved and copied."""

from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gsplit.device import packing
from gsplit.device.packing import PinnedBuffers, map_tensors

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Inner:
    rows: Tensor
    name: str


@dataclass(frozen=True)
class _Value:
    inner: tuple[_Inner, ...]
    flags: Tensor | None
    again: Tensor


class _Mark:
    """The end of a copy; somebody waits for it or nobody does."""

    waited: list["_Mark"]

    def __init__(self, device: torch.device) -> None:
        pass

    def wait(self) -> None:
        self.waited.append(self)


@pytest.fixture(autouse=True)
def _host_only() -> Iterator[None]:
    """Pinned memory and marks in a device's queue need a device."""
    _Mark.waited = []
    empty = torch.empty
    with (
        patch.object(packing, "StreamEvent", _Mark),
        patch.object(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)),
    ):
        yield


def _value(seed: int) -> _Value:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(seed % 3, 5, generator=generator, dtype=torch.float64), torch.arange(seed + 1)]
    flags = torch.rand(7, generator=generator) > 0.5
    return _Value(tuple(_Inner(row, str(seed)) for row in rows), flags if seed % 2 else None, rows[1])


def _same(one: _Value, two: _Value) -> bool:
    pairs = zip((*one.inner, _Inner(one.again, "")), (*two.inner, _Inner(two.again, "")), strict=True)
    equal = all(torch.equal(a.rows, b.rows) and a.name == b.name for a, b in pairs)
    if one.flags is None or two.flags is None:
        return equal and one.flags is two.flags
    return equal and torch.equal(one.flags, two.flags)


def test_a_value_comes_out_as_it_went_in_and_a_tensor_crosses_once() -> None:
    value = _value(3)
    pinned, memory = PinnedBuffers(2).pin(value)
    assert pinned.inner[1].rows is pinned.again  # one of the rows, pinned once
    out = memory.to(CPU, pinned)
    assert _same(pinned, value) and _same(out, value) and out.inner[1].rows.data_ptr() == out.again.data_ptr()


def test_tensors_are_found_in_dataclasses_and_tuples_only() -> None:
    assert map_tensors(lambda tensor: tensor + 1, (torch.ones(1), [torch.ones(1)], "x"))[0].item() == 2
    held = [torch.ones(1)]
    assert map_tensors(lambda tensor: tensor + 1, held) is held


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_not_moved_is_never_overwritten(count: int) -> None:
    """However many are pinned first: more than there were to be buffers."""
    buffers = PinnedBuffers(count)
    for turn in range(4):
        values = [_value(seed + turn) for seed in range(7)]
        pinned = [buffers.pin(value) for value in values]
        moved = [memory.to(CPU, value) for value, memory in pinned]
        assert all(_same(one, value) for one, value in zip(moved, values, strict=True))


def test_a_buffer_is_used_again_when_its_copy_is_over() -> None:
    buffers, used = PinnedBuffers(2), []
    for turn in range(6):
        value, memory = buffers.pin(_value(4))
        used.append(memory.buffer)
        memory.to(CPU, value)
        assert len(_Mark.waited) == max(0, turn - 1)  # before it was written: its own last copy
    assert len({id(buffer) for buffer in used}) == 2 and used[0] is used[2] is used[4]
