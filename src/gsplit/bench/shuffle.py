"""Shuffle, forward and backward, between gloo ranks of this machine, against the bare engine."""

from statistics import median
from typing import Any

from gsplit.progress import Progress, silent
from gsplit.testing import run_ranks
from gsplit.testing.baselines import time_shuffles

__all__ = ["bench_shuffle"]


def bench_shuffle(
    *,
    world_sizes: tuple[int, ...] = (2, 4),
    num_rows: tuple[int, ...] = (10_000, 100_000),
    width: int = 256,
    repeats: int = 15,
    progress: Progress = silent,
) -> dict[str, Any]:
    """One row per number of ranks and of rows; bytes are those that leave a rank, there and back.

    Ours goes through shared memory, as on any one host; ``ratio_over_gloo`` is the same with the process group alone.
    """
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
            {
                "ranks": world_size,
                "rows": count,
                "bytes_per_s": moved / median(seconds["ours"]),
                "composed_bytes_per_s": moved / median(seconds["composed"]),
                "bare_bytes_per_s": moved / median(seconds["bare"]),
                "ratio": median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "ratio_over_gloo": median(c / o for c, o in zip(gloo["composed"], gloo["ours"], strict=True)),
                "ratio_to_bare": median(b / o for b, o in zip(seconds["bare"], seconds["ours"], strict=True)),
            }
        )
        progress("shuffle", number + 1, len(cases))
    return {"width": width, "repeats": repeats, "rows": rows} | {
        key: rows[-1][key] for key in ("bytes_per_s", "composed_bytes_per_s", "bare_bytes_per_s", "ratio")
    }
