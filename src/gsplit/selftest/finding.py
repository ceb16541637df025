"""What a check found out."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Finding", "Report", "Verdict"]

Verdict = Literal["ok", "wrong", "not tried"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do if it is wrong."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All findings on one machine."""

    device: str
    nproc: int
    versions: dict[str, str]
    findings: list[Finding]

    @property
    def is_right(self) -> bool:
        """Whether nothing was found wrong."""
        return all(finding.verdict != "wrong" for finding in self.findings)
