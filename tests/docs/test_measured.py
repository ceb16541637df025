"""docs/measured.md shows what its records have, and every record can be measured again by one command."""

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from docs_hooks import ROOT

from gsplit_bench.measured import HOST, RESULTS, ROWS, Row, find_record, read_record, table
from gsplit_bench.measurements import MEASUREMENTS

PAGE = (ROOT / "docs" / "measured.md").read_text()
NAMES = {measurement.name for measurement in MEASUREMENTS}


def test_the_page_shows_what_the_command_prints() -> None:
    assert PAGE.endswith(f"\n{table()}\n"), "copy the output of python -m gsplit_bench measured"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what[:40])
def test_every_row_is_short_and_names_its_record(row: Row) -> None:
    what, result, record, command = row.cells()
    assert re.search(r"\d|bit-identical", result) and len(result) < 100 and len(what) < 160
    links = re.findall(r"\]\(\.\./([^)]+)\)", record)
    assert links and all((ROOT / link).is_file() for link in links)
    assert re.fullmatch(r"`[^`]+`|\[commands\]\(scale\.md#[\w-]+\)", command)


def test_records_that_the_command_record_does_not_make_are_known() -> None:
    """They took hours, or compare two versions."""
    named = {name for row in ROWS for name in row.records}
    assert named - NAMES == {
        "billion-edges",
        "presampling",
        "solvers",
    }


def test_the_record_without_a_date_counts_and_then_the_newest() -> None:
    assert find_record("bare-loop").stem == "bare-loop"
    assert find_record("samplers").stem == "2026-11-17-samplers"


def test_the_loss_curves_of_float32_are_those_of_the_record() -> None:
    (cell,) = (row.cells()[1] for row in ROWS if row.what.startswith("loss curves of 60 steps"))
    apart = {model: max(map(float, re.findall(rf"{model} ([\d.e-]+)", cell))) for model in ("gat", "sage")}
    said = f"GAT move up to {apart['gat']:.1e} apart, of SAGE {apart['sage']:.1e}"
    assert said in _words(ROOT / "docs" / "numerics.md"), said


def test_records_without_a_date_are_of_one_commit() -> None:
    index = read_record("record")
    made = {path.name for path in RESULTS.iterdir() if path.is_file() and not re.match(r"\d{4}-", path.name)}
    listed = {name for entry in index["measurements"].values() for name in entry["files"]}
    assert made - {"record.json"} == {name for name in listed if not name.endswith(".html")}
    documents = [json.loads((RESULTS / name).read_text()) for name in made if name.endswith(".json")]
    commits = [document["commit"][:7] for document in documents if "commit" in document]
    assert len(commits) > 10 and set(commits) == {index["commit"][:7]} and not index["quick"]
    assert f"commit {index['commit'][:7]}" in PAGE


def _over_split(record: str, model: str, batch: int, system: str) -> list[float]:
    """CPU seconds over those of split on 2 and 4 ranks: geometric means over the graphs that have both."""
    found = {
        (each["graph"], each["ranks"], each["system"]): each["cpu_s"]["median"]
        for each in read_record(record)["records"]
        if (each["model"], each["batch_size"]) == (model, batch)
    }
    graphs = {graph for graph, _, name in found if name == system}
    return [
        geometric_mean(found[graph, ranks, system] / found[graph, ranks, "split"] for graph in sorted(graphs))
        for ranks in (2, 4)
    ]


def _words(page: Path) -> str:
    return " ".join(page.read_text().split())


def test_strategies_on_several_graphs_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    systems = ("data", "data(owner)", "hybrid(1)")
    for words, record, model, batch in (
        ("SAGE, batch 256", "training-main", "sage", 256),
        ("SAGE, batch 1024", "training-main", "sage", 1024),
        ("GAT, batch 256", "training-main", "gat", 256),
        ("GAT, batch 1024", "training-main", "gat", 1024),
        ("SAGE, batch 256, features on disk", "training-disk", "sage", 256),
        ("SAGE, batch 1024, features on disk", "training-disk", "sage", 1024),
        ("GAT, batch 256, features on disk", "training-disk", "gat", 256),
        ("GAT, batch 1024, features on disk", "training-disk", "gat", 1024),
    ):
        ratios = [_over_split(record, model, batch, system) for system in systems]
        cells = " | ".join(f"{two:.2f} / {four:.2f}" for two, four in ratios)
        assert f"| {words} | {cells} |" in page, cells
    of_sage = [100 * (ratio - 1) for ratio in _over_split("training-main", "sage", 256, "data(owner)")]
    said = f"{of_sage[0]:.0f} % more and {-of_sage[1]:.0f} % less"
    assert f"[on four graphs](performance.md#strategy) {said}" in (ROOT / "docs" / "strategies.md").read_text(), said
    assert f"on four graphs {said}" in _words(ROOT / "docs" / "faq.md"), said
    owner, hybrid = (_over_split("training-main", "gat", 1024, system) for system in systems[1:])
    within = max(abs(ratio - 1) for ratio in (*owner, *hybrid))
    said = f"for GAT at 1024, `split`, `data(owner)` and `hybrid(1)` are equal within {100 * within:.0f} %"
    assert said in _words(ROOT / "docs" / "strategies.md"), said


