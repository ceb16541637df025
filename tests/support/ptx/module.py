"""One kernel as PTX: its parameters, its registers, and its instructions in blocks that only their ends leave.

Read is what Triton prints. Any other directive, declaration or operand raises NotImplementedError with its text.
"""

import re
from dataclasses import dataclass

from ptx.values import width_of

__all__ = ["Address", "Instruction", "Module", "Operand", "parse_module"]

_HEADER = (
    r"\.version [\d.]+",
    r"\.target \w+",
    r"\.address_size 64",
    r"\.global \.align \d+ \.b8 \S+ = \{[\d, ]+\};",  # a text that no instruction reads
    r"\.extern \.shared \.align \d+ \.b8 global_smem\[\];",
    r"\.visible \.entry (?P<name>\w+)\(",
    r"\.param \.\w+ (\.ptr \.global \.align \d+ )?(?P<parameter>\w+),?",
    r"\)",
    r"\.reqntid (?P<threads>\d+)(, 1, 1)?",
)
"""The lines before the body."""
_COMMENT = re.compile(r"//[^\n]*|(?m:^\s*\.loc\s[^\n]*)")
_TOKEN = re.compile(r"(?P<label>\$?\w+):(?=\s)|(?P<scope>[{}])|(?P<statement>[^\s;][^;]*);")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$?\w+)")
_INSTRUCTION = re.compile(r"(?:@(?P<unless>!?)(?P<guard>%p\d+)\s+)?(?P<mnemonic>\S+)\s*(?P<operands>.*)", re.DOTALL)
_OPERAND = re.compile(r"[{\[][^}\]]*[}\]]|[^,\s]+")
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_SIMPLE = re.compile(r"%?[\w$.]+|-\w+")


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``: a register or a parameter."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address
"""A register or a constant, several in braces, or an address."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """``mnemonic``: with all its modifiers and types. ``guard``: executed by lanes where it is not ``unless``."""

    text: str
    mnemonic: str
    operands: tuple[Operand, ...]
    guard: str | None
    unless: bool


@dataclass(frozen=True)
class Module:
    """``blocks``: instructions that are executed one after the other. Only the first one may have to wait for other
    threads, and only the last one may branch or return.

    ``widths``: bits of every register. ``labels``: the block that each one stands before.
    """

    name: str
    parameters: tuple[str, ...]
    num_threads: int
    widths: dict[str, int]
    blocks: tuple[tuple[Instruction, ...], ...]
    labels: dict[str, int]


def parse_module(text: str) -> Module:
    """Read the only kernel of a PTX file."""
    head, body = _COMMENT.sub("", text).split("\n}\n", 1)[0].split("\n{\n", 1)
    read: dict[str, list[str]] = {"name": [], "parameter": [], "threads": []}
    for line in filter(None, map(str.strip, head.splitlines())):
        matches = (re.fullmatch(pattern, line) for pattern in _HEADER)
        match = next((match for match in matches if match is not None), None)
        if match is None:
            raise NotImplementedError(f"PTX directive {line}")
        for key, value in match.groupdict().items():
            read[key].append(value)
    blocks, labels, widths = _parse_body(body)
    return Module(
        name=read["name"][0],
        parameters=tuple(read["parameter"]),
        num_threads=int(read["threads"][0]),
        widths=widths,
        blocks=tuple(map(tuple, blocks)),
        labels=labels,
    )


def _parse_body(text: str) -> tuple[list[list[Instruction]], dict[str, int], dict[str, int]]:
    """Blocks, the block after each label, and the widths of registers; an inner scope's are the kernel's."""
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    widths: dict[str, int] = {}
    targets = set(_BRANCH.findall(text))  # other labels are for debuggers
    for token in _TOKEN.finditer(text):
        statement = (token["statement"] or "").strip()
        if token["label"] in targets:
            if blocks[-1]:
                blocks.append([])
            labels[token["label"]] = len(blocks) - 1
        elif statement.startswith(".reg"):
            _declare(statement, widths)
        elif statement and not statement.startswith(".pragma"):  # a hint for the assembler
            instruction = _parse_instruction(statement)
            if blocks[-1] and ".sync" in instruction.mnemonic:
                blocks.append([])
            blocks[-1].append(instruction)
            if instruction.mnemonic in ("bra", "bra.uni", "ret"):
                blocks.append([])
    return blocks, labels, widths


def _declare(statement: str, widths: dict[str, int]) -> None:
    """``.reg .b32 %r<5>``: registers %r0 to %r4."""
    found = re.fullmatch(r"\.reg \.(pred|[bf]\d+)\s+([%\w]+)(?:<(\d+)>)?", statement)
    if found is None:
        raise NotImplementedError(f"PTX directive {statement}")
    kind, name, count = found.groups()
    names = [name] if count is None else [f"{name}{number}" for number in range(int(count))]
    if any(widths.get(register, width_of(kind)) != width_of(kind) for register in names):
        raise NotImplementedError(f"PTX registers of one name and two types: {statement}")
    widths.update(dict.fromkeys(names, width_of(kind)))


def _parse_instruction(statement: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement)
    if match is None or match["mnemonic"].startswith("."):
        raise NotImplementedError(f"PTX statement {statement}")
    operands = tuple(_parse_operand(operand) for operand in _OPERAND.findall(match["operands"]))
    return Instruction(" ".join(statement.split()), match["mnemonic"], operands, match["guard"], bool(match["unless"]))


def _parse_operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(re.findall(r"[^{},\s]+", text))
    if found := _ADDRESS.fullmatch(text):
        return Address(found[1], int(found[2] or "0", 0))
    if _SIMPLE.fullmatch(text) is None:
        raise NotImplementedError(f"PTX operand {text}")
    return text
