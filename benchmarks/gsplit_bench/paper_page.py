"""The page of ``python -m gsplit_bench paper``: its documents as tables and pictures, and what the machine cannot do."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsplit.report.figures import as_png
from gsplit.report.page import Picture, Section, Table, write_pictures
from gsplit.store.reader import open_store
from gsplit_bench.paper_table import GRAPHS, MEASURED, MODELS, System
from gsplit_bench.partition import draw_partitions
from gsplit_bench.report.comparison import Clock, describe, group, seconds, varying
from gsplit_bench.report.documents import BenchTrain, TrainRecord, read_material
from gsplit_bench.report.figures import draw_ablation, draw_accuracy, draw_scaling, draw_stages
from gsplit_bench.report.tables import as_markdown, tabulate_sources
from gsplit_bench.train_records import group_stages
from gsplit_bench.train_study import find_preset

__all__ = ["EDGE_SUFFIX", "PaperPage", "write_paper"]

EDGE_SUFFIX = "-edge"
"""Of the name of a store that was partitioned by the objective edge."""
_NAMES = {
    "split": "GSplit",
    "dgl": "DGL",
    "p3": "P3*",
    "pyg": "PyG",
    "pyg_our_sampler": "PyG, our sampler",
    "quiver": "Quiver's cache",
}
_CANNOT = """- **Quiver** itself needs GPUs. "Quiver's cache" is GSplit's data parallelism with a cache of its kind, in Table 3 only.
- **Hosts** (Figure 6b): replicas stand for hosts, on this one. Network namespaces: `gsplit_bench host-steps`.
- **Figure 7 with DGL**: peers draw other samples, and GSplit's evaluation does not run their models.
- **Figure 5 as a distribution**: means over an epoch that was not presampled.
- **The paper's machine** (4 and 8 GPUs) and its graphs, unless their stores were given: `gsplit import snap`,
  `gsplit import ogb`. Its numbers beside a model of its machine: `gsplit_bench planner-paper`.
"""
_HEAD = "# The paper's evaluation on this machine\n\nGraphs: {}. Device of the models: {}.\n"
_TRIAL = "\n**A trial (`--quick` or `--device sim`): it shows that everything runs. Its times mean nothing.**\n"
_FIGURE_6 = {
    "figure6a": ("Figure 6a: ranks of one host", "More ranks; those that were not measured are counted."),
    "figure6b": ("Figure 6b: replicas", "The same ranks as one split, and as data-parallel replicas."),
    "figure6c": ("Figure 6c: hidden size", ""),
    "figure6d": ("Figure 6d: size of the mini-batch", ""),
    "figure6e": ("Figure 6e: layers", ""),
}


@dataclass(frozen=True)
class PaperPage:
    """The page, and what must not be: launches that failed, and losses of our strategies that differ."""

    file: Path
    faults: list[str]


def write_paper(folder: Path, experiments: Sequence[str], *, is_trial: bool) -> PaperPage:
    """Write ``paper.md`` and its pictures from the documents in a folder; the others are named as missing."""
    made = {name: folder / f"{name}.json" for name in experiments}
    files = {name: file for name, file in made.items() if file.exists()}
    measured = {
        name: read_material([file]).benches[0] for name, file in files.items() if name not in ("table1", "figure5")
    }
    for name in ("table3-edge", "table3-cache"):
        if (file := folder / f"{name}.json").exists():
            measured[name] = read_material([file]).benches[0]
    makers: dict[str, Callable[[], list[Section]]] = {
        "table1": lambda: [_redundancy(json.loads(files["table1"].read_text()))],
        "table3": lambda: _epochs(folder, measured),
        "figure5": lambda: [_objectives(json.loads(files["figure5"].read_text()))],
        "figure7": lambda: [_accuracy(measured["figure7"])],
    } | {name: lambda name=name: [_ablation(name, measured[name])] for name in _FIGURE_6}
    sections = [section for name in files for section in makers[name]()]
    faults = [f"{name}: failed: {each}" for name, bench in measured.items() for each in bench.failures]
    faults += [f"{name}: LOSSES OF OUR STRATEGIES DIFFER" for name, bench in measured.items() if not bench.losses_equal]
    sections.append(_missing(measured, faults, [name for name in experiments if name not in files]))
    sections.append(Section("sources", "How this was made", tables=[tabulate_sources(list(measured.values()))]))
    write_pictures(sections, folder)
    page = folder / "paper.md"
    page.write_text("\n".join([_head(folder) + (_TRIAL if is_trial else ""), *map(_markdown, sections)]))
    return PaperPage(page, faults)


def _head(folder: Path) -> str:
    settings = json.loads((folder / "settings.json").read_text())
    graphs = {Path(path).stem: open_store(Path(path)).graph for path in settings["stores"]}
    sizes = [f"{name} ({graph.num_vertices:,} vertices, {graph.num_edges:,} edges)" for name, graph in graphs.items()]
    return _HEAD.format(", ".join(sizes), settings["device"])


def _markdown(section: Section) -> str:
    parts = [f"## {section.title}", section.text]
    parts += [f"{table.caption}\n\n{as_markdown(table)}" for table in section.tables]
    parts += [f"![{picture.caption}]({picture.name}.png)\n\n*{picture.caption}*" for picture in section.pictures]
    return "\n\n".join(part for part in parts if part) + "\n"


def _redundancy(documents: Sequence[Mapping[str, Any]]) -> Section:
    rows = []
    for document in documents:
        for found in document["redundancy"]:
            cells = [document["graph"], str(document["batch_size"]), str(found["ranks"])]
            for what in ("edges", "rows"):
                micro, mini = (found[what][who] for who in ("data", "mini"))
                cells += [f"{micro / 1e6:.2f} M", f"{mini / 1e6:.2f} M", f"{micro / mini:.2f}x"]
            rows.append(cells)
    columns = ["graph", "mini-batch", "ranks"]
    columns += [f"{what}, {how}" for what in ("edges", "rows") for how in ("micro", "mini", "ratio")]
    text = "Edges computed and input rows loaded by all ranks: a micro-batch for each (data parallel), or one mini-batch (split)."
    return Section("table1", "Table 1: redundancy", text, [Table("An epoch, counted.", columns, rows)])


def _epochs(folder: Path, measured: Mapping[str, BenchTrain]) -> list[Section]:
    """Table 3, and Figure 3 from its stages."""
    records = measured["table3"].records
    ranks = " or ".join(map(str, sorted({record.ranks for record in records})))
    text = f"""Seconds of an epoch on {ranks} ranks. S: sampling, with splitting. L: loading; rows read in place are read in FB. FB:
