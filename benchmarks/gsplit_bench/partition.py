"""Partitions by several objectives and solvers, on mini-batches that were not used for the weights, and their figure."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gsplit.errors import GSplitError, InputError, explain
from gsplit.partitioning.forecast import imbalance
from gsplit.partitioning.plan import PartitionPlan, find_parts
from gsplit.partitioning.presample import Counts, Workload, draw_epochs, presample
from gsplit.partitioning.quality import Quality, expect, measure
from gsplit.partitioning.settings import C_E, C_V, EPOCHS, TOLERANCE, PartitionSettings
from gsplit.progress import Progress, silent
from gsplit.report.figures import load_figure

__all__ = ["CASES", "bench_partition", "draw_partitions", "parse_cases", "save_partitions"]

CASES = (
    ("gsplit", "metis"),
    ("node", "metis"),
    ("edge", "metis"),
    ("random", "random"),
    ("gsplit", "mtkahypar"),
    ("gsplit", "restream"),
)


def parse_cases(given: Sequence[str] | None) -> list[tuple[str, str]] | None:
    """``objective:solver`` each.

    >>> parse_cases(["gsplit:metis"])
    [('gsplit', 'metis')]
    """
    if not given:
        return None
    for case in given:
        if case.count(":") != 1:
            raise InputError(explain("--case", "objective:solver, such as gsplit:metis", case, "give both"))
    return [(objective, solver) for objective, solver in (case.split(":") for case in given)]


def bench_partition(
    workload: Workload,
    parts: Sequence[int],
    *,
    cases: Sequence[tuple[str, str]] | None = None,
    epochs: int = EPOCHS,
    held_out: int = 1,
    tolerance: float = TOLERANCE,
    c_v: float = C_V,
    c_e: float = C_E,
    folder: Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Presample ``epochs``, partition by every case, and measure all on the ``held_out`` epochs after them.

    Without ``cases``: all of ``CASES`` whose solver is installed. A case that fails has its reason in its row.
    """
    chosen = [case for case in CASES if case[1] != "mtkahypar" or find_spec("mtkahypar")] if cases is None else cases
    settings = [
        PartitionSettings(
            parts=number,
            objective=objective,
            solver=solver,
            tolerance=tolerance,
            c_v=c_v,
            c_e=c_e,
            seed=workload.seed,
        )
        for number in parts
        for objective, solver in chosen
    ]
    started = time.perf_counter()
    counts = presample(workload, epochs=epochs, progress=progress)
    presampling = time.perf_counter() - started
    rows: list[dict[str, Any]] = []
    plans: list[tuple[dict[str, Any], PartitionPlan]] = []
    for setting in settings:
        progress("partition", len(rows), len(settings))
        row, plan = _solve(workload, counts, setting, folder)
        rows.append(row)
        if plan is not None:
            plans.append((row, plan))
    partitions = [(plan.parts, row["parts"]) for row, plan in plans]
    batches = draw_epochs(workload, range(epochs, epochs + held_out))
    for (row, plan), quality in zip(plans, measure(workload.graph, batches, partitions, c_v, c_e), strict=True):
        row |= quality.as_dict() | _compare(workload, counts, plan, quality, row["parts"])
    return {
        "num_vertices": workload.graph.num_vertices,
        "num_edges": workload.graph.num_edges,
        "num_targets": int(workload.targets.size),
        "num_neighbors": workload.num_neighbors,
        "batch_size": workload.batch_size,
        "tolerance": tolerance,
        "c_v": c_v,
        "c_e": c_e,
        "presampling": {
            "epochs": epochs,
            "batches": counts.num_batches,
            "seconds": presampling,
            "count_bytes": counts.num_bytes,
        },
        "held_out_batches": held_out * workload.steps_per_epoch,
        "rows": rows,
    }


def _solve(
    workload: Workload, counts: Counts, settings: PartitionSettings, folder: Path | None
) -> tuple[dict[str, Any], PartitionPlan | None]:
    row: dict[str, Any] = {"parts": settings.parts, "objective": settings.objective, "solver": settings.solver}
    started = time.perf_counter()
    try:
        with TemporaryDirectory(prefix="gsplit-", dir=folder) as work:
            plan = find_parts(workload, counts, settings, Path(work))
    except GSplitError as error:
        return row | {"error": str(error)}, None
    whole, solution = time.perf_counter() - started, plan.solution
    return row | {
        "seconds": solution.seconds,
        "seconds_with_weighing": whole,
        "peak_bytes": solution.peak_bytes,
        "estimated_bytes": solution.estimated_bytes,
    }, plan


def _compare(workload: Workload, counts: Counts, plan: PartitionPlan, quality: Quality, parts: int) -> dict[str, Any]:
    """The theorem: what the weights expect beside what was measured, with its confidence interval."""
    expected = expect(workload.graph, counts, plan.parts, parts, quality.c_v, quality.c_e)
    (crossing, crossing_half), (loads, loads_half) = quality.cross_edges(), quality.mean_loads()
    return {
        "expected": {
            "cross_edges": expected.cross_edges,
            "cross_edge_share": expected.cross_edge_share,
            "loads": expected.loads.tolist(),
            "work_imbalance": float(imbalance(expected.loads)),
        },
        "measured": {
            "cross_edges": crossing,
            "cross_edges_95": crossing_half if isfinite(crossing_half) else None,
            "loads": loads.tolist(),
            "loads_95": loads_half.tolist() if isfinite(crossing_half) else None,
        },
        "cross_edges_off": _off(crossing, expected.cross_edges),
        "load_off": max(abs(_off(*pair)) for pair in zip(loads, expected.loads, strict=True)),
    }


def _off(measured: float, expected: float) -> float:
    """How far off, of what was expected. What was never drawn can be found later, so nothing expected is no fault."""
    return float(measured / expected - 1) if expected else 0.0


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
