"""The examples run as their docstrings say, and losses do not depend on the number of ranks."""

import ast
import json
import re
import urllib.error
import urllib.request
from difflib import ndiff
from pathlib import Path

import numpy as np
import pytest
from forked_scripts import run_forked, run_ranks_forked, start_forked

import gsplit
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _under_torchrun(folder: Path, script: str, *args: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_forked([*launcher, str(EXAMPLES / script), *args], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _output(folder: Path, script: str, *args: str, ranks: int = 1) -> list[str]:
    return "".join(run_ranks_forked([str(EXAMPLES / script), *args], ranks, folder)).splitlines()


def _losses(lines: list[str]) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = PlantedGraph(4000, 60_000, num_features=16)
    return str(build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit").path)


@pytest.mark.parametrize("script", ["by_hand.py", "own_model.py"])
def test_losses_are_the_same_on_one_and_two_ranks(store: str, script: str, tmp_path: Path) -> None:
    words = [script, store, "--batch-size", "256"]
    one = _output(tmp_path, *words)
    two = _under_torchrun(tmp_path, *words) if script == "own_model.py" else _output(tmp_path, *words, ranks=2)
    assert len(_losses(one)) >= 2
    assert _losses(one) == pytest.approx(_losses(two), abs=1e-4)  # float32: sums are made in another order
    assert _losses(one)[-1] < _losses(one)[0]
    if script == "own_model.py":
        assert float(two[-1].split()[-1]) < 1e-9  # it checks itself against one process


def test_both_ways_of_the_same_training_run(tmp_path: Path) -> None:
    for script in ("train_ddp.py", "train_gsplit.py"):
        losses = _losses(_output(tmp_path, f"ddp_to_gsplit/{script}", ranks=2))
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def test_five_lines_change_from_ddp() -> None:
    ddp, ours = ((EXAMPLES / "ddp_to_gsplit" / f"train_{name}.py").read_text() for name in ("ddp", "gsplit"))
    before, after = (text.split('"""')[2].splitlines() for text in (ddp, ours))
    new = [line[2:] for line in ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(new) == 5  # as README.md and docs/training.md say
    assert all(f"# ({number})" in line for number, line in enumerate(new, start=1))  # each is marked
    assert any("GLOBAL" in line for line in new)


@pytest.fixture(scope="module")
def parts(store: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("parts") / "demo4.gsplit"
    return str(gsplit.partition(gsplit.open(store), path, 4, [12, 12, 12], batch_size=256, solver="restream").path)


SMALL = {
    "ogbn_products_sage.py": "{parts} --epochs 2 --batch-size 256 --hidden 16",
    "papers100m.py": "{parts} run --steps 6 --batch-size 256 --hidden 16 --cache 64kB",
    "gat_edge_features.py": "--vertices 1000 --epochs 8",
    "gcn.py": "{parts} --epochs 2",
    "sweep.py": "{parts} runs --lr 1e-2,1e-4 --hidden 8 --epochs 1",
    "dgl_to_gsplit/train_gsplit.py": "graph.npz",
    "own_sampler.py": "{store}",
    "own_row_source.py": "{parts}",
    "unsupervised_sage.py": "{parts} --pairs 8000 --epochs 3 --batch-size 512",
}


@pytest.mark.parametrize("script", SMALL)
def test_an_example_runs_on_small_data(script: str, store: str, parts: str, tmp_path: Path) -> None:
    if script.startswith("dgl"):
        _write_npz(parts, tmp_path / "graph.npz")
    words = SMALL[script].format(store=store, parts=parts).split()
    ranks = 2 if script.startswith(("own_", "unsupervised")) else 1
    lines = "".join(run_ranks_forked([str(EXAMPLES / script), *words], ranks, tmp_path, cwd=tmp_path)).splitlines()
    if script == "sweep.py":
        scores = [line.split() for line in lines[1:]]
        assert [name for _, _, name in scores] == ["lr0.01-hidden8-dropout0.3", "lr0.0001-hidden8-dropout0.3"]
        assert float(scores[0][0]) > float(scores[1][0])  # the table is sorted, and the small step learned less
    elif script == "papers100m.py":
        assert re.fullmatch(r"step 6 loss \d\.\d+ rows from the cache [1-9]\d*%", lines[0])
    elif script == "unsupervised_sage.py":
        assert _losses(lines)[-1] < _losses(lines)[0]
        features, embeddings = re.findall(r"0\.\d+", lines[-1])
        assert float(embeddings) > float(features) + 0.1
    else:
        assert _losses(lines)[-1] < _losses(lines)[0]
        own = {
            "own_sampler.py": r"2 rank\(s\) equal to one process: True",
            "own_row_source.py": r"test accuracy 0\.\d+",
        }
        assert re.fullmatch(own.get(script, ".*"), lines[-1])


def test_trainable_rows_give_the_same_losses_on_one_and_two_ranks(tmp_path: Path) -> None:
    store = str(tmp_path / "likes.gsplit")
    _output(tmp_path, "recommender.py", "make", store, "--users", "200")
    programs = {
        r"test accuracy (0\.\d+)": ["ogbn_mag_rgcn.py", "--papers", "600", "--epochs", "5", "--batch-size", "64"],
        r"test mrr (0\.\d+) hits@10 0\.\d+": ["recommender.py", "train", store, "--epochs", "3", "--batch-size", "128"],
    }
    for last_line, words in programs.items():
        one, two = (_output(tmp_path, *words, ranks=ranks) for ranks in (1, 2))
        assert _losses(one) == pytest.approx(_losses(two), abs=1e-3)  # float32
        assert _losses(one)[-1] < _losses(one)[0]
        for lines in (one, two):
            score = re.fullmatch(last_line, lines[-1])
            assert score is not None, lines
            assert float(score[1]) > (0.5 if "accuracy" in last_line else 0.1)  # by chance: 0.125 and 0.05


def _write_npz(store: str, path: Path) -> None:
    data = gsplit.to_pyg(gsplit.open(store))
    train = np.flatnonzero(data.train_mask.numpy())
    np.savez(path, edge_index=data.edge_index.numpy(), x=data.x.numpy(), y=data.y.numpy(), train_idx=train)


def test_the_service_answers_from_the_file(tmp_path: Path) -> None:
    outputs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.save(tmp_path / "predictions.npy", outputs)
    service = start_forked([str(EXAMPLES / "serve.py"), "predictions.npy", "--port", "0"], tmp_path, cwd=tmp_path)
    try:
        while not (said := service.out.read_text() if service.out.exists() else "").endswith("\n"):
            assert service.process.is_alive(), service.err.read_text()
        address = said.split()[-1].removesuffix("/vertex/ID")
        found = json.load(urllib.request.urlopen(f"{address}/vertex/17", timeout=100))
        assert (found["vertex"], found["class"]) == (17, outputs[17].argmax())
        assert found["outputs"] == pytest.approx(outputs[17].tolist())
        assert json.load(urllib.request.urlopen(f"{address}/health", timeout=100))["num_vertices"] == 50
        for wrong in ("vertex/50", "vertex/-1", "vertex/../etc"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/{wrong}", timeout=100)
    finally:
        service.process.kill()
        service.process.join()


def test_the_notebook_runs_and_keeps_its_outputs(tmp_path: Path) -> None:
    """Its cells as one script, without a kernel; the outputs it keeps are those of a run from top to bottom."""
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]
    programs = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in programs] == list(range(1, len(programs) + 1))
    kept = [output for cell in programs for output in cell["outputs"]]
    assert {output["output_type"] for output in kept} == {"stream", "display_data"}  # and no error
    assert sum("image/png" in output.get("data", {}) for output in kept) == 3
    code = "\n".join("".join(cell["source"]) for cell in programs)
    (tmp_path / "cells.py").write_text("import matplotlib\nmatplotlib.use('Agg')\n" + code)
    done = run_forked([str(tmp_path / "cells.py")], tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [
        line for output in kept if output["output_type"] == "stream" for line in "".join(output["text"]).splitlines()
    ]
    assert done.stdout.splitlines()[:2] == printed[:2]  # the graph and its partition are the same everywhere


def test_every_example_is_listed_and_says_what_it_is() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.rglob("*"):
        if not path.is_file() or "__pycache__" in path.parts or path.name == "README.md":
            continue
        assert str(path.relative_to(EXAMPLES)) in listed or str(path.parent.relative_to(EXAMPLES)) + ")" in listed, path
        if path.suffix == ".py":
            assert ast.get_docstring(ast.parse(path.read_text())), path
