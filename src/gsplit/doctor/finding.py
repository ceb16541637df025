"""What the checks of ``gsplit doctor`` return."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["SEND_BACK", "DoctorReport", "Finding", "Verdict", "amount", "largest"]

SEND_BACK = "please report this, with the output of gsplit doctor --json"

Verdict = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do about it. ``figures`` have their units in their names."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class DoctorReport:
    """The results of all checks. ``device``: the one whose computations were checked, None if none was."""

    device: str | None
    nproc: int
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return all(finding.verdict != "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}


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


def largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if one is NaN, which ``max`` overlooks.

    >>> largest([0.0, float("nan"), 1.0]), largest([0.0, 2.0])
    (nan, 2.0)
    """
    return max(errors, key=lambda error: (math.isnan(error), error))
