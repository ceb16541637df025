"""What a check found, in one line."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Diagnosis", "Line", "Verdict", "amount"]

Verdict = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Line:
    """What was looked at, what was found, and what to do about it. ``figures``: by name, with units in the names."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """All that was found."""

    lines: list[Line]

    @property
    def is_fit(self) -> bool:
        """Whether nothing stands in the way of a run; warnings do not."""
        return all(line.verdict != "error" for line in self.lines)


def amount(num_bytes: float) -> str:
    """Bytes for a reader.

    >>> amount(64 << 20), amount(1.5 * 2**30), amount(900)
    ('64 MiB', '1.5 GiB', '900 bytes')
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes:.0f} bytes"
