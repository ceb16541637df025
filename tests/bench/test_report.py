"""A report: one page that needs nothing else, the sections that there is something for, and no wrong file in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_samples import (
    PageLinks,
    bench_document,
    count,
    partition_document,
    planner_document,
    record,
    save_run,
    write,
)

from gsplit.errors import InputError
from gsplit_bench.report.documents import read_material
from gsplit_bench.report.sections import make_sections, write_study

SOURCES: dict[str, tuple[object, set[str]]] = {
    "peers": (
        bench_document([record("arxiv", "sage", system, 2) for system in ("split", "dgl")]),
        {"summary", "when", "stages", "speedups", "loads"},
    ),
    "rivals": (
        bench_document([record("arxiv", "sage", system, 2, stages_s={}) for system in ("split", "data")]),
        {"summary", "when", "redundancy", "curve", "loads"},
    ),
    "batches": (
        bench_document(
            [
                record("arxiv", "sage", system, 2, stages_s={}, batch_size=size)
                for system in ("split", "split+labor")
                for size in (256, 1024)
            ]
        ),
        {"summary", "when", "crossover", "loads"},
    ),
    "objectives": (
        bench_document([record("arxiv", "sage", "split", 1, stages_s={}, partition=how) for how in ("gsplit", "edge")]),
        {"summary", "when", "partition"},
    ),
    "counts": (bench_document([], [count("arxiv", "split", ranks) for ranks in (2, 64)]), {"summary", "scaling"}),
    "planner": (planner_document(), {"planner"}),
    "partition": (partition_document(), {"partition"}),
    "accuracy": (
        bench_document([record("arxiv", "sage", "split", 2, epochs=[{"epoch": 0, "loss": 1.0, "accuracies": {}}])]),
        {"summary", "learning"},
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_section_is_there_when_its_data_is(name: str, tmp_path: Path) -> None:
    document, expected = SOURCES[name]
    sections = make_sections(read_material([write(tmp_path / f"{name}.json", document)]))
    assert {section.name for section in sections} == expected
    for section in sections:
        assert section.tables or section.pictures
        assert all(picture.png.startswith(b"\x89PNG") and len(picture.png) > 5000 for picture in section.pictures)


def test_a_run_has_its_sections_and_one_without_spans_no_timeline(tmp_path: Path) -> None:
    run, plain = save_run(tmp_path / "run"), save_run(tmp_path / "plain", ranks=1, spans=False)
    names = [section.name for section in make_sections(read_material([run]))]
    assert names == ["summary", "loads", "timeline", "learning"]
    assert [section.name for section in make_sections(read_material([plain]))] == ["summary", "learning"]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    records = [record("<b>arxiv", "sage", "split", 1), *(record("<b>arxiv", "sage", s, 2) for s in ("split", "pyg"))]
    bench = write(tmp_path / "bench.json", bench_document(records))
    written = write_study(
        [bench, save_run(tmp_path / "run")],
        tmp_path / "r.html",
        png=tmp_path / "png",
        trace=tmp_path / "t.json",
        markdown=tmp_path / "when.md",
    )
    page = (tmp_path / "r.html").read_text()
    links = PageLinks()
    links.feed(page)
    pictures = [value for name, value in links.found if name == "src"]
    assert len(pictures) == len(written.written.pictures) == 6
    assert all(value.startswith("data:image/png;base64,") for value in pictures)
    assert all(value.startswith("#") for name, value in links.found if name != "src")
    assert not {"script", "link", "iframe", "object", "b"} & set(links.tags)
    assert "url(" not in page and "@import" not in page
    for text in (
        "0123abc",
        "2026-11-16",
        "python -m gsplit_bench train arxiv.gsplit --preset main",
        "two cores &lt;of something",
    ):
        assert text in page
    assert all(path.is_file() for path in written.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bench.json",
        "png",
        "r.html",
        "run",
        "t.json",
        "when.md",
    ]
    tables = (tmp_path / "when.md").read_text().split("## ")[1:]
    titles = ["When to use what", "Times faster than the peers, geometric means over the graphs", "Records"]
    assert [table.splitlines()[0] for table in tables] == titles
    first, _, one, two = tables[0].strip().splitlines()[1:]
    assert first.startswith(
        "| graph | model | scenario | fastest | s per step | ahead of the next | against one process |"
    )
    assert first.endswith("| least CPU time | CPU s per step |")
    assert one.startswith("| <b>arxiv | sage | 1 rank | one process | 1.100 |")
    assert "| 2 ranks | split | 0.677 |  | 1.62x faster | split | " in two


def test_files_are_not_replaced_by_accident(tmp_path: Path) -> None:
    source = write(tmp_path / "p.json", planner_document())
    (tmp_path / "r.html").write_text("mine")
    with pytest.raises(InputError, match="r.html: expected a new file .*--overwrite"):
        write_study([source], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == "mine"
    write_study([source], tmp_path / "r.html", overwrite=True)
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")


def _without(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


@pytest.mark.parametrize(
    "content, message",
    [
        ("no json", "f.json: expected JSON: .*got Expecting value"),
        ("[1]", "f.json: expected a document of gsplit_bench train.*got a JSON list"),
        ('{"kind": "bench tea"}', "f.json: expected .*got the kind 'bench tea'"),
        ('{"rows": []}', "f.json: expected .*got the kind 'none'"),
        (json.dumps(_without(bench_document([]), "date")), "f.json: date: expected Field required"),
        (
            json.dumps(bench_document([record("g", "sage", "split", 2, wall_s={"median": -1, "low": 0, "high": 0})])),
            "f.json: records.0.wall_s.median: expected .*greater than or equal to 0 .got -1",
        ),
        (
            json.dumps(bench_document([record("g", "sage", "split", 1) | {"ranks": 0}])),
            "records.0.ranks: expected .*greater than or equal to 1 .got 0",
        ),
    ],
)
def test_wrong_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_material([tmp_path / "f.json"])


def test_missing_binary_and_too_large_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.json: expected .*No such file.*check the path"):
        read_material([tmp_path / "none.json"])
    (tmp_path / "f.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(InputError, match="f.png: expected JSON: .*got bytes that are not UTF-8"):
        read_material([tmp_path / "f.png"])
    with (tmp_path / "huge.json").open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(InputError, match="huge.json: expected at most 33554432 bytes .got 1073741824"):
        read_material([tmp_path / "huge.json"])
    with pytest.raises(InputError, match="settings.json: expected the settings of a run"):
        read_material([tmp_path])


def test_markdown_and_trace_need_something_to_write(tmp_path: Path) -> None:
    source = write(tmp_path / "p.json", planner_document())
    with pytest.raises(InputError, match="--markdown: expected records of our strategies .got 0 records"):
        write_study([source], tmp_path / "r.html", markdown=tmp_path / "m.md")
    with pytest.raises(InputError, match="--trace: expected a run whose telemetry has spans .got no runs"):
        write_study([source], tmp_path / "r.html", trace=tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
