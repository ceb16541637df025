"""The report of runs: one page that needs nothing else, and refusals of what is not a run."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import PageLinks, save_run

from gsplit.errors import InputError, MissingDependencyError
from gsplit.files.rotated import older_file
from gsplit.report.figures import draw_run
from gsplit.report.page import run_sections, tabulate_runs, write_report
from gsplit.report.reading import read_run
from gsplit.run.folder import history_path, telemetry_files


def test_a_run_has_its_sections_and_one_without_spans_no_timeline(tmp_path: Path) -> None:
    run, plain = save_run(tmp_path / "run"), save_run(tmp_path / "plain", ranks=1, spans=False)
    sections = run_sections([read_run(run)])
    assert [section.name for section in sections] == ["summary", "loads", "timeline", "learning"]
    assert [section.name for section in run_sections([read_run(plain)])] == ["summary", "learning"]
    for section in sections:
        assert section.tables or section.pictures
        assert all(picture.png.startswith(b"\x89PNG") and len(picture.png) > 5000 for picture in section.pictures)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    runs = [save_run(tmp_path / "<b>one"), save_run(tmp_path / "two")]
    written = write_report(runs, tmp_path / "r.html", png=tmp_path / "png", trace=tmp_path / "t.json")
    page = (tmp_path / "r.html").read_text()
    links = PageLinks()
    links.feed(page)
    pictures = [value for name, value in links.found if name == "src"]
    assert len(pictures) == len(written.pictures) == 6
    assert all(value.startswith("data:image/png;base64,") for value in pictures)
    assert all(value.startswith("#") for name, value in links.found if name != "src")
    assert not {"script", "link", "iframe", "object", "b"} & set(links.tags)
    assert "url(" not in page and "@import" not in page and "&lt;b&gt;one" in page
    assert all(path.is_file() for path in written.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["<b>one", "png", "r.html", "t.json", "two"]


def test_files_are_not_replaced_by_accident(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    (tmp_path / "r.html").write_text("mine")
    with pytest.raises(InputError, match="r.html: expected a new file .*--overwrite"):
        write_report([run], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == "mine"
    write_report([run], tmp_path / "r.html", overwrite=True)
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_pictures_of_runs_with_one_name_are_told_apart_and_not_replaced_by_accident(tmp_path: Path) -> None:
    runs = [save_run(tmp_path / name / "run") for name in ("a", "b")]
    written = write_report(runs, tmp_path / "r.html", png=tmp_path / "png")
    assert len({path for path in written.pictures if path.is_file()}) == 6
    assert "<td>a/run</td>" in written.page.read_text() and "<td>b/run</td>" in written.page.read_text()
    with pytest.raises(InputError, match="loads-a-run.png: expected a new file"):
        write_report(runs, tmp_path / "s.html", png=tmp_path / "png")
    assert not (tmp_path / "s.html").exists()
    with pytest.raises(InputError, match="nowhere: expected a folder to write in .got no such folder"):
        write_report(runs, tmp_path / "nowhere" / "r.html")


def test_a_run_that_went_on_with_other_ranks_is_reported_for_the_last_ones(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", ranks=3, steps=9)
    for rank, kept in ((1, slice(4)), (2, slice(2, 9))):  # 3 ranks, then rank 0 and what was rank 2
        path = telemetry_files(run)[rank]
        path.write_text("".join(path.read_text().splitlines(keepends=True)[kept]))
    steps = read_run(run).steps
    assert {rank: [line.step for line in lines] for rank, lines in steps.items()} == {
        key: [4, 5, 6, 7, 8] for key in [0, 2]
    }
    assert read_run(run).num_ranks == 2
    path = telemetry_files(run)[2]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # a full disk
    assert list(read_run(run).steps) == [0, 2]


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"the package matplotlib .*gsplit\[report\]"):
        write_report([save_run(tmp_path / "run")], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(InputError, match=r"bench.json: expected a folder of gsplit train --out .*gsplit_bench report"):
        write_report([tmp_path / "bench.json"], tmp_path / "r.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="settings.json: expected the settings of a run"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")


def test_steps_of_the_older_file_of_a_rank_come_first(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", ranks=1)
    (path,) = telemetry_files(run)
    lines = path.read_text().splitlines(keepends=True)
    older_file(path).write_text("".join(lines[:3]))
    path.write_text("".join(lines[3:]))
    assert [line.step for line in read_run(run).steps[0]] == [0, 1, 2, 3]


def test_the_history_of_a_million_steps_is_read(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    values = ", ".join(["0.3333333333333333"] * 1_000_000)
    history_path(run).write_text(f'{{"losses": [{values}], "step_seconds": [{values}], "evaluations": []}}')
    assert len(read_run(run).history.losses) == 1_000_000


def test_a_damaged_line_of_telemetry_is_named(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    want = read_run(run)
    with (run / "1" / "steps-rank-1.jsonl").open("a") as stream:
        stream.write('{"rank": 1, "epo')
    assert read_run(run) == want  # written when the disk was full
    with (run / "1" / "steps-rank-1.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(InputError, match="steps-rank-1.jsonl, line 5: .*Invalid JSON"):
        read_run(run)


def test_a_trace_needs_spans(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", spans=False)
    with pytest.raises(InputError, match="--trace: expected a run whose telemetry has spans .got no spans in run"):
        write_report([run], tmp_path / "r.html", trace=tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_best_score_of_an_error_is_the_smallest(tmp_path: Path) -> None:
    run = read_run(save_run(tmp_path / "run"))
    evaluations = [{"epoch": 1.0, "val": 0.5}, {"epoch": 2.0, "val": 0.4}, {"epoch": 3.0, "val": 0.6}, {"epoch": 4.0}]
    history = run.history.model_copy(update={"evaluations": evaluations})
    for metric, best in (("rmse,mae", "0.4000"), ("accuracy", "0.6000")):
        settings = run.settings.model_copy(update={"metric": metric, "loss": "mse"})
        table = tabulate_runs([replace(run, settings=settings, history=history)])
        assert table.rows[0][table.columns.index("best val")] == best
        labels = [
            (axes.get_ylabel(), axes.get_title(loc="left"))
            for axes in draw_run(replace(run, settings=settings, history=history)).axes
        ]
        assert labels[0][0] == "mse" and labels[1][0] == metric.split(",")[0]
