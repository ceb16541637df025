"""What every instruction does: the table of those that are accepted.

Any other one raises NotImplementedError with its name when a kernel is prepared, whether it would be executed or not.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NoReturn

import numpy as np

from ptx.arithmetic import OPERATIONS, Operation, select
from ptx.machine import FINISHED, WARP, Execute, Kernel, Lanes, Machine
from ptx.memory import Addresses
from ptx.module import Address, Instruction, Module, Operand
from ptx.values import FLOATS, INTEGERS, Values, constant, dtype_of, width_of

__all__ = ["INSTRUCTIONS", "prepare_kernel"]


def prepare_kernel(module: Module) -> Kernel:
    """Look up every instruction of a module."""
    return Kernel(module, tuple(tuple((each, _find(each)) for each in block) for block in module.blocks))


def _find(instruction: Instruction) -> Execute:
    if instruction.mnemonic not in INSTRUCTIONS:
        raise NotImplementedError(f"PTX instruction {instruction.mnemonic}: {instruction.text}")
    return INSTRUCTIONS[instruction.mnemonic]


def _refuse(what: str, *operands: Operand) -> NoReturn:
    raise NotImplementedError(f"PTX {what} with operands {', '.join(map(str, operands))}")


def _words(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a vector, or the one there is."""
    return operand if isinstance(operand, tuple) else (operand,)


def _compute(operation: Operation, machine: Machine, lanes: Lanes, destination: Operand, *sources: Operand) -> None:
    values = [machine.read(lanes, *source) for source in zip(sources, operation.sources, strict=True)]
    machine.write(lanes, destination, operation.result, operation.compute(*values))


def _branch(machine: Machine, lanes: Lanes, label: str) -> None:
    machine.block_of[lanes.index] = machine.module.labels[label]


def _return(machine: Machine, lanes: Lanes) -> None:
    machine.block_of[lanes.index] = FINISHED


def _wait_for_program(machine: Machine, lanes: Lanes, barrier: Operand, *threads: Operand) -> None:
    """A barrier of all threads of a program that have not returned: the machine has waited for them."""
    if barrier != "0" or threads:
        _refuse("bar.sync", barrier, *threads)


def _wait_for_warp(machine: Machine, lanes: Lanes, members: Operand) -> None:
    if members != "-1":
        _refuse("bar.warp.sync", members)
    lanes.positions_in_warps()


def _load_parameter(name: str, machine: Machine, lanes: Lanes, destination: Operand, source: Address) -> None:
    if source.offset:
        _refuse("ld.param", source)
    machine.write(lanes, destination, name, constant(str(machine.arguments[source.base]), name))


