"""Draws docs/result.svg: CPU seconds of a training step, GSplit, DGL and PyG, from the records of a measurement.

python docs/draw_result.py docs/result.svg
"""

import math
import sys
from pathlib import Path

from gsplit_bench.measured import HOST, read_record

PICTURE = "result.svg"
SYSTEMS = {
    "split": ("GSplit, split", "#b5651d"),
    "dgl": ("DGL 1.1.3", "#7f9bb3"),
    "pyg_our_sampler": ("PyG with DDP", "#a9b8c6"),
}
MODELS = {"sage": "GraphSAGE", "gat": "GAT"}
RANKS = (2, 4)
LEFT, BAR, GAP, LONGEST, WIDTH, TEXT = 78, 20, 5, 200, 510, "#333333"


def read_seconds() -> dict[tuple[str, int, str], dict[str, float]]:
    """CPU seconds of all ranks per step, by (model, ranks, system) and graph; medians over the turns."""
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    for record in [record for name in HOST for record in read_record(name)["records"]]:
        key = (record["model"], record["ranks"], record["system"])
        found.setdefault(key, {})[record["graph"]] = record["cpu_s"]["median"]
    return found


def mean(values: dict[str, float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values.values())) / len(values))


def _text(x: float, y: float, words: str, *, size: int = 13, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{TEXT}" text-anchor="{anchor}"{weight}>{words}</text>'
    )


def draw() -> str:
    seconds, parts, y = read_seconds(), list[str](), 30
    parts.append(_text(16, y, "CPU seconds of all ranks per step (shorter is better)", size=15, bold=True))
    for model, title in MODELS.items():
        graphs = sorted(seconds[model, RANKS[0], "split"])
        longest = max(mean(seconds[model, ranks, system]) for ranks in RANKS for system in SYSTEMS)
        y += 34
        parts.append(_text(16, y, f"{title}, geometric mean over {', '.join(graphs)}", bold=True))
        for ranks in RANKS:
            y += 12
            parts.append(_text(LEFT - 12, y + 1.5 * BAR + GAP + 5, f"{ranks} ranks", anchor="end"))
            ours = mean(seconds[model, ranks, "split"])
            for system, (name, colour) in SYSTEMS.items():
                assert sorted(seconds[model, ranks, system]) == graphs
                value = mean(seconds[model, ranks, system])
                length = LONGEST * value / longest
                parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
                times = "" if system == "split" else f", {value / ours:.2f} times"
                parts.append(_text(LEFT + length + 8, y + BAR - 5, f"{name}: {value:.2f} s{times}"))
                y += BAR + GAP
    for line in (
        "Batch 1024, 3 layers of width 256, fanout 15, two cores shared by all ranks,",
        "the same allocator settings for all.",
    ):
        y += 18
        parts.append(_text(16, y, line, size=12))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" font-family="Helvetica, Arial, sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 16}" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