forward, backward and optimizer. S, L and FB are means of the ranks, the total is that of the slowest. All are the median
step times the steps of an epoch, each by itself, so stages need not sum to the total. Speed-up of GSplit: a system's total over GSplit's, and the same for the CPU seconds of all ranks,
which are to be compared where ranks share cores. `data` and `data_cached` are GSplit's own data parallelism; with
`data_cached` each input row is read by one rank and sent.

The paper's speed-ups, on its graphs and GPUs: {_speedups_of_the_paper()}."""
    tables = [_epoch_table(folder, "Features in memory; the systems take turns.", records)]
    if "table3-edge" in measured:
        caption = "GSplit on its own partition, and on one by edges (Edge): two launches, one after the other."
        tables.append(_epoch_table(folder, caption, [_name_edge(found) for found in measured["table3-edge"].records]))
    if "table3-cache" in measured:
        caption = f"""Features on disk, and out of the page cache before every step; each rank caches the hottest {find_preset("main").cache:.0%} of all
rows. GSplit and `data_cached`: an owner caches rows of its own, and reads the others once for all ranks. Quiver's cache: data
parallelism in which a rank reads the caches of all ranks directly, and what they do not have from the file, as the other ranks do.
`data`: every rank caches the same rows. Ranks share the page cache, so the second rank that reads a row does not wait for the disk."""
        tables.append(_epoch_table(folder, caption, measured["table3-cache"].records))
    caption = "Seconds per step by stage, features in memory: the bars of Figure 3, for every system."
    named = [record.model_copy(update={"system": _NAMES.get(record.system, record.system)}) for record in records]
    pictures = [
        Picture(f"figure3-{graph}", as_png(draw_stages(graph, named)), caption)
        for graph in dict.fromkeys(record.graph for record in records)
    ]
    return [
        Section("table3", "Table 3: seconds of an epoch", text, tables),
        Section("figure3", "Figure 3: stages", pictures=pictures),
    ]


def _name_edge(record: TrainRecord) -> TrainRecord:
    """The record of a store that was partitioned by edges, as that of the system Edge on the same graph."""
    if record.partition != "edge":
        return record
    graph = record.graph.removesuffix(EDGE_SUFFIX)
    return record.model_copy(update={"graph": graph, "system": "Edge", "partition": "gsplit"})


def _epoch_table(folder: Path, caption: str, records: Sequence[TrainRecord]) -> Table:
    rows = []
    for scenario, systems in group(records).items():
        targets = open_store(folder / f"{scenario.graph}.gsplit").stored_array("targets/train").size
        steps = int(targets) // scenario.batch_size
        for label, record in systems.items():
            stages = group_stages(record.stages_s)
            sums = (
                stages["sample"],
                stages["load"],
                sum(stages[name] for name in ("forward", "backward", "optimizer")),
            )
            times = (*sums, seconds(record, "wall"), seconds(record, "cpu"))
            cells = [scenario.graph, scenario.model, _NAMES.get(label, label)]
            cells += [f"{steps * second:.2f}" for second in times]
            rows.append(cells + [_over_split(systems, record, clock) for clock in ("wall", "cpu")])
    columns = ["graph", "model", "system", "S", "L", "FB", "total (s)", "CPU (s)", "speed-up", "speed-up, CPU"]
    return Table(caption, columns, rows)