def _load(space: str, name: str, machine: Machine, lanes: Lanes, destination: Operand, source: Operand) -> None:
    targets, addresses = _words(destination), machine.addresses(lanes, source, space)
    words = machine.memories[space].load(addresses, width_of(name) // 8, len(targets))
    for target, values in zip(targets, words, strict=True):
        machine.write(lanes, target, name, values)


def _store(space: str, name: str, machine: Machine, lanes: Lanes, destination: Operand, source: Operand) -> None:
    words = [machine.read(lanes, word, name) for word in _words(source)]
    machine.memories[space].store(machine.addresses(lanes, destination, space), words)


def _move(name: str, machine: Machine, lanes: Lanes, destination: Operand, source: Operand) -> None:
    """Copies a register, cuts it into several, or joins several, the lowest bits first."""
    targets, parts = _words(destination), _words(source)
    if len(targets) == len(parts) == 1:
        machine.write(lanes, destination, name, machine.read(lanes, source, name))
    elif len(parts) == 1:
        part_bits = width_of(name) // len(targets)
        whole = machine.read(lanes, source, name)
        for number, target in enumerate(targets):
            machine.write(lanes, target, f"b{part_bits}", (whole >> number * part_bits).astype(f"u{part_bits // 8}"))
    else:
        part_bits = width_of(name) // len(parts)
        values = [machine.read(lanes, part, f"b{part_bits}") for part in parts]
        machine.write(lanes, destination, name, np.stack(values, axis=1).view(dtype_of(name))[:, 0])


def _swap(found: Values, wanted: Values, new: Values) -> Values:
    return select(new, found, found == wanted)


def _update(
    change: Callable[..., Values], name: str, machine: Machine, lanes: Lanes, destination: Operand, *sources: Operand
) -> None:
    """An atomic: ``change(found, *values)`` takes the place of what is found."""
    addresses = machine.addresses(lanes, sources[0], "global")
    values = [machine.read(lanes, source, name) for source in sources[1:]]
    found = machine.memories["global"].update(
        addresses, dtype_of(name), lambda old, threads: change(old, *(value[threads] for value in values))
    )
    machine.write(lanes, destination, name, found)


def _shuffle(pick: Callable[[Values, Values], Values], machine: Machine, lanes: Lanes, *operands: Operand) -> None:
    """Each lane reads the register of the lane of its warp that ``pick(position, number)`` names."""
    destination, source, number, clamp, members = operands
    if (clamp, members) != ("31", "-1"):
        _refuse("shfl.sync", *operands)
    position = lanes.positions_in_warps()
    other = pick(position, machine.read(lanes, number, "u32").astype(np.int64)) % WARP
    values = machine.read(lanes, source, "b32")
    machine.write(lanes, destination, "b32", values[np.arange(position.size) - position + other])


def _reduce(reduce: Callable[..., Values], name: str, machine: Machine, lanes: Lanes, *operands: Operand) -> None:
    """One number of all lanes of a warp."""
    destination, source, members = operands
    if (machine.read(lanes, members, "s32") != -1).any():
        _refuse("redux.sync", *operands)
    lanes.positions_in_warps()
    values = machine.read(lanes, source, name).reshape(-1, WARP)
    machine.write(lanes, destination, name, np.repeat(reduce(values, axis=1), WARP))


def _matrix_addresses(machine: Machine, lanes: Lanes, operand: Operand, number: int) -> Addresses:
    """Of the 4 bytes per lane of a matrix of 8 rows of 16 bytes: lane i has the address of row i, and a part of row
    i // 4. Lanes 8 and more have the rows of the next matrices."""
    position = lanes.positions_in_warps()
    first = np.arange(position.size) - position
    rows: Addresses = machine.addresses(lanes, operand, "shared")[first + 8 * number + position // 4]
    return rows + (position % 4 * 4).astype(np.uint64)


def _load_matrix(machine: Machine, lanes: Lanes, destination: Operand, source: Operand) -> None:
    for number, target in enumerate(_words(destination)):
        (words,) = machine.memories["shared"].load(_matrix_addresses(machine, lanes, source, number), 4, 1)
        machine.write(lanes, target, "b32", words)


def _store_matrix(machine: Machine, lanes: Lanes, destination: Operand, source: Operand) -> None:
    for number, word in enumerate(_words(source)):
        addresses = _matrix_addresses(machine, lanes, destination, number)
        machine.memories["shared"].store(addresses, [machine.read(lanes, word, "b32")])


_BITS = ("b8", "b16", "b32", "b64")
_VECTORS = ("", "v2.", "v4.")
_SHARED_NAMES = ("shared", "shared::cta")
INSTRUCTIONS: dict[str, Execute] = {
    **{name: partial(_compute, operation) for name, operation in OPERATIONS.items()},
    **{f"mov.{t}": partial(_move, t) for t in ("pred", "b16", "b32", "b64", *INTEGERS, *FLOATS)},
    "bra": _branch,
    "bra.uni": _branch,
    "ret": _return,
    "bar.sync": _wait_for_program,
    "bar.warp.sync": _wait_for_warp,
    **{f"ld.param.{t}": partial(_load_parameter, t) for t in ("b32", "b64", *INTEGERS)},
    **{f"ld.global.{v}{t}": partial(_load, "global", t) for v, t in product(_VECTORS, (*_BITS, *INTEGERS))},
    **{f"st.global.{v}{t}": partial(_store, "global", t) for v, t in product(_VECTORS, _BITS)},
    **{
        f"ld.{shared}.{v}{t}": partial(_load, "shared", t)
        for shared, v, t in product(_SHARED_NAMES, _VECTORS, (*_BITS, *INTEGERS))
    },
    **{f"st.{shared}.{v}{t}": partial(_store, "shared", t) for shared, v, t in product(_SHARED_NAMES, _VECTORS, _BITS)},
    **{f"atom.global.gpu.acq_rel.min.{t}": partial(_update, np.minimum, t) for t in ("s32", "u32", "s64", "u64")},
    **{f"atom.global.acq_rel.gpu.cas.{t}": partial(_update, _swap, t) for t in ("b32", "b64")},
    "shfl.sync.bfly.b32": partial(_shuffle, np.bitwise_xor),
    "shfl.sync.idx.b32": partial(_shuffle, lambda position, number: number),
    **{f"redux.sync.max.{t}": partial(_reduce, np.max, t) for t in ("s32", "u32")},
    **{f"ldmatrix.sync.aligned.m8n8.x{n}.shared.b16": _load_matrix for n in (1, 2, 4)},
    **{f"stmatrix.sync.aligned.m8n8.x{n}.shared.b16": _store_matrix for n in (1, 2, 4)},
}
