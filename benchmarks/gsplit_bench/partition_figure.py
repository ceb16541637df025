"""The figure of a partition benchmark: cross edges, rows shuffled and imbalance, as in the paper's Figure 5."""

from pathlib import Path
from typing import Any

from gsplit.report.drawing import load_figure

__all__ = ["draw_partitions", "save_partitions"]

_PANELS = (
    ("cross_edge_share", "edges between parts"),
    ("rows_shuffled_per_input", "rows shuffled per input row"),
    ("edge_imbalance", "edge imbalance (max / mean)"),
    ("vertex_imbalance", "vertex imbalance (max / mean)"),
)
_COLOURS = {
    "gsplit, metis": "#1b6ca8",
    "gsplit, mtkahypar": "#5fa8d3",
    "gsplit, restream": "#a9d6e5",
    "node, metis": "#e09f3e",
    "edge, metis": "#9e2a2b",
    "random, random": "#8d99ae",
}


def save_partitions(documents: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw into a file."""
    draw_partitions(documents).savefig(path, dpi=150)


def draw_partitions(documents: dict[str, dict[str, Any]]) -> Any:
    """One group of bars per graph and number of parts, a bar per objective and solver; held-out mini-batches."""
    groups = [(name, parts) for name, doc in documents.items() for parts in sorted({r["parts"] for r in doc["rows"]})]
    cases = list(dict.fromkeys(_case(row) for document in documents.values() for row in document["rows"]))
    figure = load_figure()(figsize=(4 + 1.5 * len(groups), 10), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(len(_PANELS), 1, sharex=True), _PANELS, strict=True):
        width = 0.85 / len(cases)
        for number, case in enumerate(cases):
            heights = [_value(documents[name], parts, case, key) for name, parts in groups]
            places = [group + (number - (len(cases) - 1) / 2) * width for group in range(len(groups))]
            axes.bar(places, heights, width * 0.92, color=_COLOURS.get(case), label=case.replace("random, ", ""))
        axes.set_ylabel(title, fontsize=9)
        axes.grid(axis="y", linewidth=0.4)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(-0.6, len(groups) - 0.4)
        if key.endswith("imbalance"):
            axes.set_ylim(bottom=1.0)
        else:
            _cut_random(axes, documents, key)
    axes.set_xticks(range(len(groups)), [f"{name}\n{parts} parts" for name, parts in groups])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _cut_random(axes: Any, documents: dict[str, dict[str, Any]], key: str) -> None:
    """Random parts would dwarf the others: their bars are cut at the top, with their values written on them."""
    others = [
        r[key] for document in documents.values() for r in document["rows"] if key in r and r["solver"] != "random"
    ]
    top = 1.25 * max(others, default=1.0)
    axes.set_ylim(0, top)
    for bar in axes.patches:
        if bar.get_height() > top:
            x = bar.get_x() + bar.get_width() / 2
            axes.text(
                x, 0.97 * top, f"{bar.get_height():.2f}", ha="center", va="top", rotation=90, fontsize=8, color="white"
            )


def _case(row: dict[str, Any]) -> str:
    return f"{row['objective']}, {row['solver']}"


def _value(document: dict[str, Any], parts: int, case: str, key: str) -> float:
    """Not a number where there is no bar."""
    found = [row for row in document["rows"] if row["parts"] == parts and _case(row) == case and key in row]
    return float(found[0][key]) if found else float("nan")