def test_data_parallelism_by_owner_against_split_is_that_of_the_record() -> None:
    records = [record for name in HOST for record in read_record(name)["records"] if record["ranks"] > 1]
    cpu = {(each["graph"], each["model"], each["ranks"], each["system"]): each["cpu_s"]["median"] for each in records}
    ratios = [cost / cpu[*key, "split"] for (*key, system), cost in cpu.items() if system == "data(owner)"]
    said = f"At 1024 `split` or `data(owner)`, which takes {min(ratios):.2f} to {max(ratios):.2f} of its CPU time"
    assert len(ratios) == 20 and said in (ROOT / "docs" / "strategies.md").read_text(), said


def test_the_gain_by_the_allocator_is_that_of_the_records() -> None:
    """CPU seconds with glibc's defaults over those with tuned settings, in the cases that both have."""
    default, tuned = (
        {
            (each["system"], *(each[key] for key in ("graph", "model", "ranks", "batch_size"))): each["cpu_s"]["median"]
            for name in names
            for each in read_record(name)["records"]
        }
        for names in (("training-default-allocator",), HOST)
    )
    ratios = {
        system: [default[case] / tuned[case] for case in default if case[0] == system and case in tuned]
        for system in ("split", "dgl", "pyg_our_sampler")
    }
    assert {len(found) for found in ratios.values()} == {10}
    ours, (dgl, pyg) = ratios["split"], (geometric_mean(ratios[peer]) for peer in ("dgl", "pyg_our_sampler"))
    page = _words(ROOT / "docs" / "performance.md")
    said = f"took {min(ours):.2f} to {max(ours):.2f} times the CPU seconds, geometric mean {geometric_mean(ours):.2f}"
    assert f"{said}; a step of DGL took {dgl:.2f} times, of PyG {pyg:.2f} times" in page, said


def test_the_memory_of_the_allocator_settings_is_that_of_the_records() -> None:
    default, tuned = (
        {
            tuple(each[key] for key in ("graph", "model", "ranks")): max(each["peak_bytes_per_rank"])
            for name in names
            for each in read_record(name)["records"]
        }
        for names in (("training-default-allocator",), HOST)
    )
    most = max(tuned[case] / default[case] for case in default if case in tuned)
    assert f"increase memory use by up to {most:.1f} times" in _words(ROOT / "docs" / "performance.md")
    assert f"[up to {most:.1f} times the memory]" in _words(ROOT / "docs" / "train-command.md")


def test_attention_is_that_of_the_record() -> None:
    shown = {row.what: row.cells()[1] for row in ROWS if row.records == ("attention",)}
    (layers, step), (layers2, step2) = (
        [
            re.findall(r"[\d.]+", re.search(r"PyG ([\d., ]+)", result)[1])  # type: ignore[index]
            for what, result in shown.items()
            if f" {kind} layer" in what or what.startswith(f"a step of {kind}:")
        ]
        for kind in ("GAT", "GATv2")
    )
    times = sorted(map(float, (*layers, *layers2)))
    said = f"The layer is {times[0]} to {times[-1]} times as fast as PyG's on one core"
    assert step[2] == step2[2]
    said += f", a whole step of GAT and GATv2 {step[0]} and {step2[0]} times on one rank, {step[2]} times on four"
    assert said in _words(ROOT / "docs" / "performance.md"), said


def test_sixty_four_ranks_are_those_of_the_record() -> None:
    """The busiest rank, arxiv, batch 4096."""
    counts: dict[str, Any] = {
        count["strategy"]: count
        for count in read_record("training-counted")["counts"]
        if count["graph"].startswith("arxiv") and (count["ranks"], count["batch_size"]) == (64, 4096)
    }
    (edges, other_edges), (rows, other_rows) = (
        [max(counts[strategy][key]) for strategy in ("split", "data")]
        for key in ("edges_per_rank", "rows_loaded_per_rank")
    )
    page = _words(ROOT / "docs" / "performance.md")
    assert f"computes {edges / 1e3:.0f} k edges and loads {rows / 1e3:.1f} k rows" in page
    assert f"that of `data` computes {other_edges / 1e3:.0f} k and loads {other_rows / 1e3:.0f} k" in page
    assert round(other_rows / rows) == 7
    said = f"a rank computes {edges / other_edges:.1f} of the edges and loads a seventh of the rows of `data`"
    assert said in _words(ROOT / "docs" / "strategies.md")
