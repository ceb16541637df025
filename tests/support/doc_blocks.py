"""The blocks of code in README and docs, and how they are run in a moment.

A block is ```` ```python ````, a block of commands (no language), ```` ```toml ````, or ```` ```text ````, which is
output or a picture and not run. What stands in a comment before it does not show on the page:

- ``<!-- setup`` code ``-->`` is Python that is run first, in the page's own names;
- ``<!-- not run: reason -->`` leaves the next block out;
- ``<!-- same as: page -->`` too: that page has the same block, and runs it;
- ``<!-- runs: on 2 ranks -->`` runs it as a program of its own on two ranks.

Commands are those of the page but for ``SMALLER``, a table of sizes, and ``ADDED``.
"""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forked_scripts import run_ranks_forked

__all__ = ["ADDED", "ROOT", "SMALLER", "Block", "blocks_of", "forked_launch", "gsplit_commands", "pages", "smaller"]

ROOT = Path(__file__).resolve().parents[2]

SMALLER: Mapping[str, Mapping[str, str]] = {
    "--vertices": {"20000": "2000"},
    "--edges": {"400000": "20000"},
    "--hidden": {"64": "16", "128": "16", "256": "16"},
    "--epochs": {"3": "1", "10": "1", "20": "2"},
    "--nproc": {"2": "1", "4": "2"},  # one process starts none; tests/dist has train and infer on two
}
"""What a command of a page says, and what is run instead."""
ADDED: Mapping[str, Sequence[str]] = {
    "train": ("--hidden", "16", "--epochs", "1", "--fanout", "5,5"),
    "verify": ("--hidden", "16", "--fanout", "5,5", "--steps", "1"),
    "partition": ("--epochs", "2"),
}
"""Options that these commands are given where the page leaves them to their defaults; not with --resume."""

_ITEM = re.compile(
    r"^<!-- (?P<word>setup|not run|same as|runs)(?P<said>.*?)-->|^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page, or the setup before one."""

    page: str
    line: int
    kind: str  # python, commands, toml, text or setup
    text: str
    ranks: int = 1
    reason: str = ""  # why it is not run
    same_as: str = ""  # the page that runs it instead

    @property
    def is_run(self) -> bool:
        """Whether it is code that this page runs."""
        return self.kind != "text" and not self.reason and not self.same_as

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """The pages with blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page in their order, with what the comments before them say."""
    blocks: list[Block] = []
    text, said_before = page.read_text(), Block("", 0, "", "")
    for found in _ITEM.finditer(text):
        name, line = str(page.relative_to(ROOT)), text.count("\n", 0, found.start()) + 1
        said = (found["said"] or "").strip(" :")
        if found["word"] == "setup":
            blocks.append(Block(name, line, "setup", found["said"]))
        elif found["word"] == "runs":
            said_before = replace(said_before, ranks=int(re.fullmatch(r"on (\d+) ranks", said)[1]))  # type: ignore[index]
        elif found["word"] == "not run":
            said_before = replace(said_before, reason=said)
        elif found["word"] == "same as":
            said_before = replace(said_before, same_as=said)
        else:
            kind, code = found["kind"] or "commands", textwrap.dedent(found["text"])
            blocks.append(replace(said_before, page=name, line=line, kind=kind, text=code))
            said_before = Block("", 0, "", "")
    assert said_before == Block("", 0, "", ""), f"{page}: a comment without a block behind it"
    return blocks


def gsplit_commands(text: str) -> list[list[str]]:
    """The commands of a block, a list of words each; every one is gsplit's."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def smaller(words: list[str]) -> list[str]:
    """The same command with the sizes of ``SMALLER`` and ``ADDED``."""
    pairs = zip(["", *words], words, strict=False)
    said = [SMALLER.get(option, {}).get(word, word) for option, word in pairs]
    added = iter(ADDED.get(said[1], ()) if "--resume" not in said else ())
    return [
        *said,
        *(word for option, value in zip(added, added, strict=True) if option not in said for word in (option, value)),
    ]


def forked_launch(folder: Path) -> object:
    """What takes the launcher's place: the same ranks forked, not new Pythons (tests/dist/test_train_command.py)."""

    def launch(
        program: Sequence[str] | Callable[[], int],
        nproc: int,
        *,
        variables: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
    ) -> int:
        words = ["-m", program.__module__] if callable(program) else list(program[2:])
        before = dict(os.environ)
        try:
            os.environ.update(variables or {})
            said = run_ranks_forked(words, nproc, folder, cwd=Path.cwd())
        finally:
            os.environ.clear()
            os.environ.update(before)
        sys.stdout.write(said[0])
        return 0

    return launch