def _over_split(systems: Mapping[str, TrainRecord], record: TrainRecord, clock: Clock) -> str:
    split = systems.get("split")
    if split is None or record is split or seconds(split, clock) == 0:
        return ""
    return f"{seconds(record, clock) / seconds(split, clock):.2f}x"


def _speedups_of_the_paper() -> str:
    others: tuple[System, ...] = ("DGL", "P3*", "Quiver", "Edge")
    texts = []
    for system in others:
        ratios = [
            sum(MEASURED[system, model][graph]) / sum(MEASURED["GSplit", model][graph])
            for model in MODELS
            for graph in GRAPHS
        ]
        texts.append(f"{system} {min(ratios):.1f} to {max(ratios):.1f}x")
    return ", ".join(texts)


def _objectives(documents: Sequence[dict[str, Any]]) -> Section:
    rows = []
    for document in documents:
        for row in document["rows"]:
            cells = [document["graph"], str(row["parts"]), row["objective"]]
            if "error" in row:
                rows.append([*cells, row["error"], "", ""])
                continue
            values = (f"{row['edge_imbalance']:.3f}", f"{row['rows_shuffled_per_input']:.3f}")
            rows.append([*cells, f"{row['cross_edge_share']:.1%}", *values])
    columns = [
        "graph",
        "parts",
        "objective",
        "cross edges",
        "edges, largest part / mean",
        "rows shuffled per input row",
    ]
    caption = "Means over the mini-batches of an epoch that was not presampled."
    picture = as_png(draw_partitions({document["graph"]: document for document in documents}))
    return Section(
        "figure5",
        "Figure 5: partition objectives",
        tables=[Table(caption, columns, rows)],
        pictures=[Picture("figure5", picture, "The same; bars of random parts are cut, with their values on them.")],
    )


def _ablation(name: str, bench: BenchTrain) -> Section:
    """A part of Figure 6: seconds of the other systems over those of split."""
    title, text = _FIGURE_6[name]
    scenarios = group(bench.records)
    names = varying(list(scenarios))
    systems = list(dict.fromkeys(label for found in scenarios.values() for label in found if label != "split"))
    rows = []
    for scenario, found in scenarios.items():
        cells = [scenario.graph, scenario.model, describe(scenario, names)]
        split = found.get("split")
        cells.append(f"{split.wall_s.median:.3f} ({split.cpu_s.median:.3f})" if split else "")
        for label in systems:
            over = [_over_split(found, found[label], clock) if label in found else "" for clock in ("wall", "cpu")]
            cells.append(f"{over[0]} ({over[1]})" if all(over) else "")
        rows.append(cells)
    columns = ["graph", "model", "scenario", "GSplit: s per step (CPU)", *(_NAMES.get(each, each) for each in systems)]
    caption = "Seconds of the other systems over those of GSplit (CPU seconds of all ranks in brackets)."
    pictures = []
    if systems:
        picture = as_png(draw_ablation(bench.records, lambda system: _NAMES.get(system, system)))
        pictures.append(Picture(name, picture, "CPU seconds of the other systems over those of GSplit."))
    if bench.counts:
        counted = "Counted per step, of the busiest rank."
        pictures.append(Picture(f"{name}-counted", as_png(draw_scaling(bench.counts)), counted))
    return Section(name, title, text, [Table(caption, columns, rows)], pictures)


def _accuracy(bench: BenchTrain) -> Section:
    scenarios = group(bench.records)
    rows = [
        [
            scenario.graph,
            scenario.model,
            _NAMES.get(label, label),
            f"{last.loss:.4f}",
            ", ".join(f"{name} {value:.2%}" for name, value in last.accuracies.items()),
        ]
        for scenario, systems in scenarios.items()
        for label, record in systems.items()
        for last in record.epochs[-1:]
    ]
    text = "Our strategies compute the same steps, so their curves must lie on each other."
    pictures = [Picture("figure7", as_png(draw_accuracy(bench.records)), "Loss and accuracy after every epoch.")]
    table = Table("After the last epoch.", ["graph", "model", "system", "mean loss", "accuracy"], rows)
    return Section("figure7", "Figure 7: accuracy", text, [table], pictures if bench.records else [])


def _missing(measured: Mapping[str, BenchTrain], faults: Sequence[str], names: Sequence[str]) -> Section:
    notes: dict[str, list[str]] = {}
    for name, bench in measured.items():
        for note in bench.notes:
            notes.setdefault(note, []).append(name)
    lines = [*faults, *([f"Not run: {', '.join(names)}."] if names else [])]
    lines += [f"{', '.join(where)}: {note}" for note, where in notes.items()]
    return Section("missing", "What is not here, and why", _CANNOT + "\n".join(f"- {line}" for line in lines))
