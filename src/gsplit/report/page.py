"""The report of runs: its sections, as one HTML file without scripts, fonts or links to other files."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from gsplit.errors import InputError, explain
from gsplit.files.atomic import write_atomic
from gsplit.report.figures import as_png, draw_run, draw_run_loads, draw_timeline, load_figure, typical_window
from gsplit.report.reading import Run, read_run
from gsplit.report.trace import write_trace
from gsplit.run.preflight import check_new_file

__all__ = [
    "Picture",
    "ReportFiles",
    "Section",
    "Table",
    "learning_pictures",
    "load_pictures",
    "run_sections",
    "tabulate_runs",
    "timeline_section",
    "write_files",
    "write_page",
    "write_pictures",
    "write_report",
]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #fff; max-width: 1200px; margin: 2em auto }
h1 { font-size: 1.6em }
h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ced4da }
nav a { margin-right: 1em }
img { max-width: 100%; height: auto }
figure { margin: 1em 0 }
figcaption { color: #495057; font-size: .9em }
table { border-collapse: collapse; font-size: .85em; display: block; overflow-x: auto; margin: 1em 0 }
caption { text-align: left; font-weight: 600 }
th, td { padding: .2em .7em .2em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e9ecef }
td { font-variant-numeric: tabular-nums }
"""


@dataclass(frozen=True)
class Table:
    """A table of text."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG picture. ``name`` is its file name without suffix."""

    name: str
    png: bytes
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def write_page(sections: Sequence[Section], path: Path) -> None:
    """Write the page. The file is complete, or is not there."""
    links = "".join(f'<a href="#{escape(s.name)}">{escape(s.title)}</a>' for s in sections)
    body = "\n".join(_section(section) for section in sections)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>GSplit report</title><style>{_STYLE}</style></head>
<body>
<h1>GSplit report</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""
    write_atomic(path, [page.encode()])


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.name)}">', f"<h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    parts += [_table(table) for table in section.tables]
    for picture in section.pictures:
        data = base64.b64encode(picture.png).decode()
        caption = escape(picture.caption)
        image = f'<img src="data:image/png;base64,{data}" alt="{escape(picture.name)}: {caption}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>"
    return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"


def write_pictures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write every picture as a PNG file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _picture_files(sections, folder)
    for path, picture in files.items():
        path.write_bytes(picture.png)
    return list(files)


def _picture_files(sections: Sequence[Section], folder: Path) -> dict[Path, Picture]:
    pictures = (picture for section in sections for picture in section.pictures)
    return {folder / f"{_file_name(picture.name)}.png": picture for picture in pictures}


def _file_name(name: str) -> str:
    """Replace the characters of a user's name that do not belong in file names.

    >>> _file_name("stages-a/b c")
    'stages-a-b-c'
    """
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def tabulate_runs(runs: Sequence[Run]) -> Table:
    """A table of runs. The first step, which compiles, is left out of the seconds."""
    rows = []
    for run in runs:
        settings = run.settings
        history = run.history
        times = history.step_seconds[1:] or history.step_seconds
        best = run.best_score
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


def load_pictures(runs: Sequence[Run]) -> list[Picture]:
    """The work of every rank, of runs with several ranks."""
    caption = "Means over the newest steps that these ranks computed together."
    return [Picture(f"loads-{run.name}", as_png(draw_run_loads(run)), caption) for run in runs if run.num_ranks > 1]


def learning_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Losses and evaluations."""
    pictures = []
    for run in runs:
        if run.history.losses:
            caption = f"{run.settings.model}, {run.settings.strategy}, batch {run.settings.batch_size}."
            pictures.append(Picture(f"losses-{run.name}", as_png(draw_run(run)), caption))
    return pictures


def timeline_section(runs: Sequence[Run]) -> Section:
    """One step of every run."""
    pictures = []
    for run in runs:
        if (window := typical_window(run)) is not None:
            caption = f"{run.settings.model}, hidden {run.settings.hidden}, batch {run.settings.batch_size}."
            pictures.append(Picture(f"timeline-{run.name}", as_png(draw_timeline(run, window)), caption))
    text = "A step of median length. Narrow bars are stages within another. Exchanges include waiting for other ranks."
    return Section("timeline", "Timeline of one step", text, pictures=pictures)


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """The sections of the page; those without content are left out."""
    sections = (
        Section("summary", "Summary", tables=[tabulate_runs(runs)]),
        Section("loads", "Load of the ranks", pictures=load_pictures(runs)),
        timeline_section(runs),
        Section("learning", "Loss and scores", pictures=learning_pictures(runs)),
    )
    return [section for section in sections if section.tables or section.pictures]


@dataclass(frozen=True)
class ReportFiles:
    """The files that were written. ``num_spans``: spans in the trace."""

    page: Path
    sections: list[str]
    pictures: list[Path]
    trace: Path | None
    num_spans: int

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.page, *self.pictures, self.trace) if path is not None]

    def as_dict(self) -> dict[str, Any]:
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
    return ReportFiles(
        page=out,
        sections=[section.name for section in sections],
        pictures=pictures,
        trace=trace,
        num_spans=num_spans,
    )


def write_report(
    folders: Sequence[Path], out: Path, *, png: Path | None = None, trace: Path | None = None, overwrite: bool = False
) -> ReportFiles:
    """Write the report of some run folders. All runs are read first, so a refused folder leaves no files."""
    for path in (out, trace):
        if path is not None:
            check_new_file(path, overwrite=overwrite)
    for folder in folders:
        if not folder.is_dir():
            fix = "check the path of the run; for records of benchmarks: python -m gsplit_bench report, in a checkout"
            got = "a file" if folder.exists() else "no such folder"
            raise InputError(explain(folder, "a folder of gsplit train --out", got, fix))
    runs = _name_apart({folder.resolve(): read_run(folder) for folder in folders})
    load_figure()
    sections = run_sections(runs)
    if png is not None and png.is_dir():
        for path in _picture_files(sections, png):
            check_new_file(path, overwrite=overwrite)
    return write_files(sections, runs, out, png=png, trace=trace)


def _name_apart(runs: dict[Path, Run]) -> list[Run]:
    """Runs with the names of their folders, and of as many folders around them as tell them apart."""
    for depth in range(1, max((len(folder.parts) for folder in runs), default=0) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in runs]
        if len({_file_name(name) for name in names}) == len(names):
            return [replace(run, name=name) for run, name in zip(runs.values(), names, strict=True)]
    return list(runs.values())
