"""From files and folders to a report on disk: what ``gsplit report`` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsplit.bench.partition_figure import load_figure
from gsplit.errors import InputError, explain
from gsplit.report.material import read_material
from gsplit.report.page import write_page, write_pictures
from gsplit.report.sections import make_sections
from gsplit.report.tables import as_markdown, tabulate_advice
from gsplit.report.trace import write_trace
from gsplit.run.recipe import check_new_file

__all__ = ["Written", "write_report"]


@dataclass(frozen=True)
class Written:
    """What was written; ``num_spans``: of the trace."""

    page: Path
    sections: list[str]
    pictures: list[Path]
    trace: Path | None
    num_spans: int
    markdown: Path | None

    @property
    def files(self) -> list[Path]:
        """Every file."""
        return [path for path in (self.page, *self.pictures, self.trace, self.markdown) if path is not None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "page": str(self.page),
            "sections": self.sections,
            "pictures": [str(path) for path in self.pictures],
            "trace": None if self.trace is None else {"file": str(self.trace), "spans": self.num_spans},
            "markdown": None if self.markdown is None else str(self.markdown),
        }


def write_report(
    sources: Sequence[Path],
    out: Path,
    *,
    png: Path | None = None,
    trace: Path | None = None,
    markdown: Path | None = None,
    overwrite: bool = False,
) -> Written:
    """Read everything first, then write: a source that is refused leaves nothing behind."""
    for path in (out, trace, markdown):
        if path is not None:
            check_new_file(path, overwrite=overwrite)
    material = read_material(sources)
    records = [record for bench in material.benches for record in bench.records if not record.epochs]
    advice = tabulate_advice(records)
    if markdown is not None and not advice.rows:
        fix = "give a document of gsplit bench train"
        raise InputError(explain("--markdown", "records of our strategies", "none", fix))
    load_figure()
    num_spans = 0 if trace is None else write_trace(material.runs, trace)
    sections = make_sections(material)
    write_page(sections, out)
    pictures = [] if png is None else write_pictures(sections, png)
    if markdown is not None:
        markdown.write_text(as_markdown(advice) + "\n")
    return Written(out, [section.name for section in sections], pictures, trace, num_spans, markdown)
