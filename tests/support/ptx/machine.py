"""Who executes which instruction: the threads of some programs as lanes of numpy arrays.

Lanes stand before blocks of instructions. The block that comes first in the text is executed next, by all lanes that
stand there. A barrier, and an instruction for whole warps, is the first of its block: its lanes wait there for each
other, which is an error if they never come, as is every access that ``memory`` does not allow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ptx.memory import Addresses, CheckedMemory, KernelError
from ptx.module import Address, Instruction, Module, Operand
from ptx.values import Values, bits_of, constant, dtype_of

__all__ = ["FINISHED", "WARP", "Execute", "Kernel", "Lanes", "Machine"]

WARP = 32
FINISHED = 1 << 30
"""The block before which lanes stand that have returned."""
_SHARED = 1024
"""The address of shared memory; not 0, so that a register without an address does not lead there."""
_GAP = 16
"""Bytes between the shared memories of programs, at least: the largest access."""
_UNDEFINED = 0xA5A5A5A5A5A5A5A5
"""What a register holds before it is written."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Those that execute an instruction: ``index`` selects them in an array of all lanes, ``numbers`` lists them."""

    index: slice | NDArray[np.int64]
    numbers: NDArray[np.int64]

    def where(self, condition: Values) -> "Lanes":
        """Those of the lanes for which the condition is true."""
        if condition.all():
            return self
        numbers = self.numbers[condition]
        return Lanes(numbers, numbers)

    def positions_in_warps(self) -> NDArray[np.int64]:
        """The numbers 0 to 31 of each warp's lanes."""
        if self.numbers.size % WARP:
            raise KernelError("some threads of a warp have returned")
        return self.numbers % WARP


Execute = Callable[..., None]
"""``execute(machine, lanes, *operands)``."""


@dataclass(frozen=True)
class Kernel:
    """A module, and what executes each instruction of its blocks."""

    module: Module
    blocks: tuple[tuple[tuple[Instruction, Execute], ...], ...]


class Machine:
    """Programs of a launch that run together: their registers, their memory, and how far each lane is.

    ``programs``: their numbers in the grid. ``arguments``: bits, by parameter.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        programs: NDArray[np.int64],
        arguments: Mapping[str, int],
        memory: CheckedMemory,
        shared_bytes: int,
        rng: np.random.Generator,
    ) -> None:
        num_threads = kernel.module.num_threads
        self.module = kernel.module
        self.blocks = kernel.blocks
        self.arguments = arguments
        self._shared_bytes = torch.from_numpy(rng.integers(0, 256, (programs.size, shared_bytes + _GAP), np.uint8))
        shared = self._shared_bytes[:, :shared_bytes]
        self.memories = {"global": memory, "shared": CheckedMemory(shared, shared, rng, may_race=False)}
        self.all_lanes = Lanes(slice(None), np.arange(programs.size * num_threads))
        self.block_of = np.zeros(programs.size * num_threads, np.int64)
        self.registers: dict[str, Values] = {}
        program = np.repeat(programs, num_threads)
        self.special = {
            "%tid.x": self.all_lanes.numbers % num_threads,
            "%ctaid.x": program % grid[0],
            "%ctaid.y": program // grid[0] % grid[1],
            "%ctaid.z": program // (grid[0] * grid[1]),
            "%nctaid.x": np.full_like(program, grid[0]),
            "%nctaid.y": np.full_like(program, grid[1]),
            "%nctaid.z": np.full_like(program, grid[2]),
            "global_smem": np.full_like(program, _SHARED),
        }

    def run(self) -> None:
        """Execute until all lanes have returned."""
        with np.errstate(all="ignore"):
            while (block := int(self.block_of.min())) != FINISHED:
                lanes = self.all_lanes
                if not (self.block_of == block).all():
                    block, lanes = self._choose()
                self.block_of[lanes.index] = block + 1
                for instruction, execute in self.blocks[block]:
                    self._step(lanes, instruction, execute)

    def _choose(self) -> tuple[int, Lanes]:
        """The first block before which lanes stand that need not wait for others, and these lanes."""
        running = self.block_of != FINISHED
        for block in np.unique(self.block_of[running]):
            here = self.block_of == block
            size = self._group_size(self.blocks[block][0][0].mnemonic)
            arrived = (here.reshape(-1, size) == running.reshape(-1, size)).all(1)
            numbers = np.flatnonzero(here & np.repeat(arrived, size))
            if numbers.size:
                return int(block), Lanes(numbers, numbers)
        first = self.blocks[int(self.block_of.min())][0][0].text
        raise KernelError(f"{self.module.name}: {first}: threads wait for others, which never come")

    def _group_size(self, mnemonic: str) -> int:
        """How many threads begin an instruction together."""
        if mnemonic == "bar.sync":
            return self.module.num_threads
        return WARP if ".sync" in mnemonic else 1

    def _step(self, lanes: Lanes, instruction: Instruction, execute: Execute) -> None:
        if instruction.guard is not None:
            lanes = lanes.where(self.read(lanes, instruction.guard, "pred") != instruction.unless)
        if lanes.numbers.size:
            try:
                execute(self, lanes, *instruction.operands)
            except KernelError as error:
                raise KernelError(f"{self.module.name}: {instruction.text}: {error}") from None

    def register(self, name: str) -> Values:
        """A register of all lanes."""
        if name not in self.registers:
            width = self.module.widths[name]
            dtype = np.dtype(bool if width == 1 else f"u{width // 8}")
            self.registers[name] = np.full(self.block_of.size, _UNDEFINED & ((1 << width) - 1), dtype)
        return self.registers[name]

    def read(self, lanes: Lanes, operand: Operand, name: str) -> Values:
        """A source as values of a type, one per lane: of a register, the lower bits if it is wider, or a constant."""
        if not isinstance(operand, str):
            raise NotImplementedError(f"PTX operand {operand} of type {name}")
        dtype = dtype_of(name)
        if operand in self.special:
            return self.special[operand][lanes.index].astype(dtype)
        if operand not in self.module.widths:
            return np.broadcast_to(constant(operand, name), lanes.numbers.shape)
        bits = self.register(operand)[lanes.index]
        return bits.view(dtype) if bits.itemsize == dtype.itemsize else bits.astype(f"u{dtype.itemsize}").view(dtype)

    def write(self, lanes: Lanes, operand: Operand, name: str, values: Values) -> None:
        """Write values of a type to a register; the upper bits of a wider one are the sign, or zeros."""
        if not isinstance(operand, str):
            raise NotImplementedError(f"PTX operand {operand} of type {name}")
        if operand != "_":
            register = self.register(operand)
            if name[0] == "s" and register.itemsize > values.itemsize:
                values = values.astype(f"i{register.itemsize}")
            register[lanes.index] = bits_of(values)

    def addresses(self, lanes: Lanes, operand: Operand, space: str) -> Addresses:
        """Where the lanes find something in ``memories[space]``."""
        if not isinstance(operand, Address):
            raise NotImplementedError(f"PTX address {operand}")
        width = self.module.widths.get(operand.base, 64)
        base = self.read(lanes, operand.base, f"u{width}").astype(np.uint64)
        addresses: Addresses = base + np.uint64(operand.offset % (1 << 64))
        if space == "global":
            return addresses
        place = addresses - np.uint64(_SHARED)
        program = (lanes.numbers // self.module.num_threads).astype(np.uint64)
        start = np.uint64(self._shared_bytes.data_ptr()) + program * np.uint64(self._shared_bytes.size(1))
        return np.where(place < self._shared_bytes.size(1), start + place, np.uint64(0))
