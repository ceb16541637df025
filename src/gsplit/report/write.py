"""The report of runs: its sections, and the files that ``gsplit report`` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gsplit.errors import InputError, explain
from gsplit.report.drawing import as_png, load_figure
from gsplit.report.page import Picture, Section, Table, write_page, write_pictures
from gsplit.report.reading import Run, read_run
from gsplit.report.run_figures import draw_run, draw_run_loads
from gsplit.report.timeline import draw_timeline, typical_window
from gsplit.report.trace import write_trace
from gsplit.run.recipe import check_new_file

__all__ = [
    "ReportFiles",
    "learning_section",
    "loads_section",
    "run_sections",
    "tabulate_runs",
    "timeline_section",
    "write_files",
    "write_report",
]


def tabulate_runs(runs: Sequence[Run]) -> Table:
    """Runs of ``gsplit train``; the first step, which compiles, is left out of the seconds."""
    rows = []
    for run in runs:
        settings, history = run.settings, run.history
        times = history.step_seconds[1:] or history.step_seconds
        best = max((e.get("val", 0.0) for e in history.evaluations), default=None)
        rows.append(
            [
                run.name,
                f"{settings.model}, hidden {settings.hidden}",
                settings.strategy,
                str(run.num_ranks),
                str(settings.batch_size),
                ",".join(map(str, settings.fanout)),
                str(len(history.losses)),
                f"{median(times):.3f}" if times else "",
                f"{history.losses[-1]:.4f}" if history.losses else "",
                "" if best is None else f"{best:.4f}",
            ]
        )
    columns = ["run", "model", "strategy", "ranks", "batch", "fanout", "steps", "s per step", "last loss", "best val"]
    return Table("Runs", columns, rows)


def loads_section(runs: Sequence[Run], others: Sequence[Picture] = ()) -> Section | None:
    """What every rank did; ``others`` are pictures to show before those of the runs."""
    pictures = list(others)
    for run in runs:
        if run.num_ranks > 1:
            caption = "Means over the steps in the telemetry."
            pictures.append(Picture(f"loads-{run.name}", as_png(draw_run_loads(run)), caption))
    return Section("loads", "Load of the ranks", pictures=pictures) if pictures else None


def timeline_section(runs: Sequence[Run]) -> Section | None:
    """One step of every run."""
    pictures = []
    for run in runs:
        if (window := typical_window(run)) is not None:
            caption = f"{run.settings.model}, hidden {run.settings.hidden}, batch {run.settings.batch_size}."
            pictures.append(Picture(f"timeline-{run.name}", as_png(draw_timeline(run, window)), caption))
    text = (
        "A step of median length. Narrow bars are stages within another; waiting for other ranks is in the exchanges."
    )
    return Section("timeline", "Timeline of one step", text, pictures=pictures) if pictures else None


def learning_section(runs: Sequence[Run], others: Sequence[Picture] = ()) -> Section | None:
    """Losses and evaluations; ``others`` are pictures to show before those of the runs."""
    pictures = list(others)
    for run in runs:
        if run.history.losses:
            caption = f"{run.settings.model}, {run.settings.strategy}, batch {run.settings.batch_size}."
            pictures.append(Picture(f"losses-{run.name}", as_png(draw_run(run)), caption))
    return Section("learning", "Loss and accuracy", pictures=pictures) if pictures else None


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """All sections that the runs are enough for, in the order of the page."""
    summary = Section("summary", "Summary", tables=[tabulate_runs(runs)])
    found = (loads_section(runs), timeline_section(runs), learning_section(runs))
    return [summary, *(section for section in found if section is not None)]


@dataclass(frozen=True)
class ReportFiles:
    """What was written; ``num_spans``: of the trace."""

    page: Path
    sections: list[str]
    pictures: list[Path]
    trace: Path | None
    num_spans: int

    @property
    def files(self) -> list[Path]:
        """Every file."""
        return [path for path in (self.page, *self.pictures, self.trace) if path is not None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "page": str(self.page),
            "sections": self.sections,
            "pictures": [str(path) for path in self.pictures],
            "trace": None if self.trace is None else {"file": str(self.trace), "spans": self.num_spans},
        }


def write_files(
    sections: Sequence[Section], runs: Sequence[Run], out: Path, *, png: Path | None, trace: Path | None
) -> ReportFiles:
    """Write the trace, the page and the pictures."""
    num_spans = 0 if trace is None else write_trace(runs, trace)
    write_page(sections, out)
    pictures = [] if png is None else write_pictures(sections, png)
    return ReportFiles(out, [section.name for section in sections], pictures, trace, num_spans)


def write_report(
    folders: Sequence[Path], out: Path, *, png: Path | None = None, trace: Path | None = None, overwrite: bool = False
) -> ReportFiles:
    """Read all runs first, then write: a folder that is refused leaves nothing behind."""
    for path in (out, trace):
        if path is not None:
            check_new_file(path, overwrite=overwrite)
    for folder in folders:
        if not folder.is_dir():
            fix = "for records of benchmarks: python -m gsplit_bench report, in a checkout"
            raise InputError(explain(folder, "a folder of gsplit train --out", "a file or nothing", fix))
    runs = [read_run(folder) for folder in folders]
    load_figure()
    return write_files(run_sections(runs), runs, out, png=png, trace=trace)
