"""``python -m gsplit_bench paper``: the presets that it runs, and the page of a small graph, made by real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import run_forked
from report_samples import bench_document, record, write
from typer.testing import CliRunner

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store, open_store
from gsplit_bench.commands import app
from gsplit_bench.paper import EXPERIMENTS, make_studies
from gsplit_bench.paper_page import write_paper
from gsplit_bench.report.documents import TrainRecord
from gsplit_bench.report.figures import draw_ablation
from gsplit_bench.train_study import find_preset

PRESET_OF = {"figure6a": "ranks", "figure6c": "hidden", "figure6d": "batch", "figure6e": "layers"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    planted = PlantedGraph(2000, 24_000, num_communities=8, num_features=16, num_classes=4)
    return build_store(synthetic_source(planted), tmp_path_factory.mktemp("paper") / "tiny.gsplit")


def test_studies_are_the_presets_on_the_papers_ranks_and_models() -> None:
    studies = make_studies(4, "cuda", quick=False)
    for name, preset in PRESET_OF.items():
        found, known = studies[name], find_preset(preset)
        assert (found.hidden, found.batch_sizes, found.fanouts) == (known.hidden, known.batch_sizes, known.fanouts)
        assert {"split", "data", "dgl", "p3"} <= set(found.systems)
    assert studies["table3"].hidden == (256,) and studies["table3"].batch_sizes == (1024,)
    assert studies["figure6a"].ranks == (1, 2, 4) and studies["figure6b"].replicas == (1, 2, 4)
    assert all(study.device == "cuda" and study.models == ("sage", "gat") for study in studies.values())
    assert all(max(study.ranks) == 4 for study in studies.values())
    quick = make_studies(4, "cpu", quick=True)
    for name, study in quick.items():
        assert len(study.hidden) == len(studies[name].hidden) and max(study.hidden) <= 32
        assert max(study.ranks) == 2 and study.repeats == study.steps == 1


def test_edge_and_quiver_are_compared_with_split_measured_beside_them(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tiny.gsplit").symlink_to(store.path)
    settings = {"stores": [str(tmp_path / "tiny.gsplit")], "device": "cpu"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    both = [
        record("tiny", "sage", "split", 4, cost=2.0),
        record("tiny-edge", "sage", "split", 4, cost=3.0, partition="edge"),
    ]
    cached = [record("tiny", "sage", system, 4, cost=cost) for system, cost in (("split", 1.0), ("quiver", 4.0))]
    for name, records in (("table3", both[:1]), ("table3-edge", both), ("table3-cache", cached)):
        write(tmp_path / f"{name}.json", bench_document(records))
    text = write_paper(tmp_path, EXPERIMENTS, is_trial=False).file.read_text()
    ends = {row.split(" | ")[2]: row.split(" | ")[-2:] for row in text.splitlines() if row.startswith("| tiny |")}
    assert ends["Edge"] == ["1.50x", "1.50x |"] and ends["Quiver's cache"] == ["4.00x", "4.00x |"]
    assert "each rank caches the hottest 10% of all" in text


def test_an_ablation_that_failed_has_no_picture(store: Store, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"stores": [str(store.path)], "device": "cpu"}))
    write(tmp_path / "figure6a.json", bench_document([]) | {"failures": ["rank 1 ended"]})
    page = write_paper(tmp_path, EXPERIMENTS, is_trial=False)
    assert page.faults == ["figure6a: failed: rank 1 ended"]
    assert "Figure 6a" in page.file.read_text() and not (tmp_path / "figure6a.png").exists()


def test_layers_of_figure_6_are_in_order() -> None:
    fanouts = [[5] * 4, [15] * 2, [15] * 3]
    records = [record("tiny", "sage", name, 4, fanout=each) for each in fanouts for name in ("split", "dgl")]
    figure = draw_ablation([TrainRecord.model_validate(found) for found in records], str.upper)
    found = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [text.count(",") for text in found] == [1, 2, 3], found


def test_a_picture_of_figure_6_has_a_line_per_system_over_split() -> None:
    costs = {("split", 2): 1.0, ("dgl", 2): 2.0, ("split", 4): 1.0, ("dgl", 4): 3.0}
    records = [record("tiny", "sage", system, ranks, cost=cost) for (system, ranks), cost in costs.items()]
    figure = draw_ablation([TrainRecord.model_validate(found) for found in records], str.upper)
    (axes,) = figure.axes
    line, one = axes.lines
    assert line.get_label() == "DGL" and line.get_ydata() == pytest.approx([2.0, 3.0]) and one.get_ydata()[0] == 1.0
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2 ranks", "4 ranks"]


def _paper(store: Store, out: Path, *words: str) -> Any:
    return run_forked(
        ["-m", "gsplit_bench", "paper", str(store.path), "--out", str(out), "--quick", *words], out.parent
    )


@pytest.mark.weekly
def test_a_page_has_tables_pictures_and_what_is_missing(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    only = ("--only", "table1,table3,figure5")
    done = _paper(store, out, *only)
    assert done.returncode == 0, done.stderr
    text = (out / "paper.md").read_text()
    assert "Graphs: tiny (2,000 vertices, 24,000 edges). Device of the models: cpu." in text
    assert "## Table 1: redundancy" in text and "## Figure 5: partition objectives" in text
    for system in ("GSplit", "data_cached", "data", "P3*", "Edge", "PyG, our sampler"):
        for model in ("sage", "gat"):
            assert f"| tiny | {model} | {system} |" in text
    assert "Not run: figure6a, figure6b, figure6c, figure6d, figure6e, figure7." in text
    for system in ("GSplit", "data_cached", "Quiver's cache", "data"):
        tables = {"GSplit": 3, "Quiver's cache": 1}.get(system, 2)
        assert text.count(f"| tiny | sage | {system} |") == tables
    assert "**Quiver** itself needs GPUs" in text and "A trial" in text
    _check_epoch_seconds(out, text)
    _add_other_documents(out)
    words = ["paper", str(store.path), "--out", str(out), "--quick"]
    again = CliRunner().invoke(app, [*words, *only])  # nothing is measured again; the page has the new documents
    assert again.exit_code == 1 and "presample" not in again.stderr
    _check_other_sections(out)
    refused = CliRunner().invoke(app, [*words, "--ranks", "3"])
    assert refused.exit_code == 2 and "choose another --out" in refused.stderr


def _check_epoch_seconds(out: Path, text: str) -> None:
    """A row of Table 3 against its record: seconds per step times the steps of an epoch."""
    records = json.loads((out / "table3.json").read_text())["records"]
    found = {(record["model"], record["system"]): record for record in records}
    row = next(line for line in text.splitlines() if line.startswith("| tiny | sage | data |")).strip("| ").split(" | ")
    split, data = found["sage", "split"], found["sage", "data"]
    steps = open_store(out / "tiny.gsplit").stored_array("targets/train").size // data["batch_size"]
    assert float(row[6]) == pytest.approx(steps * data["wall_s"]["median"], abs=0.006)
    assert row[8] == f"{data['wall_s']['median'] / split['wall_s']['median']:.2f}x"


def _add_other_documents(out: Path) -> None:
    """Figures 6 and 7 from the records at hand: one of a launch that failed, one with epochs and losses that differ."""
    document = json.loads((out / "table3.json").read_text())
    epochs = [{"epoch": 0, "loss": 1.5, "accuracies": {"test": 0.25}}]
    (out / "figure6c.json").write_text(json.dumps(document | {"failures": ["rank 1 ended"]}))
    records = [record | {"epochs": epochs} for record in document["records"]]
    (out / "figure7.json").write_text(json.dumps(document | {"records": records, "losses_equal": False}))


def _check_other_sections(out: Path) -> None:
    text = (out / "paper.md").read_text()
    assert "- figure6c: failed: rank 1 ended\n- figure7: LOSSES OF OUR STRATEGIES DIFFER\n" in text
    assert "Not run: figure6a, figure6b, figure6d, figure6e." in text
    assert "| tiny | sage | GSplit | 1.5000 | test 25.00% |" in text
    for name in ("figure3-tiny", "figure5", "figure6c", "figure7"):
        assert f"({name}.png)" in text and (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.weekly
def test_every_experiment_runs(store: Store, tmp_path: Path) -> None:
    done = _paper(store, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "paper.md").read_text()
    assert "Not run" not in text and text.count("\n## ") == len(EXPERIMENTS) + 3  # Figure 3, what is missing, sources


def test_wrong_words_are_refused(store: Store, tmp_path: Path) -> None:
    words = ["paper", str(store.path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*words, "--only", "table9"])
    assert result.exit_code == 2 and "--only: expected some of table1" in result.stderr
    result = CliRunner().invoke(app, [*words[:2], str(store.path), *words[2:]])
    assert result.exit_code == 2 and "stores with different names" in result.stderr
    edge = tmp_path / "tiny-edge.gsplit"
    edge.symlink_to(store.path)
    result = CliRunner().invoke(app, ["paper", str(edge), *words[2:]])
    assert result.exit_code == 2 and "names that do not end in -edge" in result.stderr
    assert not (tmp_path / "out").exists()
