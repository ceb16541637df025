"""The sections of a report of benchmarks: each made from what was given, and left out where there is nothing for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsplit.errors import InputError, explain
from gsplit.report.figures import as_png, load_figure
from gsplit.report.page import (
    Picture,
    ReportFiles,
    Section,
    learning_pictures,
    load_pictures,
    tabulate_runs,
    timeline_section,
    write_files,
)
from gsplit.run.preflight import check_new_file
from gsplit_bench.partition import draw_partitions
from gsplit_bench.report.comparison import compare_with_peers, find_redundancy, split_against
from gsplit_bench.report.documents import Count, Material, TrainRecord, read_material
from gsplit_bench.report.figures import (
    draw_accuracy,
    draw_crossover,
    draw_loads,
    draw_objectives,
    draw_planner,
    draw_redundancy,
    draw_rivalry,
    draw_scaling,
    draw_speedups,
    draw_stages,
)
from gsplit_bench.report.tables import (
    as_markdown,
    planner_errors,
    tabulate_advice,
    tabulate_records,
    tabulate_sources,
    tabulate_speedups,
)

__all__ = ["StudyReport", "make_sections", "write_study"]


@dataclass(frozen=True)
class StudyReport:
    """What was written."""

    written: ReportFiles
    markdown: Path | None

    @property
    def files(self) -> list[Path]:
        """Every file."""
        return [*self.written.files, *([] if self.markdown is None else [self.markdown])]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.written.as_dict() | {"markdown": None if self.markdown is None else str(self.markdown)}


def write_study(
    sources: Sequence[Path],
    out: Path,
    *,
    png: Path | None = None,
    trace: Path | None = None,
    markdown: Path | None = None,
    overwrite: bool = False,
) -> StudyReport:
    """Read everything first, then write: a source that is refused leaves nothing behind."""
    for path in (out, trace, markdown):
        if path is not None:
            check_new_file(path, overwrite=overwrite)
    material = read_material(sources)
    records = [record for bench in material.benches for record in bench.records if not record.epochs]
    tables = [tabulate_advice(records), tabulate_speedups(records), tabulate_records(records)]
    if markdown is not None and not tables[0].rows:
        fix = "give a document of gsplit_bench train"
        raise InputError(explain("--markdown", "records of our strategies", f"{len(records)} records", fix))
    load_figure()
    written = write_files(make_sections(material), material.runs, out, png=png, trace=trace)
    if markdown is not None:
        markdown.write_text("\n".join(f"## {each.caption}\n{as_markdown(each)}\n" for each in tables if each.rows))
    return StudyReport(written, markdown)


def make_sections(material: Material) -> list[Section]:
    """All sections that the material is enough for, in the order of the page."""
    every = [record for bench in material.benches for record in bench.records]
    records = [record for record in every if not record.epochs]  # those of accuracy did not take turns
    counts = [count for bench in material.benches for count in bench.counts]
    makers: tuple[Callable[[], Section | None], ...] = (
        lambda: _summary(material, every),
        lambda: _advice(records),
        lambda: _stages(records),
        lambda: _speedups(records),
        lambda: _redundancy(records, counts),
        lambda: _rivalry(records),
        lambda: _crossover(records),
        lambda: _partitions(material, records),
        lambda: _scaling(counts),
        lambda: _planner(material),
        lambda: _loads(material, records),
        lambda: _timeline(material),
        lambda: _learning(material, every),
    )
    return [section for section in (make() for make in makers) if section is not None]


def _summary(material: Material, records: list[TrainRecord]) -> Section | None:
    tables = [tabulate_sources(material.benches), tabulate_runs(material.runs), tabulate_records(records)]
    text = "What was run, on what hardware, when, at which commit, and the command that repeats it."
    tables = [table for table in tables if table.rows]
    return Section("summary", "Summary", text, tables) if tables else None


def _advice(records: list[TrainRecord]) -> Section | None:
    table = tabulate_advice(records)
    text = (
        "The fastest of our strategies by wall time, measured on the hardware above; one process where it was measured."
    )
    return Section("when", "When to use what", text, [table]) if table.rows else None


def _stages(records: list[TrainRecord]) -> Section | None:
    graphs = list(dict.fromkeys(record.graph for record in records if record.stages_s))
    if not graphs:
        return None
    caption = "Mean of the ranks, medians over the repeats; the black line is the wall time of the slowest rank."
    pictures = [Picture(f"stages-{graph}", as_png(draw_stages(graph, records)), caption) for graph in graphs]
    return Section("stages", "Where the time goes", pictures=pictures)


def _speedups(records: list[TrainRecord]) -> Section | None:
    found = compare_with_peers(records)
    if not found:
        return None
    caption = "Seconds of a peer over seconds of the best of our strategies, in each scenario."
    return Section(
        "speedups",
        "Speed-ups over peers",
        "A peer with our allocator setting, and as its users run it (default allocator).",
        [tabulate_speedups(records)],
        [Picture("speedups", as_png(draw_speedups(found)), caption)],
    )


def _redundancy(records: list[TrainRecord], counts: list[Count]) -> Section | None:
    found = [each for each in find_redundancy(records, counts) if each.ranks > 1]
    if not found:
        return None
    caption = "Data parallelism computes and loads some vertices on several ranks; split parallelism each of them once."
    return Section(
        "redundancy", "Redundancy", pictures=[Picture("redundancy", as_png(draw_redundancy(found)), caption)]
    )


def _rivalry(records: list[TrainRecord]) -> Section | None:
    found = [
        each for each in split_against(records) if each.rival in ("data", "data_cached") and each.redundancy is not None
    ]
    if not found:
        return None
    caption = "The same kernels and the same sample on both sides: only who computes what differs."
    return Section(
        "curve", "What redundancy is worth", pictures=[Picture("curve", as_png(draw_rivalry(found)), caption)]
    )


def _crossover(records: list[TrainRecord]) -> Section | None:
    found = split_against(records)
    if len({each.scenario.batch_size for each in found}) < 2:
        return None
    caption = "Above 1: split is faster. Another sampler (split+labor) draws another sample, with fewer vertices."
    picture = Picture("crossover", as_png(draw_crossover(found)), caption)
    return Section("crossover", "Who wins where", pictures=[picture])


def _partitions(material: Material, records: list[TrainRecord]) -> Section | None:
    pictures = []
    documents = {name: bench.model_dump(exclude_none=True) for name, bench in material.partitions.items()}
    if documents:
        caption = "On mini-batches that were not used for the weights (gsplit_bench partition)."
        pictures.append(Picture("partition", as_png(draw_partitions(documents)), caption))
    if len({record.partition for record in records if record.system == "split" and record.partition}) > 1:
        caption = "The strategy split on partitions by each objective (gsplit_bench train)."
        pictures.append(Picture("objectives", as_png(draw_objectives(records)), caption))
    return Section("partition", "Partition objectives", pictures=pictures) if pictures else None


def _scaling(counts: list[Count]) -> Section | None:
    if not counts:
        return None
    most = max(count.ranks for count in counts)
    text = (
        "Counted by the code of training with all ranks in one process; no time was measured at these numbers of ranks."
    )
    picture = Picture("scaling", as_png(draw_scaling(counts)), "Per step, of the busiest rank.")
    return Section("scaling", f"Scaling to {most} ranks", text, pictures=[picture])


def _planner(material: Material) -> Section | None:
    if not any(check.points for check in material.checks.values()):
        return None
    checks = {name: check for name, check in material.checks.items() if check.points}
    pictures = [
        Picture(
            f"planner-{name}", as_png(draw_planner(check.points)), "The band is 20 % to either side of the diagonal."
        )
        for name, check in checks.items()
    ]
    return Section("planner", "Predicted against measured", "", [planner_errors(checks)], pictures)


def _timeline(material: Material) -> Section | None:
    section = timeline_section(material.runs)
    return section if section.pictures else None


def _loads(material: Material, records: list[TrainRecord]) -> Section | None:
    pictures = []
    if any(len(record.cpu_s_per_rank) > 1 for record in records):
        caption = "The number over a system is its busiest rank over the mean."
        pictures.append(Picture("loads", as_png(draw_loads(records)), caption))
    return _with_pictures("loads", "Load of the ranks", pictures + load_pictures(material.runs))


def _learning(material: Material, records: list[TrainRecord]) -> Section | None:
    pictures = []
    if any(record.epochs for record in records):
        caption = "All strategies compute the same step, so their curves lie on each other."
        pictures.append(Picture("accuracy", as_png(draw_accuracy(records)), caption))
    return _with_pictures("learning", "Loss and scores", pictures + learning_pictures(material.runs))


def _with_pictures(name: str, title: str, pictures: list[Picture]) -> Section | None:
    return Section(name, title, pictures=pictures) if pictures else None
