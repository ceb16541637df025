"""Shuffle, forward and backward, between gloo ranks of this machine, against the bare engine."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gsplit.progress import Progress, silent
from gsplit_bench.baselines import time_shuffles
from gsplit_bench.ranks import run_ranks

__all__ = ["ShuffleReport", "ShuffleRow", "bench_shuffle"]


@dataclass(frozen=True)
class ShuffleRow:
    """Rates of one number of ranks and of rows; bytes are those that leave a rank, there and back."""

    ranks: int
    rows: int
    bytes_per_s: float
    composed_bytes_per_s: float
    bare_bytes_per_s: float
    ratio: float
    """Ours over the composition of torch operations."""
    ratio_range: list[float]
    ratio_over_gloo: float
    """The same without shared memory, through the process group alone."""
    ratio_to_bare: float


@dataclass(frozen=True)
class ShuffleReport:
    """One row per number of ranks and of rows."""

    width: int
    repeats: int
    rows: list[ShuffleRow]

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``: all rows, and the last one's rates."""
        last = asdict(self.rows[-1])
        keys = ("bytes_per_s", "composed_bytes_per_s", "bare_bytes_per_s", "ratio")
        return asdict(self) | {key: last[key] for key in keys}


def bench_shuffle(
    *,
    world_sizes: tuple[int, ...] = (2, 4),
    num_rows: tuple[int, ...] = (10_000, 100_000),
    width: int = 256,
    repeats: int = 15,
    progress: Progress = silent,
) -> ShuffleReport:
    """Measure ours, through shared memory as on any one host, against the composition and the bare exchange."""
    cases = [(world_size, count) for world_size in world_sizes for count in num_rows]
    rows = []
    for number, (world_size, count) in enumerate(cases):
        count -= count % (world_size - 1)  # the same for every peer
        run = (time_shuffles, world_size, count, width, repeats)
        seconds = run_ranks(*run, timeout_s=300.0)[0]
        gloo = run_ranks(*run, timeout_s=300.0, shared_memory=False)[0]
        moved = 2 * 4 * count * width
        ratios = [c / o for c, o in zip(seconds["composed"], seconds["ours"], strict=True)]
        rows.append(
            ShuffleRow(
                ranks=world_size,
                rows=count,
                bytes_per_s=moved / median(seconds["ours"]),
                composed_bytes_per_s=moved / median(seconds["composed"]),
                bare_bytes_per_s=moved / median(seconds["bare"]),
                ratio=median(ratios),
                ratio_range=[min(ratios), max(ratios)],
                ratio_over_gloo=median(c / o for c, o in zip(gloo["composed"], gloo["ours"], strict=True)),
                ratio_to_bare=median(b / o for b, o in zip(seconds["bare"], seconds["ours"], strict=True)),
            )
        )
        progress("shuffle", number + 1, len(cases))
    return ShuffleReport(width, repeats, rows)
